"""Spot checks: a share of one model's outputs, written again by another.

A job of a small model is cheap, and its outputs are its own. How often a larger model would have
written the same is found out by a second job: rows that are drawn at random, and those that a rule
flags, with the same prompts, sampling and noise. Drawn rows alone tell the agreement; flagged ones
are shown apart, as they are no random sample.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.moderation.patterns import Patterns
from specbatch.pipeline.operations.comparing import CONTEXT, Difference, first_place, named
from specbatch.pipeline.outputs.prompt_file import PromptFile, input_values
from specbatch.pipeline.policy.ratios import Interval, share_of
from specbatch.pipeline.storage.objects import Objects, join
from specbatch.pipeline.storage.prompts import in_order
from specbatch.schemas.errors import ObjectError, UsageError
from specbatch.schemas.numeric_class import samples_by_seed
from specbatch.schemas.openai_formats import OPENAI_FORMATS
from specbatch.schemas.policies import PATTERNS, PolicySpec, Ruling
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import CompletionRecord, JobRow, PromptRow, Verification
from specbatch.schemas.seeds import derive_seed
from specbatch.schemas.spec import JobSpec, spec_of
from specbatch.schemas.speculation import VOCABULARY

MALFORMED = "malformed"  # why a row is flagged whose output has not the form it was asked for
SHOWN = 10  # differences
_MOST_NAME = 80  # characters of the job's name in the check's
_BEFORE = 10  # characters of a text that are shown before its first difference
_COLUMNS = (pa.field("flags", pa.list_(pa.string()), nullable=False),)
_DROPPED = (  # what a check does not share with its job
    *("deadline_sec", "budget_usd", "notify", "policies", "reuse_outputs", "reuse_check"),
    *("model_fingerprint", "proposer", "speculation"),
)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which rows of a job are checked: a random share, and all in which a pattern is found."""

    share: float
    seed: int = 0
    patterns: Mapping[str, str] = field(default_factory=dict)  # RE2, by name

    def digest(self, job_id: str, by: str, output: str | None = None) -> str:
        """What two checks have in common that check the same rows by the same model, into the same
        output."""
        said = orjson.dumps([job_id, by, output, asdict(self)], option=orjson.OPT_SORT_KEYS)
        return hashlib.sha256(said).hexdigest()[:16]

    def draws(self, row_index: int) -> bool:
        """Whether a row is drawn, whatever the others are."""
        return derive_seed(self.seed, str(row_index)) < self.share * 2**63


@dataclass(frozen=True, slots=True)
class Chosen:
    """A row to check, and why."""

    row: PromptRow
    flags: Sequence[str]  # the rules that found it


@dataclass(frozen=True, slots=True)
class SpotChecks:
    """Makes checks of one store's jobs, and reads what they found."""

    store: Store
    objects: Objects

    def spec_of_check(
        self, job: JobRow, selection: Selection, by: str, output: str | None = None
    ) -> JobSpec:
        """Write the prompts of a check, and say which job does it.

        Raises `UsageError` for a job that cannot be checked, and where no row is drawn or flagged;
        `ObjectError`.
        """
        spec = spec_of(job)
        if output is not None and output.rstrip("/") == spec.output.uri.rstrip("/"):
            raise UsageError(f"--output {output} is the output of job {job.job_id} itself")
        name = f"spot-check-{selection.digest(job.job_id, by, output)[:8]}"
        prompts = join(job.workspace_uri, f"{name}.parquet")
        chosen = choose(self.store, self.objects, job, selection)
        if not write_prompts(self.objects, prompts, chosen, spec.sampling.n):
            if not any(all(map(_can_be_checked, of)) for _, of in _by_row(self.store, job)):
                raise UsageError(f"no row of job {job.job_id} has an output that can be checked")
            raise UsageError(
                f"no row of job {job.job_id} is drawn with share {selection.share:g} and seed "
                f"{selection.seed}, and none is flagged: raise the share, or take another seed"
            )
        return check_spec(spec, by, prompts, output or f"{spec.output.uri.rstrip('/')}-{name}")

    def found_by(self, job: JobRow, check: JobRow, selection: Selection) -> Checked | None:
        """What a check of such a selection that has ended found; None if it did not begin. Raises
        `UsageError` and `ObjectError`."""
        if check.purged_at is not None or not check.privacy.is_full:
            raise UsageError(f"the texts of job {check.job_id}, which checked, are not kept")
        one, other = (of.report.get(VOCABULARY) for of in (job, check))
        if other is None:
            return None
        if None not in (one, other) and one != other:
            raise UsageError(
                f"`{job.verifier}` and `{check.verifier}` give other meanings to token ids: only "
                "models with one tokenizer can check each other"
            )
        return compare_jobs(self.store, self.objects, job, check, selection)


