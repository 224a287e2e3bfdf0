"""Numeric classes: two workers of one class write the same bits for the same request.

A name is `ENGINE/DTYPE/VERSION`, as in `exact/f32/1` or `torch/bf16/5d0c1a2b`. The store and the
claims need the names alone; how a worker finds its own is
`pipeline/engines/exact/model/numeric_class.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple

from specbatch.schemas.fingerprint import Fingerprint, Models
from specbatch.schemas.vllm_proposer import vllm_proposer_in

UNKNOWN = "unknown"  # of jobs from before classes were pinned: any worker may serve them
PATTERN = r"^[a-z][a-z0-9-]*/(f32|bf16|f16)(/[a-z0-9-]+)+$"
EXACTNESS = ("bitwise", "fast")
WEIGHTS = ("as-is", "int8", "fp8")
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}

Facts = Mapping[str, str]  # what a name digests, in words


def dtype_of(name: str) -> str:
    """The dtype in which a model of this class computes, as a spec names it."""
    return DTYPES[name.split("/")[1]]


def contradiction(dtype: str, name: str, weights: str = "as-is") -> str | None:
    """Says why a class does not fit a job's `dtype` and `weights`; None if it fits."""
    if re.fullmatch(PATTERN, name) is None:
        return f"{name!r} is not a numeric class: write one like exact/f32/1 or torch/bf16/5d0c1a2b"
    if dtype not in ("auto", dtype_of(name)):
        return f"numeric class {name} computes in {dtype_of(name)}, and dtype is {dtype}"
    if name.startswith("exact/") and weights != "as-is":
        return f"numeric class {name} has no {weights} weights: name another class, or none"
    return None


def digested(engine: str, dtype: str, facts: Facts) -> str:
    """The name of a class that stands for all these facts; `dtype` as a spec names it."""
    short = next(short for short, name in DTYPES.items() if name == dtype)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return f"{engine}/{short}/{digest[:8]}"


def engine_of(name: str | None) -> str:
    """What decides tokens of this class: exact, torch, vllm; or `unknown`."""
    return (name or UNKNOWN).partition("/")[0]


def samples_by_seed(name: str | None) -> bool:
    """Whether sampled tokens of this class follow from the request's seed.

    Those of vLLM also depend on its drafts and its batch.
    """
    return engine_of(name) != "vllm"


def masks_logprobs(name: str | None) -> bool:
    """Whether log-probabilities of this class are of the tokens that a form allows, not of all."""
    return engine_of(name) == "vllm"


def engine_key(dtype: str, exactness: str, weights: str) -> str:
    """A key of the engine options that bits depend on. `dtype` may be `auto`."""
    return f"{dtype}/{exactness}/{weights}"


def key_with(key: str, own: str) -> str:
    """The key of a job that asks for vLLM's own speculation too, by its name; empty: for none."""
    return f"{key}/{own}" if own else key


def all_keys() -> Iterator[str]:
    """All engine keys that a job may have without vLLM's own speculation."""
    for dtype, exactness, weights in product(("auto", *DTYPES.values()), EXACTNESS, WEIGHTS):
        yield engine_key(dtype, exactness, weights)


def key_of_spec(spec: Mapping[str, Any], numeric_class: str | None = None) -> str:
    """The engine key of a stored job spec, which may be older than some of its fields.

    `numeric_class`: in the dtype of that class.
    """
    engine = spec.get("engine") or {}
    known = numeric_class is not None and re.fullmatch(PATTERN, numeric_class)
    key = engine_key(
        dtype_of(numeric_class) if numeric_class and known else engine.get("dtype", "auto"),
        engine.get("exactness", "bitwise"),
        engine.get("verifier_weights", "as-is"),
    )
    return key_with(key, vllm_proposer_in(spec))


def class_note(kept: str | None, here: str | None) -> str | None:
    """Says that tokens were not decided in the class here, for all that is known; else None."""
    if here is None or kept == here:
        return None
    if kept in (None, UNKNOWN):
        return f"written before numeric classes were recorded, checked in {here}: bits may differ"
    return f"written in numeric class {kept}, checked in {here}: bits may differ"


