"""`make bench-vllm-nights`: whole nights over vLLM beside vLLM alone, on the same prompts.

    generate         `vllm.LLM.generate`, no speculation configured
    log-probs        the same with each token's log-probability, which every job records
    empty proposer   as generate, with the proposer that never drafts
    never drafts     a job of `depth: off`
    first night      a job that may draft, of a table that nobody has seen before
    second night     the same with a tenth of its prompts changed, from the first one's outputs

All greedy, from text to text, with end tokens ignored. A job's time is what its user waits for:
from its submission to the published Parquet, with the model loaded before. vLLM has one engine in
a process, so each contender has its own. It needs an environment with vLLM.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.benchmarks.engine import RESULTS
from specbatch.benchmarks.overhead_job import write_input
from specbatch.benchmarks.vllm import MAX_DEPTH, TOKENS, Child, their_llm
from specbatch.jobs.bench.machine import machine
from specbatch.jobs.bench.models import demo_model
from specbatch.jobs.running.here import IN_MEMORY
from specbatch.pipeline.bootstrap import make_client
from specbatch.pipeline.engines.vllm.core import CoreOptions, vllm_version
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.records import JobState
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import load_spec
from specbatch.workers.app import make_enqueue
from specbatch.workers.lifecycle import embedded

KV_MIB = 1024
OPTIONS = {"max_model_len": 512}
CHANGED = 0.1  # of the second night's prompts
WARM_UP = 128  # prompts
POLL_SEC = 0.5

Outputs = Mapping[str, tuple[int, ...]]  # by row id


class Night(NamedTuple):
    """One pass over a table."""

    seconds: float
    outputs: Outputs
    facts: Mapping[str, float] = {}


class TheirLlm:
    """`vllm.LLM` with the model's tokenizer."""

    def __init__(
        self, empty: bool, model: str, dtype: str, sequences: int, more: dict[str, Any]
    ) -> None:
        depth = MAX_DEPTH if empty else 0
        options = CoreOptions(model, dtype, sequences, TOKENS, depth, KV_MIB << 20, more=more)
        self._llm = their_llm(options, skip_tokenizer_init=False)

    def night(self, source: Path, new_tokens: int, logprobs: int | None = None) -> Night:
        from vllm import SamplingParams

        rows = pq.read_table(source, columns=["id", "prompt"]).to_pylist()
        params = SamplingParams(
            max_tokens=new_tokens, ignore_eos=True, temperature=0.0, logprobs=logprobs
        )
        begun = time.perf_counter()
        done = self._llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
        seconds = time.perf_counter() - begun
        pairs = zip(rows, done, strict=True)
        return Night(seconds, {row["id"]: tuple(o.outputs[0].token_ids) for row, o in pairs})


