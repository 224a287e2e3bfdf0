"""Picks: a small model writes candidates, the verifier scores them, and writes what none is good
enough for.

Each part is an ordinary job of one model, with outputs of its own, which resumes, is audited and
costs what it costs. So a job's output stays what its verifier wrote. What is put together of them
is no job's output: its rows say which model wrote them, and its manifest by which rule.

1. `candidates`: the small model writes. A package's scorer scores here, as `output.best_by`.
2. `scores`: the verifier answers the judge's question about each text, once it can only say yes,
   once only no. The log-probabilities of these outputs are the score, as they are of `best_by`.
3. `own`: the verifier writes the rows whose best score is below the least. What the candidates say
   is among its drafts, as far as the tenant's history reaches.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

from specbatch.pipeline.inputs.sources import find_files
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.moderation.judge import (
    ANSWER,
    EACH_ANSWER,
    NO,
    YES,
    question_ids,
    score_of,
)
from specbatch.pipeline.outputs.best import best_of_each
from specbatch.pipeline.outputs.outputs import Manifest, OutputWriter, read_manifest
from specbatch.pipeline.outputs.parts import Columns, OutputRow, columns_of
from specbatch.pipeline.outputs.prompt_file import PromptFile, input_values
from specbatch.pipeline.stages.reviews import with_decisions
from specbatch.pipeline.stages.text_stop import Decode
from specbatch.pipeline.stages.unfinished import with_unfinished_rows
from specbatch.pipeline.stages.whole_results import held_back
from specbatch.pipeline.storage.objects import Objects, join, local_path
from specbatch.pipeline.storage.prompts import in_order
from specbatch.schemas.arrow import PICKED_OUTPUT
from specbatch.schemas.errors import ObjectError, OutputError, UsageError
from specbatch.schemas.job_progress import JobProgress
from specbatch.schemas.picks import SECTION, Pick
from specbatch.schemas.policies import Place, PolicyInput
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import (
    FINISHED,
    CompletionRecord,
    JobRow,
    PromptRow,
    RejectedRow,
)
from specbatch.schemas.spec import JobSpec, load_spec, spec_of
from specbatch.schemas.speculation import VOCABULARY

CANDIDATES, SCORES, OWN = "candidates", "scores", "own"  # the jobs of a pick
_MOST_NAME = 80  # characters of the spec's name in a job's
_OF_VERIFIER = ("numeric_class", "verifier_weights", "proposer_weights")  # of `engine`


# --- the jobs ------------------------------------------------------------------------------------
def candidates_spec(pick: Pick) -> JobSpec:
    """The job of the small model over the pick's own input. Raises `SpecError`."""
    job, by = pick.job, pick.section.by
    values = _values(job, "model_fingerprint", "proposer", "speculation")
    engine = {k: v for k, v in (values.get("engine") or {}).items() if k not in _OF_VERIFIER}
    output = _output(job, CANDIDATES)
    if not pick.uses_judge:
        output |= {"keep_best": 1, "best_by": by.model_dump(mode="json", exclude_defaults=True)}
    values |= {
        "name": _name(job, CANDIDATES),
        "verifier": pick.section.model,
        "engine": engine,
        "output": output,
        "sampling": pick.sampling.model_dump(mode="json", exclude_defaults=True),
    }
    return load_spec(values)


def scores_spec(pick: Pick, questions: InputFile, left_usd: float | None) -> JobSpec:
    """The job in which the verifier answers the judge's questions."""
    job = pick.job
    values = {
        "name": _name(job, SCORES),
        "tenant": job.tenant,
        "priority": job.priority,
        "placement": job.placement.model_dump(),
        "group_size": job.group_size,
        "budget_usd": left_usd,
        "verifier": job.verifier,
        "model_fingerprint": job.model_fingerprint,
        "engine": job.engine.model_copy(update={"proposer_weights": "as-is"}).model_dump(),
        "speculation": {"history_tokens": 0},
        "input": input_values(questions.uri),
        "output": {"uri": f"{_beside(job, SCORES)}-{questions.digest}"},
        "sampling": {
            "max_tokens": ANSWER.max_tokens,
            "response_format": ANSWER.response_format,
        },
    }
    return load_spec(values)


