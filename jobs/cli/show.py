"""`specbatch show JOB`: how one job stands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from specbatch.jobs.cli.audit import correctness_line
from specbatch.jobs.cli.connect import silent
from specbatch.jobs.cli.console import moment, out, say, say_json
from specbatch.jobs.cli.cost import cost_of, saved_json, saved_line, stages_json, stages_line
from specbatch.jobs.cli.drafting import switch_line
from specbatch.jobs.cli.options import JobId
from specbatch.jobs.cli.outcome import ROWS_COUNT, as_json
from specbatch.jobs.cli.review import waiting_line
from specbatch.jobs.cli.stores import found_settings
from specbatch.pipeline.bootstrap import make_client, make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.observe.terminal.progress import interrupted_line, resume_command
from specbatch.pipeline.observe.terminal.summary import JobSummary, summary_table
from specbatch.pipeline.operations.summaries import summary_of
from specbatch.pipeline.operations.tools import first_rows
from specbatch.pipeline.policy.costs.savings import drafted, savings
from specbatch.pipeline.policy.costs.stage_costs import total_usd
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.runtime.snapshots import snapshot_of
from specbatch.schemas.audit import AuditRecord, Correctness
from specbatch.schemas.context_length import CONTEXT_TOKENS, beyond_context
from specbatch.schemas.draft_switches import DraftSwitch
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.lineage import TARGET
from specbatch.schemas.notifications import FILE, NotificationRow
from specbatch.schemas.records import (
    NORMAL,
    PRIORITIES,
    JobRow,
    PromptRow,
    Prompts,
    RejectedRow,
)
from specbatch.schemas.speculation import ALL_PROPOSERS, Decision
from specbatch.schemas.table_spec import (
    DELTA,
    ICEBERG,
    OUTPUT_SNAPSHOT,
    is_iceberg,
    kind_of_input,
    words_of,
)
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE
from specbatch.schemas.vllm_proposer import vllm_proposer_in

EXAMPLES = 3
DECISIONS = 20


def show(
    job: JobId,
    json: Annotated[bool, typer.Option("--json", help="one JSON object on one line")] = False,
) -> None:
    """Show a job's state, progress, costs, errors, quarantined rows and decisions about drafts."""
    settings = found_settings()
    with closing(make_store(settings)) as store:
        c = make_client(settings, silent, store)
        row = c.job(job)
        progress = c.progress(row.job_id)
        interrupted = bool(c.interrupted([row], settings.lease_sec))
        decisions = store.decisions(row.job_id)
        switches = switches_of(store, row)
        audits = store.audits(row.job_id)
        saved, stages = savings(row.report), cost_of(store, row).by_stage
        templates = Privacy.of_settings(settings).templates(row)
        is_drafted = drafted(row.report, progress.proposed)
        silence_sec = LEASES_OF_SILENCE * settings.lease_sec
        waits = c.waits_for(row.job_id, silence_sec)
        unfinished = store.failed_groups(row.job_id)
        reviews = store.reviews(row.job_id)
        alone = [(p, error) for _, word, p, error in unfinished if _is_one_row(word, p)]
        if json:
            payload = {"rows_quarantined": len(alone), "decisions": [asdict(d) for d in decisions]}
            payload["audits"] = [asdict(audit) for audit in audits]
            payload |= {"numeric_class": row.numeric_class, "waits_for": waits}
            payload |= {"proposer": row.proposer}
            payload |= {"given_back": row.last_error}
            payload |= {"model_fingerprint": row.model_fingerprint, "model_parts": row.model_parts}
            payload |= {"workers": models_here(store, row, silence_sec)}
            resume = resume_command(row.job_id) if interrupted else None
            payload |= {"drafting_switched_off": [asdict(switch) for switch in switches]}
            payload |= {"interrupted": interrupted, "resume": resume}
            payload |= {"template": None, "system": None} | dict(templates)
            payload |= {"notifications": [asdict(n) for n in store.notifications_of(row.job_id)]}
            payload |= {"tables": table_lines(row)}
            payload |= {"in_review": [list(place) for place in reviews.pending]}
            payload |= {"stages": stages_json(stages)}
            say_json(as_json(row, progress, interrupted) | saved_json(saved, is_drafted) | payload)
            return
        _say_how_far(row, summary_of(row, progress, interrupted, total_usd(stages)))
        for name, text in templates:
            say(f"{name}: {text}")
        if interrupted:
            say(interrupted_line(row.job_id))
        for line in (
            *model_lines(row, models_here(store, row, silence_sec)),
            *class_lines(store, row),
            *proposer_lines(row),
            *waiting_lines(row, waits),
        ):
            say(line)
        say(stages_line(stages))
        say(saved_line(saved, is_drafted))
        for switch in switches:
            say(f"drafting is switched off for {switch_line(switch)}")
        if in_review := waiting_line(row, reviews):
            for place in reviews.pending[:EXAMPLES]:
                say(f"row {place[0]}: {reviews.held[place].why}")
            say(in_review)
        for line in quarantine_lines(store.rejected(row.job_id)):
            say(line)
        if alone:
            shown = first_rows(settings, row, [prompts for prompts, _ in alone[:EXAMPLES]])
            for line in failed_row_lines(row.job_id, [error for _, error in alone], shown):
                say(line)
        for index, word, prompts, error in unfinished:
            if not _is_one_row(word, prompts):
                reason = (row.stop_reason if word == "cancelled" else None) or error
                say(f"group {index} {word}: {reason or 'no reason given'}")
        told = notification_lines(store.notifications_of(row.job_id))
    for line in (*decision_lines(decisions), *audit_lines(audits), *told):
        say(line)
    say(f"output: {row.output_uri}")


