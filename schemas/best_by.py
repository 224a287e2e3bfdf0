"""What says which of a prompt's completions are the best: the verifier, or a package's scorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from specbatch.schemas.policies import (
    JUDGE,
    MOST_PROMPT_CHARS,
    PATTERNS,
    Name,
    problem_of_question,
)

SCORERS = "specbatch.scorers"  # the group of entry points that other packages offer
SCORED, UNSCORED = "scored", "unscored"  # in a job's report: completions with and without a score
NO_JUDGE_HERE = (
    "the judge of best_by needs log-probabilities of all tokens, and engine vllm has those of the "
    "tokens that a form allows: verify with engine exact, or score with a package's scorer"
)


class BestBySpec(BaseModel):
    """Who scores a prompt's completions, of which `keep_best` are published."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    use: Name = Field(description="`judge`, or the name of an entry point of `specbatch.scorers`")
    prompt: str | None = Field(
        default=None,
        max_length=MOST_PROMPT_CHARS,
        description="of `judge`: a question about {text} that the verifier answers with yes or no; "
        "the likelier yes is, the better",
    )
    options: Mapping[str, Any] = Field(
        default_factory=dict, description="of an entry point: its keyword arguments"
    )
    timeout_sec: float = Field(
        default=10.0, gt=0, le=3600, description="of an entry point: for each completion"
    )

    @model_validator(mode="after")
    def _has_what_it_uses(self) -> BestBySpec:
        if self.use == PATTERNS:
            raise ValueError("patterns give no score: use judge, or an entry point")
        if self.use != JUDGE and self.prompt is not None:
            raise ValueError(f"field prompt goes with `use: {JUDGE}`, and this is `{self.use}`")
        if self.use == JUDGE and not self.prompt:
            raise ValueError("judge needs prompt")
        if self.use == JUDGE and self.options:
            raise ValueError("judge takes no options")
        if self.prompt and (problem := problem_of_question(self.prompt)) is not None:
            raise ValueError(problem)
        return self

    def shown(self, whole: bool) -> dict[str, Any]:
        """As plain JSON; `whole`: also what may quote texts."""
        return self.model_dump(mode="json", exclude_defaults=True) if whole else {"use": self.use}


def why_no_choice(
    best_by: BestBySpec | None, keep_best: int | None, n: int, rows_say_n: bool
) -> str | None:
    """What to say where nothing would ever be scored; None where something may be.

    `rows_say_n`: rows may have another number of completions than the job's `n`.
    """
    if best_by is None:
        return None
    if keep_best is None:
        return "best_by needs keep_best: say how many of a prompt's completions to publish"
    if keep_best >= n and not rows_say_n:
        return (
            f"best_by has nothing to choose from: keep_best {keep_best} keeps every one of "
            f"{n} completions; raise sampling.n, or leave best_by out"
        )
    return None