def own_spec(pick: Pick, rows: InputFile, left_usd: float | None) -> JobSpec:
    """The job in which the verifier writes rows itself, as it would have without candidates."""
    job = pick.job
    output = _output(job, OWN)
    values = _values(job) | {
        "name": _name(job, OWN),
        "input": input_values(rows.uri),
        "output": output | {"uri": f"{output['uri']}-{rows.digest}"},
        "budget_usd": left_usd,
    }
    return load_spec(values)


def _values(job: JobSpec, *without: str) -> dict[str, Any]:
    values = job.model_dump(mode="json", exclude_defaults=True)
    return {name: value for name, value in values.items() if name not in without}


def _name(job: JobSpec, part: str) -> str:
    return f"{job.name[:_MOST_NAME]}-{part}"


def _beside(job: JobSpec, part: str) -> str:
    return f"{job.output.uri.rstrip('/')}-{part}"


def _output(job: JobSpec, part: str) -> dict[str, Any]:
    mended = job.output.malformed.model_dump(exclude_defaults=True, exclude={"then"})
    return {"uri": _beside(job, part), "format": job.output.format, "malformed": mended}


def may_be_read(job: JobRow) -> None:
    """Raise `UsageError` for a job of a pick whose texts are not kept."""
    if job.purged_at is not None:
        raise UsageError(
            f"a pick needs the texts of job {job.job_id}, which was purged: its output stays as it "
            "is; name another output for a new pick"
        )
    if not job.privacy.is_full:
        raise UsageError(
            f"a pick needs the texts of job {job.job_id}, and those of tenant {job.tenant} are not "
            "kept"
        )


def check_same_tokens(candidates: JobRow, other: JobRow) -> None:
    """Raise `UsageError` for jobs whose models give other meanings to the prompts' token ids, which
    only shows once both were ingested where neither model's files are here."""
    one, two = (job.report.get(VOCABULARY) for job in (candidates, other))
    if None not in (one, two) and one != two:
        raise UsageError(
            f"`{candidates.verifier}` and `{other.verifier}` give other meanings to token ids: "
            "name a small model with the verifier's tokenizer"
        )


# --- choosing ------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Choice:
    """A row, its candidates that may be picked, and the best of them by their scores."""

    row: PromptRow
    candidates: tuple[CompletionRecord, ...]
    best: CompletionRecord | None  # with its score; None: no candidate has one


@dataclass(slots=True)
class Counts:
    """What became of the rows that were read."""

    picked: int = 0
    own: int = 0  # the verifier writes them: the best score is below the least, or …
    own_without_candidate: int = 0  # … of these, none may be picked
    rejected: int = 0  # they were not read, so nobody wrote them


@dataclass(frozen=True, slots=True)
class InputFile:
    """The input of a job of a pick. The same rows make the same digest."""

    uri: str
    digest: str
    rows: array[int]  # by row of the file, the number of the row that it is about …
    asked: array[int]  # … and a hash of its id and its prompt


