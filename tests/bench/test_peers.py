"""A peer is a process of its own: its answers count, what it prints or dies of does no harm."""

from __future__ import annotations

import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbatch.benchmarks.peer_roster import KNOWN, Roster
from specbatch.jobs.bench.models import BenchModel
from specbatch.jobs.bench.peer_client import Peer, PeerError, PeerSpec

pytestmark = pytest.mark.pipeline  # starts processes

# Completes a prompt by counting on from its last token. The first token may ask for trouble.
COUNTING = """
import os, signal, sys
from pathlib import Path

RAISE, DIE, HANG, SHORT = 900, 901, 902, 903

def convert(source, target, dtype):
    with (source / "conversions").open("a") as file:
        file.write(dtype + "\\n")
    (target / "model").write_text((source / "config.json").read_text())

class Engine:
    def __init__(self, model, dtype, threads, options):
        print("loading", (model / "model").read_text())
        os.write(1, b"a library writes to the descriptor\\n")
        assert "specbatch" not in sys.modules
        if options.get("broken"):
            raise ValueError("no such precision")
        self.ready = None

        self.options, self.learnt, self.is_warm = options, None, True

    def versions(self):
        return {"counting": "1.2"}

    def learn(self, prompts, known, drafts):
        if self.learnt == (known, drafts):
            return False
        self.learnt, self.is_warm = (known, drafts), False
        return True

    def prepare(self, sequences, tokens):
        self.ready = (sequences, tokens)

    def generate(self, prompts, new_tokens, depth=0):
        assert self.ready == (len(prompts), max(map(len, prompts)) + new_tokens)
        print("generating")
        if prompts[0][0] == RAISE:
            raise RuntimeError("out of cache")
        if prompts[0][0] == DIE:
            sys.stderr.write("bad instruction\\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGFPE)
        if prompts[0][0] == HANG:
            signal.pause()
        self.counts, self.is_warm = {"warm": self.is_warm}, True
        if depth:
            assert (Path(self.options["draft"]) / "model").read_text() == "draft"
            assert self.learnt[1] == [[6, 9]]
            self.counts |= {"proposed": depth, "accepted": 1}
        made = new_tokens - (prompts[0][0] == SHORT)
        return [[prompt[-1] + 1 + i for i in range(made)] for prompt in prompts]
"""
RAISE, DIE, HANG, SHORT = 900, 901, 902, 903


@pytest.fixture
def spec(tmp_path: Path) -> PeerSpec:
    engine, model = tmp_path / "counting.py", tmp_path / "model"
    engine.write_text(COUNTING)
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    return PeerSpec("counting", sys.executable, engine, model, "float32", 1, tmp_path / "work")


@pytest.fixture
def peer(spec: PeerSpec) -> Any:
    peer = Peer(spec, limit_sec=120)
    yield peer
    peer.stop()


def conversions(spec: PeerSpec) -> list[str]:
    return (spec.model / "conversions").read_text().split()


def test_tokens_go_over_the_pipe_whatever_the_engine_prints(peer: Peer) -> None:
    seconds, outputs = peer.complete([[5, 7], [9]], 3)
    assert outputs == [[8, 9, 10], [10, 11, 12]]
    assert seconds > 0
    assert peer.versions == {"counting": "1.2"}
    assert "a library writes" in peer.log.read_text()


def wait_for(state: str, pid: int) -> None:
    """Until the kernel says this of a process, or that it is gone."""
    stat, begun = Path(f"/proc/{pid}/stat"), time.monotonic()
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != state:
        assert time.monotonic() - begun < 30
        time.sleep(0.02)


def test_a_peer_stands_still_until_it_is_asked_again(peer: Peer) -> None:
    for _ in range(2):
        assert peer.complete([[5]], 2)[1] == [[6, 7]]
        assert peer.process is not None
        wait_for("T", peer.process.pid)


def test_a_peer_ends_with_the_run_that_asked_it(spec: PeerSpec, tmp_path: Path) -> None:
    """Also while it is stopped, and where the run had no time to end it."""
    text = f"""
import os
from pathlib import Path
from specbatch.jobs.bench.peer_client import Peer, PeerSpec
paths = [Path(p) for p in {[str(spec.engine), str(spec.model), str(spec.work)]}]
peer = Peer(PeerSpec("p", {spec.python!r}, paths[0], paths[1], "float32", 1, paths[2]))
peer.complete([[5]], 2)
print(peer.process.pid, flush=True)
os._exit(0)
"""
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    wait_for("Z", int(done.stdout))


def test_model_is_converted_once_for_each_dtype_and_weights(spec: PeerSpec) -> None:
    changed = spec.model / "model.safetensors"
    for dtype, weights in (
        ("float32", b"weights"),
        ("float32", b"weights"),
        ("bfloat16", b"weights"),
        ("float32", b"others"),
    ):
        changed.write_bytes(weights)
        peer = Peer(PeerSpec("c", spec.python, spec.engine, spec.model, dtype, 1, spec.work))
        peer.start()
        peer.stop()
    assert conversions(spec) == ["float32", "bfloat16", "float32"]


