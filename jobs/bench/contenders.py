"""This engine in a benchmark: at any depth, with replayed drafts and with those of a draft model.

A replayed draft is the known output, in which each token is spoilt with a fixed probability.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from specbatch.jobs.bench.isa import Seen
from specbatch.jobs.bench.isa import facts as isa_facts
from specbatch.jobs.bench.models import BenchModel
from specbatch.jobs.bench.peers.serve import seen_since
from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.device import DeviceOptions, capture_for
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL as MODEL_NAME
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.schemas.records import SamplingParams

OURS = "specbatch"
DRAFT_MODEL = "draft model"  # in place of an acceptance: real drafts
Prompts = list[list[int]]
Outputs = list[list[int]]


@dataclass(frozen=True, slots=True)
class Completed:
    """The result of one run of a contender; `facts` go into its row of the results."""

    seconds: float
    outputs: Outputs
    facts: dict[str, Any] = field(default_factory=dict)


def timed(complete: Callable[[Prompts], Outputs]) -> Callable[[Prompts], Completed]:
    """Time a contender of this process, which does not time itself."""

    def run(prompts: Prompts) -> Completed:
        begun = time.perf_counter()
        outputs = complete(prompts)
        return Completed(time.perf_counter() - begun, outputs)

    return run


def looked_at(
    complete: Callable[[Prompts], Completed], level: str | None
) -> Callable[[Prompts], Completed]:
    """Add the instruction set level that a contender of this process kept to its facts."""
    seen = Seen()

    def run(prompts: Prompts) -> Completed:
        nonlocal seen
        begun = time.perf_counter()
        completed = complete(prompts)
        seen = seen.with_later(Seen(**seen_since(begun)))
        words = f"torch dispatches for {torch.backends.cpu.get_cpu_capability()}"
        return replace(completed, facts={**completed.facts, **isa_facts(level, seen, words)})

    return run


class Ours:
    """This engine over one model: weights are packed once, and each run has a new engine."""

    def __init__(
        self,
        model: BenchModel,
        dtype: str,
        new_tokens: int,
        device: str = "cpu",
        exactness: str = "bitwise",
        graphs: bool = True,
        draft: Path | None = None,
        kv_cache_bytes: int = 1 << 30,
    ) -> None:
        self.vocab_size, self.new_tokens = model.vocab_size, new_tokens

        def runner(folder: Path) -> ModelRunner:
            loaded = load_model(inspect_model(str(folder)), dtype, exactness, device)
            # Every run completes the same prompts in full, so nothing may be cached.
            return ModelRunner(
                loaded,
                kv_cache_bytes=kv_cache_bytes,
                share_prefixes=False,
                capture=capture_for(loaded, DeviceOptions(device, graphs)),
            )

        self.runner = runner(model.folder)
        self.drafting = runner(draft) if draft else None
        self.known: dict[str, list[int]] = {}
        self.learned: dict[float | str | None, Knowledge] = {}

    def complete(
        self, prompts: Prompts, depth: int | None = 0, acceptance: float | str | None = None
    ) -> Completed:
        """With replayed drafts of an acceptance, with those of `DRAFT_MODEL`, or with none."""
        begun = time.perf_counter()
        # As in production, a run uses what earlier runs learned about drafts.
        knowledge = self.learned.setdefault(acceptance, Knowledge())
        proposers = self._proposers(acceptance, knowledge)
        engine = Engine(self.runner, proposers, len(prompts), 4096, knowledge=knowledge)
        params = SamplingParams(max_tokens=self.new_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts):
            engine.add(Request(str(i), tuple(prompt), params, seed=i, depth=depth))
        done: dict[str, list[int]] = {}
        while not engine.idle:
            done.update({c.request_id: list(c.token_ids) for c in engine.step()})
        seconds = time.perf_counter() - begun
        if acceptance is None:
            self.known = self.known | done
        stats = engine.stats
        facts = {
            "outside_forward": round(1 - stats.forward_sec / stats.busy_sec, 4),
            "proposed": stats.proposed,
            "accepted": stats.accepted,
            "steps": stats.steps,
        }
        return Completed(seconds, [done[str(i)] for i in range(len(prompts))], facts)

    def _proposers(
        self, acceptance: float | str | None, knowledge: Knowledge
    ) -> tuple[Proposer, ...]:
        if acceptance is None:
            return ()
        if isinstance(acceptance, str):
            assert self.drafting is not None, "no draft model was loaded"
            return (
                DraftModelProposer(self.drafting, pass_time=knowledge.draft_time_of(MODEL_NAME)),
            )
        return (ReplayProposer(self.known, acceptance, self.vocab_size),)


class ReplayProposer(Proposer):
    """Proposes what is known to come; a token is right with probability `acceptance`."""

    name = "replay"

    def __init__(
        self,
        outputs: Mapping[str, Seq[int]],  # by request id
        acceptance: float,
        vocab_size: int,
    ) -> None:
        self._drafts = {
            name: spoilt(output, acceptance, vocab_size, f"0/{name}")
            for name, output in outputs.items()
        }

    def available(self, sequence: Sequence) -> int:
        return len(self._drafts[sequence.request.request_id]) - sequence.num_output

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        return [
            self._drafts[s.request.request_id][s.num_output : s.num_output + depth]
            for s, depth in zip(sequences, depths, strict=True)
        ]


def spoilt(output: Seq[int], acceptance: float, vocab_size: int, seed: str) -> list[int]:
    """The output with each token right with this probability; the same for the same seed."""
    rng = random.Random(seed)
    return [t if rng.random() < acceptance else (t + 1) % vocab_size for t in output]