def _say_how_far(row: JobRow, summary: JobSummary) -> None:
    progress = summary.progress
    out.print(summary_table(summary))
    for line in table_lines(row):
        say(line)
    say(f"progress: {progress.rows_done:,} of {progress.rows_total:,} prompts, "
        f"{progress.groups_done:,} of {progress.groups_total:,} groups"
        + ("" if progress.ingest_done else f", {_of_reading(row)}"))  # fmt: skip
    for line in (*limit_lines(row), *context_lines(row)):
        say(line)
    if row.cancel_requested:
        ends = "stopped" if row.state.is_final else "is being stopped"
        say(f"{ends}: {row.stop_reason or 'a cancel was asked for'}")
    if row.error:
        say(f"error: {row.error}")


def table_lines(row: JobRow) -> list[str]:
    """The snapshot of a table that is read, and the one that the job has committed."""
    given, lines = row.spec.get("input") or {}, []
    if (kind := kind_of_input(given.get("uri", ""), given.get("format", ""))) is not None:
        snapshot = snapshot_of(row)
        which = snapshot.words(kind) if snapshot else "pinned when it is read"
        lines.append(f"input: {words_of(kind)[0]} {given['uri']}, {which}")
    if written := (row.spec.get("output") or {}).get("table"):
        kind = ICEBERG if is_iceberg(written["uri"]) else DELTA
        name, word = words_of(kind)
        number = row.report.get(OUTPUT_SNAPSHOT)
        which = f"{word} {number}" if number else "nothing committed"
        lines.append(f"table: {name} {written['uri']}, {which}")
    return lines


def models_here(store: Store, row: JobRow, silence_sec: float) -> dict[str, str | None]:
    """Live workers with the job's verifier, and the fingerprint that each has; by owner."""
    if row.state.is_final:
        return {}
    alive = store.backlog().alive(silence_sec).workers
    offers = [(w.owner, w.serves) for w in alive if w.serves and w.serves.model == row.verifier]
    return {owner: s.fingerprint.digest if s.fingerprint else None for owner, s in offers}


def model_lines(row: JobRow, workers: Mapping[str, str | None]) -> list[str]:
    """The fingerprint of a job's model, its parts, and which workers have which."""
    if row.model_fingerprint is None:
        lines = ["model fingerprint: pinned when its input is read"]
    else:
        lines = [f"model fingerprint: {row.model_fingerprint}"]
    if row.model_parts:
        parts = (f"{name} {shown(digest)}" for name, digest in row.model_parts.items())
        lines.append("    " + ", ".join(parts))
    for owner, digest in sorted(workers.items()):
        lines.append(f"    worker {owner} has {shown(digest or 'files that cannot be read')}")
    return lines


def switches_of(store: Store, row: JobRow) -> list[DraftSwitch]:
    """What an operator has switched off now of drafting on a job that is not over."""
    if row.state.is_final:
        return []
    return [s for s in store.draft_switches() if s.scope.concerns(row.tenant, row.name)]


def waiting_lines(row: JobRow, waits: str | None) -> list[str]:
    """What it waits for, with the command that helps where somebody else is there."""
    lines = []
    if row.last_error and not row.state.is_final:
        lines.append(f"given back: {row.last_error}")
    if waits is not None:
        how = {"of numeric class": "--numeric-class NAME", "fingerprint": "--accept-model"}
        option = next((option for words, option in how.items() if words in waits), None)
        again = f"specbatch retry {row.job_id} {option}"
        lines.append(waits + (f" (`{again}` moves it)" if option else ""))
    return lines


def proposer_lines(row: JobRow) -> list[str]:
    """What drafts for the job, where that is not a draft model of ours."""
    own = vllm_proposer_in(row.spec)
    return [f"proposer: {own}, vLLM's own speculation"] if own else []