class Pinned(NamedTuple):
    """What a job has pinned, for claims to compare. None: nothing pinned yet, or not needed."""

    numeric_class: str | None = None
    model_fingerprint: str | None = None  # of its verifier
    # Of its draft model, where its outputs depend on that: under ratio tests.
    proposer_fingerprint: str | None = None

    @classmethod
    def of(cls, row: Any) -> Pinned:
        """The pins of a job's row, or of a claimed group."""
        return cls(row.numeric_class, row.model_fingerprint, row.proposer_fingerprint)


class Change(NamedTuple):
    """What a user wants to pin anew. None leaves a value as it is."""

    numeric_class: str | None = None
    models: Models | None = None

    @property
    def is_any(self) -> bool:
        return self != NO_CHANGE


NO_CHANGE = Change()


@dataclass(frozen=True, slots=True)
class Serves:
    """What a verify worker offers; claims compare it with what a job has pinned.

    Claims take the whole object, so every new thing to compare becomes a field here.
    """

    model: str  # as jobs name it
    classes: tuple[tuple[str, str], ...]  # (engine key, numeric class), sorted
    facts: Mapping[str, Facts] = field(default_factory=dict, compare=False)  # by class
    fingerprint: Fingerprint | None = None  # of the model's files; None: not known
    drafts: tuple[str, ...] = ()  # fingerprints of the draft models beside it, sorted
    only_job: str | None = None  # the one job that a local run works on; None: any
    probe: str | None = None  # what was found when the engine was tried, in words; None: it was not

    @classmethod
    def of(
        cls, model: str, classes: Mapping[str, str], facts: Mapping[str, Facts] | None = None
    ) -> Serves:
        return cls(model, tuple(sorted(classes.items())), facts or {})

    @property
    def names(self) -> tuple[str, ...]:
        """All classes that the worker can run, sorted."""
        return tuple(sorted({name for _, name in self.classes}))

    def class_of(self, key: str) -> str | None:
        """The class in which the worker would run a job with this engine key."""
        return dict(self.classes).get(key)

    def takes(self, pinned: Pinned) -> bool:
        """Whether the worker may verify groups of a job that has pinned this."""
        return (
            pinned.numeric_class in (None, UNKNOWN, *self.names)
            and self.has_model(pinned.model_fingerprint)
            and pinned.proposer_fingerprint in (None, *self.drafts)
        )

    def works_on(self, job_id: str) -> bool:
        """Whether the worker takes work of this job. A local run takes only its own job's."""
        return self.only_job in (None, job_id)

    def has_model(self, fingerprint: str | None) -> bool:
        """Whether the worker's verifier has this fingerprint; None accepts any."""
        return fingerprint in (None, UNKNOWN) or (
            self.fingerprint is not None and self.fingerprint.digest == fingerprint
        )

    def as_json(self) -> dict[str, Any]:
        facts = {name: dict(of) for name, of in self.facts.items()}
        return {
            "model": self.model,
            "classes": dict(self.classes),
            "facts": facts,
            "fingerprint": self.fingerprint and self.fingerprint.as_json(),
            "drafts": list(self.drafts),
            "only_job": self.only_job,
            "probe": self.probe,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> Serves | None:
        if values is None:
            return None
        of_classes = cls.of(values["model"], values["classes"], values.get("facts"))
        fingerprint = Fingerprint.from_json(values.get("fingerprint"))
        drafts = tuple(values.get("drafts", ()))
        only_job, probe = values.get("only_job"), values.get("probe")
        return replace(
            of_classes, fingerprint=fingerprint, drafts=drafts, only_job=only_job, probe=probe
        )


def preferred(key: str, own: Serves, alive: Iterable[Serves]) -> str | None:
    """The class that a job should pin: the one that most live workers of its model offer.

    `own` is the asking worker; `alive` are all live workers of that model, `own` included. On a tie
    the asking worker's class wins, then the first by name. None if no worker offers any.
    """
    counts: dict[str, int] = {}
    for one in alive:
        if (name := one.class_of(key)) is not None:
            counts[name] = counts.get(name, 0) + 1
    mine = own.class_of(key)
    if mine is not None:
        counts.setdefault(mine, 1)
    return min(counts, key=lambda name: (-counts[name], name != mine, name), default=None)
