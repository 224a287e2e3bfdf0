"""An engine that is stopped keeps nobody waiting, whatever else its thread is at."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specbatch.jobs.chaos.stand_in import NUMERIC_CLASS, StandInEngine
from specbatch.jobs.chaos.stand_in_model import CONTEXT_TOKENS, VOCAB_SIZE, write_model
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.service import EngineService
from specbatch.pipeline.stages.dispatch import run_stage
from specbatch.schemas.errors import RequestCancelledError
from specbatch.schemas.numeric_class import Serves, all_keys
from specbatch.schemas.records import JobState, SamplingParams, Stage
from specbatch.schemas.spec import EngineSpec
from support.stand_ins import Site

PATIENCE_SEC = 60.0
SPECS = [EngineSpec(dtype=dtype, exactness="fast") for dtype in ("float32", "bfloat16")]


def engine() -> StandInEngine:
    return StandInEngine(VOCAB_SIZE, CONTEXT_TOKENS, max_sequences=4)


def requests(job: str) -> list[Request]:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    return [Request(f"{job}/{i}/0", (i, 2, 3), params, seed=i) for i in range(3)]


class Loading(EngineHost):
    """A host that loads its models until `loaded`, of the numeric class of the stand-ins."""

    def serves(self) -> Serves:
        return Serves.of(self.model.ref, dict.fromkeys(all_keys(), NUMERIC_CLASS))

    def __init__(self, model: Path) -> None:
        super().__init__(inspect_model(str(model)), None, 4, 64, 1 << 20, gate=threading.Lock())
        self.begun, self.loaded = threading.Event(), threading.Event()
        self.made = 0

    def make_engine(self, spec: EngineSpec) -> Any:  # noqa: ARG002 - one is like another
        self.made += 1
        self.begun.set()
        assert self.loaded.wait(PATIENCE_SEC)
        return engine()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Loading]:
    made = Loading(write_model(tmp_path / "loading"))
    yield made
    made.loaded.set()
    made.close()


def test_tickets_of_all_engines_fail_while_a_model_is_loaded(host: Loading) -> None:
    """The second engine waits for the first one's turn to be over, and is never made."""
    first = host.service(SPECS[0]).submit("a", requests("a"))
    assert host.begun.wait(PATIENCE_SEC)
    late = host.service(SPECS[0]).submit("b", requests("b"))
    second = host.service(SPECS[1]).submit("c", requests("c"))
    closing = threading.Thread(target=host.close)
    closing.start()
    for ticket in (first, late, second):
        with pytest.raises(RequestCancelledError, match="closed"):
            ticket.wait(PATIENCE_SEC / 2)
    assert closing.is_alive()  # its memory is waited for
    host.loaded.set()
    closing.join(PATIENCE_SEC)
    assert not closing.is_alive()
    assert host.made == 1
    assert [stats.finished for stats in host.stats] == [0, 0]


def test_tickets_fail_while_their_engine_waits_for_another_one_s_turn() -> None:
    gate = threading.Lock()
    service = EngineService(engine, gate)
    done = service.submit("a", requests("a"))
    answers = done.wait(PATIENCE_SEC)
    with gate:
        ticket = service.submit("b", requests("b"))
        service.stop()
        with pytest.raises(RequestCancelledError, match="closed"):
            ticket.wait(PATIENCE_SEC)
    service.close()
    assert service.stats.finished == len(answers)
    assert done.wait(PATIENCE_SEC) == answers  # what is done stays so


def test_no_engine_is_begun_once_the_host_is_stopped(host: Loading) -> None:
    host.stop()
    with pytest.raises(RequestCancelledError, match="closed"):
        host.service(SPECS[0])
    assert host.made == 0


def test_a_task_that_reads_its_prompts_while_the_host_is_stopped_gives_its_group_back(
    host: Loading, tmp_path: Path
) -> None:
    site = Site(tmp_path)
    try:
        job = site.submit(["a", "b"])
        site.work(site.worker("reads", site.host()), Stage.INGEST)
        (message,) = site.store.due()
        host._models.model = inspect_model(site.model)
        ending = site.worker("ends", host)
        host.stop()
        for _ in range(10):  # forgiven: more often than a group may fail
            run_stage(ending, message.stage, message.job_id, message.group_index)
        assert host.made == 0
        assert site.store.due() == [message]
        site.work(site.worker("goes on", site.host()))
        assert site.state(job) is JobState.DONE
    finally:
        site.close()
