"""Reads a row's own sampling values, from an OpenAI body or a sampling column.

The job's value replaces every value that a row omits, also temperature (OpenAI's own default is 1).
A field that we cannot honour rejects the row, unless it cannot change the completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any

import orjson

from specbatch.schemas.errors import SpecError
from specbatch.schemas.spec import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    MAX_TOKENS_NAMED,
    MAX_TOP_LOGPROBS,
    SamplingSpec,
)

MAX_SEED = 2**63 - 1
MAX_ID = 2**31 - 1
_MAX_DIGITS = 64  # of a token id as text, zeros in front included

_HARMLESS = {
    "messages", "model", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "stream_options",
}  # fmt: skip
# Fields that change nothing at these values (null is always one of them).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}


class ParameterError(Exception):
    """A row has a sampling value that cannot be honoured."""

    def __init__(self, code: str, reason: str):
        super().__init__(reason)
        self.code = code
        self.reason = reason


def read_body(
    body: Mapping[str, Any], job: SamplingSpec, vocab_size: int
) -> tuple[dict[str, Any], int, int | None]:
    """(overrides by `SamplingParams` field, n, seed or None). Raises `ParameterError`."""
    asked = {}
    for name, value in body.items():
        if value is None or name in _HARMLESS:
            continue
        if name not in _NEUTRAL:
            asked[name] = value
        elif not any(value == neutral for neutral in _NEUTRAL[name]):
            raise ParameterError("unsupported_parameter", _unsupported(name, value))
    return _read(asked, job, vocab_size)


def read_column(
    given: Any, job: SamplingSpec, vocab_size: int
) -> tuple[dict[str, Any], int, int | None]:
    """The same from a row's sampling column: an object, or JSON text of one."""
    if isinstance(given, str):
        try:
            given = orjson.loads(given) if given.strip() else {}
        except orjson.JSONDecodeError:
            raise ParameterError("bad_parameter", "the sampling values are not JSON") from None
    if not isinstance(given, dict):
        raise ParameterError("bad_parameter", "the sampling values are not an object")
    asked = {name: value for name, value in given.items() if value is not None}
    return _read(asked, job, vocab_size)


def check_vocabulary(job: SamplingSpec, vocab_size: int) -> None:
    """Raise `SpecError` if the job itself names a token that the model does not have."""
    values = {name: getattr(job, name) for name in _NAMING}
    try:
        _check_vocabulary(values, vocab_size)
    except ParameterError as error:
        raise SpecError(f"job spec: sampling: {error.reason}") from None


def _read(
    asked: Mapping[str, Any], job: SamplingSpec, vocab_size: int
) -> tuple[dict[str, Any], int, int | None]:
    values: dict[str, Any] = {}
    for name, value in asked.items():
        if name in _READERS:
            target, reader = _READERS[name]
            read = reader(name, value)
            if values.setdefault(target, read) != read:
                raise ParameterError("bad_parameter", "max_tokens and max_completion_tokens differ")
        else:
            raise ParameterError("unsupported_parameter", f"`{name}` is not supported")
    n = values.pop("n", job.n)
    seed = values.pop("seed", None)
    _settle_logprobs(values, job)
    _check_together(values, job, vocab_size)
    return values, n, seed


def read_seed(value: Any) -> int | None:
    """A row's seed, None when absent. Raises `ParameterError`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_SEED:
        raise ParameterError("bad_seed", f"seed {value!r:.50} is not an integer in [0, 2^63)")
    return value


def _settle_logprobs(values: dict[str, Any], job: SamplingSpec) -> None:
    """As in the job's own sampling, top_logprobs implies logprobs, and false turns off both."""
    top = values.get("top_logprobs")
    if top and not values.setdefault("logprobs", True):
        raise ParameterError("bad_parameter", f"top_logprobs {top} needs logprobs to be true")
    if values.get("logprobs") is False and job.top_logprobs:
        values["top_logprobs"] = 0


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
    _check_vocabulary(values, vocab_size)