@dataclass(frozen=True, slots=True)
class Picks:
    """One pick's choices and outputs, of one store's jobs."""

    store: Store
    objects: Objects
    pick: Pick
    decode: Decode  # of the verifier's tokens; called for rows that a review has released

    def check_output(self) -> None:
        """Raise `OutputError` unless the pick's output may be written where it is asked for."""
        self._writer(None).check()

    def claim_output(self) -> None:
        """Keep others away from the pick's output. Raises `OutputError` if something else is there,
        and `ObjectError`."""
        self._writer(None).claim()

    def questions(self, candidates: JobRow, tokenizer: TextTokenizer) -> InputFile | None:
        """Write what the judge is asked about the candidates; None where there is none to ask
        about. Equal texts of a row are asked about once.

        `tokenizer`: the verifier's. Raises `ObjectError`, and `RowError` if its chat template takes
        no such question.
        """
        prompt = self.pick.section.by.prompt
        assert prompt is not None, "a judge has one"

        def rows() -> Iterator[PromptRow]:
            for choice in self.choices(candidates):
                given = {
                    record.sample_index: _input(choice.row, record, tokenizer)
                    for record in _each_text(choice.candidates)
                }
                asked = question_ids(prompt, given.values(), tokenizer, candidates.created_at)
                for sample, ids in zip(given, asked, strict=True):
                    for word, answer in zip((YES, NO), EACH_ANSWER, strict=True):
                        yield PromptRow(
                            choice.row.row_index,
                            f"{choice.row.row_index}/{sample}/{word}",
                            tuple(ids),
                            seed=0,
                            overrides={"response_format": answer.response_format},
                        )

        return self._written(candidates, SCORES, rows())

    def own_rows(
        self, candidates: JobRow, scores: Callable[[], Scores] | None
    ) -> tuple[InputFile | None, Counts]:
        """Write the rows that the verifier writes itself, None if there are none; and count what
        became of all. Raises `ObjectError`, also where prompts are gone."""
        counts = Counts(rejected=sum(1 for _ in self.store.rejected(candidates.job_id)))

        def rows() -> Iterator[PromptRow]:
            for choice in self.choices(candidates, scores and scores()):
                if self.is_good(choice.best):
                    counts.picked += 1
                    continue
                counts.own += 1
                counts.own_without_candidate += choice.best is None
                yield replace(choice.row, n=1)

        file = self._written(candidates, OWN, rows())
        if counts.picked + counts.own + counts.rejected != candidates.rows_total:
            self._check_kept([candidates.job_id])
            raise _prompts_missing(candidates)
        return file, counts

    def is_good(self, best: CompletionRecord | None) -> bool:
        """Whether the best candidate is picked."""
        return best is not None and best.score is not None and best.score >= self.pick.section.least

    def choices(self, candidates: JobRow, scores: Scores | None = None) -> Iterator[Choice]:
        """All rows that were read, in order. `scores`: of the judge; else those that the candidates
        have, which may be none. Raises `ObjectError`."""
        prompts = in_order(
            self.objects, candidates, partial(self.store.prompts_of, candidates.job_id)
        )
        records = groupby(self.store.completions(candidates.job_id), key=attrgetter("row_index"))
        row_index, samples = next(records, (-1, iter(())))
        for row in prompts:
            while -1 < row_index < row.row_index:
                row_index, samples = next(records, (-1, iter(())))
            of = tuple(filter(may_be_picked, samples)) if row_index == row.row_index else ()
            scored = of if scores is None else scores.given_to(of)
            known = [record for record in scored if record.score is not None]
            yield Choice(row, of, next(best_of_each(known, 1), None))

    def _written(
        self, candidates: JobRow, part: str, rows: Iterable[PromptRow]
    ) -> InputFile | None:
        """Rows as the input of a job, in the workspace of the candidates' job: its purge deletes
        them too."""
        said, numbers, asked = hashlib.sha256(), array("q"), array("Q")
        with self.objects.temp_folder() as folder:
            path = Path(folder) / "rows.parquet"
            with closing(PromptFile(path, samples=1)) as file:
                for row in rows:
                    said.update(_digested(row))
                    numbers.append(row.row_index)
                    asked.append(_hashed(row))
                    file.add(row)
            if not numbers:
                return None
            digest = said.hexdigest()[:16]
            uri = join(candidates.workspace_uri, f"{self.pick.pick_id}-{part}-{digest}.parquet")
            if not self.objects.exists(uri):  # a job may be reading it
                self.objects.put_file(uri, path)
        return InputFile(uri, digest, numbers, asked)

    # --- the output --------------------------------------------------------------------------
    def publish(
        self,
        candidates: JobRow,
        scores: tuple[JobRow, Callable[[], Scores]] | None,
        own: tuple[JobRow, InputFile] | None,
        counts: Counts,
    ) -> Manifest:
        """Write the output of a pick whose jobs have ended. The same jobs write the same files.

        Raises `OutputError`, `UsageError` where a job was purged meanwhile, and `ObjectError`, also
        where a job's rows are not those that it was made of.
        """
        chosen = self.choices(candidates, scores and scores[1]())
        rows: list[Iterable[CompletionRecord]] = [self._picked(candidates, chosen, counts.picked)]
        rejected: list[Iterable[RejectedRow]] = [self.store.rejected(candidates.job_id)]
        if own is not None:
            self._check_read(*own)
            rows.append(_renumbered(self._as_published(own[0]), own[1]))
            rejected.append(_renumbered(self.store.rejected(own[0].job_id), own[1]))
        jobs = {
            CANDIDATES: candidates,
            SCORES: scores and scores[0],
            OWN: own and own[0],
        }
        return self._writer(_columns(candidates, own and own[0])).write(
            heapq.merge(*rows, key=attrgetter("row_index")),
            heapq.merge(*rejected, key=attrgetter("row_index")),
            info=self._info(jobs, counts),
            still_mine=partial(self._check_kept, [job.job_id for job in jobs.values() if job]),
            quarantines=self.pick.job.output.malformed.then == "quarantine",
        )

    def _picked(
        self, candidates: JobRow, chosen: Iterable[Choice], count: int
    ) -> Iterator[CompletionRecord]:
        """The best of each row that has a good one. Raises where they are not so many any more."""
        found = 0
        for choice in chosen:
            if choice.best is not None and self.is_good(choice.best):
                found += 1
                yield choice.best
        if found != count:
            self._check_kept([candidates.job_id])
            raise _prompts_missing(candidates)

    def _check_kept(self, job_ids: Iterable[str]) -> None:
        """Raise `UsageError` where a job was purged: its texts may have been read as empty ones."""
        for job_id in job_ids:
            may_be_read(self.store.get_job(job_id))

    def _as_published(self, job: JobRow) -> Iterator[CompletionRecord]:
        """A job's completions with what was decided of those that a policy sent to review."""
        whole = partial(held_back, self.store, self.objects, job, spec_of(job), self.decode)
        rows = with_unfinished_rows(self.store, self.objects, job)
        return with_decisions(rows, self.store.reviews(job.job_id), whole)

    def _check_read(self, job: JobRow, file: InputFile) -> None:
        """Raise `ObjectError` where a job read other prompts than those that it was made of."""
        read = in_order(self.objects, job, partial(self.store.prompts_of, job.job_id))
        if job.rows_total != len(file.rows) or any(
            _hashed(row) != file.asked[row.row_index] for row in read
        ):
            raise ObjectError(
                f"job {job.job_id} did not read what the pick has asked: {file.uri} was changed or "
                "damaged; name another output for a new pick"
            )

    def _writer(self, columns: Columns | None) -> OutputWriter:
        output = self.pick.job.output
        return OutputWriter(
            self.objects, output.uri, self.pick.pick_id, kind=output.format, columns=columns
        )

    def _info(self, jobs: Mapping[str, JobRow | None], counts: Counts) -> dict[str, Any]:
        section = self.pick.section
        costs = {part: self.progress_of(job).cost_usd for part, job in jobs.items() if job}
        return {
            "name": self.pick.job.name,
            SECTION: {
                "by": section.by.model_dump(mode="json", exclude_defaults=True),
                "least": section.least,
                "says": "picked rows are the text of `written_by` as its job wrote it, and not "
                "what the verifier would have written",
                "verifier": self.pick.job.verifier,
                "candidates_by": section.model,
                "jobs": {part: job and job.job_id for part, job in jobs.items()},
                "rows": asdict(counts),
                "cost_usd": costs | {"total": sum(costs.values())},
            },
        }

    def scores_of(self, job: JobRow, questions: InputFile, tokenizer: TextTokenizer) -> Scores:
        """The judge's scores, from the beginning. Raises `ObjectError` where it was asked something
        else."""
        self._check_read(job, questions)
        return Scores(self.store.completions(job.job_id), frozenset(tokenizer.eos_ids))

    def is_published(self, job: JobRow) -> bool:
        """Whether a job's output says what became of each of its rows. Raises `ObjectError`."""
        try:
            return read_manifest(job.output_uri, self.objects).job_id == job.job_id
        except OutputError:
            return False

    def progress_of(self, job: JobRow) -> JobProgress:
        return self.store.progress(job.job_id)


