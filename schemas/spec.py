"""The job spec: what a user asks for, checked field by field before anything starts."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from specbatch.schemas.best_by import BestBySpec, why_no_choice
from specbatch.schemas.encryption import no_key
from specbatch.schemas.errors import SpecError
from specbatch.schemas.field_errors import explain, first_with_nul
from specbatch.schemas.fingerprint import PATTERN
from specbatch.schemas.lineage import ParentId
from specbatch.schemas.malformed import AS_IT_IS, MalformedSpec
from specbatch.schemas.malformed import contradiction as malformed_contradiction
from specbatch.schemas.notifications import NAME_PATTERN
from specbatch.schemas.numeric_class import (
    UNKNOWN,
    contradiction,
    dtype_of,
    engine_key,
    engine_of,
    key_with,
)
from specbatch.schemas.openai_formats import EITHER, OPENAI_FORMATS
from specbatch.schemas.placement import ANYWHERE, PlacementSpec
from specbatch.schemas.policies import PolicySpec
from specbatch.schemas.privacy import MOST_TENANT_CHARS, SEALED, TENANT
from specbatch.schemas.prompt_places import columns_in, first_doubled
from specbatch.schemas.records import JobRow, SamplingParams, Verification
from specbatch.schemas.response_format import canonical
from specbatch.schemas.spec_part import PAIRS, Part
from specbatch.schemas.speculation_spec import SpeculationSpec
from specbatch.schemas.table_spec import (
    Snapshot,
    TableKind,
    TableSpec,
    input_problem,
    kind_of_input,
)
from specbatch.schemas.tools import (
    canonical_choice,
    canonical_tools,
    problem_of_choice,
    tools_in_use,
)
from specbatch.schemas.uris import InputUri, OutputUri, absolute, model_ref
from specbatch.schemas.vllm_proposer import Proposer, VllmProposer, proposer_at

PILOT_EVERY_GROUPS, PILOT_EVERY_TOKENS = 16, 65_536  # whichever is more

_MOST_TOKENS_NAMED = 1024  # in logit_bias, in bad_token_ids

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
StopString = Annotated[str, Field(min_length=1, max_length=256)]
BadWord = Annotated[tuple[TokenId, ...], Field(min_length=1, max_length=16)]

Weights = Literal["as-is", "int8", "fp8"]


PROMPT_COLUMN = "prompt"
_MOST_TEMPLATE_CHARS = 65_536
Template = Annotated[str, Field(min_length=1, max_length=_MOST_TEMPLATE_CHARS)]


# fmt: off
InputFormat = Literal[
    "auto", "parquet", "arrow", "csv", "jsonl", "openai", "openai-completions", "delta", "iceberg"
]
# fmt: on


class InputSpec(Part):
    """Where prompts come from, and what the columns mean."""

    uri: InputUri = Field(
        min_length=1,
        description="file, folder, glob, s3:// or another store of Parquet, Arrow, CSV or JSONL; "
        "or iceberg://CATALOG/TABLE",
    )
    format: InputFormat = Field(
        default="auto",
        description="csv: TSV too; delta: a Delta table; openai: a batch file of custom_id and "
        "body.messages, openai-completions: of body.prompt",
    )
    snapshot: int | None = Field(
        default=None,
        ge=0,
        description="of a table: the version or id; else the newest at submission",
    )
    since: Literal["last"] | Annotated[int, Field(ge=0)] | None = Field(
        default=None,
        description="of a table: only rows that were added since this snapshot; last: since the "
        "one that the last finished job of this name has read",
    )
    pinned_snapshot: int | None = Field(default=None, description="set by the submission")
    pinned_since: int | None = Field(default=None, description="set by the submission")
    pinned_table: str | None = Field(default=None, description="set by the submission")
    delimiter: str | None = Field(
        default=None, description="of CSV; default: a tab in .tsv files, else a comma"
    )
    prompt_column: str = Field(
        default=PROMPT_COLUMN, min_length=1, description="column with the prompt"
    )
    prompt_kind: Literal["auto", "text", "token_ids", "messages"] = Field(
        default="auto", description="auto: by the column's type"
    )
    id_column: str | None = Field(
        default=None, description="default: `id` if present, else row number"
    )
    seed_column: str | None = Field(default=None, description="integer column with a seed per row")
    tag_column: str | None = Field(default=None, description="default: `tag` if present")
    sampling_column: str | None = Field(
        default=None, description="a row's own sampling values: a struct, an object or JSON text"
    )
    template: Template | None = Field(
        default=None,
        description="the prompt as text with {column} places, instead of prompt_column; "
        "{{ and }} are literal braces",
    )
    template_kind: Literal["simple", "jinja"] = Field(
        default="simple",
        description="language of template and system; jinja: a sandboxed Jinja template, which "
        "with prompt_kind messages writes a JSON list of messages",
    )
    system: Template | None = Field(
        default=None,
        description="the system prompt, which may have places too: the row becomes a chat of two "
        "messages",
    )

    @property
    def table(self) -> TableKind | None:
        """The kind of table that it is; None: files."""
        return kind_of_input(self.uri, self.format)

    @property
    def pinned(self) -> Snapshot | None:
        """What the submission has pinned of a table."""
        number = self.pinned_snapshot
        return None if number is None else Snapshot(number, self.pinned_since, self.pinned_table)

    def pinned_to(self, snapshot: Snapshot) -> InputSpec:
        found = {"pinned_snapshot": snapshot.number, "pinned_since": snapshot.since}
        return self.model_copy(update={**found, "pinned_table": snapshot.table_id})

    @model_validator(mode="after")
    def _is_one_table(self) -> InputSpec:
        if problem := input_problem(self.uri, self.format, self.snapshot, self.since):
            raise ValueError(problem)
        return self

    @property
    def is_templated(self) -> bool:
        """Whether prompts are made of more than the prompt column."""
        return self.template is not None or self.system is not None

    @property
    def writes_messages(self) -> bool:
        """Whether the template itself writes the messages of a chat."""
        return self.template is not None and self.prompt_kind == "messages"

    @property
    def makes_chats(self) -> bool:
        """Whether templates make chats, which the model's chat template then renders."""
        return self.system is not None or self.writes_messages

    @property
    def read_prompt_column(self) -> str | None:
        """The column that holds the prompt; None where a template makes it of others."""
        return self.prompt_column if self.template is None else None

    @field_validator("delimiter")
    @classmethod
    def _one_character(cls, value: str | None) -> str | None:
        value = "\t" if value == r"\t" else value  # as a shell passes it
        if value is not None and (len(value) != 1 or not value.isascii() or value in '"\r\n\0'):
            raise ValueError("should be one ASCII character, and neither a quote nor a line end")
        return value

    @model_validator(mode="after")
    def _bodies_carry_their_own(self) -> InputSpec:
        if self.format in OPENAI_FORMATS and self.sampling_column is not None:
            raise ValueError("sampling_column is not for openai files: their bodies say it")
        if self.format in OPENAI_FORMATS and self.is_templated:
            raise ValueError(NO_TEMPLATE_OF_BODIES)
        return self

    @model_validator(mode="after")
    def _template_fits(self) -> InputSpec:
        if not self.is_templated:
            if self.template_kind == "jinja":
                raise ValueError("template_kind is jinja, and there is no template: add one")
            return self
        if self.template is not None and self.prompt_column != PROMPT_COLUMN:
            raise ValueError(
                "template and prompt_column exclude each other: the template names its columns "
                f"itself, so leave prompt_column out and write {{{self.prompt_column}}}"
            )
        if self.prompt_kind == "token_ids":
            raise ValueError("prompt_kind token_ids has no template and no system prompt")
        if self.prompt_kind == "messages":
            self._check_messages()
        if self.template_kind == "simple":
            self._check_places()
        return self

    def _check_messages(self) -> None:
        if self.system is not None:
            raise ValueError(
                "prompt_kind messages and system exclude each other: put the system prompt into "
                "the messages, or let prompt_kind be text"
            )
        if self.template_kind == "simple":
            raise ValueError(
                "a simple template writes text: add system for a chat, or set template_kind to "
                "jinja to write messages"
            )

    def _check_places(self) -> None:
        named: list[str] = []
        for name in ("template", "system"):
            try:
                named += columns_in(getattr(self, name) or "")
            except ValueError as error:
                raise ValueError(f"{name}, {error}") from None
        if self.template is not None and not named:
            doubled = first_doubled(self.template)
            raise ValueError(
                "template names no column, so all rows would have the same prompt: "
                + (
                    f"write {{{doubled}}} for a column, or set template_kind to jinja"
                    if doubled
                    else "write {column} where a column's value belongs"
                )
            )


