"""What an OpenAI request body may ask for, and what that means in our sampling parameters.

A value the body leaves out is the job's, also temperature (OpenAI's own default would be 1).
Anything we would have to ignore is refused instead, unless it cannot change the completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from specbatch.schemas.spec import SamplingSpec

MAX_SEED = 2**63 - 1

_HARMLESS = {
    "messages", "model", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "stream_options",
}  # fmt: skip
# Fields that change nothing at these values (null is always one of them).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "stop": ([], ""),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class ParameterError(Exception):
    """A row asks for something it cannot have."""

    def __init__(self, code: str, reason: str):
        super().__init__(reason)
        self.code = code
        self.reason = reason


def read_body(
    body: Mapping[str, Any], job: SamplingSpec, vocab_size: int
) -> tuple[dict[str, Any], int, int | None]:
    """(overrides by `SamplingParams` field, n, seed or None). Raises `ParameterError`."""
    values: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in _HARMLESS:
            continue
        if name in _NEUTRAL:
            if not any(value == neutral for neutral in _NEUTRAL[name]):
                raise ParameterError("unsupported_parameter", _unsupported(name, value))
        elif name in _READERS:
            target, reader = _READERS[name]
            read = reader(name, value)
            if values.setdefault(target, read) != read:
                raise ParameterError("bad_parameter", "max_tokens and max_completion_tokens differ")
        else:
            raise ParameterError("unsupported_parameter", f"`{name}` is not supported")
    n = values.pop("n", job.n)
    seed = values.pop("seed", None)
    _check_together(values, job, vocab_size)
    return values, n, seed


def read_seed(value: Any) -> int | None:
    """A row's seed, None when absent. Raises `ParameterError`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEED:
        raise ParameterError("bad_seed", f"seed {value!r:.50} is not an integer in [0, 2^63)")
    return value


def _check_together(values: Mapping[str, Any], job: SamplingSpec, vocab_size: int) -> None:
    low = values.get("min_tokens", job.min_tokens)
    high = values.get("max_tokens", job.max_tokens)
    if low > high:
        raise ParameterError("bad_parameter", f"min_tokens {low} is above max_tokens {high}")
    for token in values.get("stop_token_ids", ()):
        if token >= vocab_size:
            raise ParameterError(
                "bad_parameter", f"stop token id {token} is outside the vocabulary of {vocab_size}"
            )


def _integer(low: int, high: int) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ParameterError(
                "bad_parameter", f"{name} {value!r:.50} is not an integer from {low} to {high}"
            )
        return value

    return read


def _number(allowed: Callable[[float], bool], words: str) -> Callable[[str, Any], float]:
    def read(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not allowed(value):
            raise ParameterError("bad_parameter", f"{name} {value!r:.50} is not {words}")
        return float(value)

    return read


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ParameterError("bad_parameter", f"{name} {value!r:.50} is not true or false")
    return value


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ParameterError("bad_parameter", f"{name} is not a list of token ids")
    return tuple(_integer(0, 2**31 - 1)(name, item) for item in value)


def _seed(_: str, value: Any) -> int | None:
    return read_seed(value)


def _unsupported(name: str, value: Any) -> str:
    shown = f" {value!r}" if isinstance(value, bool | int | float) else ""
    return f"`{name}`{shown} is not supported"


# Field of the body: the `SamplingParams` field it sets, and its reader.
_READERS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "max_tokens": ("max_tokens", _integer(1, 131072)),
    "max_completion_tokens": ("max_tokens", _integer(1, 131072)),
    "min_tokens": ("min_tokens", _integer(0, 131072)),
    "temperature": ("temperature", _number(lambda v: 0 <= v <= 10, "from 0 to 10")),
    "top_p": ("top_p", _number(lambda v: 0 < v <= 1, "above 0 and up to 1")),
    "top_k": ("top_k", _integer(0, 2**31 - 1)),
    "min_p": ("min_p", _number(lambda v: 0 <= v < 1, "from 0 to below 1")),
    "n": ("n", _integer(1, 128)),
    "seed": ("seed", _seed),
    "stop_token_ids": ("stop_token_ids", _token_ids),
    "ignore_eos": ("ignore_eos", _flag),
}
