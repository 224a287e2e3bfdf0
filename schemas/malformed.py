"""What a job does about outputs that ended without the form that they were asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from specbatch.schemas.records import SamplingParams, Verification
from specbatch.schemas.seeds import retry_seed

# In a job's report: outputs that were continued, those that were sampled again, those of both that
# have their form now, and those without it whose texts are not among the published rows.
CONTINUED, RETRIED = "malformed_continued", "malformed_retried"
MENDED, QUARANTINED = "malformed_mended", "malformed_quarantined"
CODE = "malformed_output"  # of an output in quarantine


class MalformedSpec(BaseModel):
    """An output is malformed if it ended without its response format or its tools' calls. It is
    continued first, then sampled again; `then` is for what is still malformed."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    max_tokens: int | None = Field(
        default=None,
        ge=2,
        le=131072,
        description="continue what sampling.max_tokens cut, to this many tokens in all; that is "
        "what this max_tokens would have written at once",
    )
    retries: int = Field(
        default=0,
        ge=0,
        le=16,
        description="sample again, at most so many times, with other seeds; greedy rows are not",
    )
    then: Literal["keep", "quarantine"] = Field(
        default="keep",
        description="keep: publish the text with its error; quarantine: publish the error alone, "
        "and the text in malformed.jsonl beside data",
    )

    @property
    def mends(self) -> bool:
        """Whether anything is computed for a malformed output."""
        return self.max_tokens is not None or self.retries > 0

    def longer(self, params: SamplingParams) -> SamplingParams:
        """The sampling of what is continued or sampled again."""
        most = max(params.max_tokens, self.max_tokens or 0)
        return replace(params, max_tokens=most)

    def decided_by(
        self, params: SamplingParams, seed: int, recorded_seed: int, tokens: int
    ) -> tuple[SamplingParams, int]:
        """Sampling and seed that decided a recorded completion of so many `tokens`.

        `seed` is its sample's. A recorded seed that no retry has is ignored: it is a fault, which
        whoever compares both finds.
        """
        seeds = (retry_seed(seed, number) for number in range(1, self.retries + 1))
        is_retry = params.temperature > 0 and recorded_seed in seeds
        of = self.longer(params) if tokens > params.max_tokens and params.form else params
        return of, recorded_seed if is_retry else seed


AS_IT_IS = MalformedSpec()


def contradiction(
    malformed: MalformedSpec, max_tokens: int, verification: Verification
) -> str | None:
    """Why a job cannot do that; None: it can."""
    if malformed.mends and verification is not Verification.COUPLED:
        return (
            "output.malformed needs outputs that do not depend on drafts: leave its max_tokens "
            f"and retries out, or verification {verification}"
        )
    if malformed.max_tokens is not None and malformed.max_tokens <= max_tokens:
        return (
            f"output.malformed.max_tokens {malformed.max_tokens} is not above sampling.max_tokens "
            f"{max_tokens}: it is the whole length, with what was written before"
        )
    return None
