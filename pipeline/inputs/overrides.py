"""Reads a row's own sampling values, from an OpenAI body or a sampling column.

The job's value replaces every value that a row omits, also temperature (OpenAI's own default is 1).
A field that we cannot honour rejects the row, unless it cannot change the completion. The spec's
own `SamplingSpec` checks the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson
from pydantic import ValidationError

from specbatch.pipeline.inputs.contract import RowError
from specbatch.schemas.errors import SpecError
from specbatch.schemas.field_errors import explain
from specbatch.schemas.spec import SamplingSpec

_MAX_DIGITS = 64  # of a token id as text, zeros in front included

_HARMLESS = {
    "messages", "model", "user", "metadata", "store", "service_tier", "safety_identifier",
    "prompt_cache_key", "stream_options",
}  # fmt: skip
# Fields that change nothing at these values (null is always one of them).
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "functions": ([],),
    "modalities": (["text"],),
}
_NAMING: dict[str, Callable[[Any], list[int]]] = {
    "logit_bias": lambda pairs: [token for token, _ in pairs],
    "bad_token_ids": list,
    "bad_words": lambda words: [token for word in words for token in word],
}

Overrides = tuple[dict[str, Any], int, int | None]  # by `SamplingParams` field, n, seed or None


def read_body(body: Mapping[str, Any], job: SamplingSpec, vocab_size: int) -> Overrides:
    """The sampling values of an OpenAI body. Raises `RowError`."""
    asked = {}
    for name, value in body.items():
        if value is None or name in _HARMLESS:
            continue
        if name not in _NEUTRAL:
            asked[name] = value
        elif not any(value == neutral for neutral in _NEUTRAL[name]):
            shown = f" {value!r}" if isinstance(value, bool | int | float) else ""
            raise RowError("unsupported_parameter", f"`{name}`{shown} is not supported")
    return _read(asked, job, vocab_size)


def read_column(given: Any, job: SamplingSpec, vocab_size: int) -> Overrides:
    """The same from a row's sampling column: an object, or JSON text of one."""
    if isinstance(given, str):
        try:
            given = orjson.loads(given) if given.strip() else {}
        except orjson.JSONDecodeError:
            raise RowError("bad_parameter", "the sampling values are not JSON") from None
    if not isinstance(given, dict):
        raise RowError("bad_parameter", "the sampling values are not an object")
    asked = {name: value for name, value in given.items() if value is not None}
    return _read(asked, job, vocab_size)


def read_seed(value: Any) -> int | None:
    """A row's seed, None when absent. Raises `RowError`."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise RowError("bad_seed", f"seed {value!r:.50} is not an integer in [0, 2^63)")
    return value


def check_vocabulary(job: SamplingSpec, vocab_size: int) -> None:
    """Raise `SpecError` if the job itself names a token that the model does not have."""
    try:
        _check_vocabulary({name: getattr(job, name) for name in _NAMING}, vocab_size)
    except RowError as error:
        raise SpecError(f"job spec: sampling: {error}") from None


def _read(asked: dict[str, Any], job: SamplingSpec, vocab_size: int) -> Overrides:
    most = asked.pop("max_completion_tokens", None)
    if most is not None and asked.setdefault("max_tokens", most) != most:
        raise RowError("bad_parameter", "max_tokens and max_completion_tokens differ")
    for name in asked:
        if name not in SamplingSpec.model_fields:
            raise RowError("unsupported_parameter", f"`{name}` is not supported")
    seed = read_seed(asked.pop("seed", None))
    if isinstance(asked.get("logit_bias"), dict):
        # JSON keys are text, so token ids are too. A struct has the keys of all rows, with nulls.
        bias = asked["logit_bias"].items()
        asked["logit_bias"] = {_token_id(key): value for key, value in bias if value is not None}
    if asked.get("stop") == "":
        asked["stop"] = ()
    # As in the job's own sampling, top_logprobs implies logprobs, and false turns off both.
    if asked.get("top_logprobs"):
        asked.setdefault("logprobs", True)
    if asked.get("logprobs") is False and job.top_logprobs:
        asked.setdefault("top_logprobs", 0)
    values = job.__dict__ | {name: _tuples(value) for name, value in asked.items()}
    try:
        checked = SamplingSpec.model_validate(values, strict=True)
    except ValidationError as error:
        raise RowError("bad_parameter", explain(error.errors(), SamplingSpec)) from None
    overrides = {name: getattr(checked, name) for name in asked if name != "n"}
    _check_vocabulary(overrides, vocab_size)
    return overrides, checked.n, seed


def _check_vocabulary(values: Mapping[str, Any], vocab_size: int) -> None:
    named = {name: tokens_of(values.get(name, ())) for name, tokens_of in _NAMING.items()}
    named["stop_token_ids"] = values.get("stop_token_ids", ())
    for name, tokens in named.items():
        if wrong := [token for token in tokens if token >= vocab_size]:
            raise RowError(
                "bad_parameter",
                f"{name} has the token id {wrong[0]}, outside the vocabulary of {vocab_size}",
            )


def _token_id(key: Any) -> Any:
    """The number that a key spells, or the key itself if it is not a number or far too long: `int`
    raises for thousands of digits."""
    is_number = isinstance(key, str) and key.isascii() and key.isdigit()
    return int(key) if is_number and len(key) <= _MAX_DIGITS else key


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
