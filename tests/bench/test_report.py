"""What is measured is kept: ratios within one run, rows merged within one setup only."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from specbatch.benchmarks.contenders import NEW_TOKENS, Contender
from specbatch.benchmarks.measuring import Row, measure
from specbatch.benchmarks.peer_roster import KNOWN, Roster
from specbatch.benchmarks.report import Results, print_table
from specbatch.jobs.bench.contenders import OURS, Completed, Prompts
from specbatch.jobs.bench.models import demo_model
from specbatch.jobs.bench.peer_client import PeerError

HEADER = {"machine": {"cpu": "c", "date": "2026-01-01"}, "runs": 3, "peers": {"x": {"x": "1"}}}


def fixed(name: str, engine: str, seconds: list[float], token: int = 1) -> Contender:
    """Takes these seconds in turn and writes `token` throughout."""
    left = iter(seconds)

    def complete(prompts: Prompts) -> Completed:
        return Completed(next(left), [[token] * NEW_TOKENS for _ in prompts], {"steps": token})

    return Contender(name, engine, complete)


def failing(name: str, engine: str, good_runs: int) -> Contender:
    left = iter(range(good_runs))

    def complete(prompts: Prompts) -> Completed:
        if next(left, None) is None:
            raise PeerError("no memory")
        return Completed(1.0, [[1] * NEW_TOKENS for _ in prompts])

    return Contender(name, engine, complete)


def rows() -> list[Row]:
    contenders = [
        fixed("generate", "transformers", [9.0, 4.0, 4.0, 1.0]),
        fixed("generate_batch", "transformers", [9.0, 2.0, 2.0, 2.0]),
        fixed("fast", "x", [9.0, 0.5, 0.5, 0.5], token=2),
        failing("slow", "x", good_runs=2),
        fixed("depth 0", OURS, [9.0, 1.0, 1.0, 3.0]),
    ]
    return measure(contenders, "m", [[3, 4], [5, 6]], runs=3)


def test_row_is_the_median_without_the_warm_up() -> None:
    generate = rows()[0]
    assert generate["seconds"] == [4.0, 4.0, 1.0]
    assert generate["tokens_per_sec"] == 2 * NEW_TOKENS / 4
    assert (generate["n"], generate["engine"], generate["steps"]) == (2, "transformers", 1)


def test_rows_say_the_share_of_outputs_that_generate_wrote_too() -> None:
    assert [row.get("same_as_generate") for row in rows()] == [1.0, 1.0, 0.0, None, 1.0]


def test_failed_peer_has_a_row_with_the_reason_and_no_figure() -> None:
    slow = rows()[3]
    assert slow["failed"] == "no memory"
    assert "tokens_per_sec" not in slow


def test_our_rows_are_ratios_over_the_best_of_each_engine() -> None:
    *others, ours = rows()
    assert (ours["vs_best_transformers"], ours["vs_best_x"]) == (2.0, 0.5)
    assert not any(key.startswith("vs_") for row in others for key in row)


def test_file_is_written_after_each_n_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "results" / "engine.json"
    Results(path, HEADER).add([{"n": 32, "contender": "a"}, {"n": 32, "contender": "b"}])
    later = Results(path, HEADER)
    later.add([{"n": 8, "contender": "a"}])
    later.add([{"n": 32, "contender": "c"}])
    written = json.loads(path.read_text())
    assert {k: v for k, v in written.items() if k != "rows"} == HEADER
    assert [(r["n"], r["contender"]) for r in written["rows"]] == [(8, "a"), (32, "c")]


@pytest.mark.parametrize(
    "other",
    [
        HEADER | {"machine": {"cpu": "c", "date": "2026-01-02"}},
        HEADER | {"machine": {"cpu": "d", "date": "2026-01-01"}},
        HEADER | {"peers": {"x": {"x": "2"}}},
        HEADER | {"not_installed": ["x"]},
    ],
    ids=["date", "machine", "version of a peer", "a peer that is missing"],
)
def test_file_of_another_setup_is_replaced(tmp_path: Path, other: dict[str, object]) -> None:
    path = tmp_path / "engine.json"
    Results(path, HEADER).add([{"n": 32, "contender": "a"}])
    Results(path, other).add([{"n": 8, "contender": "a"}])
    assert [row["n"] for row in json.loads(path.read_text())["rows"]] == [8]


def test_table_says_rates_ratios_and_failures() -> None:
    out = io.StringIO()
    print_table(rows(), Console(file=out, width=100))
    lines = {
        line.split("│")[1].strip(): line for line in out.getvalue().splitlines() if "│" in line
    }
    assert "64 (4.00×)" in lines["generate"]
    assert "512 (0.50×)" in lines["fast"]
    assert "failed" in lines["slow"]


def test_what_was_not_verified_to_keep_to_the_level_has_a_star() -> None:
    held = {"contender": "depth 0", "n": 1, "tokens_per_sec": 50.0, "isa_verified": True}
    for kept, wanted in ((True, "25 (2.00×)"), (False, "25* (2.00×)")):
        out = io.StringIO()
        peer = {"contender": "peer", "n": 1, "tokens_per_sec": 25.0, "isa_verified": kept}
        print_table([held, peer], Console(file=out, width=100))
        assert wanted in out.getvalue()
        assert ("above the level" in out.getvalue()) is not kept


def test_each_peer_of_the_roster_has_an_engine_file(tmp_path: Path) -> None:
    environment = {known.variable: "python" for known in KNOWN}
    roster = Roster(environment, demo_model(), "float32", 1, tmp_path)
    files = {peer.spec.engine for peers in roster._peers.values() for peer in peers}
    assert len(files) == len(KNOWN)
    assert all(file.is_file() for file in files)
