"""The flags that make a job spec, as typer sees them, and the spec fields they set."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from specbatch.jobs.cli.completing import jobs_beginning
from specbatch.schemas.errors import UsageError
from specbatch.schemas.settings import ENGINES, Settings

Text = str | None
Whole = int | None
Real = float | None
MOST_SHOWN = 1_000_000_000  # rows or jobs: so many fit every database's numbers

_IN, _OUT, _MODELS, _SAMPLING, _SPEED = "Input", "Output", "Models", "Sampling", "Speed"

SpecFile = Annotated[
    Path | None,
    typer.Argument(metavar="[SPEC.yaml]", help="job spec; flags override it", show_default=False),
]


def _option(name: str, text: str, panel: str | None = None, **more: Any) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        name, help=text, rich_help_panel=panel, show_default=False, **more
    )
    return option


Input = Annotated[
    Text,
    _option(
        "--input",
        "file, folder, glob or s3:// of Parquet, Arrow, CSV or JSONL; or iceberg://CATALOG/TABLE",
        _IN,
    ),
]
Format = Annotated[
    Text,
    _option(
        "--format",
        "auto, parquet, arrow, csv, jsonl, delta (a Delta table), openai or openai-completions",
        _IN,
    ),
]
Snapshot = Annotated[
    Whole, _option("--snapshot", "of a table: version or id to read, instead of the newest", _IN)
]
Since = Annotated[
    Text,
    _option(
        "--since",
        "of a table: only rows that were added since this snapshot, or since the `last` that a "
        "finished job of this name has read",
        _IN,
    ),
]
Delimiter = Annotated[Text, _option("--delimiter", "of CSV: a comma, or a tab in .tsv files", _IN)]
PromptColumn = Annotated[Text, _option("--prompt-column", "column with the prompt", _IN)]
PromptKind = Annotated[Text, _option("--prompt-kind", "auto, text, token_ids or messages", _IN)]
IdColumn = Annotated[Text, _option("--id-column", "column with the row's id", _IN)]
SeedColumn = Annotated[Text, _option("--seed-column", "integer column with a seed per row", _IN)]
SamplingColumn = Annotated[
    Text, _option("--sampling-column", "struct or JSON text with a row's own sampling values", _IN)
]
Template = Annotated[
    Text, _option("--template", "the prompt made of columns, as 'Summarise: {body}'", _IN)
]
TemplateFile = Annotated[
    Path | None,
    _option("--template-file", "file with the template", _IN, metavar="FILE"),
]
TemplateKind = Annotated[Text, _option("--template-kind", "simple ({column} places) or jinja", _IN)]
System = Annotated[
    Text,
    _option("--system", "system prompt, with places too: rows become chats of two messages", _IN),
]

Output = Annotated[Text, _option("--output", "folder or s3:// prefix for the results", _OUT)]
OutputFormat = Annotated[
    Text, _option("--output-format", "of the completions: parquet or jsonl", _OUT)
]
KeepColumns = Annotated[
    Text, _option("--keep-columns", "columns of the input to keep: a,b,... or all", _OUT)
]

Table = Annotated[
    Text,
    _option(
        "--table",
        "Delta table (folder or s3://) or iceberg://CATALOG/TABLE that gets the finished rows too",
        _OUT,
    ),
]
KeepBest = Annotated[
    Whole,
    _option("--keep-best", "publish so many of a prompt's n completions, the best", _OUT),
]

Verifier = Annotated[Text, _option("--verifier", "model that decides: folder or hub id", _MODELS)]
Proposer = Annotated[
    Text,
    _option(
        "--proposer",
        "model that drafts: folder or hub id, or `none`; or vLLM's own speculation as JSON: "
        '{"kind": "suffix"}',
        _MODELS,
    ),
]
Proposers = Annotated[
    list[str] | None,
    _option(
        "--proposer",
        "model that drafts, or `none`; repeat for more beside one verifier, the main one first; "
        "with --engine vllm its own speculation, as JSON",
        _MODELS,
    ),
]

MaxTokens = Annotated[Whole, _option("--max-tokens", "most tokens per completion", _SAMPLING)]
MinTokens = Annotated[Whole, _option("--min-tokens", "no stop before this many tokens", _SAMPLING)]
Temperature = Annotated[Real, _option("--temperature", "0 is greedy", _SAMPLING)]
TopP = Annotated[Real, _option("--top-p", "nucleus; 1 is off", _SAMPLING)]
TopK = Annotated[Whole, _option("--top-k", "the k likeliest tokens; 0 is off", _SAMPLING)]
MinP = Annotated[
    Real,
    _option("--min-p", "least probability, relative to the most likely token; 0 is off", _SAMPLING),
]
Samples = Annotated[Whole, _option("--n", "completions per prompt", _SAMPLING)]
Seed = Annotated[Whole, _option("--seed", "the job's seed", _SAMPLING)]
StopTokenId = Annotated[
    list[int] | None,
    _option("--stop-token-id", "token id that ends a completion; repeat for more", _SAMPLING),
]
StopTokenIds = Annotated[
    Text, _option("--stop-token-ids", "the same as one list: 2,32000", _SAMPLING)
]
Stop = Annotated[
    list[str] | None,
    _option("--stop", "text that ends a completion, and is left out; repeat for more", _SAMPLING),
]
ResponseFormat = Annotated[
    Text,
    _option(
        "--response-format",
        "form of the output: JSON as in an OpenAI body, or the path of a file of it",
        _SAMPLING,
    ),
]
Tools = Annotated[
    Text,
    _option(
        "--tools",
        "functions that an output may call: JSON as in an OpenAI body, or the path of a file of it",
        _SAMPLING,
    ),
]
ToolChoice = Annotated[
    Text,
    _option(
        "--tool-choice",
        "auto, required, none, or JSON as in an OpenAI body, which names a function",
        _SAMPLING,
    ),
]
ParallelToolCalls = Annotated[
    bool | None,
    _option(
        "--parallel-tool-calls/--no-parallel-tool-calls",
        "whether an output may have several calls",
        _SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    Real, _option("--repetition-penalty", "of tokens in prompt and output; 1 is off", _SAMPLING)
]
PresencePenalty = Annotated[
    Real, _option("--presence-penalty", "of tokens in the output, -2 to 2", _SAMPLING)
]
FrequencyPenalty = Annotated[
    Real,
    _option("--frequency-penalty", "penalty on tokens of the output, per occurrence", _SAMPLING),
]
Logprobs = Annotated[
    bool | None,
    _option("--logprobs/--no-logprobs", "write each token's log-probability", _SAMPLING),
]
TopLogprobs = Annotated[
    Whole, _option("--top-logprobs", "also of this many most likely tokens, 0 to 20", _SAMPLING)
]
IgnoreEos = Annotated[
    bool | None,
    _option("--ignore-eos/--no-ignore-eos", "do not stop at the model's end token", _SAMPLING),
]

Depth = Annotated[
    Text,
    _option(
        "--depth",
        "draft tokens per step: auto, off, a number, or shadow (draft and count, verify nothing); "
        "never changes outputs",
        _SPEED,
    ),
]
Sources = Annotated[
    Text,
    _option(
        "--sources",
        "sources of drafts: hybrid (all), or a list of grammar, block, history, ngram, draft-model",
        _SPEED,
    ),
]
MaxDepth = Annotated[Whole, _option("--max-depth", "draft tokens per step at most", _SPEED)]
HistoryTokens = Annotated[
    Whole,
    _option("--history-tokens", "tokens of earlier jobs' outputs to draft from; 0: none", _SPEED),
]
Verification = Annotated[
    Text,
    _option(
        "--verification",
        "coupled, rejection or block: what decides about drafts; outputs depend on drafts with the "
        "last two",
        _SPEED,
    ),
]
Dtype = Annotated[Text, _option("--dtype", "auto, bfloat16, float16 or float32", _SPEED)]
Exactness = Annotated[
    Text, _option("--exactness", "bitwise or fast: whether bits may depend on the batch", _SPEED)
]
ReuseOutputs = Annotated[
    bool | None,
    _option(
        "--reuse-outputs/--no-reuse-outputs",
        "copy the outputs of requests that were computed before",
        _SPEED,
    ),
]
ReuseCheck = Annotated[
    Real, _option("--reuse-check", "share of reused outputs to compute again and compare", _SPEED)
]
GroupSize = Annotated[Whole, _option("--group-size", "prompts per unit of work", _SPEED)]

Name = Annotated[Text, _option("--name", "the job's name")]
Tenant = Annotated[Text, _option("--tenant", "the tenant that the job belongs to")]

Priority = Annotated[Text, _option("--priority", "class: high, normal or low")]
Deadline = Annotated[
    Real,
    _option("--deadline-sec", "stop this many seconds after submission, and keep what is done"),
]
Budget = Annotated[
    Real, _option("--budget-usd", "stop when this much is spent on devices, and keep what is done")
]

Regions = Annotated[
    Text,
    _option("--regions", "regions, separated by commas, whose workers may have the job's rows"),
]
Spot = Annotated[
    bool | None,
    _option("--spot/--no-spot", "whether workers on spot devices may have the job's rows"),
]

Notify = Annotated[
    list[str] | None,
    _option(
        "--notify",
        "target that hears of the job's end, by its name in SPECBATCH_NOTIFY_FILE; repeat for more",
    ),
]

LineageParent = Annotated[
    Text,
    _option(
        "--lineage-parent",
        "run that the job is a part of, for OpenLineage: NAMESPACE/JOB NAME/RUN ID",
    ),
]

SchedulesFolder = Annotated[
    Path | None,
    _option("--folder", "where the schedule files are; default: SPECBATCH_SCHEDULES_DIR"),
]
ScheduleFile = Annotated[
    Path | None,
    _option(
        "--schedule",
        "submit what is due of this schedule file, instead of a spec; for cron and timers",
        metavar="FILE",
    ),
]
LogicalTime = Annotated[
    Text,
    _option(
        "--logical-time",
        "with --schedule: only this time: 2026-01-31T02:30, or a day for its first",
    ),
]

Local = Annotated[
    bool, typer.Option("--local", help="do the whole job in this process, without servers")
]
Engine = Annotated[
    Text, _option("--engine", "what verifies here: exact, or vllm, which must be installed too")
]
Wait = Annotated[bool, typer.Option("--wait", help="follow the job to its end")]
Timeout = Annotated[
    Real, _option("--timeout", "seconds to wait at most; then exit code 6", min=0.0)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="read and check the whole input, start nothing")
]
AssumedSpeed = Annotated[
    Real,
    _option(
        "--tokens-per-sec",
        "for --dry-run: speed to assume instead of earlier jobs'",
        min=0.001,
    ),
]
ForTenant = Annotated[
    str, typer.Option("--tenant", help="for this tenant's jobs", show_default=False)
]
ForJob = Annotated[str, typer.Option("--job", help="for jobs of this name", show_default=False)]
ForTag = Annotated[str, typer.Option("--tag", help="for rows with this tag", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="one JSON object as stdout's last line")]
IdempotencyKey = Annotated[
    Text,
    _option(
        "--idempotency-key", "submitting again with this key finds the same job and resumes it"
    ),
]
JobId = Annotated[
    str,
    typer.Argument(
        metavar="JOB",
        help="job id, 6 or more first characters, a name, or latest",
        autocompletion=jobs_beginning,
    ),
]


def check_engine_here(engine: str | None, local: bool) -> None:
    """Raise `UsageError` for an `--engine` of a job that is not done here."""
    if engine is not None and not local:
        raise UsageError("--engine needs --local: without it, workers have their own engines")


def with_engine(settings: Settings, engine: str | None) -> Settings:
    """The settings with the engine that `--engine` names. Raises `UsageError`."""
    if engine is None:
        return settings
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: there are {' and '.join(ENGINES)}")
    return settings.model_copy(update={"engine": engine})


def number_or_word(text: str | None) -> str | int | None:
    """`4` is a number, `auto`, `off`, `shadow` and `last` are words; the spec's check sees to the
    rest."""
    is_number = text is not None and re.fullmatch(r"-?[0-9]{1,18}", text)
    return int(text) if text is not None and is_number else text


def template_text(text: str | None, file: Path | None) -> str | None:
    """The template, whichever way it was given. A file's last line end is not part of it.

    Raises `UsageError`.
    """
    if file is None:
        return text
    if text is not None:
        raise UsageError("--template and --template-file exclude each other: leave one out")
    try:
        return file.read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise UsageError(f"template file {file} is not a text file in UTF-8") from None
    except OSError as error:
        reason = (error.strerror or "error").lower()
        raise UsageError(f"template file {file} cannot be read: {reason}") from None


def forms(response_format: str | None, tools: str | None) -> dict[str, str | None]:
    """The JSON of both options. Raises `UsageError`."""
    return {
        "response_format": _form("--response-format", response_format, "{"),
        "tools": _form("--tools", tools, "["),
    }


def _form(option: str, given: str | None, begin: str) -> str | None:
    """The JSON of an option, which begins so, from the text or a file. Raises `UsageError`."""
    if given is None or given.lstrip().startswith(begin):
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{option} {given} is no JSON that begins with {begin}, and no file of it can be read: "
            f"{getattr(error, 'strerror', None) or 'it is not UTF-8'}"
        ) from None


def stop_ids(single: list[int] | None, several: str | None) -> list[int | str] | None:
    """Both spellings of the stop ids in one list."""
    listed = [part.strip() for part in several.split(",") if part.strip()] if several else []
    return [*(single or []), *listed] or None
