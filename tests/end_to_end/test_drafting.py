"""Whole jobs by an embedded worker: where their drafts come from, how far they may reach, and what
is kept of them. Whatever is drafted, the outputs are those of depth 0, bit for bit."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import create_engine, text

from specbatch.pipeline.bootstrap import Worker, make_client, make_store
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.policy.breaker import DecisionLog
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.pipeline.runtime.client import Client
from specbatch.pipeline.runtime.knowledge_store import KnowledgeStore
from specbatch.pipeline.storage.artefacts import read_drafts
from specbatch.schemas.draft_switches import SwitchScope
from specbatch.schemas.policies import Decided
from specbatch.schemas.records import CompletionRecord, JobRow, JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from specbatch.schemas.speculation import (
    ALL_PROPOSERS,
    AcceptanceCount,
    Decision,
    DecisionAction,
)
from specbatch.workers.app import make_enqueue
from specbatch.workers.lifecycle import embedded
from support import demo
from support.databases import migrated
from support.models import tiny_llama
from support.workers import wait_until

ROWS = 8
TOKENS = 48
WAIT_SEC = 240


@dataclass(frozen=True)
class Done:
    """A job that ended well, as the store knows it."""

    store: Store
    job: JobRow

    @cached_property
    def completions(self) -> list[CompletionRecord]:
        return list(self.store.completions(self.job.job_id))

    @property
    def outputs(self) -> list[tuple[object, ...]]:
        """What must not depend on drafts: log-probabilities tell of bits."""
        return [
            (c.row_id, c.sample_index, c.token_ids, c.logprobs, c.text, c.finish_reason)
            for c in self.completions
        ]

    @property
    def drafted(self) -> int:
        """Draft tokens that were verified."""
        return sum(c.proposed for c in self.completions)

    @property
    def deepest(self) -> int:
        """The most draft tokens of one sequence in a step."""
        return max(len(c.proposed_at_depth) for c in self.completions)

    @property
    def mean_accepted_length(self) -> float:
        """Accepted tokens per block of drafts."""
        blocks = sum(c.proposed_at_depth[0] for c in self.completions if c.proposed)
        return sum(c.accepted for c in self.completions) / blocks

    @property
    def decisions(self) -> list[Decision]:
        return self.store.decisions(self.job.job_id)

    @property
    def priors(self) -> list[AcceptanceCount]:
        return self.store.acceptance(self.job.tenant, self.job.name)


class Night:
    """A folder with prompts and a workspace, whose workers come and go."""

    def __init__(self, folder: Path, rows: int = ROWS, **settings: Any) -> None:
        self.folder = folder
        self.settings = Settings(
            workspace=str(folder / "workspace"), broker_url="memory://localhost/", **settings
        )
        migrated(folder / "workspace" / "specbatch.db")
        self.store = make_store(self.settings)
        self._client: Client | None = None
        self._jobs = 0
        prompts = pq.read_table(demo.PROMPTS).slice(0, rows)
        assert len(prompts) == rows
        tags = pa.array(["odd" if i % 2 else "even" for i in range(rows)])
        pq.write_table(
            prompts.drop_columns("tag").append_column("tag", tags), folder / "prompts.parquet"
        )

    @contextmanager
    def worker(
        self, draft: Path | None = demo.DRAFT, verifier: Path = demo.VERIFIER
    ) -> Iterator[Worker]:
        """An embedded worker for the jobs inside."""
        models = str(verifier), str(draft) if draft else None
        with embedded(self.settings, *models) as (app, worker):
            self._client = make_client(self.settings, make_enqueue(app), worker.store)
            self._models = {"verifier": models[0], "proposer": models[1]}
            try:
                yield worker
            finally:
                self._client = None

    def run(
        self,
        name: str = "night",
        tenant: str = "default",
        tokens: int = TOKENS,
        sampling: Mapping[str, Any] | None = None,
        more: Mapping[str, Any] | None = None,
        keep_best: int | None = None,
        output: Mapping[str, Any] | None = None,
        ends: JobState | None = JobState.DONE,
        best_by: Mapping[str, Any] | None = None,
        **speculation: Any,
    ) -> Done:
        """Do a job: greedy if `sampling` says nothing else, its log-probabilities kept.

        `more`: other fields of its spec; `output`: of that part of it. It `ends` in that state, or
        in any.
        """
        assert self._client is not None, "only inside `worker`"
        self._jobs += 1
        spec = load_spec(
            {
                "name": name,
                "tenant": tenant,
                "input": {"uri": str(self.folder / "prompts.parquet")},
                "output": {
                    "uri": str(self.folder / f"out-{self._jobs}"),
                    "keep_best": keep_best,
                    **(output or {}),
                    "best_by": best_by,
                },
                "sampling": {
                    **{"max_tokens": tokens, "ignore_eos": True, "logprobs": True},
                    **(sampling or {}),
                },
                "speculation": {"pregenerate": False, **speculation},
                **self._models,
                **(more or {}),
            }
        )
        job = self._at_its_end(self._client.submit(spec)[0].job_id)
        assert ends in (None, job.state), job.error
        return Done(self.store, job)

    def review(self, done: Done, decided: Mapping[tuple[int, int], Decided]) -> JobRow:
        """Decide on completions that are held back; the job when it is published again."""
        assert self._client is not None, "only inside `worker`"
        self._client.review(done.job.job_id, decided)
        return self._at_its_end(done.job.job_id)

    def _at_its_end(self, job_id: str) -> JobRow:
        wait_until("the job's end", lambda: self.store.get_job(job_id).state.is_final)
        return self.store.get_job(job_id)

    def write(self, statement: str, **values: Any) -> None:
        """Change the store's rows behind its back."""
        engine = create_engine(self.settings.store_url)
        try:
            with engine.begin() as connection:
                connection.execute(text(statement), values)
        finally:
            engine.dispose()

    def table(self, name: str) -> list[dict[str, Any]]:
        """The store's own rows."""
        engine = create_engine(self.settings.store_url)
        try:
            with engine.connect() as connection:
                found = connection.execute(text(f"SELECT * FROM {name}")).mappings()
                return [dict(row) for row in found]
        finally:
            engine.dispose()


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    night = Night(tmp_path)
    yield night
    night.store.close()


