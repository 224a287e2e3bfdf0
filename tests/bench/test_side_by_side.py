"""Engines side by side: every wanted row, drafts of the promised acceptance, honest ratios."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from specbatch.benchmarks.contenders import random_prompts
from specbatch.jobs.bench import side_by_side
from specbatch.jobs.bench.contenders import OURS, Completed, spoilt
from specbatch.jobs.bench.entries import NONE, REPLAYED, Entry, learning
from specbatch.jobs.bench.huggingface import ReplayCandidates, Transformers
from specbatch.jobs.bench.models import demo_model
from specbatch.jobs.bench.peer_client import PeerError
from specbatch.jobs.bench.plan import ENGINES, Plan, read_prompts
from specbatch.jobs.bench.side_by_side import DEPTH_OFF, Turns, beside_others, run
from specbatch.jobs.bench.side_report import plot, reference_count, reference_share, remarks, table
from specbatch.schemas.errors import InputError, ModelError, UsageError
from support.models import TinyPair

pytestmark = pytest.mark.pipeline  # runs models

SMALL = Plan(
    counts=(1, 3),
    acceptances=(0.5, 1.0),
    real=True,
    new_tokens=10,
    runs=1,
    dtype="float32",
    prompt_tokens=24,
)


def quiet(_done: int, _total: int, _what: str) -> None:
    """Nobody looks."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    run(SMALL, folder / "bench.json", folder, quiet)
    found: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return found


def test_every_way_has_a_row_at_every_n(measured: dict[str, Any]) -> None:
    replayed = [(OURS, mode) for mode in ("auto", "depth 2", "depth 4", "depth 8")]
    replayed += [("transformers", f"assisted {depth}") for depth in (2, 4, 8)]
    wanted = {(*entry, share) for entry, share in product(replayed, SMALL.acceptances)}
    alone = [
        (OURS, "off"),
        *((OURS, f"draft {m}") for m in ("auto", "depth 2", "depth 4", "depth 8")),
    ]
    alone += [("transformers", m) for m in ("generate", "generate_batch", "lookup 4", "draft 4")]
    wanted |= {(*entry, None) for entry in alone}
    for n in SMALL.counts:
        rows = [row for row in measured["rows"] if row["n"] == n]
        assert {(r["engine"], r["mode"], r["acceptance"]) for r in rows} == wanted
        assert len(rows) == len(wanted)
        assert all(row["tokens_per_sec"] > 0 and row["over_off"] > 0 for row in rows)
        one_by_one = {r["timed_prompts"] for r in rows if r["mode"].startswith("assisted")}
        assert one_by_one == {min(n, 2)}


def test_all_ways_write_the_same_and_keep_the_drafts_they_were_promised(
    measured: dict[str, Any],
) -> None:
    for row in measured["rows"]:
        assert row["same_as_off"] == 1, row
        if row["acceptance"] == 1:
            assert row["accepted"] == row["proposed"], row
            # `auto` goes by measured times: on a busy machine it may find that no draft pays.
            assert row["proposed"] > 0 or row["mode"] == "auto", row
        if row["drafts"] == REPLAYED and row["engine"] != OURS:
            assert row["as_replayed"] == 1
    # The same spoilt tokens at the same depth: the same passes, whoever verifies.
    passes = {
        (row["engine"], row["mode"].split()[-1], row["acceptance"]): row["tokens_per_pass"]
        for row in measured["rows"]
        if row["n"] == 1 and row["drafts"] == REPLAYED
    }
    for depth, share in product("248", SMALL.acceptances):
        assert passes[OURS, depth, share] == passes["transformers", depth, share]


def test_the_file_says_what_was_done_on_what(measured: dict[str, Any]) -> None:
    assert measured["machine"]["torch"] == torch.__version__
    assert measured["prompts"]["prompts"] == 3
    assert measured["prompts"]["tokens"]["most"] <= 24
    assert not measured["interrupted"]
    entries = {(row["engine"], row["drafts"]) for row in measured["rows"]}
    assert {(e, d) for e, how in measured["engines"].items() for d in how} == entries
    compared = measured["auto_beside_others"]
    assert [(row["n"], row["acceptance"]) for row in compared] == list(
        product(SMALL.counts, (*SMALL.acceptances, None))
    )


