"""Tries a draft model with a verifier before it serves: do they fit, and can its drafts pay?

The prompts are recent ones of the store, held out of trainings where there are such. Each size of
batch and depth is run in turns with depth 0, so that what the machine does meanwhile falls on both
alike. Each reads its prompts in full: no run finds the KV of the one before. Fixed depths are
tried, as the depth policy would hide a bad draft model by not asking it.

Where no drafts pay, a retrained model is refused only if its parent does not draft either: to keep
the parent would save nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace

from specbatch.pipeline.engines.contract import Completion, ModelFolder, Request
from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.exact.model.device import DeviceOptions
from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL
from specbatch.pipeline.engines.models.model_folder import (
    check_architecture,
    check_pair,
    vocabulary_digest,
)
from specbatch.pipeline.learning.datasets import DataSets, Example, Wanted
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.storage.objects import ASKED_RETRY_SEC, Objects
from specbatch.schemas.errors import ModelError, UsageError
from specbatch.schemas.records import SamplingParams
from specbatch.schemas.registry import PairTrial
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import EngineSpec
from specbatch.schemas.training import DataOrder

DEPTHS = (2, 4)
TURNS = 3
TOKENS = 48  # of each completion
MOST_PROMPTS = 64  # of one turn
PROMPTS_ALONE = 4  # of one turn of one sequence at a time
MOST_READ = 500_000  # tokens of completions, to find them


@dataclass(frozen=True, slots=True)
class Measured:
    """One size of batch at one depth, beside depth 0."""

    sequences: int
    depth: int
    acceptance: float
    accepted_length: float  # draft tokens in a pass of a sequence
    ratio: float  # tokens per device second over those of depth 0; the median of the turns …
    lowest: float
    highest: float  # … and their range


@dataclass(frozen=True, slots=True)
class Pair:
    """What is tried together."""

    verifier: ModelFolder
    proposer: ModelFolder
    engine: EngineSpec


OnTurn = Callable[[int, int], None]  # how many turns are done, and of how many


def try_pair(
    settings: Settings,
    store: Store,
    pair: Pair,
    order: DataOrder,
    on_turn: OnTurn,
    replaces_worse: bool = False,
) -> PairTrial:
    """Try a pair and store the verdict. Raises `UsageError` where the store has no prompts for it,
    or none that fit the KV cache.

    Models that do not fit together are a verdict, too. `replaces_worse`: a model drafts now that
    costs the same and whose drafts are accepted less, so nothing is lost even if no drafts pay.
    """
    device = DeviceOptions(settings.device)
    try:
        check_architecture(pair.proposer)
        check_pair(pair.verifier, pair.proposer)
    except ModelError as error:
        return store.add_pair_trial(_verdict(pair, "", False, str(error), []))
    prompts, are_held_out = _prompts(settings, store, pair.verifier, order)
    sizes = sorted({1, settings.max_concurrent_sequences})
    host = EngineHost(
        pair.verifier,
        pair.proposer,
        settings.max_concurrent_sequences,
        settings.max_batch_tokens,
        settings.kv_cache_bytes,
        device=device,
        share_prefixes=False,
    )
    with closing(host):
        numeric_class = host.serves().class_of(pair.engine.key)
        assert numeric_class is not None, "the engine of a spec has a class"
        measured = list(_measured(_Runner(host, pair.engine), prompts, sizes, on_turn))
        memory = 0 if host.memory is None else host.memory.total
    pays, reason = judged(measured)
    if not pays and replaces_worse:
        pays, reason = True, f"{reason}; its parent drafts at the same cost and is accepted less"
    if not are_held_out:
        reason += ", on prompts that it may have learned from, as none were held out"
    return store.add_pair_trial(_verdict(pair, numeric_class, pays, reason, measured, memory))


def judged(measured: Sequence[Measured]) -> tuple[bool, str]:
    """Whether drafts can pay, and why. They cannot if depth 0 won every turn everywhere."""
    best = max(measured, key=lambda one: one.ratio)
    at = (
        f"at depth {best.depth} with {best.sequences} "
        f"sequence{'s' if best.sequences != 1 else ''} at once, acceptance {best.acceptance:.2f}"
    )
    times = f"{best.ratio:.2f} times as fast as depth 0 ({best.lowest:.2f} to {best.highest:.2f})"
    if all(one.highest < 1.0 for one in measured):
        return False, f"drafts do not pay: at best {times}, {at}"
    return True, f"drafts can pay: {times}, {at}"


def _prompts(
    settings: Settings, store: Store, verifier: ModelFolder, order: DataOrder
) -> tuple[list[tuple[int, ...]], bool]:
    """Prompts of recent jobs, each once, and whether they are held out. Raises `UsageError` for
    none."""
    wanted = Wanted(vocabulary_digest(verifier), verifier.vocab_size, verifier.context_tokens)
    sets = DataSets(store, Objects.of_settings(settings, ASKED_RETRY_SEC), settings.retention_days)
    few = replace(order, most_tokens=min(order.most_tokens, MOST_READ))
    data = sets.make(few, wanted, f"verifier {verifier.ref}", what="trial")
    most = verifier.context_tokens - TOKENS
    held_out: Sequence[Example] = data.judging or data.choosing
    examples = held_out or data.train
    of = {one.prompt_digest: tuple(map(int, one.ids[: one.prompt_tokens])) for one in examples}
    found = [ids for ids in of.values() if len(ids) <= most]
    if not found:
        raise UsageError(
            f"of {len(of):,} prompts none is short enough to be tried with the verifier, which "
            f"reads {verifier.context_tokens:,} tokens, {TOKENS} of them its own: name a job with "
            "shorter prompts with --job"
        )
    return found, bool(held_out)


def _within(room: int, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The prompts that the verifier's KV cache has room for. Raises `UsageError` for none."""
    found = [ids for ids in prompts if len(ids) + TOKENS <= room]
    if not found:
        raise UsageError(
            f"of {len(prompts):,} prompts none is short enough for the verifier's KV cache, which "
            f"has room for {room:,} tokens, {TOKENS} of them its own: set SPECBATCH_KV_CACHE_MIB "
            "higher, or name a job with shorter prompts with --job"
        )
    return found