def _check_vocabulary(values: Mapping[str, Any], vocab_size: int) -> None:
    for name, tokens_of in _NAMING.items():
        wrong = [token for token in tokens_of(values.get(name, ())) if token >= vocab_size]
        if wrong:
            raise ParameterError(
                "bad_parameter",
                f"{name} has the token id {wrong[0]}, outside the vocabulary of {vocab_size}",
            )


_NAMING: dict[str, Callable[[Any], list[int]]] = {
    "logit_bias": lambda pairs: [token for token, _ in pairs],
    "bad_token_ids": list,
    "bad_words": lambda words: [token for word in words for token in word],
}


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
    return tuple(_integer(0, MAX_ID)(name, item) for item in value)


def _bad_token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = _token_ids(name, value)
    _check_count(MAX_TOKENS_NAMED, name, ids)
    return ids


def _bad_words(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value, list):
        raise ParameterError("bad_parameter", f"{name} is not a list of lists of token ids")
    _check_count(MAX_BAD_WORDS, name, value)
    words = tuple(_token_ids(name, word) for word in value)
    if not all(1 <= len(word) <= MAX_BAD_WORD_TOKENS for word in words):
        raise ParameterError(
            "bad_parameter", f"each of {name} has 1 to {MAX_BAD_WORD_TOKENS} token ids"
        )
    return words


def _stop(name: str, value: Any) -> tuple[str, ...]:
    listed = [value] if isinstance(value, str) and value else value or []
    if not isinstance(listed, list) or not all(
        isinstance(item, str) and 1 <= len(item) <= MAX_STOP_CHARS for item in listed
    ):
        raise ParameterError(
            "bad_parameter", f"{name} is not text of 1 to {MAX_STOP_CHARS} characters, or a list"
        )
    _check_count(MAX_STOPS, name, listed)
    return tuple(listed)


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    """JSON keys are text, so token ids are too. A struct has the keys of all rows, with nulls."""
    if not isinstance(value, dict):
        raise ParameterError("bad_parameter", f"{name} is not an object of token ids and numbers")
    read: dict[int, float] = {}
    for key, bias in value.items():
        if bias is None:
            continue
        read[_integer(0, MAX_ID)(name, _token_id(key))] = _bias(name, bias)
    _check_count(MAX_TOKENS_NAMED, name, read)
    return tuple(sorted(read.items()))


def _token_id(key: Any) -> Any:
    """The number that a key spells, or the key itself if it is not a number or far too long: `int`
    raises for thousands of digits."""
    is_number = isinstance(key, str) and key.isascii() and key.isdigit()
    return int(key) if is_number and len(key) <= _MAX_DIGITS else key


def _check_count(most: int, name: str, value: Sized) -> None:
    if len(value) > most:
        raise ParameterError("bad_parameter", f"{name} has {len(value)} entries; {most} is most")


def _seed(_: str, value: Any) -> int | None:
    return read_seed(value)


_bias = _number(lambda v: -100 <= v <= 100, "from -100 to 100")


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
    "stop": ("stop", _stop),
    "repetition_penalty": (
        "repetition_penalty",
        _number(lambda v: 0.1 <= v <= 10, "from 0.1 to 10"),
    ),
    "presence_penalty": ("presence_penalty", _number(lambda v: -2 <= v <= 2, "from -2 to 2")),
    "frequency_penalty": ("frequency_penalty", _number(lambda v: -2 <= v <= 2, "from -2 to 2")),
    "logit_bias": ("logit_bias", _logit_bias),
    "bad_token_ids": ("bad_token_ids", _bad_token_ids),
    "bad_words": ("bad_words", _bad_words),
    "logprobs": ("logprobs", _flag),
    "top_logprobs": ("top_logprobs", _integer(0, MAX_TOP_LOGPROBS)),
}