def test_an_interrupted_run_keeps_what_was_finished(tmp_path: Path) -> None:
    plan = replace(SMALL, acceptances=(1.0,), real=False, engines=("ours",))
    path = tmp_path / "bench.json"

    def tell(done: int, total: int, what: str) -> None:
        if what.startswith("N=3") and done == total - 1:
            raise KeyboardInterrupt

    report = run(plan, path, tmp_path, tell)
    found = json.loads(path.read_text())
    assert report.interrupted
    assert found["interrupted"]
    modes = ["off", "auto", "depth 2", "depth 4", "depth 8"]
    at = {n: [row["mode"] for row in found["rows"] if row["n"] == n] for n in plan.counts}
    assert at == {1: modes, 3: modes[:-1]}  # the last entry of the last turn is missing


def test_an_interruption_in_the_first_warm_up_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(side_by_side, "_take_turns", interrupted)
    plan = replace(SMALL, real=False, engines=("ours",))
    report = run(plan, tmp_path / "bench.json", tmp_path, quiet)
    assert report.interrupted
    assert report.rows == []
    assert list(tmp_path.iterdir()) == []


def fixed(engine: str, mode: str, seconds: list[float], drafts: str = NONE) -> Entry:
    left = iter(seconds)
    return Entry(
        engine,
        mode,
        lambda prompts: Completed(next(left), [[1, 2] for _ in prompts], {"accepted": 1}),
        drafts,
        1.0 if drafts == REPLAYED else None,
    )


def test_ratios_are_over_the_depth_off_that_ran_just_before() -> None:
    """The machine is twice as slow in the second half of each turn."""

    def fails(_prompts: list[list[int]]) -> Completed:
        raise PeerError("no memory")

    # The first of an engine's turns after another's is repeated; so is the warm-up's.
    off = fixed(OURS, "off", [9, 1, 2, 9, 1, 2, 9, 1, 2])
    entries = [
        off,
        fixed(OURS, "auto", [9, 0.5, 0.5], REPLAYED),
        off,
        fixed(OURS, "draft auto", [9, 1, 1]),
        fixed("x", "plain", [9, 9, 9, 4, 9, 4]),
        Entry("y", "plain", fails),
    ]
    turns = Turns(1)
    plan = replace(SMALL, new_tokens=2, runs=2)
    side_by_side._take_turns(turns, entries, [[5]], plan, (0, 18), quiet)
    rows = {(row["engine"], row["mode"]): row for row in turns.rows(entries)}
    assert rows[OURS, "auto"]["over_off"] == 2
    assert rows[OURS, "draft auto"]["over_off"] == 2
    assert rows["x", "plain"]["over_off"] == 0.5
    assert rows[OURS, "off"]["over_off"] == 1
    assert rows[OURS, "off"]["runs_tokens_per_sec"] == [2, 1, 2, 1]
    assert rows["y", "plain"]["failed"] == "no memory"
    assert turns.last[DEPTH_OFF].outputs == [[1, 2]]
    assert remarks(list(rows.values())) == ["y, plain: no memory"]


def test_each_process_of_an_engine_is_warm_when_it_is_timed() -> None:
    entries = [
        fixed(OURS, "off", [9, 1, 9, 1]),
        replace(fixed("x", "plain", [9, 9, 9, 1]), process="x plain"),
        replace(fixed("x", "lookup 4", [9, 9, 9, 1]), process="x lookup"),
        replace(fixed("x", "depth 2", [9, 9, 9, 1]), process="x replay"),
        replace(fixed("x", "depth 4", [9, 1]), process="x replay"),
    ]
    turns = Turns(1)
    plan = replace(SMALL, new_tokens=2, runs=1)
    side_by_side._take_turns(turns, entries, [[5]], plan, (0, 10), quiet)
    assert {row["tokens_per_sec"] for row in turns.rows(entries)} == {2}


