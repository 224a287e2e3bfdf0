"""`make bench-acceptance`: how many drafts the demo pair's three verifications keep, sampled.

One token ahead, on the same contexts: the ratio test keeps the overlap of both distributions,
coupling the share of noises under which both models choose the same token. Then whole jobs at a
fixed depth, where every mode writes texts of its own.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor

from specbatch.benchmarks.engine import RESULTS
from specbatch.jobs.bench.machine import machine
from specbatch.kernels.verify.contract import SamplingRows
from specbatch.pipeline.engines.contract import Completion, Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.sampling.sampler import choose_sampler
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.state.kv_blocks import KvState
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.schemas.records import SamplingParams, Verification

DEMO = Path(__file__).parents[1] / "jobs" / "demo"
PROMPTS, NEW_TOKENS, NOISES, DEPTH = 64, 64, 16, 4
KV_BYTES = 256 << 20
SAMPLED = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0)


@dataclass(frozen=True, slots=True)
class OneAhead:
    """Shares of draft tokens kept, over the same contexts."""

    contexts: int
    ratio_test: float  # the overlap of both distributions: no test can keep more
    coupled: float  # with the same noise on both models


def main() -> None:
    torch.manual_seed(0)
    verifier, draft = demo_runners()
    prompts = demo_prompts(PROMPTS)
    texts = [c.token_ids for c in complete(verifier, None, prompts, Verification.COUPLED)[0]]
    result: dict[str, Any] = {
        "machine": machine(),
        "one_ahead": asdict(one_ahead(verifier, draft, prompts, texts)),
        f"depth_{DEPTH}": {
            kind.value: complete(verifier, draft, prompts, kind)[1] for kind in Verification
        },
    }
    print(json.dumps(result, indent=1))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "acceptance-demo.json").write_text(json.dumps(result, indent=1) + "\n")


def demo_runners(dtype: str = "float32") -> tuple[ModelRunner, ModelRunner]:
    """The demo's verifier and draft model."""
    folders = [inspect_model(str(DEMO / "models" / name)) for name in ("verifier", "draft")]
    verifier, draft = (ModelRunner(load_model(f, dtype), KV_BYTES) for f in folders)
    return verifier, draft


def demo_prompts(count: int) -> list[list[int]]:
    texts = pq.read_table(DEMO / "prompts.parquet", columns=["prompt"]).column(0).to_pylist()
    return TextTokenizer.load(str(DEMO / "models" / "verifier")).encode_batch(texts[:count])


def complete(
    verifier: ModelRunner, draft: ModelRunner | None, prompts: list[list[int]], kind: Verification
) -> tuple[list[Completion], dict[str, float]]:
    """Completions, and what they cost: with a draft model, at the fixed depth."""
    engine = Engine(verifier, () if draft is None else (DraftModelProposer(draft),))
    for i, prompt in enumerate(prompts):
        depth = 0 if draft is None else DEPTH
        engine.add(Request(str(i), tuple(prompt), SAMPLED, i, depth=depth, verification=kind))
    done: dict[str, Completion] = {}
    begun = time.perf_counter()
    while not engine.idle:
        done.update({c.request_id: c for c in engine.step()})
    elapsed, stats = time.perf_counter() - begun, engine.stats
    return [done[str(i)] for i in range(len(prompts))], {
        "accepted_of_proposed": round(stats.accepted / max(stats.proposed, 1), 4),
        "tokens_per_pass": round(stats.generated_tokens / stats.verifier_passes, 3),
        "tokens_per_sec": round(stats.generated_tokens / elapsed, 1),
    }


@torch.inference_mode()
def one_ahead(
    verifier: ModelRunner,
    draft: ModelRunner,
    prompts: list[list[int]],
    texts: list[tuple[int, ...]],
    noises: int = NOISES,
) -> OneAhead:
    """Every position of every text is a context of both models, teacher-forced."""
    overlap = agreed = 0.0
    contexts = 0
    sampler = choose_sampler(torch.device("cpu"))
    for prompt, text in zip(prompts, texts, strict=True):
        mine, theirs = (logits_along(runner, prompt, text) for runner in (verifier, draft))
        overlap += float(torch.minimum(mine.softmax(1), theirs.softmax(1)).double().sum())
        plain = plain_rows(len(text))
        for noise in range(noises):
            keys = torch.full((len(text),), 2**40 + noise * PROMPTS + contexts)
            counters = torch.stack((keys, torch.arange(len(text))), dim=1)
            same = sampler.sample(mine, counters, plain) == sampler.sample(theirs, counters, plain)
            agreed += float(same.sum()) / noises
        contexts += len(text)
    return OneAhead(contexts, round(overlap / contexts, 4), round(agreed / contexts, 4))


def logits_along(runner: ModelRunner, prompt: list[int], text: tuple[int, ...]) -> Tensor:
    """float32 [len(text), vocab_size]: what each token of the text was chosen from."""
    kv = KvState()
    tokens = [*prompt, *text[:-1]]
    runner.blocks.grow(kv, len(tokens))
    logits = runner.forward([Chunk(kv, tokens, len(text))])
    runner.blocks.release(kv)
    return logits


def plain_rows(rows: int) -> SamplingRows:
    """Temperature 1 and nothing else."""
    nothing = torch.empty(0, dtype=torch.int64)
    return SamplingRows(
        temperature=torch.ones(rows),
        top_k=torch.zeros(rows, dtype=torch.int64),
        top_p=torch.ones(rows),
        min_p=torch.zeros(rows),
        forbidden_rows=nothing,
        forbidden_tokens=nothing,
        any_sampled=True,
        any_top_k=False,
        any_top_p=False,
        any_min_p=False,
    )


if __name__ == "__main__":
    main()
