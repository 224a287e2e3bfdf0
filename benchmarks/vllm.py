"""`make bench-vllm`: what our drafts gain and cost on vLLM, beside vLLM alone.

    generate          `vllm.LLM.generate`, no speculation configured
    empty proposer    the same with the proposer that never drafts
    depth 0           our engine, nobody drafts: the same core as below
    recorded          our engine; the outputs of `generate` as drafts, at depth `auto` and at 8
    useless           the same with drafts that are always wrong

All greedy, all prompts at once, prefix caching off, in one process, in turns. The result is a JSON
file in `benchmarks/results/`. It needs an environment with vLLM: `make .venv-vllm`.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specbatch.benchmarks.engine import RESULTS
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import demo_model
from specbatch.pipeline.engines.contract import Cohort, Completion, Request
from specbatch.pipeline.engines.models.model_folder import inspect_folder
from specbatch.pipeline.engines.vllm.core import (
    ENVIRONMENT,
    Core,
    CoreOptions,
    arguments_of,
    vllm_version,
)
from specbatch.pipeline.engines.vllm.engine import VllmEngine
from specbatch.pipeline.engines.vllm.probe import probe
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.speculation import PRE_GENERATED

PROMPT_TOKENS = 64
NEW_TOKENS = 96
MAX_DEPTH = 8
TOKENS = 2048  # of a step
MORE = {"max_model_len": 512, "enable_prefix_caching": False}

Prompts = Sequence[Sequence[int]]
Outputs = list[tuple[int, ...]]


@dataclass(slots=True)
class Turn:
    """What one contender did in one turn."""

    seconds: float
    outputs: Outputs
    facts: dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = []
    bed = Bed(arguments.dtype, max(arguments.n), arguments.eager)
    for n in arguments.n:
        for row in measure(bed, bed.prompts(n), arguments.runs):
            rows.append(row)
            print(json.dumps(row), flush=True)
    about = machine() | {"vllm": vllm_version(), "dtype": arguments.dtype, "eager": arguments.eager}
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / f"vllm-cpu-{arguments.dtype}.json"
    path.write_text(
        json.dumps({"machine": about, "probe": bed.found, "rows": rows}, indent=1) + "\n"
    )
    print(f"written to {path}")
    bed.close()


class Bed:
    """Three processes, as vLLM has one engine in each: its own two, and ours."""

    def __init__(self, dtype: str, sequences: int, eager: bool) -> None:
        self.model = inspect_folder("demo", demo_model().folder)
        more = {**MORE, "enforce_eager": eager}
        make = partial(Child, str(self.model.path), dtype, sequences, more)
        self.plain = make(partial(TheirLlm, False))
        self.empty = make(partial(TheirLlm, True))
        self.ours = make(Ours)
        self.found = self.ours.ask("probe")

    def prompts(self, n: int) -> Prompts:
        pick = random.Random(n)
        vocab = self.model.vocab_size
        return [[pick.randrange(10, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(n)]

    def close(self) -> None:
        for child in (self.plain, self.empty, self.ours):
            child.ask("close")


class Child:
    """A contender in a process of its own, asked one thing at a time."""

    def __init__(
        self, model: str, dtype: str, sequences: int, more: dict[str, Any], make: Callable[..., Any]
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, make, model, dtype, sequences, more)
        context.Process(target=_serve, args=arguments, daemon=True).start()

    def ask(self, name: str, *arguments: Any) -> Any:
        self._pipe.send((name, arguments))
        return self._pipe.recv()


def _serve(pipe: Any, make: Callable[..., Any], *arguments: Any) -> None:
    served = make(*arguments)
    while True:
        name, given = pipe.recv()
        pipe.send(None if name == "close" else getattr(served, name)(*given))
        if name == "close":
            os._exit(0)  # vLLM's own ends are slow and noisy


def their_llm(options: CoreOptions, **more: Any) -> Any:
    """A `vllm.LLM` with the arguments of our core."""
    os.environ |= ENVIRONMENT
    from vllm import LLM

    return LLM(**(arguments_of(options) | more))


class TheirLlm:
    """`vllm.LLM` as anybody would use it."""

    def __init__(
        self, empty: bool, model: str, dtype: str, sequences: int, more: dict[str, Any]
    ) -> None:
        core = CoreOptions(
            model, dtype, sequences, TOKENS, MAX_DEPTH if empty else 0, 1 << 30, more=more
        )
        as_ours = TOKENS + sequences * (1 + MAX_DEPTH)
        self._llm = their_llm(core, max_num_batched_tokens=as_ours)

    def generate(self, prompts: Prompts) -> Turn:
        from vllm import SamplingParams as VllmParams

        params = VllmParams(
            max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.0, logprobs=0, detokenize=False
        )
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        begun = time.perf_counter()
        outputs = self._llm.generate(given, params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return Turn(seconds, [tuple(o.outputs[0].token_ids) for o in outputs], {})


class Ours:
    """Our engine around vLLM's core, without the pipeline."""

    def __init__(self, model: str, dtype: str, sequences: int, more: dict[str, Any]) -> None:
        vocab = inspect_folder("demo", Path(model)).vocab_size
        core = Core(CoreOptions(model, dtype, sequences, TOKENS, MAX_DEPTH, 1 << 30, more=more))
        verdict = probe(core, vocab, dtype, MAX_DEPTH)
        self._found = verdict.in_words
        # All run in the core with speculation, those of depth 0 too: that is what is compared.
        self._engine = VllmEngine(lambda _: core, lambda _: verdict, vocab, frozenset(), sequences)
        self._calls = 0

    def probe(self) -> str:
        return self._found

    def complete(
        self, prompts: Prompts, drafts: Outputs | None, depth: int | None, job: str = "bench"
    ) -> Turn:
        self._calls += 1
        engine, params = self._engine, SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        steps, forward_sec = engine.stats.steps, engine.stats.forward_sec
        begun = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add(
                Request(
                    request_id=f"{self._calls}-{i}",
                    prompt_ids=tuple(prompt),
                    params=params,
                    seed=i,
                    draft_ids=drafts[i] if drafts else (),
                    depth=depth,
                    sources=frozenset({PRE_GENERATED} if drafts else ()),
                    route=Cohort(f"{job} {len(prompts)}"),
                )
            )
        done: dict[str, Completion] = {}
        while not engine.idle:
            done |= {completion.request_id: completion for completion in engine.step()}
        seconds = time.perf_counter() - begun
        found = [done[f"{self._calls}-{i}"] for i in range(len(prompts))]
        steps = engine.stats.steps - steps
        own_sec = seconds - (engine.stats.forward_sec - forward_sec)
        facts = {
            "steps": steps,
            "own_us_per_step": 1e6 * own_sec / steps,
            "proposed": sum(c.proposed for c in found),
            "accepted": sum(c.accepted for c in found),
        }
        return Turn(seconds, [c.token_ids for c in found], facts)