def check_spec(spec: JobSpec, by: str, prompts: str, output: str) -> JobSpec:
    """The spec of the job that checks: another verifier over a file of prompts."""
    values = spec.model_dump(mode="json", exclude_defaults=True)
    values = {name: value for name, value in values.items() if name not in _DROPPED}
    engine = dict(values.get("engine") or {})
    for of_the_other in ("numeric_class", "verifier_weights", "proposer_weights"):
        engine.pop(of_the_other, None)
    mended = spec.output.malformed.model_dump(exclude_defaults=True, exclude={"then"})
    values |= {
        "name": f"{spec.name[:_MOST_NAME]}-spot-check",
        "verifier": by,
        "input": input_values(prompts),
        "output": {"uri": output, "format": spec.output.format, "malformed": mended},
        "engine": engine,
    }
    return JobSpec.model_validate(values)


def may_be_checked(job: JobRow) -> None:
    """Raise `UsageError` for a job whose rows cannot be written again."""
    if not job.state.is_final:
        raise UsageError(f"job {job.job_id} is still {job.state}: check it once it has ended")
    if job.purged_at is not None:
        raise UsageError(f"a check needs the prompts of job {job.job_id}, which was purged")
    if not job.privacy.is_full:
        raise UsageError(
            f"a check needs the prompts of job {job.job_id}, and those of tenant {job.tenant} are "
            "not kept"
        )
    speculation = job.spec.get("speculation") or {}
    if speculation.get("verification", Verification.COUPLED) != Verification.COUPLED:
        raise UsageError(
            f"job {job.job_id} was verified by a ratio test, so its outputs depend on its drafts: "
            "another model's cannot be compared with them"
        )
    if not samples_by_seed(job.numeric_class) and _may_sample(job):
        raise UsageError(
            f"job {job.job_id} was sampled by vLLM, whose choices do not follow from a seed: "
            "another model's cannot be compared with them"
        )


def _may_sample(job: JobRow) -> bool:
    sampling, given = (job.spec.get(part) or {} for part in ("sampling", "input"))
    own = given.get("sampling_column") or given.get("format") in OPENAI_FORMATS
    return bool(sampling.get("temperature") or own)


# --- choosing rows -------------------------------------------------------------------------------
def choose(store: Store, objects: Objects, job: JobRow, selection: Selection) -> Iterator[Chosen]:
    """The rows to check, in order. Rows that failed, or whose tokens are not kept, are none.

    Raises `UsageError` for a pattern that is none, and `ObjectError`.
    """
    flags = _Flags(selection.patterns)
    prompts = in_order(objects, job, partial(store.prompts_of, job.job_id))
    row = next(prompts, None)
    for row_index, samples in _by_row(store, job):
        while row is not None and row.row_index < row_index:
            row = next(prompts, None)
        if row is None or row.row_index != row_index or not all(map(_can_be_checked, samples)):
            continue
        drawn, why = selection.draws(row_index), flags.of(samples)
        if drawn or why:
            yield Chosen(row, why)


def _can_be_checked(record: CompletionRecord) -> bool:
    is_ours = not record.has_failed or record.is_malformed
    return is_ours and not record.is_withheld and NOT_KEPT not in record.token_ids


class _Flags:
    """The rules that flag a row."""

    def __init__(self, patterns: Mapping[str, str]) -> None:
        try:
            self._patterns = {
                name: Patterns(PolicySpec(use=PATTERNS, patterns={name: regex}))
                for name, regex in patterns.items()
            }
        except UsageError as error:
            raise UsageError(f"a flag cannot be used: {error}") from None

    def of(self, samples: Sequence[CompletionRecord]) -> list[str]:
        """The names of those that one of the row's completions meets."""
        found = [MALFORMED] if any(record.is_malformed for record in samples) else []
        for name, pattern in self._patterns.items():
            if any(pattern.judge(r.text).ruling is not Ruling.ALLOW for r in samples):
                found.append(name)
        return found


def write_prompts(objects: Objects, uri: str, chosen: Iterable[Chosen], samples: int) -> int:
    """Write the input of a check; returns how many rows it has. The same rows make the same file.

    Raises `ObjectError`.
    """
    with objects.temp_folder() as folder:
        path = folder / "spot-check.parquet"
        with closing(PromptFile(path, samples, _COLUMNS)) as file:
            for one in chosen:
                file.add(one.row, flags=one.flags)
        if file.rows:
            objects.put_file(uri, path)
        return file.rows


# --- comparing -----------------------------------------------------------------------------------
@dataclass(slots=True)
class Agreement:
    """How many rows both models wrote alike, in all their samples."""

    rows: int = 0
    same: int = 0
    tokens: int = 0  # of the checked job's completions …
    tokens_alike: int = 0  # … and of these, those before the first difference

    @property
    def interval(self) -> Interval:
        """The share of equal rows, with its 95 % interval."""
        return share_of(self.same, self.rows)