@pytest.fixture
def drafting(spec: PeerSpec) -> Iterator[Peer]:
    """A peer with a draft model."""
    draft = spec.work.parent / "draft"
    draft.mkdir()
    (draft / "config.json").write_text("draft")
    peer = Peer(replace(spec, draft=draft))
    yield peer
    peer.stop()


def test_peer_that_drafts_gets_its_model_the_depth_and_what_to_replay(drafting: Peer) -> None:
    assert drafting.complete([[5]], 2, depth=3, known=[[6, 7]], drafts=[[6, 9]])[1] == [[6, 7]]
    assert drafting.counts == {"warm": True, "proposed": 3, "accepted": 1}
    assert drafting.complete([[5]], 2)[1] == [[6, 7]]


def test_what_an_engine_makes_to_replay_has_run_once_when_it_is_timed(drafting: Peer) -> None:
    for known in ([[6, 7]], [[6, 7]], [[6, 8]]):
        drafting.complete([[5]], 2, depth=3, known=known, drafts=[[6, 9]])
        assert drafting.counts["warm"], known


class CountingContext:
    """Stands in for a llama.cpp context: the next token is the last one plus 1, or plus `step`.

    Fed anything but the next position of a sequence it fails, as llama.cpp does.
    """

    def __init__(self, step: int = 1, slip: int = 0) -> None:
        self.step, self.slip = step, slip
        self.held: dict[int, list[int]] = {}
        self.passes = 0

    def clear(self) -> None:
        self.held.clear()

    def keep(self, sequence: int, tokens: int) -> None:
        del self.held[sequence][tokens:]

    def name_sequences(self, sequences: Any) -> None:
        self.named = list(sequences)

    def decode(self, tokens: Any, positions: Any, wanted: Any) -> Any:
        assert all(wanted)
        found = zip(self.named, positions, tokens, strict=True)
        return [int(row[0]) for row in self.feed([(s, p, [t]) for s, p, t in found])]

    def feed(self, pieces: Any, all_rows: bool = False) -> list[list[int]]:
        self.passes += 1
        rows = []
        for sequence, position, tokens in pieces:
            held = self.held.setdefault(sequence, [])
            assert position == len(held)
            assert tokens
            held += tokens
            slips = [self.slip and t % self.slip == 0 for t in tokens]
            row = [t + self.step + bool(s) for t, s in zip(tokens, slips, strict=True)]
            rows.append(row if all_rows else row[-1:])
        return rows


def llama_engine(drafting: CountingContext | None) -> Any:
    """`llama_cpp.py`'s engine with contexts that need no llama.cpp."""
    import specbatch.jobs.bench.peers as package

    engine = runpy.run_path(str(Path(package.__file__).with_name("llama_cpp.py")))["Engine"]
    made = engine.__new__(engine)
    made.verifier, made.drafting, made.replayed = CountingContext(), drafting, []
    return made


PROMPTS = [[3, 4], [10, 11, 12], [7]]


