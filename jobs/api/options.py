"""Keyword arguments that make a job spec: the options of `submit-job`, by the same names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypedDict

from specbatch.jobs.running.fields import by_field
from specbatch.pipeline.operations.spec_input import spec_with
from specbatch.schemas.errors import SpecError
from specbatch.schemas.spec import JobSpec

Place = str | os.PathLike[str]
Base = Mapping[str, Any] | Place  # of a spec: its values, or its file


class SpecOptions(TypedDict, total=False):
    """What a job does, beside its data and its output. `docs/reference/spec.md` says what each
    field means, and its default."""

    # Input
    format: (
        Literal["auto", "parquet", "arrow", "csv", "jsonl", "openai", "openai-completions"]
        | Literal["delta", "iceberg"]
        | None
    )
    delimiter: str | None
    snapshot: int | None
    since: int | Literal["last"] | None
    prompt_column: str | None
    prompt_kind: Literal["auto", "text", "token_ids", "messages"] | None
    id_column: str | None
    seed_column: str | None
    sampling_column: str | None
    template: str | None
    template_kind: Literal["simple", "jinja"] | None
    system: str | None
    # Output
    output_format: Literal["parquet", "jsonl"] | None
    keep_columns: str | Sequence[str] | None
    keep_best: int | None
    table: Place | None
    # Models
    verifier: Place | None
    proposer: Place | Mapping[str, Any] | None
    # Sampling
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    n: int | None
    seed: int | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    stop: str | Sequence[str] | None
    response_format: Mapping[str, Any] | str | None
    tools: Sequence[Mapping[str, Any]] | str | None
    tool_choice: Mapping[str, Any] | str | None
    parallel_tool_calls: bool | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logprobs: bool | None
    top_logprobs: int | None
    # Speed
    depth: int | Literal["auto", "off", "shadow"] | None
    sources: str | Sequence[str] | None
    max_depth: int | None
    history_tokens: int | None
    verification: Literal["coupled", "rejection", "block"] | None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None
    exactness: Literal["bitwise", "fast"] | None
    reuse_outputs: bool | None
    reuse_check: float | None
    group_size: int | None
    # The job
    name: str | None
    tenant: str | None
    priority: Literal["high", "normal", "low"] | None
    deadline_sec: float | None
    budget_usd: float | None
    regions: str | Sequence[str] | None
    spot: bool | None
    notify: str | Sequence[str] | None
    lineage_parent: str | None


class SubmitOptions(SpecOptions, total=False):
    """What `submit` takes beside these."""

    spec: Base | None  # a spec file, or its values: the options override it
    idempotency_key: str | None  # submitting again with it finds the same job


class RunOptions(SubmitOptions, total=False):
    """What `run` takes beside these."""

    settings: Mapping[str, Any] | None  # by their names in lower case; win over the environment's
    timeout: float | None  # seconds
    progress: bool  # shown, unless False


_SYNONYMS = {"model": "verifier", "draft_model": "proposer"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The keyword arguments of one call, apart: what the job does, and how it is done."""

    fields: Mapping[str, Any]  # by the option's name, none of them None
    spec: Base | None = None
    idempotency_key: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    timeout: float | None = None
    progress: bool = True


def asked(
    model: Place | None, draft_model: Place | None, given: Mapping[str, Any], kind: type
) -> Asked:
    """The keyword arguments of a function that takes `kind`, a typed dictionary.

    Raises `SpecError` for one that there is not, and for a model that is named twice.
    """
    for name in given:
        if name not in kind.__annotations__:
            raise SpecError(_unknown(name, kind))
    named = {name: value for name, value in given.items() if value is not None}
    own = {name: named.pop(name) for name in list(named) if name not in SpecOptions.__annotations__}
    for name, value in (("model", model), ("draft_model", draft_model)):
        same = _SYNONYMS[name]
        if value is not None:
            if same in named:
                raise SpecError(f"{name} and {same} mean the same: give one of them")
            named[same] = value
    fields = {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in named.items()
    }
    return Asked(fields, **own)


def _unknown(name: str, kind: type) -> str:
    if name == "input":
        return "unknown option `input`: the first argument is the data, a frame or a path"
    near = get_close_matches(name, ["output", *_SYNONYMS, *kind.__annotations__], 1)
    meant = f" (did you mean `{near[0]}`?)" if near else ""
    return f"unknown option `{name}`{meant}; the options are those of `submit-job --help`"


def spec_of(asked: Asked, input_uri: str | None, output_uri: str | None) -> JobSpec:
    """The checked spec of a job; a place that is None is the base's. Raises `SpecError`."""
    places = {"input": input_uri, "output": output_uri}
    named = {name: uri for name, uri in places.items() if uri is not None}
    if asked.spec is None and "verifier" not in asked.fields:
        raise SpecError("no model is named: give model=, a folder or a hub id")
    base = asked.spec
    values = Path(os.fspath(base)) if isinstance(base, str | os.PathLike) else base
    return spec_with(values, by_field({**named, **asked.fields}))