# --- history ------------------------------------------------------------------------------------


def test_a_second_run_is_drafted_for_from_the_first_and_never_from_another_tenant_s(
    night: Night,
) -> None:
    history: dict[str, Any] = {"sources": ["history"], "depth": 16}
    with night.worker():
        first = night.run(**history)
        assert "history" not in first.job.report, "there was nothing before"
        assert first.drafted == 0

        again = night.run(**history)
        assert again.job.report["history"]["size_bytes"] > 0
        written = Path(again.job.report["history"]["uri"].removeprefix("file://"))
        assert written.parent.is_dir()
        assert not written.exists(), "it ends with its job"
        assert again.mean_accepted_length >= 6
        assert again.outputs == first.outputs

        foreign = night.run(tenant="another", **history)
        assert "history" not in foreign.job.report
        assert foreign.drafted == 0
        assert foreign.outputs == first.outputs

        without = night.run(history_tokens=0, **history)
        assert "history" not in without.job.report
        assert without.drafted == 0


def test_outputs_in_other_token_ids_are_no_history(night: Night, tmp_path: Path) -> None:
    """The same weights behind a tokenizer in which two letters have changed places."""
    other = tmp_path / "other"
    shutil.copytree(demo.VERIFIER, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    a, b, *_ = (k for k in tokenizer["model"]["vocab"] if len(k) == 1 and k.isalpha())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with night.worker(draft=None):
        before = night.run()
    with night.worker(draft=None, verifier=other):
        done = night.run(sources=["history"], depth=16)
    assert done.job.report["vocabulary"] != before.job.report["vocabulary"]
    assert "history" not in done.job.report
    assert done.drafted == 0


# --- shadow -------------------------------------------------------------------------------------


def test_shadow_counts_what_depth_0_would_have_accepted_and_tells_the_next_night(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    primed: dict[str, tuple[AcceptanceCount, ...]] = {}
    prime = DecisionLog.prime

    def noted(decision_log: DecisionLog, job: str, counts: Iterable[AcceptanceCount]) -> None:
        primed[job] = tuple(counts)
        prime(decision_log, job, primed[job])

    monkeypatch.setattr(DecisionLog, "prime", noted)
    with night.worker():
        off = night.run(depth="off")
        assert off.priors == [], "nothing was drafted"
        shadow = night.run(depth="shadow")
        assert shadow.outputs == off.outputs
        assert shadow.drafted == 0
        assert all(c.verifier_passes == len(c.token_ids) for c in shadow.completions)
        report = shadow.job.report
        assert 0 < report["shadow_accepted"] <= report["shadow_proposed"]
        learned = shadow.priors
        assert sum(p.agreed for p in learned) == report["shadow_accepted"]
        assert {p.tag for p in learned} <= {"odd", "even"}

        after = night.run(depth="shadow")
        night.run(name="other", depth="shadow")
    assert after.outputs == off.outputs
    assert primed[shadow.job.job_id] == ()
    assert primed[after.job.job_id] == tuple(learned)
    assert sum(p.tested for p in after.priors) > sum(p.tested for p in learned)
    (other,) = (job for job in night.store.list_jobs(9) if job.name == "other")
    assert primed[other.job_id] == ()


# --- what is known of a machine -----------------------------------------------------------------


def test_what_a_worker_learned_of_its_machine_is_read_by_the_next_or_written_anew(
    night: Night, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[dict[str, Any] | None] = []
    load = KnowledgeStore.load

    def noted(stored: KnowledgeStore, about: str) -> Knowledge | None:
        found = load(stored, about)
        read.append(found and found.state())
        return found

    def known() -> tuple[str, dict[str, Any]]:
        (row,) = night.table("machine_knowledge")
        return row["key"], json.loads(row["state"])

    monkeypatch.setattr(KnowledgeStore, "load", noted)
    with night.worker():
        first = night.run(depth="off", tokens=80)
        assert night.table("machine_knowledge") == [], "it is written at the end"
    key, state = known()
    device, models, engine = key.split("; ")
    assert "threads" in device
    assert [part.split()[1] for part in models.split(" + ")] == ["as-is", "as-is"]
    assert all(
        inspect_model(str(m)).fingerprint.digest[:16] in models for m in (demo.VERIFIER, demo.DRAFT)
    )
    assert engine in ("bfloat16 bitwise", "float32 bitwise"), "of the class that the job pinned"
    assert state["pass_time"]["cells"]

    with night.worker():
        assert night.run(depth="off", tokens=80).outputs == first.outputs
    assert read == [None, state]
    assert known()[0] == key
    assert known()[1] != state, "the second added to what the first knew"

    night.store.keep_knowledge(key, {"pass_time": 3, "draft_times": [], "acceptance": None})
    with night.worker():
        assert night.run(tokens=80).outputs == first.outputs
        assert night.run(depth="off", tokens=80).outputs == first.outputs
    assert read[2:] == [None]
    assert Knowledge.restored(known()[1]).step_time.observations, "it is written over"


# --- caps ---------------------------------------------------------------------------------------


def test_caps_hold_by_job_tag_prompt_and_tenant(tmp_path: Path) -> None:
    night = Night(tmp_path, tenant_depths={"small": 3, "none": 0})
    with night.worker():
        free = night.run(depth=8)
        assert free.deepest == 8
        assert night.run(depth=8, max_depth=2).deepest == 2
        assert night.run(depth=8, tenant="small").deepest == 3
        assert night.run(depth=8, tenant="none").drafted == 0

        by_tag = night.run(depth=8, tag_depths={"odd": 0})
        assert by_tag.outputs == free.outputs
        assert {c.tag for c in by_tag.completions if c.proposed} == {"even"}

        ahead = night.run(depth=8, tag_depths={"odd": 0}, pregenerate=True)
        assert ahead.outputs == free.outputs
        (drafts,) = Path(ahead.job.workspace_uri).glob("drafts-00000000-1-*.arrow")
        blocks = read_drafts(drafts.read_bytes())
        assert [b.row_index for b in blocks] == list(range(0, ROWS, 2)), "nor written ahead for"

        lengths = sorted(c.prompt_tokens for c in free.completions)
        middle = lengths[ROWS // 2]
        assert lengths[0] < middle
        by_prompt = night.run(depth=8, prompt_depths=[(middle, 1)])
        for c in by_prompt.completions:
            assert len(c.proposed_at_depth) == (1 if c.prompt_tokens >= middle else 8)

        chosen = night.run(max_depth=2, tag_depths={"odd": 0}, tokens=96)
        assert chosen.deepest <= 2
        assert not any(c.proposed for c in chosen.completions if c.tag == "odd")
    night.store.close()


# --- decisions ----------------------------------------------------------------------------------


def test_drafts_that_never_fit_are_given_up_and_the_reason_is_kept(
    night: Night, tmp_path: Path
) -> None:
    random = tiny_llama(tmp_path / "random", vocab_size=2048, layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.DRAFT / name, random / name)
    with night.worker(draft=random):
        off = night.run(depth="off", tokens=192)
        assert off.decisions == []
        tried = night.run(sources=["draft-model"], tokens=192)
    assert tried.outputs == off.outputs
    assert tried.drafted > 0, "they were tried"
    given_up = (DecisionAction.OFF, DecisionAction.DISABLED)
    told = [d for d in tried.decisions if d.action in given_up]
    assert told
    too_little = r"acceptance 0\.\d\d over .*; break-even at \d+ sequences is"
    too_dear = r"no acceptance pays for what drafts of draft-model cost at \d+ sequences"
    for decision in told:
        assert re.search(f"{too_little}|{too_dear}", decision.reason)
        assert tried.job.created_at <= decision.at <= (tried.job.finished_at or 0.0)


# --- switched off by an operator ----------------------------------------------------------------

HEARTBEAT_SEC = 0.5


def drafted_by(worker: Worker) -> tuple[int, int]:
    """Draft tokens and steps of the verify engine so far."""
    stats = worker.engines[0].stats
    return sum(of.proposed for of in stats), sum(of.steps for of in stats)


def until(happened: Callable[[], bool]) -> float:
    """Wait until something has happened; the seconds that it took."""
    begun = time.monotonic()
    while not happened():
        assert time.monotonic() < begun + WAIT_SEC
        time.sleep(0.002)
    return time.monotonic() - begun


def test_drafting_that_is_switched_off_under_load_ends_within_a_heartbeat(tmp_path: Path) -> None:
    """And is on again once it is switched on. No row is lost, and outputs are those of depth 0."""
    night = Night(tmp_path, rows=64, lease_sec=3 * HEARTBEAT_SEC)
    load: dict[str, Any] = {"tokens": 256, "depth": 4, "sources": ["draft-model", "ngram"]}
    operator = make_store(night.settings, "alice")
    with night.worker() as worker, ThreadPoolExecutor(1) as pool:
        running = pool.submit(night.run, **load)
        until(lambda: drafted_by(worker)[0] > 0)
        operator.switch_drafting_off(SwitchScope(), "acceptance fell")
        waited = until(lambda: worker.switches.now.active != ())
        assert waited < 2 * HEARTBEAT_SEC
        _, steps = drafted_by(worker)
        until(lambda: drafted_by(worker)[1] > steps + 2)
        proposed, steps = drafted_by(worker)
        done = running.result(WAIT_SEC)
        assert drafted_by(worker)[0] == proposed
        assert drafted_by(worker)[1] > steps + 50, "most of the job went on without drafts"
        assert done.drafted == proposed

        later = night.run(tokens=8)
        assert later.drafted == 0
        operator.switch_drafting_on(SwitchScope())
        until(lambda: worker.switches.now.active == ())
        assert night.run(**load | {"tokens": 8}).drafted > 0
        plain = night.run(**load | {"depth": "off"})
    assert len(done.outputs) == 64
    assert done.outputs == plain.outputs
    said = {(d.action, d.proposer, d.reason) for d in done.decisions}
    assert (
        DecisionAction.SWITCHED_OFF,
        ALL_PROPOSERS,
        "switched off by alice: acceptance fell",
    ) in said
    operator.close()