def measure(bed: Bed, prompts: Prompts, runs: int) -> list[dict[str, Any]]:
    truth = bed.plain.ask("generate", prompts).outputs
    wrong = [tuple((t + 1) % bed.model.vocab_size for t in tokens) for tokens in truth]
    ours = partial(bed.ours.ask, "complete", prompts)
    contenders: dict[str, Callable[[], Turn]] = {
        "generate": partial(bed.plain.ask, "generate", prompts),
        "empty proposer": partial(bed.empty.ask, "generate", prompts),
        "depth 0": partial(ours, None, None),
        "recorded, auto": partial(ours, truth, None, "recorded"),
        "recorded, 8": partial(ours, truth, MAX_DEPTH),
        "useless, auto": partial(ours, wrong, None, "useless"),
    }
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    for turn in range(runs + 2):
        for name, run in contenders.items():
            found = run()
            if turn > 1:  # two rounds warm up, and teach the policy
                turns[name].append(found)
    rows = []
    for name, of in turns.items():
        rate = len(prompts) * NEW_TOKENS / statistics.median(t.seconds for t in of)
        row: dict[str, Any] = {"n": len(prompts), "contender": name}
        row["tokens_per_sec"] = round(rate, 1)
        row["over_generate"] = _ratio(turns["generate"], of)
        row["over_depth_0"] = _ratio(turns["depth 0"], of)
        row["over_depth_0_within"] = _interval(turns["depth 0"], of)
        same = sum(a == b for t in of for a, b in zip(t.outputs, truth, strict=True))
        row["same_as_generate"] = round(same / (len(of) * len(prompts)), 4)
        for fact in of[0].facts:
            row[fact] = round(statistics.median(t.facts[fact] for t in of), 1)
        rows.append(row)
    return rows


def _ratio(of: Sequence[Turn], over: Sequence[Turn]) -> list[float]:
    """Median speed-up within turns, and its extremes."""
    ratios = sorted(a.seconds / b.seconds for a, b in zip(of, over, strict=True))
    return [round(r, 3) for r in (statistics.median(ratios), ratios[0], ratios[-1])]


def _interval(of: Sequence[Turn], over: Sequence[Turn]) -> list[float]:
    """95 % interval of the mean speed-up within turns, by a bootstrap over turns."""
    logs = [math.log(a.seconds / b.seconds) for a, b in zip(of, over, strict=True)]
    pick = random.Random(0)
    means = sorted(statistics.fmean(pick.choices(logs, k=len(logs))) for _ in range(2000))
    return [round(math.exp(means[at]), 3) for at in (50, 1949)]


if __name__ == "__main__":
    main()
