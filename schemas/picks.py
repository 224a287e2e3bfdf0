"""A job with candidates of a small model: `specbatch pick` writes the best of them, or the
verifier's own.

The file is an ordinary job spec, which says what the verifier does alone, with one section more:
`pick`. Without that section it is a job for `submit-job`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field, ValidationError, field_validator, model_validator

from specbatch.schemas.best_by import BestBySpec
from specbatch.schemas.errors import SpecError
from specbatch.schemas.field_errors import explain
from specbatch.schemas.policies import JUDGE
from specbatch.schemas.records import Verification
from specbatch.schemas.spec import JobSpec, SamplingSpec
from specbatch.schemas.spec_part import Part
from specbatch.schemas.uris import model_ref

SECTION = "pick"
ID = "pick-"  # begins the name of a pick, which owns its output as a job owns its own


class PickSection(Part):
    """Who writes candidates, who scores them, and how good the best must be."""

    model: str = Field(
        min_length=1,
        description="the small model that writes the candidates: folder, hub id, or a served name",
    )
    sampling: Mapping[str, Any] = Field(
        default_factory=dict,
        description="of the candidates, over the job's own `sampling`: such as n and temperature",
    )
    by: BestBySpec = Field(
        description="who scores them: {use: judge, prompt: …} asks the verifier, another name is "
        "an entry point of `specbatch.scorers`"
    )
    least: float = Field(
        allow_inf_nan=False,
        description="where the best score is below it, the verifier writes the row itself",
    )

    @field_validator("sampling")
    @classmethod
    def _keeps_the_noise(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        if "seed" in value:
            raise ValueError(
                "has a seed, and the candidates have the job's, so that they make good drafts: "
                "leave it out"
            )
        return value

    @model_validator(mode="after")
    def _can_be_reached(self) -> PickSection:
        if self.by.use == JUDGE and not 0 <= self.least <= 1:
            raise ValueError(
                f"least {self.least:g} says nothing of a judge's scores, which are from 0 to 1"
            )
        return self


@dataclass(frozen=True, slots=True)
class Pick:
    """A pick with resolved paths: the verifier's job, and the section beside it."""

    job: JobSpec
    section: PickSection
    input: str = ""  # what tells its input from any other; empty: not looked at yet

    @property
    def uses_judge(self) -> bool:
        return self.section.by.use == JUDGE

    @property
    def sampling(self) -> SamplingSpec:
        """Of the candidates."""
        own = self.job.sampling.model_dump(mode="json", exclude_defaults=True)
        return SamplingSpec.model_validate(own | dict(self.section.sampling))

    @property
    def pick_id(self) -> str:
        """The same for the same spec and input, so that its jobs and its output are found again.
        What decides no text does not count."""
        job = self.job.model_copy(update={"budget_usd": None, "priority": "normal"})
        section = self.section.model_dump(mode="json", exclude_defaults=True)
        said = [job.digest(), section, self.input]
        data = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
        return ID + hashlib.sha256(data).hexdigest()[:16]


def load_pick(section: object, job: JobSpec, base: Path) -> Pick:
    """A pick of a checked job and the section beside it, whose paths are relative to `base`.

    Raises `SpecError` that names what is wrong, and what no pick can promise.
    """
    if section is None:
        raise SpecError(
            f"pick spec: section `{SECTION}` not given; say there which model writes candidates, "
            "what scores them, and the least score; or use `submit-job`"
        )
    try:
        checked = PickSection.model_validate(section)
    except ValidationError as error:
        raise SpecError(f"pick spec: {SECTION}: {explain(error.errors(), PickSection)}") from None
    checked = checked.model_copy(update={"model": model_ref(checked.model, base)})
    pick = Pick(job, checked)
    try:
        candidates = pick.sampling.n
    except ValidationError as error:
        words = explain(error.errors(), SamplingSpec)
        raise SpecError(f"pick spec: {SECTION}.sampling: {words}") from None
    for problem in _problems(pick, candidates):
        raise SpecError(f"pick spec: {problem}")
    return pick


def _problems(pick: Pick, candidates: int) -> list[str]:
    """What is asked for and cannot be had, each as a sentence with its remedy."""
    job, output = pick.job, pick.job.output
    found = []
    if job.sampling.n != 1:
        found.append(
            f"sampling.n is {job.sampling.n}, and each row of a pick has one text: leave it out, "
            f"and set {SECTION}.sampling.n for the candidates"
        )
    if not pick.uses_judge and candidates < 2:
        found.append(
            f"scorer `{pick.section.by.use}` scores where there is a choice: set "
            f"{SECTION}.sampling.n to 2 or more, or let the verifier judge"
        )
    if output.keep_best is not None or output.best_by is not None:
        found.append(f"output.keep_best and best_by are what `{SECTION}` says: leave them out")
    if output.keep_columns:
        found.append("output.keep_columns is not for picks: join the output with the input by id")
    if output.table is not None:
        found.append(
            "output.table gets the finished rows of one job, and a pick has up to three: leave it "
            "out, and load the parts of its output"
        )
    if job.speculation.verification is not Verification.COUPLED:
        found.append(
            f"verification {job.speculation.verification} makes the verifier's own rows depend on "
            "drafts, which candidates are: leave it out"
        )
    if job.deadline_sec is not None:
        found.append("deadline_sec is of one job, and a pick has up to three: use --timeout")
    if job.notify:
        found.append("notify tells the end of one job, and a pick has up to three: leave it out")
    return found
