"""`make bench-grammars`: outputs with a form, by the demo pair.

a) Seeded JSON schemas, greedy and sampled: how many outputs end within the tokens that their schema
   should need, how many of these are valid, and how many of their tokens were forced and drafted.
b) What drafts of forced tokens bring: function calls with and without them, all modes in turns in
   one process; every mode must write the same bits.
c) What masks take of a step with 64 sequences, also of a random model of 230M weights with 32,000
   tokens, whose steps take longer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specbatch.benchmarks.engine import RESULTS
from specbatch.jobs.bench.isa import forced_level
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import BenchModel, demo_model, random_model
from specbatch.pipeline.engines.contract import Completion, Grammar, GrammarState, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.proposers.grammar import GrammarProposer
from specbatch.pipeline.engines.proposers.ngram import NgramProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.records import FinishReason, SamplingParams
from support.schemas import Case, cases, problem_of

KV_CACHE_BYTES = 1 << 30
TEMPERATURES = (0.0, 0.8)
CALL_TOKENS = 200
MODES = ("off", "pair", "pair and grammar", "grammar")  # who drafts, in part b


@dataclass(slots=True)
class Timed:
    """Seconds in a grammar's methods."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, begun: float) -> None:
        self.seconds[name] += time.perf_counter() - begun
        self.calls[name] += 1


@dataclass(frozen=True, slots=True)
class TimedGrammar:
    inner: Grammar
    timed: Timed

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def end_ids(self) -> Seq[int]:
        return self.inner.end_ids

    def begin(self) -> GrammarState:
        return TimedState(self.inner.begin(), self.timed)


@dataclass(frozen=True, slots=True)
class TimedState:
    inner: GrammarState
    timed: Timed

    def append(self, token: int) -> None:
        begun = time.perf_counter()
        self.inner.append(token)
        self.timed.add("append", begun)

    def masks(self, allowed: NDArray[np.int32], draft: Seq[int], first: int) -> None:
        begun = time.perf_counter()
        self.inner.masks(allowed, draft, first)
        self.timed.add("masks", begun)

    def forced(self) -> Seq[int]:
        begun = time.perf_counter()
        found = self.inner.forced()
        self.timed.add("forced", begun)
        return found


class Bed:
    """A pair and its tokenizer; what a mode has learned is kept from run to run."""

    def __init__(self, model: BenchModel, dtype: str) -> None:
        self.tokenizer = TextTokenizer.load(str(model.folder))
        self._verifier, self._drafting = (
            self._load(model.folder, dtype),
            self._load(model.draft, dtype),
        )
        self._learned: dict[tuple[str, int], Knowledge] = {}
        self.vocab_size = model.vocab_size

    @staticmethod
    def _load(folder: Path, dtype: str) -> ModelRunner:
        loaded = load_model(inspect_model(str(folder)), dtype)
        return ModelRunner(loaded, KV_CACHE_BYTES, share_prefixes=False)

    def request(self, case: Case, i: int, temperature: float, most: int) -> Request:
        (prompt,) = self.tokenizer.encode_batch([f"Call the function for request {i}:"])
        form = case.response_format
        return Request(
            f"bench/{i}/0",
            tuple(prompt),
            SamplingParams(max_tokens=most, temperature=temperature, response_format=form),
            seed=i,
            grammar=self.tokenizer.grammar(form, self.vocab_size),
        )

    def engine(self, mode: str, at_once: int, fresh: bool = False) -> Engine:
        learned = self._learned.setdefault((mode, at_once), Knowledge())
        knowledge = Knowledge() if fresh else learned
        proposers: list[Proposer] = []
        if "grammar" in mode:
            proposers.append(GrammarProposer())
        if "pair" in mode:
            cost = knowledge.draft_time_of("draft-model")
            proposers += [NgramProposer(), DraftModelProposer(self._drafting, pass_time=cost)]
        return Engine(
            self._verifier,
            tuple(proposers),
            at_once,
            max_batch_tokens=4096,
            knowledge=knowledge,
        )