def may_be_picked(record: CompletionRecord) -> bool:
    """Whether a candidate ended well, and nothing changed its text or keeps it back."""
    is_well = record.finish_reason in FINISHED and record.error is None
    return is_well and NOT_KEPT not in record.token_ids


class Scores:
    """The judge's scores, taken from the answers in the order of the candidates."""

    def __init__(self, answers: Iterable[CompletionRecord], end_ids: Collection[int]) -> None:
        """`end_ids`: tokens that end an answer, which count for none."""
        self._rows = groupby(_scored(answers, end_ids), key=lambda found: found[0][0])
        self._next = next(self._rows, None)

    def given_to(self, records: Iterable[CompletionRecord]) -> list[CompletionRecord]:
        """A row's candidates with the scores of their texts; None for one that was not scored.
        Rows come in order."""
        records = list(records)
        if not records:
            return []
        row_index = records[0].row_index
        while self._next is not None and self._next[0] < row_index:
            self._next = next(self._rows, None)
        if self._next is None or self._next[0] != row_index:
            return records
        by_sample = {place[1]: score for place, score in self._next[1]}
        of_text = {r.text: by_sample.get(r.sample_index) for r in _each_text(records)}
        return [replace(record, score=of_text[record.text]) for record in records]


def _scored(
    records: Iterable[CompletionRecord], end_ids: Collection[int]
) -> Iterator[tuple[Place, float | None]]:
    """Scores by candidate; a question that was not answered twice has none."""
    for place, of in groupby(records, key=_place_asked):
        answers = {record.row_id.rpartition("/")[2]: record for record in of}
        if answers.keys() == {YES, NO}:
            yield place, score_of(answers[YES], answers[NO], end_ids)