@dataclass(slots=True)
class _Runner:
    """Completes prompts, nothing drafted but by the draft model."""

    host: EngineHost
    engine: EngineSpec
    runs: int = 0

    def run(self, prompts: Sequence[tuple[int, ...]], depth: int) -> list[Completion]:
        self.runs += 1
        job = f"trial-{self.runs}"
        requests = [
            Request(
                request_id=f"{job}/{i}/0",
                prompt_ids=ids,
                params=SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
                seed=i,
                depth=depth,
                sources=frozenset({DRAFT_MODEL}),
            )
            for i, ids in enumerate(prompts)
        ]
        return self.host.service(self.engine).submit(job, requests, ()).wait()


def _measured(
    runner: _Runner, prompts: Sequence[tuple[int, ...]], sizes: Sequence[int], on_turn: OnTurn
) -> Iterator[Measured]:
    turns, done = len(sizes) * TURNS, 0
    runner.run([min(prompts, key=len)], max(DEPTHS))  # loads the models
    prompts = _within(runner.host.context_tokens, prompts)[:MOST_PROMPTS]
    for size in sizes:
        batches = _batches(prompts, size)
        rounds: list[dict[int, list[Completion]]] = []
        for _ in range(TURNS):
            rounds.append(
                {
                    depth: [one for batch in batches for one in runner.run(batch, depth)]
                    for depth in (0, *DEPTHS)
                }
            )
            done += 1
            on_turn(done, turns)
        for depth in DEPTHS:
            drafted = [one for turn in rounds for one in turn[depth]]
            proposed = sum(one.proposed for one in drafted)
            accepted = sum(one.accepted for one in drafted)
            passes = sum(one.verifier_passes for one in drafted)
            ratios = [_speed(turn[depth]) / _speed(turn[0]) for turn in rounds]
            yield Measured(
                size,
                depth,
                accepted / proposed if proposed else 0.0,
                accepted / passes if passes else 0.0,
                statistics.median(ratios),
                min(ratios),
                max(ratios),
            )


def _batches(prompts: Sequence[tuple[int, ...]], size: int) -> list[Sequence[tuple[int, ...]]]:
    """Batches of `size`; the prompts come again where there are few."""
    if size == 1:
        return [[ids] for ids in prompts[:PROMPTS_ALONE]]
    return [[prompts[i % len(prompts)] for i in range(size)]]


def _speed(completions: Sequence[Completion]) -> float:
    """Tokens per tick of the device."""
    ticks = sum(one.ticks.total for one in completions)
    return sum(len(one.token_ids) for one in completions) / max(1, ticks)


def _verdict(
    pair: Pair,
    numeric_class: str,
    pays: bool,
    reason: str,
    measured: Sequence[Measured],
    memory: int = 0,
) -> PairTrial:
    return PairTrial(
        pair.verifier.fingerprint.digest,
        pair.proposer.fingerprint.digest,
        numeric_class,
        pays,
        reason,
        {"memory_bytes": memory, "measured": [asdict(one) for one in measured]},
    )