NO_TEMPLATE_OF_BODIES = (
    "template and system are not for openai files: each body already is a whole request"
)


# Fields of an input that the submission sets, and that nobody asks for.
PINNED = ("pinned_snapshot", "pinned_since", "pinned_table")
OutputFormat = Literal["parquet", "jsonl"]
KeptColumns = Literal["all"] | tuple[Annotated[str, Field(min_length=1)], ...]


class OutputSpec(Part):
    """Where results go: completions into `data` below it, everything else beside."""

    uri: OutputUri = Field(
        min_length=1, description="folder or s3:// prefix; must not hold another job"
    )
    format: OutputFormat = Field(
        default="parquet", description="of the completions: Parquet, or one JSON object per line"
    )
    keep_columns: KeptColumns = Field(
        default=(), description="columns of the input to carry into the output: names, or all"
    )

    keep_best: int | None = Field(
        default=None,
        ge=1,
        le=128,
        description="publish so many of a prompt's n completions: those with the highest mean "
        "log-probability; all n are in the store",
    )
    best_by: BestBySpec | None = Field(
        default=None,
        description="what scores them instead: {use: judge, prompt: …}, or a package's entry point",
    )
    malformed: MalformedSpec = AS_IT_IS
    table: TableSpec | None = Field(
        default=None,
        description="Delta or Iceberg table that gets the finished rows too: {uri: …, mode: append "
        "or merge}",
    )

    @field_validator("table", mode="before")
    @classmethod
    def _named_table(cls, value: object) -> object:
        return {"uri": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _table_is_of_parquet(self) -> OutputSpec:
        if self.table is not None and self.format != "parquet":
            raise ValueError(
                f"table gets what parts of Parquet have: leave format {self.format} out"
            )
        return self

    def at(self, base: Path) -> OutputSpec:
        """The same with absolute paths."""
        places: dict[str, Any] = {"uri": absolute(self.uri, base)}
        if self.table is not None:
            uri = absolute(self.table.uri, base)
            places["table"] = self.table.model_copy(update={"uri": uri})
        return self.model_copy(update=places)

    @field_validator("keep_columns", mode="before")
    @classmethod
    def _named_columns(cls, value: object) -> object:
        if isinstance(value, str) and value != "all":
            value = [name for part in value.split(",") if (name := part.strip())]
        if isinstance(value, list | tuple) and len(set(map(str, value))) < len(value):
            raise ValueError("a column occurs twice")
        return value


class SamplingSpec(Part):
    """How completions are sampled; a row's own values (bodies, `sampling_column`) win."""

    max_tokens: int = Field(default=128, ge=1, le=131072, description="most tokens of a completion")
    min_tokens: int = Field(
        default=0, ge=0, le=131072, description="no end before this many tokens"
    )
    temperature: float = Field(default=0.0, ge=0.0, le=10.0, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="nucleus; 1 is off")
    top_k: int = Field(default=0, ge=0, lt=2**31, description="the k likeliest tokens; 0 is off")
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="least probability, relative to the most likely token; 0 is off",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="rows without a seed of their own get one from it and their id",
    )
    n: int = Field(default=1, ge=1, le=128, description="completions per prompt")
    stop_token_ids: tuple[TokenId, ...] = Field(
        default=(), description="token ids that end a completion beside the model's own"
    )
    ignore_eos: bool = Field(
        default=False, description="the model's own end tokens do not end a completion"
    )
    response_format: Annotated[str, BeforeValidator(canonical)] = Field(
        default="",
        description="form of the output, as OpenAI writes it: {type: json_schema, json_schema: "
        "{schema: …}}, json_object, regex, choice or lark",
    )
    tools: Annotated[str, BeforeValidator(canonical_tools)] = Field(
        default="",
        description="functions that an output may call, as OpenAI writes them: [{type: function, "
        "function: {name: …, parameters: {…}}}]",
    )
    tool_choice: Annotated[str, BeforeValidator(canonical_choice)] = Field(
        default="",
        description="none, auto (the same as empty), required, or {type: function, function: "
        "{name: …}}",
    )
    parallel_tool_calls: bool = Field(
        default=True, description="whether an output may have several calls"
    )
    stop: tuple[StopString, ...] = Field(
        default=(), max_length=16, description="strings that end the text, excluded from it"
    )
    repetition_penalty: float = Field(
        default=1.0, ge=0.1, le=10.0, description="of tokens in prompt and output; 1 is off"
    )
    presence_penalty: float = Field(
        default=0.0, ge=-2.0, le=2.0, description="of tokens in the output; 0 is off"
    )
    frequency_penalty: float = Field(
        default=0.0,
        ge=-2.0,
        le=2.0,
        description="penalty on tokens of the output, per occurrence; 0 is off",
    )
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], PAIRS] = Field(
        default=(), max_length=_MOST_TOKENS_NAMED, description="token id: bias added to its logit"
    )
    bad_token_ids: tuple[TokenId, ...] = Field(
        default=(), max_length=_MOST_TOKENS_NAMED, description="never chosen"
    )
    bad_words: tuple[BadWord, ...] = Field(
        default=(), max_length=256, description="sequences of token ids to exclude"
    )

    logprobs: bool = Field(default=False, description="return each token's log-probability")
    top_logprobs: int = Field(
        default=0,
        ge=0,
        le=20,
        description="also of this many most likely tokens; above 0 implies logprobs",
    )

    @model_validator(mode="before")
    @classmethod
    def _top_implies_logprobs(cls, value: object) -> object:
        if isinstance(value, dict) and value.get("top_logprobs"):
            return {"logprobs": True, **value}
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("logit_bias")
    @classmethod
    def _each_once(cls, value: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
        if len(dict(value)) < len(value):
            raise ValueError("a token id occurs twice")
        return tuple(sorted(value))

    @model_validator(mode="after")
    def _fields_fit_together(self) -> SamplingSpec:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs {self.top_logprobs} needs logprobs to be true")
        for name in ("min_tokens", "ignore_eos", "stop_token_ids"):
            if self.response_format and getattr(self, name):
                raise ValueError(f"response_format says where an output ends: leave {name} out")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        if (problem := problem_of_choice(self.tools, self.tool_choice)) is not None:
            raise ValueError(problem)
        if not tools_in_use(self.tools, self.tool_choice):
            return
        for name in ("min_tokens", "ignore_eos", "stop_token_ids"):
            if getattr(self, name):
                raise ValueError(f"tools say where an output ends: leave {name} out")
        if self.response_format:
            raise ValueError(
                "response_format and tools contradict one another: leave one out, or set "
                "tool_choice to none"
            )

    def params(self, overrides: dict[str, Any] | None = None) -> SamplingParams:
        """The sampling of one row: the job's values, then the row's own."""
        values = {name: getattr(self, name) for name in SamplingParams.__dataclass_fields__} | dict(
            overrides or {}
        )
        return SamplingParams(**values)


class EngineSpec(Part):
    """How the verifier runs. Bits may depend on these fields, and audits use them."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="auto: bfloat16 where the device computes it, else float32"
    )
    exactness: Literal["bitwise", "fast"] = Field(
        default="bitwise", description="bitwise: a token's bits do not depend on batch or depth"
    )
    verifier_weights: Weights = Field(
        default="as-is", description="int8 or fp8: quantised on loading; another verifier"
    )
    proposer_weights: Weights = Field(default="as-is", description="the same; changes speed only")
    numeric_class: str | None = Field(
        default=None,
        description="exact/f32/1 or another: only its workers verify; else the first claim chooses",
    )

    @model_validator(mode="after")
    def _class_fits_dtype(self) -> EngineSpec:
        if self.numeric_class is not None:
            problem = contradiction(self.dtype, self.numeric_class, self.verifier_weights)
            if problem is not None:
                raise ValueError(problem)
        return self

    def of_proposer(self) -> EngineSpec:
        """The engine options of a proposer that drafts ahead by itself."""
        return self.model_copy(
            update={"verifier_weights": self.proposer_weights, "numeric_class": None}
        )

    def resolved(self, numeric_class: str | None) -> EngineSpec:
        """The engine options of a verifier of the job's class: `auto` becomes the class's dtype.

        Without a known class `auto` stays, and each worker uses its device's dtype.
        """
        update: dict[str, str | None] = {"numeric_class": None}
        if self.dtype == "auto" and numeric_class not in (None, UNKNOWN):
            update["dtype"] = dtype_of(numeric_class)
        return self.model_copy(update=update)

    @property
    def key(self) -> str:
        """The options that bits depend on, for `Serves.class_of`."""
        return engine_key(self.dtype, self.exactness, self.verifier_weights)


class JobSpec(Part):
    """A whole job. `load_spec` makes one from a mapping and explains errors."""

    name: str = Field(
        default="job",
        min_length=1,
        max_length=100,
        pattern=r"^[\w.@:+ -]+$",
        description="the job's name in lists; it learns from earlier runs of the same name",
    )
    tenant: str = Field(
        default="default",
        min_length=1,
        max_length=MOST_TENANT_CHARS,
        pattern=TENANT,
        description="the tenant that the job belongs to: its share, its privacy, its history",
    )
    input: InputSpec
    output: OutputSpec
    verifier: str = Field(min_length=1, description="model folder, hub id, or a served name")
    model_fingerprint: str | None = Field(
        default=None,
        pattern=PATTERN,
        description="the verifier's, as `specbatch show` has it; else the one that ingest finds",
    )
    proposer: Proposer = Field(
        default=None,
        description="draft model: folder, hub id or name; or vLLM's own speculation: {kind: eagle3 "
        "or draft_model, model: …}, {kind: mtp} or {kind: suffix}",
    )
    sampling: SamplingSpec = SamplingSpec()
    speculation: SpeculationSpec = SpeculationSpec()
    engine: EngineSpec = EngineSpec()
    priority: Literal["high", "normal", "low"] = Field(
        default="normal", description="among the jobs of a tenant the higher priority goes first"
    )
    deadline_sec: float | None = Field(
        default=None, gt=0, description="from submission; the job then stops and keeps its results"
    )
    budget_usd: float | None = Field(
        default=None,
        gt=0,
        description="the job stops when it has spent so much, and keeps its results",
    )
    placement: PlacementSpec = ANYWHERE
    notify: tuple[Annotated[str, Field(pattern=NAME_PATTERN)], ...] = Field(
        default=(),
        max_length=16,
        description="targets that hear of the job's end, by their names in the workers' "
        "SPECBATCH_NOTIFY_FILE",
    )
    lineage_parent: ParentId = Field(
        default=None,
        description="the run that this job is a part of, for OpenLineage: NAMESPACE/JOB NAME/RUN "
        "ID; default: OPENLINEAGE_PARENT_ID",
    )
    reuse_outputs: bool = Field(
        default=False,
        description="response cache: copy the output of the same request (model, numeric class, "
        "prompt, sampling, seed) from the store, and let later jobs copy this job's outputs",
    )
    reuse_check: float = Field(
        default=0.02,
        ge=0.0,
        le=1.0,
        description="share of these outputs that are computed again and compared",
    )
    policies: tuple[PolicySpec, ...] = Field(
        default=(),
        max_length=16,
        description="content policies: they judge each text before it is published",
    )
    group_size: int = Field(default=64, ge=1, le=4096, description="prompts per unit of work")
    max_prompt_tokens: int | None = Field(default=None, ge=1, description="longer rows are refused")

    @field_validator("notify", mode="before")
    @classmethod
    def _each_target_once(cls, value: object) -> object:
        names = (value,) if isinstance(value, str) else value
        return tuple(dict.fromkeys(names)) if isinstance(names, list | tuple) else names

    @model_validator(mode="after")
    def _best_by_has_a_choice(self) -> JobSpec:
        by, n = (self.output.best_by, self.output.keep_best), self.sampling.n
        own_n = self.input.format in EITHER or self.input.sampling_column is not None
        if (problem := why_no_choice(*by, n, own_n)) is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _merged_samples_have_keys(self) -> JobSpec:
        table, samples = self.output.table, self.output.keep_best or self.sampling.n
        if table is not None and (problem := table.key_problem(samples)) is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _ratio_tests_need_a_model(self) -> JobSpec:
        verification = self.speculation.verification
        if verification is not Verification.COUPLED and self.proposer is None:
            raise ValueError(f"verification {verification} needs a draft model: name a proposer")
        return self

    @model_validator(mode="after")
    def _own_speculation_can_be(self) -> JobSpec:
        engine, speculation = self.engine, self.speculation
        problem = self.vllm_proposer and self.vllm_proposer.contradiction(
            engine.exactness,
            (engine.verifier_weights, engine.proposer_weights),
            engine.numeric_class and engine_of(engine.numeric_class),
            speculation.verification,
            speculation.allows("draft-model"),
        )
        if problem:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _malformed_can_be_mended(self) -> JobSpec:
        of = (self.output.malformed, self.sampling.max_tokens, self.speculation.verification)
        if (problem := malformed_contradiction(*of)) is not None:
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _reuse_needs_equal_bits(self) -> JobSpec:
        if not self.reuse_outputs:
            return self
        verification = self.speculation.verification
        if verification is not Verification.COUPLED:
            raise ValueError(
                f"reuse_outputs needs outputs that do not depend on drafts: leave verification "
                f"{verification} out"
            )
        if self.engine.exactness != "bitwise":
            raise ValueError(
                "reuse_outputs needs outputs that do not depend on the batch: leave exactness "
                f"{self.engine.exactness} out"
            )
        return self

    def resolved(self, base: Path) -> JobSpec:
        """The same spec with local paths made absolute against `base`."""
        return self.model_copy(
            update={
                "input": self.input.model_copy(update={"uri": absolute(self.input.uri, base)}),
                "output": self.output.at(base),
                "verifier": model_ref(self.verifier, base),
                "proposer": proposer_at(self.proposer, base),
            }
        )

    @property
    def draft_model(self) -> str | None:
        """The proposer where it is a draft model of ours."""
        return self.proposer if isinstance(self.proposer, str) else None

    @property
    def vllm_proposer(self) -> VllmProposer | None:
        """The proposer where it is vLLM's own speculation."""
        return self.proposer if isinstance(self.proposer, VllmProposer) else None

    @property
    def proposer_name(self) -> str | None:
        """The proposer as the store, reports and outputs name it."""
        return self.draft_model if self.vllm_proposer is None else self.vllm_proposer.name

    def key_in(self, numeric_class: str | None) -> str:
        """How it asks for its engine, in the dtype of this class, for `Serves.class_of`."""
        own = "" if self.vllm_proposer is None else self.vllm_proposer.name
        return key_with(self.engine.resolved(numeric_class).key, own)

    def digest(self) -> str:
        """SHA-256 of the canonical JSON of all values that are not defaults.

        So new fields and new defaults of later versions leave the digest as it is. What the
        submission pins of a table is not what was asked for. Which run asks for the job is no part
        of it either: another try asks for the same job.
        """
        said = self.model_dump(
            mode="json",
            exclude_defaults=True,
            exclude={"input": set(PINNED), "lineage_parent": True},
        )
        return hashlib.sha256(orjson.dumps(said, option=orjson.OPT_SORT_KEYS)).hexdigest()

    @property
    def may_propose(self) -> bool:
        """Whether groups may pass through the propose stage at all."""
        return (
            self.draft_model is not None
            and self.speculation.enabled
            and self.speculation.allows("block")
            and self.speculation.pregenerate is not False
            and self.speculation.verification is Verification.COUPLED  # they carry no probabilities
        )

    def proposes(self, group_index: int, worth_it: bool = False) -> bool:
        """Whether a group passes through the propose stage.

        Drafts made beforehand are paid for whether they are used or not. So `auto` makes them for
        all groups where they were worth it before, and else for a pilot: one group in 16, or in as
        many as may have 65,536 tokens. That is enough to know what they are worth here, and a
        shorter job has none.
        """
        tokens = self.group_size * self.sampling.n * self.sampling.max_tokens
        period = max(PILOT_EVERY_GROUPS, -(-PILOT_EVERY_TOKENS // tokens))
        pilot = group_index % period == period - 1
        every = self.speculation.pregenerate is True or worth_it
        return self.may_propose and (pilot or every)


def spec_of(job: JobRow) -> JobSpec:
    """A stored job's spec. Raises `UsageError` if it is encrypted and the key is not here."""
    if job.spec.get(SEALED):
        raise no_key(f"the spec of job {job.job_id}")
    return JobSpec.model_validate(job.spec)


def load_spec(values: dict[str, Any], flags: Collection[str] = ()) -> JobSpec:
    """Build a spec; raise `SpecError` naming every wrong field and what is allowed.

    `flags`: dotted names of fields that were given as flags.
    """
    try:
        spec = JobSpec.model_validate(values)
    except ValidationError as error:
        raise SpecError(f"job spec: {explain(error.errors(), JobSpec, flags)}") from None
    check_storable(spec.model_dump(mode="json"))
    return spec


def check_storable(values: Mapping[str, Any]) -> None:
    """Raise `SpecError` for a spec that not every store can keep.

    PostgreSQL keeps JSON with a NUL, and then refuses each statement that reads it. No check of
    `JobSpec`: stores on SQLite may have jobs with one, whose specs are read again.
    """
    if (where := first_with_nul(values)) is not None:
        raise SpecError(
            f"job spec: field `{where}`: has the character U+0000, which PostgreSQL cannot read "
            "again: leave it out"
        )
