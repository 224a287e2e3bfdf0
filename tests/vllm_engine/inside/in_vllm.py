"""The vLLM engine on vLLM itself: `make test-vllm` runs this in `.venv-vllm`.

vLLM's state is the process's, so cores are made one after the other, and jobs in processes of their
own.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow.dataset
import pytest
import torch
from numpy.typing import NDArray
from transformers import GraniteConfig, GraniteForCausalLM
from vllm_engine.inside import forms

from specbatch.jobs.demo import __file__ as demo
from specbatch.pipeline.engines.contract import Cohort, Completion, Request
from specbatch.pipeline.engines.models.model_folder import inspect_folder
from specbatch.pipeline.engines.service import SteppingEngine
from specbatch.pipeline.engines.vllm.core import Core, CoreOptions, Work, check_options
from specbatch.pipeline.engines.vllm.engine import VllmEngine
from specbatch.pipeline.engines.vllm.probe import Verdict, probe
from specbatch.schemas.errors import EngineError, UsageError
from specbatch.schemas.records import FinishReason, Origin, SamplingParams
from specbatch.schemas.speculation import PRE_GENERATED
from support.engine_contract import *  # noqa: F403 - the tests of the contract, which take `bed`
from support.engine_contract import Bed, capabilities, documented

DEMO = Path(demo).parent
MODEL = DEMO / "models" / "verifier"
BIN = Path(sys.executable).parent
MORE = {"enforce_eager": True, "max_model_len": 512}
KV_BYTES = 1 << 29
SEQUENCES = 16
DEPTH = 8
TOKENS = 40
MODEL_FOLDER = inspect_folder("demo", MODEL)
EOS = frozenset({2})
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)


class Kept(Core):
    """A core that outlives its engines: each would take many seconds to load the model."""

    def close(self) -> None:
        """Stay."""


class Cores:
    """The core of this process, with speculation or without."""

    core: Kept | None = None

    def __call__(self, drafted: bool, own: Mapping[str, object] | None = None) -> Core:
        depth = DEPTH if drafted else 0
        options = (str(MODEL), "float32", SEQUENCES, 512, depth, KV_BYTES)
        wanted = CoreOptions(*options, own_speculation=own or {}, more=MORE)
        if self.core is None or self.core.options != wanted:
            self.close()
            self.core = Kept(wanted)
        return self.core

    def close(self) -> None:
        if self.core is not None:
            Core.close(self.core)


@pytest.fixture(scope="module")
def cores() -> Iterator[Cores]:
    made = Cores()
    yield made
    made.close()


@pytest.fixture(scope="module")
def verdict(cores: Cores, truth: list[tuple[int, ...]]) -> Verdict:  # noqa: ARG001 - no core yet
    return probe(cores(True), MODEL_FOLDER.vocab_size, "float32", DEPTH)


@pytest.fixture
def bed(cores: Cores, verdict: Verdict) -> Bed:
    """All in the core with speculation: changing it takes seconds."""

    def make() -> VllmEngine:
        vocab = MODEL_FOLDER.vocab_size
        return VllmEngine(lambda _: cores(True), lambda _: verdict, vocab, EOS, SEQUENCES)

    return Bed(make, MODEL_FOLDER.vocab_size)


@pytest.fixture
def engine(cores: Cores, verdict: Verdict) -> SteppingEngine:
    vocab = MODEL_FOLDER.vocab_size
    return VllmEngine(cores, lambda _: verdict, vocab, EOS, SEQUENCES, max_depth=DEPTH)


def prompts(count: int = 8) -> list[tuple[int, ...]]:
    pick = random.Random(1)
    return [tuple(pick.randrange(10, 2000) for _ in range(30)) for _ in range(count)]


@pytest.fixture(scope="module")
def truth() -> list[tuple[int, ...]]:
    """What `vllm.LLM.generate` gives without speculation, in a process of its own."""
    code = (
        "import json, sys\n"
        "from vllm import LLM, SamplingParams\n"
        "given = json.load(sys.stdin)\n"
        "llm = LLM(**given['arguments'])\n"
        "params = SamplingParams(max_tokens=given['tokens'], ignore_eos=True, temperature=0.0,\n"
        "    detokenize=False)\n"
        "outputs = llm.generate([{'prompt_token_ids': p} for p in given['prompts']], params,\n"
        "    use_tqdm=False)\n"
        "print('RESULT', json.dumps([list(o.outputs[0].token_ids) for o in outputs]))\n"
    )
    arguments = {
        "model": str(MODEL),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "kv_cache_memory_bytes": KV_BYTES,
        **MORE,
    }
    given = {"arguments": arguments, "tokens": TOKENS, "prompts": prompts()}
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(given),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr
    return [tuple(tokens) for tokens in json.loads(lines[0].removeprefix("RESULT "))]


def requests(drafts: Sequence[tuple[int, ...]] = (), **changes: object) -> list[Request]:
    made = [
        Request(f"r{i}", prompt, GREEDY, seed=i, route=Cohort("job"))
        for i, prompt in enumerate(prompts())
    ]
    if drafts:
        made = [replace(r, draft_ids=d) for r, d in zip(made, drafts, strict=True)]
    return [replace(r, **changes) for r in made]  # type: ignore[arg-type]  # fields by name


def complete(engine: SteppingEngine, given: Sequence[Request]) -> Mapping[str, Completion]:
    for request in given:
        engine.add(request)
    done: dict[str, Completion] = {}
    while not engine.idle:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def tokens(done: Mapping[str, Completion]) -> list[tuple[int, ...]]:
    return [done[f"r{i}"].token_ids for i in range(len(prompts()))]


def test_the_documented_capabilities_are_those_found(engine: SteppingEngine) -> None:
    found = capabilities(Bed(lambda: engine, MODEL_FOLDER.vocab_size))
    assert found == documented("vllm")


def test_the_probe_finds_the_faults_of_this_version(verdict: Verdict) -> None:
    assert verdict.drafts
    assert not verdict.mixed
    assert not verdict.sampled
    assert "sampled requests run apart, without drafts" in verdict.in_words


def test_outputs_are_those_of_vllm_alone(
    engine: SteppingEngine, truth: list[tuple[int, ...]]
) -> None:
    assert tokens(complete(engine, requests(depth=0))) == truth
    assert tokens(complete(engine, requests())) == truth
    assert tokens(complete(engine, requests(truth, depth=4))) == truth
    wrong = [tuple((t + 1) % 2000 for t in of) for of in truth]
    assert tokens(complete(engine, requests(wrong, depth=8))) == truth


def test_recorded_outputs_are_accepted_and_accounted_for(
    engine: SteppingEngine, truth: list[tuple[int, ...]]
) -> None:
    done = complete(engine, requests(truth, depth=DEPTH, sources=frozenset({PRE_GENERATED})))
    for completion in done.values():
        assert completion.proposed == completion.accepted
        assert completion.accepted >= 0.8 * TOKENS
        counted = Counter(completion.origins)
        assert counted[Origin.ACCEPTED] == completion.accepted
        assert counted[Origin.PLAIN] + counted[Origin.BONUS] == TOKENS - completion.accepted
        assert len(completion.logprobs) == TOKENS
        assert max(completion.logprobs) <= 1e-6
        assert completion.provenance.sources == (PRE_GENERATED,)
    assert sum(sum(astuple(c.ticks)) for c in done.values()) == sum(engine.stats.time)


def test_prompts_that_are_alike_have_their_own_drafts(
    engine: SteppingEngine, truth: list[tuple[int, ...]]
) -> None:
    same = [replace(r, prompt_ids=prompts()[0]) for r in requests()]
    right = {0: truth[0], 1: truth[1]}  # the second's draft is another prompt's
    only = frozenset({PRE_GENERATED})
    given = [
        replace(r, draft_ids=right.get(i, ()), depth=4, sources=only) for i, r in enumerate(same)
    ]
    done = complete(engine, given)
    assert {c.token_ids for c in done.values()} == {truth[0]}
    assert done["r0"].accepted == done["r0"].proposed > 0
    assert done["r1"].accepted < done["r1"].proposed


def test_greedy_requests_beside_sampled_ones_are_right(
    engine: SteppingEngine, truth: list[tuple[int, ...]]
) -> None:
    sampled = replace(GREEDY, temperature=0.8)
    others = [replace(r, request_id=f"s{i}", params=sampled) for i, r in enumerate(requests())]
    mixed = [r for pair in zip(requests(truth, depth=4), others, strict=True) for r in pair]
    done = complete(engine, mixed)
    assert tokens(done) == truth
    assert len({done[f"s{i}"].token_ids for i in range(len(others))}) > 1


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.7},
        {"min_p": 0.1},
        {"logit_bias": ((50, 5.0),)},
        {"min_tokens": 20, "ignore_eos": False},
        {"top_logprobs": 1},
        {"top_logprobs": 3},
    ],
)
def test_parameters_mean_the_same_with_drafts(
    engine: SteppingEngine, changes: dict[str, object], truth: list[tuple[int, ...]]
) -> None:
    params = replace(GREEDY, **changes)  # type: ignore[arg-type]  # fields by name
    plain = complete(engine, requests(params=params, depth=0))
    drafted = complete(engine, requests(truth, params=params, depth=4))
    assert tokens(drafted) == tokens(plain)
    assert not [c.error for c in drafted.values() if c.error]
    if asked := params.top_logprobs:
        for done in (*plain.values(), *drafted.values()):
            for token, logprob, (ids, values) in zip(
                done.token_ids, done.logprobs, done.top_logprobs or (), strict=True
            ):
                assert len(ids) == len(values) == asked
                assert values == tuple(sorted(values, reverse=True))
                assert (ids[0], values[0]) == (token, logprob)


def test_what_vllm_cannot_give_is_refused_and_the_rest_goes_on(
    engine: SteppingEngine, truth: list[tuple[int, ...]]
) -> None:
    given = requests(truth)
    given[3] = replace(given[3], params=replace(GREEDY, bad_token_ids=(5,)))
    given[4] = replace(given[4], prompt_ids=(7,) * 600)
    done = complete(engine, given)
    assert "bad_token_ids" in (done["r3"].error or "")
    assert "does not fit the context of 512" in (done["r4"].error or "")
    assert [done[f"r{i}"].token_ids for i in (0, 1, 2, 5, 6, 7)] == [
        truth[i] for i in (0, 1, 2, 5, 6, 7)
    ]


@pytest.mark.parametrize("depth", [0, 4])
def test_outputs_that_are_fed_again_agree(
    cores: Cores, verdict: Verdict, truth: list[tuple[int, ...]], depth: int
) -> None:
    vocab = MODEL_FOLDER.vocab_size
    engine = VllmEngine(cores, lambda _: verdict, vocab, EOS, SEQUENCES, recheck_one_in=1)
    done = complete(engine, requests(truth, depth=depth))
    assert tokens(done) == truth
    assert {(c.recheck.tokens, c.recheck.differing) for c in done.values()} == {(TOKENS, 0)}


def test_a_draft_model_of_vllms_own_drafts_beside_ours(
    cores: Cores, truth: list[tuple[int, ...]]
) -> None:
    own = {"method": "draft_model", "model": str(DEMO / "models" / "draft")}
    vocab = MODEL_FOLDER.vocab_size
    engine = VllmEngine(
        lambda drafted: cores(drafted, own),
        lambda core: probe(core, vocab, "float32", DEPTH),
        *(vocab, EOS, SEQUENCES),
        max_depth=DEPTH,
        own_speculation="draft_model",
    )
    of_model = frozenset({"draft-model"})
    done = complete(engine, requests(depth=4, sources=of_model))
    assert engine.verdict is not None
    assert engine.verdict.drafts
    assert tokens(done) == truth
    assert {c.provenance.sources for c in done.values()} == {("draft-model@draft_model",)}
    assert all(0 < c.accepted <= c.proposed for c in done.values())
    assert max(max(c.provenance.drafted) for c in done.values()) == 4
    block = frozenset({PRE_GENERATED})
    assert tokens(complete(engine, requests(truth, depth=4, sources=block))) == truth


# --- forms ---------------------------------------------------------------------------------------
def outputs(done: Mapping[str, Completion]) -> dict[str, tuple[int, ...]]:
    assert {name: c.error for name, c in done.items() if c.error} == {}
    return {name: done[name].token_ids for name in sorted(done)}


def test_outputs_with_a_form_have_it_and_depend_on_no_draft_and_no_core(
    engine: SteppingEngine, cores: Cores, verdict: Verdict
) -> None:
    assert verdict.formed
    asked = forms.requests()
    plain = complete(engine, [replace(r, depth=0) for r in asked])
    truth = outputs(plain)
    problems = {
        r.request_id: forms.problem_with(r, truth[r.request_id], plain[r.request_id].finish_reason)
        for r in asked
    }
    assert {name: problem for name, problem in problems.items() if problem} == {}
    ended = [n for n, c in plain.items() if "form" in n and c.finish_reason is FinishReason.STOP]
    assert len(ended) >= 45, "most forms end within their limit"
    names = list(truth)
    others = dict(zip(names, [truth[n] for n in (*names[1:], names[0])], strict=True))
    for depth in (4, DEPTH):
        for drafts in (truth, others):
            given = [replace(r, draft_ids=drafts[r.request_id], depth=depth) for r in asked]
            done = complete(engine, given)
            assert outputs(done) == truth
    assert sum("grammar" in c.provenance.sources for c in done.values()) > 20
    assert outputs(complete(engine, asked)) == truth
    vocab = MODEL_FOLDER.vocab_size
    apart = VllmEngine(cores, lambda _: verdict, vocab, EOS, SEQUENCES, max_depth=0)
    assert outputs(complete(apart, asked)) == truth


def test_sampled_outputs_have_their_form(engine: SteppingEngine) -> None:
    asked = [
        replace(r, params=replace(r.params, temperature=0.9, top_p=0.95)) for r in forms.requests()
    ]
    done = complete(engine, asked)
    for request in asked:
        one = done[request.request_id]
        assert one.error is None
        assert forms.problem_with(request, one.token_ids, one.finish_reason) is None


def test_a_grammar_that_gives_up_ends_its_row_alone(
    engine: SteppingEngine, truth: list[tuple[int, ...]]
) -> None:
    given = requests(depth=0)
    given[2] = replace(given[2], grammar=Doomed(MODEL_FOLDER.vocab_size))
    given[5] = replace(given[5], grammar=Doomed(MODEL_FOLDER.vocab_size, at=7), depth=4)
    done = complete(engine, given)
    assert "too complex" in (done["r2"].error or "")
    assert "too complex" in (done["r5"].error or "")
    assert len(done["r5"].token_ids) == 7
    rest = (0, 1, 3, 4, 6, 7)
    assert [done[f"r{n}"].token_ids for n in rest] == [truth[n] for n in rest]


@dataclass(frozen=True)
class Doomed:
    """A grammar that allows everything, and gives up behind so many tokens."""

    vocab_size: int
    at: int = 0
    end_ids: tuple[int, ...] = ()

    def begin(self) -> _DoomedState:
        return _DoomedState(self.at)


@dataclass
class _DoomedState:
    left: int

    def append(self, token: int) -> None:  # noqa: ARG002 - the contract's
        if not self.left:
            raise EngineError("its response format cannot be followed: it is too complex")
        self.left -= 1

    def masks(self, allowed: NDArray[np.int32], _: Sequence[int], first: int) -> None:
        allowed[max(0, self.left - first) :] = 0

    def forced(self) -> list[int]:
        return []


def test_kv_that_is_dropped_is_computed_anew(
    engine: SteppingEngine, truth: list[tuple[int, ...]]
) -> None:
    assert isinstance(engine, VllmEngine)
    for request in requests(truth, depth=4):
        engine.add(request)
    for _ in range(3):
        engine.step()
    engine._drop_cache()
    done: dict[str, Completion] = {}
    while not engine.idle:
        done |= {c.request_id: c for c in engine.step()}
    assert tokens(done) == truth
    assert engine.stats.preemptions == len(prompts())


def test_options_that_vllm_does_not_have_are_named() -> None:
    check_options("cpu", MORE)
    with pytest.raises(UsageError, match="no option enforce_lazy"):
        check_options("cpu", {"enforce_lazy": True})
    with pytest.raises(UsageError, match="SPECBATCH_DEVICE=cpu"):
        check_options("cuda", MORE)


def test_a_cancelled_request_leaves_the_core(
    engine: SteppingEngine, truth: list[tuple[int, ...]]
) -> None:
    assert isinstance(engine, VllmEngine)
    for request in requests(truth):
        engine.add(request)
    engine.step()
    held, free, _ = engine._kv_blocks()
    assert held >= len(prompts())
    assert free > 0
    dropped = engine.cancel(lambda r: r.request_id in ("r1", "r2"))
    assert [c.finish_reason for c in dropped] == [FinishReason.CANCELLED] * 2
    done: dict[str, Completion] = {}
    while not engine.idle:
        done |= {c.request_id: c for c in engine.step()}
    assert sorted(done) == ["r0", "r3", "r4", "r5", "r6", "r7"]
    assert done["r3"].token_ids == truth[3]


def test_a_request_that_vllm_refuses_does_not_end_the_core(
    engine: SteppingEngine, cores: Cores
) -> None:
    core = cores(True)
    with pytest.raises(Exception, match="vLLM refuses the request"):
        core.add(Work("x", (5, 6), replace(GREEDY, top_logprobs=50), (), 4, 0))
    assert len(complete(engine, requests())) == len(prompts())


# --- whole jobs ----------------------------------------------------------------------------------
@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """A command for the demo's prompts; its last word is the output."""
    return [
        *(str(BIN / "submit-job"), "--local", "--engine", "vllm", "--exactness", "fast"),
        *("--input", str(DEMO / "prompts.parquet"), "--prompt-column", "prompt"),
        *("--verifier", str(MODEL), "--dtype", "float32", "--max-tokens", "48"),
        *("--idempotency-key", "one", "--output", str(tmp_path / "out")),
    ]