def class_lines(store: Store, row: JobRow) -> list[str]:
    """A job's numeric class, and its meaning if a worker has announced it."""
    if row.numeric_class is None:
        return ["numeric class: chosen when its first group is verified"]
    lines = [f"numeric class: {row.numeric_class}"]
    served = [one.serves.facts for one in store.sessions(row.job_id) if one.serves is not None]
    facts = next((of[row.numeric_class] for of in served if row.numeric_class in of), None)
    if facts:
        lines.append("    " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    return lines


def _of_reading(row: JobRow) -> str:
    """Of an input that was not read to its end."""
    if row.state.is_final:
        return "the input was not read to its end"
    return "reading waits for groups to be done" if row.paused else "the input is still being read"


def limit_lines(row: JobRow) -> list[str]:
    """Its class, where it is not the usual one, its deadline and its budget."""
    lines = []
    if row.priority != NORMAL:
        lines.append(f"priority: {PRIORITIES[row.priority]}")
    if row.deadline_at is not None:
        when = moment(row.deadline_at)
        lines.append(f"deadline: {when}")
    if row.budget_usd is not None:
        lines.append(f"budget: ${row.budget_usd:g}")
    return lines


def context_lines(row: JobRow) -> list[str]:
    """That completions cannot have as many tokens as the job allows, where that is so."""
    most = row.spec.get("sampling", {}).get("max_tokens", 0)
    words = beyond_context(most, row.report.get(CONTEXT_TOKENS))
    return [words] if words else []


def decision_lines(decisions: Sequence[Decision]) -> list[str]:
    """The last decisions about drafts, oldest first: when, what, about whom, and why."""
    if not decisions:
        return []
    left_out = len(decisions) - DECISIONS
    lines = [f"decisions about drafts ({left_out:,} earlier ones are in --json):"]
    if left_out <= 0:
        lines = ["decisions about drafts:"]
    for d in decisions[-DECISIONS:]:
        when = moment(d.at)
        whom = "" if d.proposer == ALL_PROPOSERS else f" {d.proposer}"
        lines.append(f"    {when}  {d.action}{whom}: {d.reason}")
    return lines


def audit_lines(audits: Sequence[AuditRecord]) -> list[str]:
    """What all audits of a job found of its completions, and whether the last found it intact."""
    if not audits:
        return []
    last = audits[-1]
    when = moment(last.at)
    of_all = Correctness(sum(a.sampled for a in audits), sum(a.differing for a in audits))
    state = "the log is intact" if last.intact else "the log is NOT intact"
    return [
        f"audits: {len(audits):,}, the last at {when} by {last.actor}: {state}, "
        f"{len(last.findings):,} findings",
        f"    {correctness_line(of_all)}",
    ]


def notification_lines(rows: Sequence[NotificationRow]) -> list[str]:
    """Which targets have heard of what, and why not."""
    lines = []
    for row in rows:
        if row.sent_at is not None:
            how = "sent"
        elif row.due_at is None:
            how = f"not sent: {row.error}"
        elif row.attempts == 0:
            needs = f"whose {FILE} has this target"
            if row.target == TARGET:
                needs = "with OpenLineage's configuration"
            how = f"waits for a worker {needs}"
        else:
            how = f"attempt {row.attempts:,} failed, another follows: {row.error or 'no answer'}"
        what = "lineage" if row.target == TARGET else f"notification to {row.target}"
        lines.append(f"{what}, {row.event}: {how}")
    return lines


def _is_one_row(word: str, prompts: Prompts) -> bool:
    """Whether an unfinished group is a row that failed by itself."""
    return word == "failed" and prompts.rows == 1


def failed_row_lines(
    job_id: str, reasons: Sequence[str], rows: Sequence[PromptRow] | None
) -> list[str]:
    """How many rows failed by themselves, and the first few; `rows`: these, where known."""
    again = f"specbatch retry {job_id} --quarantined"
    lines = [f"quarantined, failed: {len(reasons):,} (`{again}` does them again)"]
    for place, reason in enumerate(reasons[:EXAMPLES]):
        row = None if rows is None else rows[place]
        named = "a row" if row is None else f"row {row.row_index} (id {row.row_id})"
        lines.append(f"    {named}: {reason or 'no reason given'}")
    return lines


def quarantine_lines(rows: Iterable[RejectedRow]) -> list[str]:
    """Quarantined rows by reason, with the first few of each. Keeps no more than it prints."""
    counts: dict[str, int] = {}
    examples: dict[str, list[str]] = {}
    for row in rows:
        counts[row.code] = counts.get(row.code, 0) + 1
        shown = examples.setdefault(row.code, [])
        if len(shown) < EXAMPLES:
            named = "" if row.row_id is None else f" (id {row.row_id})"
            shown.append(f"    row {row.row_index}{named}: {row.reason}")
    lines = []
    for code, count in sorted(counts.items(), key=lambda item: -item[1]):
        lines += [f"quarantined, {code}: {count:,}", *examples[code]]
    return [*lines, f"    {ROWS_COUNT}"] if lines else []