@pytest.mark.parametrize("slip", [0, 3, 1], ids=["right", "sometimes right", "wrong"])
@pytest.mark.parametrize("source", ["replayed", "draft model"])
@pytest.mark.parametrize("depth", [1, 2, 8])
def test_llama_cpp_speculates_without_changing_what_it_writes(
    slip: int, source: str, depth: int
) -> None:
    engine = llama_engine(CountingContext(slip=slip) if source == "draft model" else None)
    plain = engine.generate(PROMPTS, 9)
    assert plain == [[prompt[-1] + 1 + i for i in range(9)] for prompt in PROMPTS]
    assert engine.counts == {}
    drafts = [[t + bool(slip and (t - 1) % slip == 0) for t in output] for output in plain]
    engine.learn(PROMPTS, plain, drafts)
    before = engine.verifier.passes
    assert engine.generate(PROMPTS, 9, depth) == plain
    proposed, accepted = engine.counts["proposed"], engine.counts["accepted"]
    if slip == 0:
        assert accepted == proposed
        assert engine.verifier.passes - before == 1 + -(-8 // (depth + 1))
    elif slip == 1:
        assert accepted == 0
    else:
        assert 0 < accepted < proposed


def vllm_file() -> dict[str, Any]:
    """`vllm.py`, which needs vLLM only to load a model."""
    import specbatch.jobs.bench.peers as package

    return runpy.run_path(str(Path(package.__file__).with_name("vllm.py")))


def test_vllm_is_given_the_drafts_of_each_text_as_deep_as_asked() -> None:
    """Rows of the batch are in any order, and one is in mid-prompt."""
    proposer = vllm_file()["Replaying"]()
    prompts = [[1, 2], [1, 2, 3], [7, 8, 9]]
    drafts = [[10, 11, 12, 13, 14], [20, 21, 22, 23, 24], [30, 31, 32, 33, 34]]
    proposer.learn(prompts, drafts)
    proposer.begin(3)
    texts = [[7, 8, 9, 30], [1, 2, 3, 5, 21, 22], [1, 2], [1, 2, 10, 11, 12], [6, 6, 6, 6]]
    tokens = np.zeros((5, 8), dtype=np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    sampled = [[30], [5, 21, 22], [], [12], [6]]
    offered = proposer.propose(sampled, [len(text) for text in texts], tokens, slot_mappings=None)
    # The last token is never offered; an unknown text gets nothing.
    assert offered == [[31, 32, 33], [23], [], [13], []]
    assert proposer.counts == {"proposed": 5, "accepted": 2}
    proposer.begin(0)
    assert proposer.propose(sampled, [len(text) for text in texts], tokens) == [[]] * 5
    assert proposer.counts["proposed"] == 0


def test_vllm_is_told_who_drafts_in_its_own_words() -> None:
    speculative = vllm_file()["speculative"]
    assert speculative({}) == {}
    assert speculative({"lookup": 4})["method"] == "ngram"
    replaying = speculative({"replay": 8})
    assert (replaying["method"], replaying["num_speculative_tokens"]) == ("custom_class", 8)
    assert replaying["model"] == "specbatch_replaying.Replaying"
    assert speculative({"draft": "d", "drafted": 4}) == {"model": "d", "num_speculative_tokens": 4}


def test_vllm_keeps_what_it_compiles_apart_by_level(tmp_path: Path) -> None:
    environment = vllm_file()["environment"]
    caches = {environment(level, tmp_path)["VLLM_CACHE_ROOT"] for level in ("", "x86-64-v3")}
    assert len(caches) == 2
    assert environment("", tmp_path)["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"


def test_failed_prompts_say_the_reason_and_leave_the_process_alive(peer: Peer) -> None:
    peer.start()
    process = peer.process
    with pytest.raises(PeerError, match="RuntimeError: out of cache"):
        peer.complete([[RAISE]], 2)
    assert peer.complete([[5]], 2)[1] == [[6, 7]]
    assert peer.process is process


def test_process_that_died_says_how_and_is_started_again(peer: Peer) -> None:
    with pytest.raises(PeerError, match=r"SIGFPE.*bad instruction"):
        peer.complete([[DIE]], 2)
    assert peer.complete([[5]], 2)[1] == [[6, 7]]


def test_process_that_does_not_answer_in_time_is_ended(peer: Peer) -> None:
    peer.start()
    process = peer.process
    assert process is not None
    peer.limit_sec = 0.1
    with pytest.raises(PeerError, match=r"no answer within 0\.1 s"):
        peer.complete([[HANG]], 2)
    assert process.poll() is not None


def test_outputs_of_another_length_are_refused(peer: Peer) -> None:
    with pytest.raises(PeerError, match="not 4 tokens for each of 2 prompts"):
        peer.complete([[SHORT], [5]], 4)


def test_peer_that_could_not_load_stays_out(spec: PeerSpec) -> None:
    broken = PeerSpec(
        "b", spec.python, spec.engine, spec.model, "float32", 1, spec.work, {"broken": True}
    )
    peer = Peer(broken)
    for _ in range(2):
        with pytest.raises(PeerError, match="ValueError: no such precision"):
            peer.complete([[5]], 2)
    assert peer.process is None


def test_missing_interpreter_is_the_reason(spec: PeerSpec) -> None:
    gone = PeerSpec("g", "/no/python", spec.engine, spec.model, "float32", 1, spec.work)
    with pytest.raises(PeerError, match="cannot run python: No such file"):
        Peer(gone).start()
    assert [path.suffix for path in spec.work.iterdir()] == [".log"]  # no unfinished conversion


def test_only_engines_with_an_interpreter_take_part(tmp_path: Path) -> None:
    model = BenchModel("m", tmp_path, tmp_path, 111)
    roster = Roster({}, model, "float32", 1, tmp_path)
    assert roster.not_installed == ["openvino_genai", "vllm", "llama_cpp"]
    assert roster.contenders == []
    there = {known.variable: "/no/python" for known in KNOWN}
    with Roster(there, model, "float32", 1, tmp_path, skipped=["openvino lookup"]) as roster:
        assert roster.not_installed == []
        names = ["openvino", "vllm", "vllm lookup", "llama.cpp"]
        assert [c.name for c in roster.contenders] == names
        assert roster.processes() == {}


def test_every_known_peer_has_its_engine_file() -> None:
    import specbatch.jobs.bench.peers as package

    folder = Path(package.__file__).parent
    assert [k.engine for k in KNOWN if not (folder / f"{k.engine}.py").is_file()] == []