class Pipeline:
    """All kinds of work in one process, as `submit-job --local` has it."""

    def __init__(self, model: str, dtype: str, sequences: int, more: dict[str, Any]) -> None:
        self._around = ExitStack()
        self._folder = Path(self._around.enter_context(tempfile.TemporaryDirectory()))
        settings = Settings(
            broker_url=IN_MEMORY,
            database_url=f"sqlite:///{self._folder / 'store.db'}",
            workspace=str(self._folder / "workspace"),
            engine="vllm",
            vllm_max_depth=MAX_DEPTH,
            vllm_options=more,
            kv_cache_mib=KV_MIB,
            max_concurrent_sequences=sequences,
            max_batch_tokens=TOKENS,
        )
        app, worker = self._around.enter_context(embedded(settings, model, None))
        self._store, self._host = worker.store, worker.engines[0]
        self._client = make_client(settings, make_enqueue(app), worker.store)
        self._model, self._dtype, self._jobs = model, dtype, 0

    def night(self, source: Path, new_tokens: int, name: str, depth: str) -> Night:
        """Jobs of the same tenant draft from each other's outputs."""
        self._jobs += 1
        spec = load_spec(
            {
                "name": name,
                "tenant": name,
                "input": {"uri": str(source)},
                "output": {"uri": str(self._folder / f"out-{self._jobs}")},
                "verifier": self._model,
                "engine": {"dtype": self._dtype, "exactness": "fast"},
                "sampling": {"max_tokens": new_tokens, "ignore_eos": True},
                "speculation": {"depth": depth},
            }
        )
        counted, begun = self._counted(), time.time()
        job, _ = self._client.submit(spec)
        while not (job := self._store.get_job(job.job_id)).state.is_final:
            time.sleep(POLL_SEC)
        if job.state is not JobState.DONE or job.finished_at is None:
            raise SystemExit(f"the job ended as {job.state}: {job.error}")
        table = read_output(spec.output.uri)
        facts = {name: of - counted[name] for name, of in self._counted().items()}
        pairs = zip(table["id"].to_pylist(), table["token_ids"].to_pylist(), strict=True)
        outputs = {name: tuple(tokens) for name, tokens in pairs}
        return Night(job.finished_at - begun, outputs, facts)

    def _counted(self) -> dict[str, float]:
        stats = self._host.stats
        return {
            "steps": sum(s.steps for s in stats),
            "proposed": sum(s.proposed for s in stats),
            "accepted": sum(s.accepted for s in stats),
            "engine_sec": round(sum(s.busy_sec for s in stats), 3),
            "vllm_sec": round(sum(s.forward_sec for s in stats), 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        nights = run(Path(folder), arguments)
    rows = rows_of(nights, arguments)
    about = machine() | {"vllm": vllm_version(), "dtype": arguments.dtype}
    about |= {"prompts": arguments.prompts, "new_tokens": arguments.new_tokens}
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / f"vllm-nights-{arguments.dtype}.json"
    path.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    for row in rows:
        print(json.dumps(row))
    print(f"written to {path}")


def run(folder: Path, arguments: argparse.Namespace) -> dict[str, list[Night]]:
    """Every contender's nights, in turns."""
    first, second, few = (folder / f"{name}.parquet" for name in ("first", "second", "few"))
    write_input(first, arguments.prompts)
    write_input(few, WARM_UP)
    change(first, second)
    model, tokens = str(demo_model().folder), arguments.new_tokens
    make = partial(Child, model, arguments.dtype, arguments.sequences, OPTIONS)
    nights: dict[str, list[Night]] = {}
    for turn in range(arguments.runs):
        # One after the other: three engines do not fit beside each other on a small machine.
        for name, theirs in (("generate", False), ("empty proposer", True)):
            llm = make(partial(TheirLlm, theirs))
            llm.ask("night", few, tokens)
            keep(nights, name, llm.ask("night", first, tokens))
            if not theirs:
                keep(nights, "log-probs", llm.ask("night", first, tokens, 0))
            llm.ask("close")
        ours = make(Pipeline)
        ours.ask("night", few, tokens, "few", "off")
        keep(nights, "never drafts", ours.ask("night", first, tokens, "never", "off"))
        ours.ask("night", few, tokens, "few", "auto")
        for name, source in (("first night", first), ("second night", second)):
            keep(nights, name, ours.ask("night", source, tokens, f"nightly-{turn}", "auto"))
        ours.ask("close")
    return nights


def keep(nights: dict[str, list[Night]], name: str, night: Night) -> None:
    nights.setdefault(name, []).append(night)
    print(f"{name}: {night.seconds:.1f} s", flush=True)


def change(source: Path, target: Path) -> None:
    """The same table with a tenth of its prompts changed."""
    rows = pq.read_table(source).to_pylist()
    changed = changed_rows([row["id"] for row in rows])
    for row in rows:
        if row["id"] in changed:
            row["prompt"] = "# changed\n" + row["prompt"]
    pq.write_table(pa.Table.from_pylist(rows), target)


def changed_rows(ids: Sequence[str]) -> frozenset[str]:
    pick = random.Random(1)
    return frozenset(pick.sample(sorted(ids), int(CHANGED * len(ids))))


def rows_of(
    nights: Mapping[str, Sequence[Night]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """The results: times, their ratios within turns, and how many outputs are those of others."""
    seconds = {name: [night.seconds for night in of] for name, of in nights.items()}
    rows = []
    for name, of in nights.items():
        row: dict[str, Any] = {"contender": name, "seconds": [round(s, 2) for s in seconds[name]]}
        made = arguments.prompts * arguments.new_tokens
        row["tokens_per_sec"] = round(made / statistics.median(seconds[name]), 1)
        for other in ("generate", "log-probs", "empty proposer", "first night"):
            ratios = [a / b for a, b in zip(seconds[other], seconds[name], strict=True)]
            row[f"speed_of_{other.replace(' ', '_')}"] = round(statistics.median(ratios), 3)
        changed = changed_rows(list(of[0].outputs)) if name == "second night" else frozenset()
        row["same_as_generate"] = _same(nights["generate"][0], of[0], changed)
        row |= of[0].facts
        rows.append(row)
    return rows


def _same(truth: Night, found: Night, changed: Collection[str]) -> float:
    """The part of the unchanged rows whose tokens are equal."""
    unchanged = truth.outputs.keys() - changed
    equal = sum(found.outputs[name] == truth.outputs[name] for name in unchanged)
    return equal / len(unchanged)


if __name__ == "__main__":
    main()
