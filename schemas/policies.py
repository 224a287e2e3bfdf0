"""Content policies: what judges the texts of a job before they are published, and what it says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

Place = tuple[int, int]  # row, sample
FAILED = "failed"  # the code of `on_error`
NO_VERDICT = "policy_failed"  # in a job's report: completions that a policy gave no verdict on
PATTERNS, JUDGE = "patterns", "judge"  # the policies that are built in
MOST_PROMPT_CHARS = 16_384  # of a judge's question
ENTRY_POINTS = "specbatch.policies"  # the group of those that other packages offer
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
Name = Annotated[str, StringConstraints(pattern=rf"^{_NAME}$")]


def _is_code(code: str) -> bool:
    return len(code) <= 64 and all(c.isascii() and (c.isalnum() or c in "_.-") for c in code)


class Ruling(StrEnum):
    """What becomes of a completion."""

    ALLOW = "allow"
    REDACT = "redact"  # published with another text, without its tokens
    REVIEW = "review"  # not published before a person has released it
    BLOCK = "block"  # never published


@dataclass(frozen=True, slots=True)
class PolicyInput:
    """One finished completion, as a policy sees it."""

    text: str  # as it would be published
    prompt: str  # what the model has read, without special tokens
    row_id: str
    tag: str | None
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a policy says of a completion. `code` is a word for the reason: it goes into columns and
    logs that outlive the text, so it never quotes it. Raises `ValueError`."""

    ruling: Ruling
    text: str | None = None  # what is published instead; with `REDACT` alone
    code: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.ruling, Ruling):
            raise ValueError("a verdict is made by allow(), redact(text), review() or block()")
        if (self.ruling is Ruling.REDACT) != isinstance(self.text, str):
            raise ValueError("a verdict has a text if it redacts, and only then")
        if not isinstance(self.code, str) or not _is_code(self.code):
            raise ValueError("a verdict's code is one word of at most 64 letters, digits, _ . -")

    @classmethod
    def allow(cls) -> Verdict:
        return cls(Ruling.ALLOW)

    @classmethod
    def redact(cls, text: str, code: str = "") -> Verdict:
        return cls(Ruling.REDACT, text, code)

    @classmethod
    def review(cls, code: str = "") -> Verdict:
        return cls(Ruling.REVIEW, code=code)

    @classmethod
    def block(cls, code: str = "") -> Verdict:
        return cls(Ruling.BLOCK, code=code)


ALLOWED = Verdict.allow()


@dataclass(frozen=True, slots=True)
class Ruled:
    """What one policy said of one completion, when it was asked."""

    policy: str
    version: str
    verdict: Verdict
    sec: float = 0.0  # that it took


_STRICTNESS = list(Ruling)


def outcome(ruled: Sequence[Ruled]) -> Ruled | None:
    """The answer that counts: the strictest, of equally strict ones the last. None: all allow."""
    strictest = max(ruled, key=lambda one: _STRICTNESS.index(one.verdict.ruling), default=None)
    if strictest is None or strictest.verdict.ruling is Ruling.ALLOW:
        return None
    return next(r for r in reversed(ruled) if r.verdict.ruling is strictest.verdict.ruling)


def in_report(ruling: Ruling) -> str:
    """The name under which a job's report counts completions of this outcome."""
    return f"policy_{ruling.value}"


HELD_BACK = in_report(Ruling.REVIEW)


class Decided(StrEnum):
    """What a person decided on a completion that was held back."""

    RELEASED = "released"  # published
    BLOCKED = "blocked"  # never published


@dataclass(frozen=True, slots=True)
class Reviews:
    """The completions of a job that policies hold back for review, by (row, sample)."""

    held: Mapping[Place, HeldBack]
    decided: Mapping[Place, Decided]
    times: int = 0  # that somebody decided: each is a revision of the output

    @property
    def pending(self) -> list[Place]:
        return [place for place in self.held if place not in self.decided]


@dataclass(frozen=True, slots=True)
class HeldBack:
    """One completion that is held back, without its text."""

    group_index: int
    why: str  # which policy, in a sentence


NO_REVIEWS = Reviews({}, {})


class PolicySpec(BaseModel):
    """One policy of a job. Those of a job are asked in turn; the strictest answer counts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    use: Name = Field(
        description="`patterns`, `judge`, or the name of an entry point of `specbatch.policies`"
    )
    patterns: Mapping[Name, str] = Field(
        default_factory=dict, description="of `patterns`: regular expressions (RE2) by name"
    )
    prompt: str | None = Field(
        default=None,
        max_length=MOST_PROMPT_CHARS,
        description="of `judge`: a question about {text} that the verifier answers with yes or no",
    )
    verdict: Literal["redact", "review", "block"] = Field(
        default="block", description="where a pattern is found, or the judge says yes"
    )
    options: Mapping[str, Any] = Field(
        default_factory=dict, description="of an entry point: its keyword arguments"
    )
    timeout_sec: float = Field(
        default=10.0, gt=0, le=3600, description="of an entry point: for each completion"
    )
    on_error: Literal["allow", "review", "block"] = Field(
        default="block", description="if the policy fails, hangs or cannot answer"
    )

    @model_validator(mode="after")
    def _has_what_it_uses(self) -> PolicySpec:
        of = {PATTERNS: "patterns", JUDGE: "prompt"}
        for name, field in of.items():
            if self.use == name and not getattr(self, field):
                raise ValueError(f"policy {name} needs {field}")
            if self.use != name and getattr(self, field):
                raise ValueError(f"field {field} goes with `use: {name}`, and this is `{self.use}`")
        if self.prompt and (problem := problem_of_question(self.prompt)) is not None:
            raise ValueError(problem)
        if self.verdict == "redact" and self.use != PATTERNS:
            raise ValueError("only patterns redact by a verdict of the spec")
        if self.use in of and self.options:
            raise ValueError(f"policy {self.use} takes no options")
        return self

    @property
    def if_met(self) -> Ruling:
        return Ruling(self.verdict)

    @property
    def if_failed(self) -> Verdict:
        return Verdict(Ruling(self.on_error), code=FAILED)


def problem_of_question(prompt: str) -> str | None:
    """What is wrong with a judge's prompt; None if nothing is."""
    unknown = set(re.findall(r"\{[a-z_]+\}", prompt)) - {"{text}", "{prompt}"}
    if unknown:
        return f"the prompt has {min(unknown)}: its places are {{text}} and {{prompt}}"
    if "{text}" not in prompt:
        return "the prompt of a judge needs {text}, where the completion goes"
    return None


def names_of(policies: Sequence[PolicySpec]) -> list[str]:
    """What each is called in errors and logs: those that use the same have a number."""
    uses = [policy.use for policy in policies]
    return [
        use if uses.count(use) == 1 else f"{use} {uses[: place + 1].count(use)}"
        for place, use in enumerate(uses)
    ]
