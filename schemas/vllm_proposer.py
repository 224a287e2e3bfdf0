"""A job's `proposer` as an object: vLLM's own speculation, instead of a draft model of ours.

    proposer: models/draft                        # a draft model, as a text
    proposer: {kind: eagle3, model: models/head}  # vLLM drafts by itself

The text means a draft model that propose workers, or engine exact, run. The object is passed to
vLLM, so only workers with engine vllm that draft so take the job.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from specbatch.schemas.errors import UsageError
from specbatch.schemas.field_errors import explain
from specbatch.schemas.uris import model_ref

ProposerKind = Literal["eagle3", "mtp", "draft_model", "suffix"]
KINDS: tuple[ProposerKind, ...] = ("eagle3", "mtp", "draft_model", "suffix")
_MODEL_OF = {"eagle3": "the folder or hub id of its head", "draft_model": "its folder or hub id"}


class VllmProposer(BaseModel):
    """vLLM's own speculation: the kind as vLLM calls it, and the model that the kind needs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: ProposerKind = Field(description="as vLLM calls it")
    model: str | None = Field(
        default=None, min_length=1, description="folder or hub id; not of suffix"
    )

    @model_validator(mode="after")
    def _has_the_model_it_needs(self) -> VllmProposer:
        if self.model is None and (what := _MODEL_OF.get(self.kind)) is not None:
            raise ValueError(f"kind {self.kind} needs a model: name {what}")
        if self.kind == "suffix" and self.model is not None:
            raise ValueError("kind suffix drafts from what was written before: leave model out")
        return self

    @property
    def name(self) -> str:
        """As jobs, workers and outputs name it: `eagle3:models/head`, `suffix`."""
        return vllm_proposer_name(self.kind, self.model)

    @property
    def as_config(self) -> dict[str, str]:
        """For vLLM's `speculative_config`, without its depth."""
        return {"method": self.kind} | ({"model": self.model} if self.model else {})

    def at(self, base: Path) -> VllmProposer:
        """With the absolute path of a model that is a folder. Raises `SpecError`."""
        return self.model_copy(update={"model": self.model and model_ref(self.model, base)})

    def contradiction(
        self,
        exactness: str,
        weights: tuple[str, str],
        engine: str | None,
        verification: str,
        is_source: bool,
    ) -> str | None:
        """Says why a job cannot have it; None: it can.

        `weights` are those of verifier and proposer, `engine` that of a pinned numeric class;
        `is_source`: the job's sources have draft models among them.
        """
        mine = f"proposer kind {self.kind} is vLLM's own speculation"
        if exactness == "bitwise":
            return (
                f"{mine}, and engine vllm cannot give exactness bitwise: set engine.exactness to "
                "fast, or name a draft model as text"
            )
        if engine not in (None, "vllm"):
            return f"{mine}, and engine.numeric_class is of engine {engine}: leave one of them out"
        if weights != ("as-is", "as-is"):
            return f"{mine}, and vLLM does not quantise weights: leave them as-is"
        if verification != "coupled":
            return f"{mine}, which verifies in its own way: leave verification {verification} out"
        if not is_source:
            return (
                f"{mine}, which drafts as a draft model, and sources leave draft models out: add "
                "draft-model to sources"
            )
        return None


def proposer_at(proposer: str | VllmProposer | None, base: Path) -> str | VllmProposer | None:
    """A job's proposer, of either form, with an absolute path. Raises `SpecError`."""
    if isinstance(proposer, VllmProposer):
        return proposer.at(base)
    return model_ref(proposer, base) if proposer else None


def vllm_proposer_name(kind: str, model: str | None) -> str:
    return kind if model is None else f"{kind}:{model}"


def vllm_proposer_in(spec: Mapping[str, Any]) -> str:
    """The name of vLLM's own speculation that a stored spec asks for; empty: it asks for none."""
    proposer = spec.get("proposer")
    if not isinstance(proposer, Mapping):
        return ""
    return vllm_proposer_name(str(proposer.get("kind")), proposer.get("model"))


def _read(value: object) -> object:
    """`none` and nothing are no proposer; a text that begins with a brace is an object's JSON."""
    if value in ("", "none"):
        return None
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            return orjson.loads(value)
        except ValueError:
            raise ValueError(
                'is not valid JSON: write a model, or {"kind": "eagle3", "model": "HEAD"}'
            ) from None
    return value


def _form(value: object) -> str:
    return "object" if isinstance(value, Mapping | VllmProposer) else "text"


Proposer = Annotated[
    Annotated[
        Annotated[str, Tag("text")] | Annotated[VllmProposer, Tag("object")],
        Discriminator(_form),
    ]
    | None,
    BeforeValidator(_read),
]
_PROPOSER: TypeAdapter[str | VllmProposer | None] = TypeAdapter(Proposer)


def read_proposer(given: str) -> str | VllmProposer | None:
    """What a command's `--proposer` names. Raises `UsageError`."""
    try:
        return _PROPOSER.validate_python(given)
    except ValidationError as error:
        raise UsageError(f"--proposer: {explain(error.errors(), VllmProposer)}") from None
