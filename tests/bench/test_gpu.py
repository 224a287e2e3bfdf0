"""The GPU benchmark: its arithmetic, that every kernel of it runs, and its answer without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from specbatch.benchmarks import gpu
from specbatch.benchmarks.contenders import Contender
from specbatch.benchmarks.measuring import measure
from specbatch.benchmarks.roofline import (
    Roofs,
    all_work,
    attention_work,
    linear_work,
    measured,
    roofs,
    verify_work,
)
from specbatch.jobs.bench.contenders import OURS, Completed, Prompts
from support import forks
from support.devices import TRITON_DEVICE
from support.tree import ROOT

pytestmark = pytest.mark.pipeline  # runs kernels in Triton's interpreter


class Clock:
    """Runs what it is given once, and says that it took two seconds."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        self.runs += 1
        return 2.0


RUN_MODULE = "import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__')"


def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    done = forks.run(
        *("-c", RUN_MODULE, "specbatch.benchmarks.gpu"),
        environment={"CUDA_VISIBLE_DEVICES": ""},
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    # Before that, libraries may say what they could not load.
    assert done.stderr.splitlines()[-1] == "error: this machine has no GPU that torch can use"


def test_the_tests_that_it_runs_are_there() -> None:
    assert [name for name in gpu.TESTS if not (ROOT / name).is_file()] == []


def test_a_rival_that_fails_has_a_row_with_the_reason() -> None:
    def fails(prompts: Prompts) -> Completed:
        raise RuntimeError(f"no room for {len(prompts)}")

    rival = gpu.harmless(Contender("generate", "transformers", fails))
    assert measure([rival], "m", [[1], [2]], runs=1) == [
        {
            "model": "m",
            "n": 2,
            "contender": "generate",
            "engine": "transformers",
            "failed": "RuntimeError('no room for 2')",
        }
    ]
    with pytest.raises(RuntimeError, match="no room for 1"):
        gpu.harmless(Contender("depth 0", OURS, fails)).complete([[1]])


def test_every_kernel_of_the_rooflines_runs() -> None:
    clock = Clock()
    rows = [measured(work, clock, Roofs(1e6, 1e6)) for work in all_work(TRITON_DEVICE, small=True)]
    kinds = {"linear": 1, "rms_norm": 1, "paged_attention": 1, "verify": 2}
    assert Counter(row["kernel"] for row in rows) == kinds
    assert clock.runs == len(rows) + 2, "torch's own linear layer and norm are timed too"
    assert all(row["seconds"] == 2.0 and 0 < row["of_roof"] < 1 for row in rows)


def test_bytes_and_operations_are_the_least_there_are() -> None:
    linear = linear_work(3, 5, 7, TRITON_DEVICE)
    assert linear.bytes_moved == 2 * (3 * 5 + 5 * 7 + 3 * 7)
    assert linear.flops == 2 * 3 * 5 * 7
    # Two sequences of 3 queries that see 38, 39 and 40 keys, 4 heads over 2 of keys and values.
    attention = attention_work(2, 3, 40, 4, 2, 32, TRITON_DEVICE)
    assert attention.flops == 2 * (2 * 2 * (38 + 39 + 40) * 4 * 32)
    assert attention.bytes_moved == 2 * (2 * 6 * 4 * 32 + 2 * 2 * 40 * 2 * 32)
    assert verify_work(3, 111, 0.0, TRITON_DEVICE).bytes_moved == 4 * 3 * 111


@pytest.mark.parametrize(
    ("limits", "of_roof"), [(Roofs(142, 1e9), 0.5), (Roofs(1e9, 1050), 0.1)], ids=["bytes", "flops"]
)
def test_the_nearer_roof_counts(limits: Roofs, of_roof: float) -> None:
    """142 bytes and 210 operations in two seconds."""
    assert measured(linear_work(3, 5, 7, TRITON_DEVICE), Clock(), limits)["of_roof"] == of_roof


def test_roofs_are_measured_on_the_device() -> None:
    found = roofs(Clock(), TRITON_DEVICE, size=16, copied=1000)
    assert found == Roofs(bytes_per_sec=1000.0, flops_per_sec=16.0**3)