@dataclass(slots=True)
class Checked:
    """What a check has found."""

    drawn: Agreement = field(default_factory=Agreement)
    flagged: Agreement = field(default_factory=Agreement)
    flags: dict[str, int] = field(default_factory=dict)  # rows by rule
    unfinished: int = 0  # rows that the check could not complete
    left_out: int = 0  # rows that could not be checked: they failed, or a policy changed their text
    differing: int = 0  # completions, of which …
    differences: list[Difference] = field(default_factory=list)  # … these are shown


def compare_jobs(
    store: Store, objects: Objects, job: JobRow, check: JobRow, selection: Selection
) -> Checked:
    """What `check`, which has ended, has found on `job`. Raises `ObjectError`, also where the file
    of its prompts does not fit the job any more."""
    uri = str((check.spec.get("input") or {}).get("uri"))
    with objects.open(uri) as file, pq.ParquetFile(file) as parquet:
        table = parquet.read(columns=["row_index", "flags"]).to_pylist()
    if check.rows_total and len(table) != check.rows_total:
        raise _damaged(uri)
    flags = {item["row_index"]: (number, item["flags"]) for number, item in enumerate(table)}
    found = Checked(flags=dict.fromkeys([MALFORMED, *selection.patterns], 0))
    theirs = _by_row(store, check)
    other = next(theirs, None)
    for row_index, mine in _by_row(store, job):
        drawn = selection.draws(row_index)
        if row_index not in flags:  # or it was completed after the check was made
            found.left_out += drawn or not all(map(_can_be_checked, mine))
            continue
        number, why = flags[row_index]
        while other is not None and other[0] < number:
            other = next(theirs, None)
        samples = other[1] if other is not None and other[0] == number else []
        if any(a.row_id != b.row_id for a, b in zip(mine, samples, strict=False)):
            raise _damaged(uri)
        _note(found, mine, samples, drawn, why)
    return found


def _damaged(uri: str) -> ObjectError:
    return ObjectError(f"{uri} is not what the check was made of: it was changed or damaged since")


def _by_row(store: Store, job: JobRow) -> Iterator[tuple[int, list[CompletionRecord]]]:
    records = store.completions(job.job_id, details=False)
    return ((row, list(of)) for row, of in groupby(records, key=attrgetter("row_index")))


def _note(
    found: Checked,
    mine: Sequence[CompletionRecord],
    theirs: Sequence[CompletionRecord],
    drawn: bool,
    flags: Sequence[str],
) -> None:
    if len(mine) != len(theirs) or not all(map(_can_be_checked, (*mine, *theirs))):
        found.unfinished += 1
        return
    pairs = list(zip(mine, theirs, strict=True))
    differing = [d for one, other in pairs if (d := _difference(one, other)) is not None]
    for flag in flags:
        found.flags[flag] = found.flags.get(flag, 0) + 1
    for agreement in [found.drawn] * drawn + [found.flagged] * bool(flags):
        agreement.rows += 1
        agreement.same += not differing
        agreement.tokens += sum(len(one.token_ids) for one in mine)
        agreement.tokens_alike += sum(first_place(a.token_ids, b.token_ids) for a, b in pairs)
    found.differing += len(differing)
    found.differences += differing[: max(0, SHOWN - len(found.differences))]


def _difference(one: CompletionRecord, other: CompletionRecord) -> Difference | None:
    if tuple(one.token_ids) == tuple(other.token_ids):
        return None
    at = first_place(one.token_ids, other.token_ids)
    left, right = (r.token_ids[at] if at < len(r.token_ids) else None for r in (one, other))
    begin = max(0, first_place(one.text, other.text) - _BEFORE)
    dots = "…" if begin else ""
    texts = (f"{dots}{of.text[begin : begin + CONTEXT]}" for of in (one, other))
    return Difference(one.row_id, one.row_index, one.sample_index, "token", at, left, right, *texts)


def as_json(job: JobRow, check: JobRow, found: Checked) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "job": job.job_id,
        "check": check.job_id,
        "verifier": job.verifier,
        "checked_by": check.verifier,
        "state": str(check.state),
        "drawn": _figures(found.drawn) | _bounds(found.drawn),
        "flagged": _figures(found.flagged) | {"by_rule": found.flags},
        "unfinished": found.unfinished,
        "left_out": found.left_out,
    }


def _figures(of: Agreement) -> dict[str, Any]:
    return {
        "rows": of.rows,
        "same": of.same,
        "tokens": of.tokens,
        "tokens_alike": of.tokens_alike,
    }


def _bounds(of: Agreement) -> dict[str, Any]:
    """Of drawn rows alone: flagged ones are no random sample."""
    share = of.interval
    known = [None if math.isnan(x) else x for x in (share.value, share.low, share.high)]
    return {"share": known[0], "interval_95": known[1:]}


def in_words(difference: Difference) -> str:
    """A difference as a person reads it."""
    row = named(difference.row_id, difference.row_index, difference.sample_index)
    return f"{row}: {difference.left_text!r} became {difference.right_text!r}"
