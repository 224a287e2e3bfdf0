"""The part of a job spec that says how far drafts reach."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from specbatch.schemas.records import Verification
from specbatch.schemas.spec_part import PAIRS, Part

Depth = Literal["auto", "off", "shadow"] | Annotated[int, Field(ge=0, le=32)]
Cap = Annotated[int, Field(ge=0, le=32)]
Source = Literal["grammar", "block", "history", "ngram", "draft-model"]
SOURCES: tuple[Source, ...] = ("grammar", "block", "history", "ngram", "draft-model")
NO_DRAFT_MODEL = "none"  # in routes


class SpeculationSpec(Part):
    """How far drafts reach. Depth changes speed and cost, never outputs."""

    depth: Depth = Field(
        default="auto",
        description="auto, off, shadow (draft and count, verify nothing), or draft tokens per step",
    )
    sources: Literal["hybrid"] | tuple[Source, ...] = Field(
        default="hybrid",
        description="sources of drafts; hybrid: all there are, the most promising at each step",
    )
    max_depth: Cap | None = Field(default=None, description="draft tokens per step at most")
    tag_depths: Annotated[tuple[tuple[str, Cap], ...], PAIRS] = Field(
        default=(), max_length=256, description="row tag: its cap; 0 drafts nothing for its rows"
    )
    routes: Annotated[tuple[tuple[str, Annotated[str, Field(min_length=1)]], ...], PAIRS] = Field(
        default=(),
        max_length=256,
        description="row tag: the only draft model its rows ask, by its folder's name; or none",
    )
    prompt_depths: Annotated[tuple[tuple[Annotated[int, Field(ge=0)], Cap], ...], PAIRS] = Field(
        default=((8192, 4), (32768, 2)),
        max_length=16,
        description="tokens of prompt and output: the cap once there are so many",
    )
    history_tokens: int = Field(
        default=1_000_000,
        ge=0,
        le=20_000_000,
        description="tokens of earlier jobs' outputs to draft from; 0: none",
    )
    pregenerate: Literal["auto"] | bool = Field(
        default="auto",
        description="let proposer workers draft continuations beforehand; auto: for pilot groups",
    )
    pregenerate_tokens: Literal["auto"] | Annotated[int, Field(ge=1, le=4096)] = Field(
        default="auto",
        description="length of a pre-generated continuation; auto: as long as it is worth it",
    )

    verification: Verification = Field(
        default=Verification.COUPLED,
        description="coupled: outputs do not depend on drafts; rejection, block: only their "
        "distribution does not",
    )

    @property
    def enabled(self) -> bool:
        return self.depth not in ("off", 0)

    def allows(self, source: Source) -> bool:
        return self.sources == "hybrid" or source in self.sources

    @field_validator("sources", mode="before")
    @classmethod
    def _named_sources(cls, value: object) -> object:
        if value == "hybrid":
            return value
        if isinstance(value, str):
            value = [name for part in value.split(",") if (name := part.strip())]
        if not isinstance(value, list | tuple):
            raise ValueError("should be hybrid or a list of sources")
        for name in value:
            if name not in SOURCES:
                raise ValueError(
                    f"no source of drafts is called {name!r}: name some of {', '.join(SOURCES)}, "
                    "or hybrid for all"
                )
        return tuple(dict.fromkeys(value))

    @field_validator("routes")
    @classmethod
    def _each_tag_once(cls, value: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        if len(dict(value)) < len(value):
            raise ValueError("a tag occurs twice")
        return value

    @model_validator(mode="after")
    def _fields_fit_together(self) -> SpeculationSpec:
        models = [name for _, name in self.routes if name != NO_DRAFT_MODEL]
        if models and not self.allows("draft-model"):
            raise ValueError(
                f"routes send rows to `{models[0]}`, and sources leave draft models out: "
                "add draft-model to sources"
            )
        if self.enabled and not self.sources:
            raise ValueError("no sources of drafts are left: name some, or set depth to off")
        if self.verification is not Verification.COUPLED:
            if self.depth == "shadow":
                raise ValueError(
                    f"verification {self.verification} and depth shadow exclude each other: "
                    "only running a ratio test shows what it accepts"
                )
            if not self.allows("draft-model"):
                raise ValueError(
                    f"verification {self.verification} needs drafts of a draft model: "
                    "add draft-model to sources"
                )
            if not self.enabled:
                raise ValueError(f"verification {self.verification} needs drafts, and depth is off")
            if self.pregenerate is True:
                raise ValueError(
                    f"verification {self.verification} needs the drafts' probabilities, which "
                    "pre-generated drafts do not carry: pregenerate must be auto or false"
                )
        return self