def test_an_architecture_that_engine_exact_does_not_run(job: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "granite"
    config = GraniteConfig(
        vocab_size=MODEL_FOLDER.vocab_size,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    GraniteForCausalLM(config).save_pretrained(folder)
    for file in MODEL.glob("*token*"):
        shutil.copy(file, folder)
    job[job.index(str(MODEL))] = str(folder)
    refused = run([*job, "--engine", "exact"], tmp_path)
    assert refused.returncode == 2
    assert "architecture `granite`, which is not supported by engine exact" in refused.stderr
    done = run(job, tmp_path)
    assert done.returncode == 0, done.stderr
    assert pyarrow.dataset.dataset(tmp_path / "out" / "data").count_rows() > 0


def outputs_of(folder: Path) -> dict[str, list[int]]:
    rows = pyarrow.dataset.dataset(folder / "data").to_table(["id", "token_ids"]).to_pylist()
    return {row["id"]: row["token_ids"] for row in rows}


def test_a_job_whose_proposer_is_a_draft_model_of_vllms_own(job: list[str], tmp_path: Path) -> None:
    """Its outputs are those without drafts, and the ledger has what was accepted of its drafts."""
    plain = run([*job[:-1], str(tmp_path / "plain"), "--depth", "off"], tmp_path)
    assert plain.returncode == 0, plain.stderr
    own = json.dumps({"kind": "draft_model", "model": str(DEMO / "models" / "draft")})
    job[job.index("one")] = "two"
    asked = [*job, "--proposer", own, "--sources", "draft-model"]
    refused = run([*asked, "--engine", "exact"], tmp_path)
    assert refused.returncode == 2
    assert "engine exact does not have: verify with engine vllm" in refused.stderr
    done = run([*asked, "--depth", "4"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert outputs_of(tmp_path / "out") == outputs_of(tmp_path / "plain")
    table = tmp_path / "tokens.parquet"
    exported = run(
        [str(BIN / "specbatch"), *("export", "latest", "--what", "tokens", "--to", str(table))],
        tmp_path,
    )
    assert exported.returncode == 0, exported.stderr
    tokens = pyarrow.dataset.dataset(table).to_table().to_pylist()
    drafted = [t for t in tokens if t["proposer"] is not None]
    assert {t["proposer"] for t in drafted} == {"draft-model@draft_model"}
    kept = sum(t["origin"] == "accepted" for t in tokens)
    assert 0 < kept < len(tokens)
    shown = run([str(BIN / "specbatch"), "show", "latest"], tmp_path)
    assert "proposer: draft_model:" in shown.stdout


UNSUPPORTED = {"type": "array", "uniqueItems": True}


def test_a_job_of_forms_is_judged_and_what_cannot_be_compiled_fails_alone(
    job: list[str], tmp_path: Path
) -> None:
    own: list[dict[str, object]] = [
        {"response_format": {"type": "json_schema", "schema": UNSUPPORTED}},
        {"response_format": {"type": "choice", "choice": ["yes", "no"]}},
        {"tools": json.loads(forms.TOOLS), "tool_choice": "required", "parallel_tool_calls": False},
        {},
    ]
    rows = [{"id": f"row-{n}", "prompt": "Hello", "own": json.dumps(o)} for n, o in enumerate(own)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    job[job.index(str(DEMO / "prompts.parquet"))] = str(file)
    judged = tmp_path / "judged.json"
    judge = {"use": "judge", "prompt": "Is this rude? {text}", "verdict": "block"}
    judged.write_text(json.dumps({"policies": [judge]}))
    job[1:1] = [str(judged)]
    done = run([*job, "--sampling-column", "own", "--max-tokens", "100"], tmp_path)
    assert done.returncode == 3, done.stderr
    table = pyarrow.dataset.dataset(tmp_path / "out" / "data").to_table()
    texts = {row["id"]: row for row in table.to_pylist()}
    assert 'at /uniqueItems: Unimplemented keys: ["uniqueItems"]' in texts["row-0"]["error"]
    assert [texts[f"row-{n}"]["error"] for n in (1, 2, 3)] == [None] * 3
    assert texts["row-1"]["text"] in ("yes", "no")
    assert texts["row-2"]["finish_reason"] == "tool_calls"
    assert "gave no verdict" not in done.stdout + done.stderr, "the judge has answered"


def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "SPECBATCH_WORKSPACE": str(tmp_path / "workspace"),
        "SPECBATCH_VLLM_OPTIONS": json.dumps(MORE),
        "SPECBATCH_KV_CACHE_MIB": "512",
    }


def run(command: Sequence[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment(tmp_path), capture_output=True, text=True, check=False
    )


def test_a_job_killed_in_mid_step_resumes_and_loses_nothing(job: list[str], tmp_path: Path) -> None:
    with subprocess.Popen(
        job, env=environment(tmp_path), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    ) as killed:
        assert killed.stderr is not None
        for line in killed.stderr:
            if "tokens per second" in line:
                killed.send_signal(signal.SIGKILL)
                break
    assert killed.returncode == -signal.SIGKILL
    done = run(job, tmp_path)
    assert done.returncode == 0, done.stderr
    rows = pyarrow.dataset.dataset(tmp_path / "out" / "data").to_table()
    assert rows.num_rows == len(set(rows["id"].to_pylist())) == 256
    assert {name.split("/")[0] for name in rows["numeric_class"].to_pylist()} == {"vllm"}
    audit = run([str(BIN / "specbatch"), "audit", "latest"], tmp_path)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "256 completions: intact" in audit.stdout


def test_an_audit_does_not_compare_what_vllm_sampled(job: list[str], tmp_path: Path) -> None:
    done = run([*job, "--temperature", "0.8", "--n", "2", "--max-tokens", "8"], tmp_path)
    assert done.returncode == 0, done.stderr
    rows = pyarrow.dataset.dataset(tmp_path / "out" / "data").to_table()
    assert rows.num_rows == 512
    audit = run([str(BIN / "specbatch"), "audit", "latest", "--sample", "2%"], tmp_path)
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert "it was sampled by vLLM" in audit.stdout
    again = run([str(BIN / "specbatch"), "replay", "latest/1"], tmp_path)
    assert again.returncode == 2
    assert "was sampled by vLLM" in again.stderr


def test_a_bitwise_job_is_refused_before_it_begins(job: list[str], tmp_path: Path) -> None:
    job[job.index("fast")] = "bitwise"
    done = run(job, tmp_path)
    assert done.returncode == 2
    assert "engine vllm cannot give `exactness: bitwise`" in done.stderr
    assert "no jobs" in run([str(BIN / "specbatch"), "jobs"], tmp_path).stdout.lower()