def test_auto_is_compared_with_drafts_of_its_own_acceptance() -> None:
    def row(
        engine: str, mode: str, drafts: str, share: float | None, rate: float
    ) -> dict[str, Any]:
        return {
            "n": 8, "engine": engine, "mode": mode, "drafts": drafts, "acceptance": share,
            "tokens_per_sec": rate,
        }  # fmt: skip

    rows = [
        row(OURS, "auto", "replayed", 0.5, 100.0),
        row(OURS, "depth 2", "replayed", 0.5, 300.0),
        row("x", "plain", "none", None, 80.0),
        row("x", "depth 4", "replayed", 0.5, 50.0),
        row("x", "depth 4", "replayed", 1.0, 400.0),
        row("y", "lookup 4", "prompt lookup", None, 200.0),
    ]
    (found,) = beside_others(rows)
    assert (found["best_same_drafts"], found["over_best_same_drafts"]) == ("x depth 4", 2)
    assert (found["best_other"], found["over_best_other"]) == ("y lookup 4", 0.5)


def test_engines_that_cannot_run_have_rows_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = ("openvino", "vllm", "llama.cpp")
    for engine in engines:
        monkeypatch.setenv(str(ENGINES[engine]), "/no/python")
    plan = replace(SMALL, engines=("ours", *engines), counts=(1,), acceptances=(1.0,))
    turns: list[str] = []
    report = run(
        plan, tmp_path / "bench.json", tmp_path / "work", lambda _, __, what: turns.append(what)
    )
    for engine in engines:
        first = next(at for at, what in enumerate(turns) if what.startswith(f"N=1 {engine} "))
        assert turns[first - 1] == "N=1 specbatch off", "each is compared with what ran just before"
        rows = [row for row in report.rows if row["engine"] == engine]
        modes = {"plain", "draft 4", "depth 2", "depth 4", "depth 8"}
        assert {row["mode"] for row in rows} - {"lookup 4"} == modes
        assert {row["failed"] for row in rows} == {"cannot run python: No such file or directory"}
    assert all("failed" not in row for row in report.rows if row["engine"] == OURS)
    assert "best_other" not in report.as_json()["auto_beside_others"][0]


def test_a_way_rehearses_until_it_writes_what_is_replayed() -> None:
    """An engine whose output is always one token away from ours, three times."""

    class Known:
        known = {"0": [1, 2, 3]}  # noqa: RUF012 - nobody writes to it
        vocab_size = 50

    seen: list[list[int]] = []

    def engine(prompts: list[list[int]], known: Any, drafts: Any) -> Completed:
        seen.append(known[0])
        assert drafts == known  # acceptance 1
        return Completed(1.0, [[min(token + 1, 6) for token in known[0]] for _ in prompts])

    complete = learning(engine, Known(), 1.0)  # type: ignore[arg-type]  # all that it looks at
    assert complete([[9]]).facts["as_replayed"] == 0
    assert seen == [[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 6]]
    assert complete([[9]]).facts["as_replayed"] == 1
    assert len(seen) == 6  # rehearsed once only


def test_candidates_offer_what_follows_and_never_the_last_token() -> None:
    candidates = ReplayCandidates(2, [5, 6, 7, 8], depth=2)
    ids, scores = candidates.get_candidates(torch.tensor([[1, 1]]))
    assert ids.tolist() == [[1, 1, 5, 6]]
    assert scores is None
    candidates.update_candidate_strategy(ids, ids, torch.tensor(1))
    assert candidates.get_candidates(torch.tensor([[1, 1, 5, 9]]))[0].tolist() == [[1, 1, 5, 9, 7]]
    candidates.update_candidate_strategy(ids, ids, 3)
    assert candidates.get_candidates(torch.tensor([[1, 1, 5, 9, 7]]))[0].shape == (1, 5)
    assert (candidates.proposed, candidates.accepted) == (3, 2)


