"""`specbatch pick SPEC.yaml`: a small model's best candidates, and the verifier's own rows where
none is good enough."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specbatch.jobs.cli import checks
from specbatch.jobs.cli import options as o
from specbatch.jobs.cli.connect import check_broker, client, load_settings
from specbatch.jobs.cli.console import (
    MAYBE_SUBMITTED,
    NOT_SUBMITTED,
    if_interrupted,
    remark,
    say,
    say_json,
    stored,
)
from specbatch.jobs.cli.outcome import EXIT_CODES, leave
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.engines.models.model_folder import known_context
from specbatch.pipeline.observe.units import percent, plural, usd
from specbatch.pipeline.operations.spec_input import read_spec_file, resolved_spec
from specbatch.pipeline.operations.tools import (
    check_share_a_vocabulary,
    have_one_chat_template,
    judge_tokenizer,
    make_picks,
)
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.audit import data_uri
from specbatch.schemas.best_by import NO_JUDGE_HERE
from specbatch.schemas.errors import UsageError
from specbatch.schemas.numeric_class import masks_logprobs
from specbatch.schemas.patience import end_within
from specbatch.schemas.picks import SECTION, Pick, load_pick
from specbatch.schemas.records import JobRow, JobState
from specbatch.schemas.settings import EXACT, Settings
from specbatch.schemas.spec import JobSpec, spec_of

if TYPE_CHECKING:  # the light install has no pyarrow
    from specbatch.pipeline.operations.picks import InputFile, Picks, Scores
    from specbatch.pipeline.outputs.outputs import Manifest

_AGAIN = "run the same command again"
_BETWEEN_JOBS = f"interrupted between two jobs: {_AGAIN}"
_MAKES = {"own": "the verifier's own rows"}  # what a part makes, other than by its name


def pick(
    spec_file: Annotated[
        Path,
        typer.Argument(
            metavar="SPEC.yaml",
            help=f"a job spec with a section `{SECTION}`: model, sampling, by, least",
        ),
    ],
    local: o.Local = False,
    wait: o.Wait = False,
    timeout: o.Timeout = None,
    json: o.Json = False,
) -> None:
    """Let a small model write candidates, and write the best of them or the verifier's own.

    The spec's section `pick` names the small model, what scores its candidates, and the least score
    of one that is picked. Each part is a job of its own. The same command again resumes where it
    stopped, and finds the jobs that it has made. Exit codes: 0 done (or submitted), else as
    `submit-job`.
    """
    settings = load_settings()
    order = _read(spec_file)
    if timeout is not None and not (wait or local):
        raise UsageError("--timeout needs --wait or --local")
    end_within(timeout)
    until = math.inf if timeout is None else time.monotonic() + timeout
    with client(settings) as c, closing(make_store(settings)) as store:
        _check_texts_are_kept(settings, order.job.tenant)
        picks = make_picks(settings, store, order)
        _Chain(settings, c, picks, local, wait, until, json).run()


def _read(file: Path) -> Pick:
    values = read_spec_file(file, needed=f"input, output, verifier and {SECTION}")
    base = file.absolute().parent
    section = values.pop(SECTION, None)
    return load_pick(section, resolved_spec(values, base), base)


@dataclass(slots=True)
class _Chain:
    """The jobs of a pick, one after the other."""

    settings: Settings
    client: Client
    picks: Picks
    local: bool
    wait: bool
    until: float  # by the monotonic clock
    json: bool
    done: dict[str, JobRow] = field(default_factory=dict)  # by part, those that have ended

    @property
    def order(self) -> Pick:
        return self.picks.pick

    def run(self) -> None:
        """Do what is left to do, and print what came out."""
        from specbatch.pipeline.operations import picks as parts

        order, picks = self.order, self.picks
        if self._found(parts.CANDIDATES) is None:
            with if_interrupted(NOT_SUBMITTED):
                self._check()
        picks.claim_output()
        candidates = self._job(parts.CANDIDATES, lambda _: parts.candidates_spec(order))
        scores = self._scores(candidates) if order.uses_judge else None
        with if_interrupted(_BETWEEN_JOBS):
            rows, counts = picks.own_rows(candidates, scores and scores[1])
        own = self._own(rows) if rows is not None else None
        with if_interrupted(f"interrupted before the output was whole: {_AGAIN}"):
            ours = (own, rows) if own is not None and rows is not None else None
            manifest = picks.publish(candidates, scores, ours, counts)
        self._tell(manifest)

    def _scores(self, candidates: JobRow) -> tuple[JobRow, Callable[[], Scores]] | None:
        """The job that scores, and how its scores are read; None without a candidate."""
        from specbatch.pipeline.operations import picks as parts

        with if_interrupted(_BETWEEN_JOBS):
            tokenizer = judge_tokenizer(self.order)
            questions = self.picks.questions(candidates, tokenizer)
        if questions is None:
            return None
        make = partial(parts.scores_spec, self.order, questions)
        job = self._job(parts.SCORES, make, questions)
        if masks_logprobs(job.numeric_class):
            raise UsageError(NO_JUDGE_HERE)
        return job, partial(self.picks.scores_of, job, questions, tokenizer)

    def _own(self, rows: InputFile) -> JobRow:
        from specbatch.pipeline.operations import picks as parts

        return self._job(parts.OWN, partial(parts.own_spec, self.order, rows), rows)

    # --- one job -----------------------------------------------------------------------------
    def _job(
        self,
        part: str,
        make_spec: Callable[[float | None], JobSpec],
        about: InputFile | None = None,
    ) -> JobRow:
        """The job of this part, which has ended well enough for the next one. `make_spec`: of what
        may be spent. Leaves the command where it has not."""
        from specbatch.pipeline.operations.picks import (
            CANDIDATES,
            check_same_tokens,
            may_be_read,
        )

        job = self._found(part, about)
        if job is None:
            job = self._submitted(part, make_spec, about)
        else:
            remark(f"job {job.job_id} makes {_what(part)} of this pick, and is {job.state}")
        with if_interrupted(stored(job.job_id)):
            if not job.state.is_final:
                self._follow(job)
                job = self.client.job(job.job_id)
        if not job.state.is_final:
            remark(f"once job {job.job_id} has ended, {_AGAIN}: it resumes from there")
            if self.json:
                say_json({"pick": self.order.pick_id, "job_id": job.job_id, "part": part})
            else:
                say(job.job_id)
            raise typer.Exit
        may_be_read(job)
        if not self._can_go_on(part, job):
            retry = f"`specbatch retry {job.job_id}`"
            remark(f"the pick needs job {job.job_id}: {retry}, then {_AGAIN}")
            leave(job)
        self.done[part] = job
        check_same_tokens(self.done[CANDIDATES], job)
        return job

    def _key(self, part: str, about: InputFile | None) -> str:
        """Other questions, or other rows to write, are another job."""
        return "/".join([self.order.pick_id, part, *([about.digest] if about else [])])

    def _found(self, part: str, about: InputFile | None = None) -> JobRow | None:
        return self.client.find(self.order.job.tenant, self._key(part, about))

    def _submitted(
        self,
        part: str,
        make_spec: Callable[[float | None], JobSpec],
        about: InputFile | None,
    ) -> JobRow:
        spec = make_spec(self._left_usd())
        if not self.local:
            check_broker(self.settings)
        with if_interrupted(MAYBE_SUBMITTED):
            job, _ = self.client.submit(spec, self._key(part, about))
        remark(f"job {job.job_id} makes {_what(part)}")
        return job

    def _left_usd(self) -> float | None:
        """What a job may spend; None: as much as it takes."""
        budget = self.order.job.budget_usd
        if budget is None:
            return None
        spent = sum(self.picks.progress_of(job).cost_usd for job in self.done.values())
        if spent < budget:
            return budget - spent
        remark(
            f"the budget of {usd(budget)} is spent: raise budget_usd and {_AGAIN}, which keeps "
            "what is done"
        )
        raise typer.Exit(EXIT_CODES[JobState.CANCELLED])

    def _follow(self, job: JobRow) -> None:
        left = None if self.until == math.inf else max(0.0, self.until - time.monotonic())
        if self.local:
            from specbatch.jobs.cli.local import run_here

            run_here(self.settings, spec_of(job), job, left, _AGAIN)
        elif self.wait:
            from specbatch.jobs.cli.remote import follow

            follow(self.settings, self.client, job, spec_of(job), left)

    def _can_go_on(self, part: str, job: JobRow) -> bool:
        """A job that failed is of use only where it published what became of the last rows."""
        from specbatch.pipeline.operations.picks import OWN

        if job.state is JobState.FAILED:
            return part == OWN and self.picks.is_published(job)
        return job.state is not JobState.CANCELLED

    # --- before and after --------------------------------------------------------------------
    def _check(self) -> None:
        """Refuse what is plainly wrong before anything is stored."""
        from specbatch.pipeline.operations.picks import candidates_spec

        order, job = self.order, self.order.job
        if not self.local:
            check_broker(self.settings)
        self.picks.check_output()
        spec = candidates_spec(order)
        if self.local:
            checks.check_first(spec)
        else:
            checks.check_input_here(spec.input)
        check_share_a_vocabulary(spec.verifier, job.verifier)
        if order.uses_judge:
            if self.local and self.settings.engine != EXACT:
                raise UsageError(NO_JUDGE_HERE)
            judge_tokenizer(order)
        if self.local:
            checks.check_job(self.settings, spec)
            checks.check_job(self.settings, job, order.pick_id, _is_id)
        else:
            for one in (spec, job):
                checks.tell_beyond_context(one, known_context(one.verifier))
        if not have_one_chat_template(spec.verifier, job.verifier):
            remark(
                f"{spec.verifier} and {job.verifier} have two chat templates: prompts that are "
                "chats are read by both as the first one writes them"
            )

    def _tell(self, manifest: Manifest) -> None:
        from specbatch.pipeline.operations.picks import CANDIDATES, OWN

        told, output = manifest.info[SECTION], self.order.job.output.uri
        own, data = self.done.get(OWN), data_uri(output, JobState.DONE)
        failed = {self.done[CANDIDATES].job_id: told["rows"]["rejected"]}
        if own is not None:
            failed[own.job_id] = self.picks.progress_of(own).rows_failed
        if self.json:
            which = {name: told[name] for name in ("jobs", "rows", "cost_usd")}
            where = {"output": output, "data": data}
            say_json(
                {"pick": manifest.job_id, **which, "rows_failed": sum(failed.values()), **where}
            )
        else:
            for line in _lines(self.order, told["rows"], told["cost_usd"]):
                say(line)
            say(f"output: {output}")
            say(f"data:   {data}")
        for job_id in (job_id for job_id, rows in failed.items() if rows):
            remark(f"some rows failed: `specbatch results {job_id} --failed` says why")
        if any(failed.values()):
            raise typer.Exit(EXIT_CODES[JobState.PARTIAL])


def _what(part: str) -> str:
    return _MAKES.get(part, f"the {part}")


def _check_texts_are_kept(settings: Settings, tenant: str) -> None:
    mode = Privacy.of_settings(settings).mode_of(tenant)
    if not mode.is_full:
        raise UsageError(
            f"a pick needs texts that are kept in full, and those of tenant {tenant!r} are kept "
            f"{mode}: run the verifier's job alone, with `submit-job`"
        )


def _is_id(job_id: str, pick_id: str) -> bool:
    """Whether the pick itself holds its output."""
    return job_id == pick_id


def _lines(order: Pick, rows: Mapping[str, int], costs: Mapping[str, float]) -> Iterator[str]:
    picked, own = rows["picked"], rows["own"]
    share = f" ({percent(picked / (picked + own))})" if picked + own else ""
    yield f"picked: {plural(picked, 'row')} by {order.section.model}{share}"
    without = rows["own_without_candidate"]
    none = f", {without:,} of them without a candidate to pick" if without else ""
    yield f"own:    {plural(own, 'row')} by {order.job.verifier}{none}"
    if rows["rejected"]:
        yield f"nobody: {plural(rows['rejected'], 'row')} that could not be read"
    total = costs["total"]
    parts = (f"{name} {usd(cost, total)}" for name, cost in costs.items() if name != "total")
    yield f"cost:   {usd(total)} ({', '.join(parts)})"
