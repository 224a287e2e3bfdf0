"""`make bench-depth`: what `auto` makes of drafts, beside depth 0 and every fixed depth.

For each number of prompts and each acceptance: tokens per second of depth off, auto and fixed, in
turns within one run. Drafts are replayed from the known output, each token right with the wanted
probability; `--real` drafts with the demo's own draft model instead. What was learned of a machine
and of a source of drafts is kept from run to run; the first run of each is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from specbatch.jobs.bench.engine import RESULTS, machine
from specbatch.jobs.bench.models import BenchModel, demo_model, random_model
from specbatch.jobs.bench.replay import ReplayProposer
from specbatch.pipeline.engine.draft_model import DraftModelProposer
from specbatch.pipeline.engine.engine import Engine
from specbatch.pipeline.engine.loader import load_model
from specbatch.pipeline.engine.model_folder import inspect_model
from specbatch.pipeline.engine.proposer import Proposer
from specbatch.pipeline.engine.runner import ModelRunner
from specbatch.pipeline.engine.sequence import Request
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.records import SamplingParams

ACCEPTANCES = (0.0, 0.3, 0.5, 0.7, 0.9, 1.0)  # 1: the true output
FIXED = (2, 4, 8)
Mode = tuple[str, int | None]
MODES: tuple[Mode, ...] = (("auto", None), *((str(k), k) for k in FIXED))
OFF: Mode = ("off", 0)


class Bed:
    """One verifier, and drafts for it of any acceptance."""

    def __init__(self, model: BenchModel, dtype: str, new_tokens: int) -> None:
        self.vocab_size, self.new_tokens = model.vocab_size, new_tokens
        self._runner = self._load(model.folder, dtype)
        self._drafting: ModelRunner | None = None
        self._folder, self._dtype = model.folder, dtype
        self.learned: dict[float | None, Knowledge] = {}
        self.known: dict[str, list[int]] = {}

    @staticmethod
    def _load(folder: Path, dtype: str) -> ModelRunner:
        loaded = load_model(inspect_model(str(folder)), dtype)
        return ModelRunner(loaded, kv_cache_bytes=1 << 30, share_prefixes=False)

    def drafting(self, knowledge: Knowledge) -> Proposer:
        if self._drafting is None:
            self._drafting = self._load(self._folder.parent / "draft", self._dtype)
        return DraftModelProposer(self._drafting, pass_time=knowledge.draft_time)

    def run(
        self, prompts: list[list[int]], depth: int | None, acceptance: float | None
    ) -> tuple[float, Engine]:
        """(tokens per second, the engine); acceptance None: the draft model."""
        knowledge = self.learned.setdefault(acceptance, Knowledge())
        proposers: tuple[Proposer, ...] = ()
        if depth != 0:
            proposers = (
                (self.drafting(knowledge),)
                if acceptance is None
                else (ReplayProposer(self.known, acceptance, self.vocab_size),)
            )
        engine = Engine(
            self._runner, proposers, len(prompts), max_batch_tokens=4096, knowledge=knowledge
        )
        params = SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add(Request(str(i), tuple(prompt), params, seed=i, depth=depth))
        done: dict[str, list[int]] = {}
        begun = time.perf_counter()
        while not engine.idle:
            done.update({c.request_id: list(c.token_ids) for c in engine.step()})
        elapsed = time.perf_counter() - begun
        if depth == 0:
            self.known |= done
        else:
            assert all(done[k] == self.known[k] for k in done), "depth changed an output"
        return len(prompts) * self.new_tokens / elapsed, engine


def measure(
    bed: Bed, prompts: list[list[int]], acceptances: list[float | None], runs: int
) -> list[dict[str, Any]]:
    """One row per acceptance; the first round warms up and teaches."""
    speeds: dict[tuple[float | None, str], list[float]] = {}
    depths: dict[float | None, float] = {}
    for turn in range(runs + 1):
        for acceptance in acceptances:
            for name, depth in (OFF, *MODES):
                speed, engine = bed.run(prompts, depth, acceptance)
                if turn:
                    speeds.setdefault((acceptance, name), []).append(speed)
                if name == "auto":
                    passes = max(engine.stats.verifier_passes, 1)
                    depths[acceptance] = engine.stats.proposed / passes
    rows = []
    for acceptance in acceptances:
        # Medians of ratios between neighbours in time: the machine's mood cancels out.
        ratios = {
            name: statistics.median(
                speed / off
                for speed, off in zip(
                    speeds[acceptance, name], speeds[acceptance, "off"], strict=True
                )
            )
            for name, _ in MODES
        }
        best = max([1.0, *(ratio for name, ratio in ratios.items() if name != "auto")])
        rows.append(
            {
                "n": len(prompts),
                "acceptance": "draft model" if acceptance is None else acceptance,
                "off_tokens_per_sec": round(statistics.median(speeds[acceptance, "off"]), 1),
                "over_off": {name: round(ratio, 3) for name, ratio in ratios.items()},
                "auto_over_best": round(ratios["auto"] / best, 3),
                "auto_mean_depth": round(depths[acceptance], 2),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("demo", "llama-230m"), default="demo")
    parser.add_argument("--n", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--acceptance", type=float, nargs="+", default=list(ACCEPTANCES))
    parser.add_argument("--real", action="store_true", help="draft with the demo's draft model")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--work", type=Path, help="where the random model is kept")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.real and arguments.model != "demo":
        parser.error("--real needs --model demo: the random model has no draft model")
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.work or Path(temporary)
        model = demo_model() if arguments.model == "demo" else random_model(folder)
        bed = Bed(model, arguments.dtype, arguments.new_tokens)
        prompts = demo_prompts() if arguments.real else model.prompts(max(arguments.n))
        rows: list[dict[str, Any]] = []
        name = f"depth-{model.name}-{arguments.dtype}{'-real' if arguments.real else ''}.json"
        for n in arguments.n:
            wanted: list[float | None] = [None] if arguments.real else [*arguments.acceptance]
            for row in measure(bed, prompts[:n], wanted, arguments.runs):
                rows.append(row)
                print(json.dumps(row), flush=True)
            arguments.results.mkdir(parents=True, exist_ok=True)
            report = {"machine": machine(), "new_tokens": arguments.new_tokens, "rows": rows}
            (arguments.results / name).write_text(json.dumps(report, indent=1) + "\n")
    worst = min(rows, key=lambda row: float(row["auto_over_best"]))
    print(f"auto is at worst {worst['auto_over_best']} of the best, at {worst}")


def demo_prompts() -> list[list[int]]:
    """The demo job's prompts, as token ids."""
    import pyarrow.parquet as pq

    from specbatch.pipeline.ingest.codec import TextCodec

    folder = demo_model().folder
    texts = pq.read_table(folder.parents[1] / "prompts.parquet", columns=["prompt"])
    return TextCodec.load(str(folder)).encode_batch(texts.column(0).to_pylist())


if __name__ == "__main__":
    main()
