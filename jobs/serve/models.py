"""The allow list: which models clients may name, and how a batch of each is run.

models:
  small:
    verifier: models/verifier  # folder, relative to this file, or hub id
    proposer: models/draft
    spec:                      # anything else of a job's spec
      sampling: {max_tokens: 512, temperature: 1.0}
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbatch.pipeline.operations.spec_input import read_spec_file, resolved_spec
from specbatch.schemas.errors import SpecError, UsageError
from specbatch.schemas.openai_formats import COMPLETIONS, FORMATS, URLS
from specbatch.schemas.policies import JUDGE, PATTERNS, PolicySpec
from specbatch.schemas.spec import JobSpec

_NAME = re.compile(r"[\w.:+-][\w.:+/ -]{0,99}")
EXAMPLE = (
    b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
    b'"body": {"model": "m", "prompt": "a"}}\n'
)  # plain text, as a model may have no template for chats
_OURS = ("input", "output", "verifier", "proposer", "name", "tenant", "deadline_sec")
_FIELDS = {"verifier", "proposer", "spec"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model of the allow list."""

    name: str
    values: Mapping[str, Any]  # of a job's spec
    base: Path  # of its relative paths

    def spec(
        self, input_path: Path, endpoint: str, output: Path, tenant: str, window_sec: float
    ) -> JobSpec:
        """The job of one batch. Raises `SpecError`."""
        ours = {
            "name": self.name.replace("/", ":"),
            "tenant": tenant,
            "input": {"uri": str(input_path), "format": FORMATS[endpoint]},
            "output": {"uri": str(output)},
            "deadline_sec": window_sec,
        }
        return resolved_spec({**self.values, **ours}, self.base)

    def example(self, source: Path, output: Path) -> JobSpec:
        """The job of a batch that has the lines of `EXAMPLE`. Raises `SpecError`."""
        return self.spec(source, URLS[COMPLETIONS], output, "default", 3600.0)


def load_models(file: Path) -> dict[str, ServedModel]:
    """The models by name. Raises `UsageError` that names what is wrong."""
    try:
        said = read_spec_file(file, "model list", "`models`")
    except SpecError as error:
        raise UsageError(str(error)) from None
    entries = said.get("models")
    if said.keys() != {"models"} or not isinstance(entries, dict) or not entries:
        raise UsageError(
            f"model list {file} must have one key, `models`: a mapping of names to models"
        )
    base = file.absolute().parent
    found = {name: _model(file, name, entry, base) for name, entry in entries.items()}
    for model in found.values():
        try:
            spec = model.example(base / "input.jsonl", base / "output")
        except SpecError as error:
            raise UsageError(f"model list {file}: model `{model.name}`: {error}") from None
        for policy in filter(may_hold_back, spec.policies):
            raise UsageError(
                f"model list {file}: model `{model.name}`: policy `{policy.use}` may hold "
                "completions back for review, and a batch ends before one: block them instead, "
                "with `patterns` or `judge`"
            )
    return found


def may_hold_back(policy: PolicySpec) -> bool:
    """Whether its completions may wait for a person. Of one of another package nobody knows."""
    return "review" in (policy.verdict, policy.on_error) or policy.use not in (PATTERNS, JUDGE)


def _model(file: Path, name: Any, entry: Any, base: Path) -> ServedModel:
    where = f"model list {file}: model `{name}`"
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{where}: a name has at most 100 letters, digits, spaces and the signs . : + / - _"
        )
    if isinstance(entry, dict) and (others := sorted(set(map(str, entry)) - _FIELDS)):
        raise UsageError(f"{where} has `{others[0]}`; it may have verifier, proposer and spec")
    if not isinstance(entry, dict) or not isinstance(entry.get("verifier"), str):
        raise UsageError(f"{where} needs `verifier`: a model folder or hub id")
    spec = entry.get("spec") or {}
    if not isinstance(spec, dict):
        raise UsageError(f"{where}: `spec` must be a mapping, as in a spec file")
    if taken := [key for key in _OURS if key in spec]:
        raise UsageError(f"{where}: leave `{taken[0]}` out of `spec`: a batch says it")
    models = {key: entry[key] for key in ("verifier", "proposer") if entry.get(key) is not None}
    return ServedModel(name, {**spec, **models}, base)