def run(engine: Engine, requests: Seq[Request]) -> tuple[float, dict[str, Completion]]:
    """(seconds, completions by request)"""
    begun, done = time.perf_counter(), {}
    for request in requests:
        engine.add(request)
    while not engine.idle:
        done.update({c.request_id: c for c in engine.step()})
    return time.perf_counter() - begun, done


# --- a) many schemas ------------------------------------------------------------------------------


def outputs(bed: Bed, count: int, at_once: int) -> list[dict[str, Any]]:
    compiled, refused = [], Counter[str]()
    for case in cases(count):
        try:
            bed.tokenizer.grammar(case.response_format, bed.vocab_size)
        except ValueError:
            refused[case.about] += 1
        else:
            compiled.append(case)
    rows = []
    for temperature in TEMPERATURES:
        requests = [
            bed.request(case, i, temperature, case.most_tokens) for i, case in enumerate(compiled)
        ]
        engine = bed.engine("pair and grammar", at_once)
        seconds, done = run(engine, requests)
        finished = problems = forced = tokens = failed = 0
        for request, case in zip(requests, compiled, strict=True):
            completion = done[request.request_id]
            failed += bool(completion.error)
            tokens += len(completion.token_ids)
            forced += forced_tokens(request.grammar, completion.token_ids)
            if completion.finish_reason is FinishReason.STOP:
                finished += 1
                problem = problem_of(bed.tokenizer.decode(completion.token_ids), case.schema)
                if problem:
                    problems += 1
                    print(f"not valid: {problem}: {json.dumps(case.schema)}", flush=True)
        rows.append(
            {
                "schemas": count,
                "refused": dict(sorted(refused.items())),
                "at_once": at_once,
                "temperature": temperature,
                "outputs": len(requests),
                "failed": failed,
                "finished": finished,
                "finished_and_not_valid": problems,
                "tokens": tokens,
                "forced_share": round(forced / tokens, 4),
                "proposed": engine.stats.proposed,
                "accepted": engine.stats.accepted,
                "steps": engine.stats.steps,
                "seconds": round(seconds, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def forced_tokens(grammar: Grammar | None, token_ids: Seq[int]) -> int:
    """How many of an output's tokens were what had to follow."""
    assert grammar is not None, "all have one"
    state, found = grammar.begin(), 0
    for token in token_ids:
        found += list(state.forced()[:1]) == [token]
        state.append(token)
    return found


# --- b) forced tokens, with and without -----------------------------------------------------------


def speeds(bed: Bed, at_once: int, temperature: float, runs: int, waves: int) -> dict[str, Any]:
    """Each mode writes the same calls in turns; the first turn teaches, and is not counted."""
    calls = [c for c in cases(20 * at_once * waves + 100, seed=1) if c.about == "function call"]
    requests: list[Request] = []
    for case in calls:
        if len(requests) == at_once * waves:
            break
        try:
            requests.append(bed.request(case, len(requests), temperature, CALL_TOKENS))
        except ValueError:
            continue  # some have a `oneOf` that is refused
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    steps: dict[str, list[int]] = {mode: [] for mode in MODES}
    accepted: dict[str, list[float]] = {mode: [] for mode in MODES}
    new_steps: list[int] = []
    wanted: dict[str, Completion] = {}
    for turn in range(runs + 1):
        for mode in MODES[turn % len(MODES) :] + MODES[: turn % len(MODES)]:
            engine = bed.engine(mode, at_once)
            took, done = run(engine, requests)
            wanted = wanted or done
            for name, completion in done.items():
                assert completion.token_ids == wanted[name].token_ids, f"{mode} changed {name}"
                assert completion.logprobs == wanted[name].logprobs, f"{mode} changed {name}"
            if turn:
                seconds[mode].append(took)
                steps[mode].append(engine.stats.steps)
                accepted[mode].append(engine.stats.accepted / max(engine.stats.proposed, 1))
        engine = bed.engine("grammar", at_once, fresh=True)
        _, done = run(engine, requests[: 2 * at_once])
        assert all(done[name].token_ids == wanted[name].token_ids for name in done)
        new_steps.append(engine.stats.steps)
    tokens = sum(len(c.token_ids) for c in wanted.values())
    forced = sum(forced_tokens(r.grammar, wanted[r.request_id].token_ids) for r in requests)
    row = {
        "n": at_once,
        "temperature": temperature,
        "calls": len(requests),
        "tokens": tokens,
        "forced_share": round(forced / tokens, 3),
        "runs": runs,
        "steps": {mode: [min(of), statistics.median(of), max(of)] for mode, of in steps.items()},
        "steps_of_an_engine_that_knows_nothing": new_steps,
        "acceptance": {mode: round(statistics.median(of), 3) for mode, of in accepted.items()},
        "tokens_per_sec": {
            mode: round(tokens / statistics.median(of)) for mode, of in seconds.items()
        },
        "pair_and_grammar_over_pair": _ratios(seconds["pair"], seconds["pair and grammar"]),
        "grammar_over_off": _ratios(seconds["off"], seconds["grammar"]),
    }
    print(json.dumps(row), flush=True)
    return row


def _ratios(before: Seq[float], after: Seq[float]) -> dict[str, float]:
    """Median and range of the ratios of turns."""
    found = [one / other for one, other in zip(before, after, strict=True)]
    median = statistics.median(found)
    return {"median": round(median, 3), "least": round(min(found), 3), "most": round(max(found), 3)}


# --- c) masks -------------------------------------------------------------------------------------


def with_words(folder: Path) -> BenchModel:
    """The random model of 230M weights, with as many tokens as it has logits, made of the text of
    Python's standard library."""
    model = random_model(folder)
    if not (model.folder / "tokenizer.json").exists():
        texts = [
            p.read_text("utf-8", "replace") for p in sorted(Path(os.__file__).parent.glob("*.py"))
        ]
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=model.vocab_size,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        made.train_from_iterator(texts, trainer)
        words = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
        words.save_pretrained(str(model.folder))
    return model


def mask_share(bed: Bed, name: str, at_once: int, temperature: float) -> dict[str, Any]:
    timed = Timed()
    requests: list[Request] = []
    for case in cases(at_once * 6, seed=2):
        if case.about != "function call" or len(requests) == at_once * 2:
            continue
        try:
            made = bed.request(case, len(requests), temperature, CALL_TOKENS)
        except ValueError:
            continue
        assert made.grammar is not None, "it has one"
        grammar = TimedGrammar(made.grammar, timed)
        params = made.params
        requests.append(
            Request(made.request_id, made.prompt_ids, params, made.seed, grammar=grammar)
        )
    engine = bed.engine("pair and grammar", at_once)
    seconds, _ = run(engine, requests)
    row = {
        "model": name,
        "vocabulary": bed.vocab_size,
        "n": at_once,
        "temperature": temperature,
        "sequences": len(requests),
        "steps": engine.stats.steps,
        "seconds": round(seconds, 3),
        "share_of_time": {k: round(s / seconds, 4) for k, s in timed.seconds.items()},
        "usec_a_call": {k: round(s / timed.calls[k] * 1e6, 1) for k, s in timed.seconds.items()},
    }
    print(json.dumps(row), flush=True)
    return row


def large_mask_shares(dtype: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model = with_words(Path(folder))
        bed = Bed(model, dtype)
        return [mask_share(bed, model.name, 64, temperature) for temperature in TEMPERATURES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schemas", type=int, default=2000)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bed = Bed(demo_model(), arguments.dtype)
    report = {
        "machine": machine() | {"llguidance": version("llguidance")},
        "isa": forced_level(os.environ),  # None: the machine's best
        "dtype": arguments.dtype,
        "speeds": [
            speeds(bed, n, temperature, arguments.runs, waves=8 if n == 1 else 2)
            for n in arguments.n
            for temperature in TEMPERATURES
        ],
        "masks": [mask_share(bed, "demo", 64, temperature) for temperature in TEMPERATURES]
        + large_mask_shares(arguments.dtype),
        "outputs": outputs(bed, arguments.schemas, 32),
    }
    path = arguments.results / "grammars-demo.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