def _place_asked(record: CompletionRecord) -> Place:
    row, sample, _ = record.row_id.split("/")
    return int(row), int(sample)


def _each_text(records: Iterable[CompletionRecord]) -> Iterable[CompletionRecord]:
    """The first record with each text, in order."""
    first: dict[str, CompletionRecord] = {}
    for record in records:
        first.setdefault(record.text, record)
    return first.values()


def _input(row: PromptRow, record: CompletionRecord, tokenizer: TextTokenizer) -> PolicyInput:
    return PolicyInput(
        text=record.text,
        prompt=tokenizer.decode(row.prompt_ids),
        row_id=row.row_id,
        tag=row.tag,
        finish_reason=record.finish_reason.value,
    )


def input_identity(pick: Pick, objects: Objects) -> str:
    """What tells the pick's input from any other: the bytes of files here, the versions of others.

    Raises `InputError` and `ObjectError`.
    """
    files, _ = find_files(pick.job.input, objects)
    said = hashlib.sha256()
    for file in sorted(files, key=attrgetter("uri")):
        path = local_path(file.uri)
        if path.is_file():
            with path.open("rb") as data:
                known = hashlib.file_digest(data, "sha256").hexdigest()
        else:
            known = f"{file.size} {file.version}"
        said.update(orjson.dumps([file.uri, known]))
    return said.hexdigest()


def _prompts_missing(job: JobRow) -> ObjectError:
    return ObjectError(
        f"prompts of job {job.job_id} are missing in {job.workspace_uri}: restore them from a copy"
    )


def _digested(row: PromptRow) -> bytes:
    values = [row.row_index, row.row_id, row.prompt_ids, row.seed, row.tag, dict(row.overrides)]
    return orjson.dumps(values, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def _renumbered(rows: Iterable[Any], file: InputFile) -> Iterator[Any]:
    """Rows of a job over the file, by the numbers of the rows that they are about."""
    return (replace(row, row_index=file.rows[row.row_index]) for row in rows)


def _hashed(row: PromptRow) -> int:
    said = orjson.dumps([row.row_id, row.prompt_ids])
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest())


def _columns(candidates: JobRow, own: JobRow | None) -> Columns:
    """Those of a pick. A picked row has a score, a row of the verifier's own has none."""

    def of(row: OutputRow) -> dict[str, Any]:
        found = columns_of(row)
        if isinstance(row, RejectedRow):
            return found
        job = candidates if row.score is not None else own
        return found | {"written_by": row.verifier, "job": job and job.job_id}

    return Columns(PICKED_OUTPUT, of)