def test_transformers_pads_prompts_of_several_lengths_and_leaves_no_generator_behind() -> None:
    model = demo_model()
    theirs = Transformers(model.folder, torch.float32, new_tokens=6)
    prompts = [p[:length] for p, length in zip(random_prompts(model, 3), (9, 4, 7), strict=True)]
    outputs = theirs.generate(prompts)
    assert outputs == theirs.one_by_one(prompts)
    assert outputs == theirs.generate_batch(prompts)
    drafts = [spoilt(output, 0.5, model.vocab_size, str(i)) for i, output in enumerate(outputs)]
    assert theirs.replay(prompts, drafts, 3)[0] == outputs
    assert "_get_candidate_generator" not in vars(theirs.module)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no prompts": ({"counts": ()}, "--n takes numbers"),
    "zero prompts": ({"counts": (0, 8)}, "--n takes numbers"),
    "acceptance": ({"acceptances": (0.5, 1.5)}, "--acceptance 1.5 is not a probability"),
    "no drafts": ({"acceptances": ()}, "nothing drafts"),
    "new tokens": ({"new_tokens": 1}, "--new-tokens is 1: give 2 or more"),
    "runs": ({"runs": 0}, "--runs is 0"),
    "engine": ({"engines": ("ours", "sglang")}, "no `sglang`: choose of ours, transformers,"),
    "not ours": ({"engines": ("transformers",)}, "must name ours"),
    "peer": ({"engines": ("ours", "openvino")}, "SPECBATCH_BENCH_OPENVINO_PYTHON"),
    "vllm": (
        {"engines": ("ours", "vllm")},
        "needs a Python that has it: name one in .*_VLLM_PYTHON",
    ),
    "random": ({"model": "llama-230m", "real": True}, "llama-230m is random"),
    "no folder": ({"model": "./nowhere"}, "does not exist"),
    "too long": ({"prompt_tokens": 1000, "new_tokens": 100}, "exceed the 1024 tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_measured_is_refused_before_it_starts(name: str) -> None:
    changes, words = WRONG[name]
    with pytest.raises(UsageError, match=words):
        Plan(**changes)


def test_a_folder_drafts_with_a_proposer_of_its_own_vocabulary_only(tiny_pair: TinyPair) -> None:
    folder = {"model": str(tiny_pair.verifier), "prompt_tokens": 16}
    with pytest.raises(UsageError, match="comes alone"):
        Plan(**folder, real=True)  # type: ignore[arg-type]  # a mapping of several types
    with pytest.raises(ModelError, match="must share one vocabulary"):
        Plan(**folder, proposer=demo_model().draft, real=True)  # type: ignore[arg-type]  # as above
    plan = Plan(**folder, proposer=tiny_pair.draft, real=True)  # type: ignore[arg-type]  # as above
    model, draft = plan.bench_model(Path())
    assert (model.folder, draft) == (tiny_pair.verifier, tiny_pair.draft)


def test_prompts_come_from_a_column_and_are_cut(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(
        pa.table({"text": ["def f(x):", None, " ", "def g(y): return"], "x": [1] * 4}), path
    )
    plan = replace(SMALL, prompts=path, prompt_column="text", counts=(2,), prompt_tokens=3)
    found = read_prompts(plan, demo_model().folder)
    assert [len(prompt) for prompt in found.ids] == [3, 3]
    assert found.facts["source"] == "prompts.parquet"
    for changes, words in (
        ({"counts": (3,)}, "has 2 prompts and --n asks for 3"),
        ({"prompt_column": "prompt"}, "no column `prompt`; its columns are text, x"),
        ({"prompt_column": "x"}, "is int64, not text"),
        ({"prompts": tmp_path / "none"}, "do not exist"),
        ({"prompts": Path(__file__)}, "cannot be read as Parquet"),
    ):
        with pytest.raises(InputError, match=words):
            read_prompts(replace(plan, **changes), demo_model().folder)  # type: ignore[arg-type]  # as above


def test_a_model_without_a_tokenizer_gets_the_demos_ids(tmp_path: Path) -> None:
    assert read_prompts(SMALL, tmp_path).facts["tokenizer"] == "the demo's"
    assert read_prompts(SMALL, demo_model().folder).facts["tokenizer"] == "the model's"


def test_the_plot_has_both_panels_and_the_same_bytes_each_time(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("a.svg", "b.svg"):
        plot(measured, tmp_path / name)
    drawn = (tmp_path / "a.svg").read_bytes()
    assert drawn == (tmp_path / "b.svg").read_bytes()
    for words in (
        b"throughput (tokens/s)",
        b"acceptance (",
        b"specbatch: auto",
        b"best with drafts",
    ):
        assert words in drawn  # in the comments beside the glyphs
    assert (reference_count(measured["rows"]), reference_share(measured["rows"])) == (3, 0.5)


def test_the_table_has_a_line_per_way(measured: dict[str, Any]) -> None:
    rows = measured["rows"]
    assert table(rows).row_count * len(SMALL.counts) == len(rows)
