"""Workers on vLLM, killed while they hand over what a step finished: `make test-long` runs this
in `.venv-vllm`.

What must hold is read from the store and the output alone: no row is lost or doubled, all outputs
are those of the undisturbed job, and time and money balance to the last unit.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from specbatch.jobs.chaos.harness import Site, site
from specbatch.jobs.chaos.plan import Deed, Disturbance, Plan
from specbatch.jobs.chaos.private_redis import private_redis
from specbatch.schemas.crash_points import CrashPoint

KILLS = range(10)
LATEST = 9  # completion after which a worker is killed


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("vllm")
    with private_redis(folder) as url, site(folder, url, engine="vllm") as made:
        yield made


@pytest.mark.parametrize("seed", KILLS)
def test_a_worker_is_killed_in_the_middle_of_a_group(here: Site, seed: int) -> None:
    draw = random.Random(seed)
    kill = Disturbance(CrashPoint.VERIFY, Deed.KILL, nth=draw.randint(1, LATEST))
    unruly = seed if seed % 2 else None
    ran = here.run(Plan(seed, (kill,), draw.choice((3, 4, 6)), True, message_seed=unruly))
    assert ran.fired == [kill]
    assert ran.restarts == 1
    assert ran.violations == []
    job = here.store.get_job(ran.reports[-1].job_id)
    assert (job.numeric_class or "").startswith("vllm/")
