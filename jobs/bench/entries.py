"""What is put side by side: ways of each engine to complete prompts, with and without drafts.

A replayed draft is a known output in which each token is right with the wanted probability. Ours
replays its own output at depth off. Another engine's entry replays what that same entry wrote last
(at first, ours), because in bfloat16 its output need not be ours, nor that of its other entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from specbatch.jobs.bench.contenders import (
    DRAFT_MODEL,
    OURS,
    Completed,
    Ours,
    Outputs,
    Prompts,
    spoilt,
    timed,
)
from specbatch.jobs.bench.huggingface import DRAFTED, ENGINE, Transformers
from specbatch.jobs.bench.plan import Plan

FIXED = (2, 4, 8)
ONE_BY_ONE = 2  # prompts that are timed of an entry that takes them one at a time
REHEARSALS = 4
NONE, REPLAYED, LOOKUP = "none", "replayed", "prompt lookup"
OFF, AUTO = "off", "auto"
Replay = Callable[[Prompts, Outputs, Outputs], Completed]  # prompts, what will come, drafts of it


@dataclass(frozen=True, slots=True)
class Entry:
    """One series of the results."""

    engine: str
    mode: str
    complete: Callable[[Prompts], Completed]
    drafts: str = NONE  # or REPLAYED, DRAFT_MODEL, LOOKUP
    acceptance: float | None = None  # of replayed drafts
    one_by_one: bool = False  # its rate does not depend on N: `ONE_BY_ONE` prompts are timed
    process: str = ""  # the peer that completes; none: this process

    @property
    def key(self) -> tuple[str, str, float | None]:
        return self.engine, self.mode, self.acceptance

    @property
    def label(self) -> str:
        share = "" if self.acceptance is None else f", acceptance {self.acceptance:g}"
        return self.mode + share


def our_entries(plan: Plan, ours: Ours) -> list[Entry]:
    """Depth off first, since all others replay what it wrote, and again before each source of
    drafts, to be compared with its neighbours."""
    sources: list[tuple[str, str, float | str]] = [(REPLAYED, "", a) for a in plan.acceptances]
    if plan.real:
        sources.append((DRAFT_MODEL, "draft ", DRAFT_MODEL))
    entries: list[Entry] = []
    for drafts, prefix, source in sources:
        entries.append(Entry(OURS, OFF, ours.complete))
        for depth in (None, *FIXED):
            mode = AUTO if depth is None else f"depth {depth}"
            complete = partial(ours.complete, depth=depth, acceptance=source)
            share = source if isinstance(source, float) else None
            entries.append(Entry(OURS, prefix + mode, complete, drafts, share))
    return entries


def transformers_entries(plan: Plan, ours: Ours, theirs: Transformers) -> list[Entry]:
    """`generate`, `generate_batch`, and assisted generation, which takes one prompt at a time."""
    entries = [
        Entry(ENGINE, "generate", timed(theirs.generate)),
        Entry(ENGINE, "generate_batch", timed(theirs.generate_batch)),
    ]
    for acceptance in plan.acceptances:
        for depth in FIXED:
            mode = f"assisted {depth}"
            complete = learning(partial(_replayed_assisted, theirs, depth), ours, acceptance)
            entries.append(Entry(ENGINE, mode, complete, REPLAYED, acceptance, one_by_one=True))
    lookup = partial(theirs.one_by_one, prompt_lookup_num_tokens=DRAFTED)
    name = f"lookup {DRAFTED}"
    entries.append(Entry(ENGINE, name, timed(lookup), LOOKUP, one_by_one=True))
    if theirs.draft is not None:
        assisted = partial(theirs.one_by_one, assistant_model=theirs.draft)
        name = f"draft {DRAFTED}"
        entries.append(Entry(ENGINE, name, timed(assisted), DRAFT_MODEL, one_by_one=True))
    return entries


def _replayed_assisted(
    theirs: Transformers, depth: int, prompts: Prompts, _known: Outputs, drafts: Outputs
) -> Completed:
    counts: dict[str, int] = {}

    def complete(prompts: Prompts) -> Outputs:
        outputs, found = theirs.replay(prompts, drafts, depth)
        counts.update(found)
        return outputs

    completed = timed(complete)(prompts)
    return Completed(completed.seconds, completed.outputs, dict(counts))


def learning(replay: Replay, ours: Ours, acceptance: float) -> Callable[[Prompts], Completed]:
    """Replays to an entry what it wrote last, spoilt the same way as the drafts of ours.

    Drafts change the shapes of an engine's passes, and so its bits in bfloat16. Before the first
    run at each N it rehearses until it writes what was replayed, `REHEARSALS` times at most.
    """
    own: dict[int, list[int]] = {}
    rehearsed: set[int] = set()

    def complete(prompts: Prompts) -> Completed:
        if len(prompts) not in rehearsed:
            rehearsed.add(len(prompts))
            for _ in range(REHEARSALS):
                if once(prompts).facts["as_replayed"] == 1:
                    break
        return once(prompts)

    def once(prompts: Prompts) -> Completed:
        known = [own.get(i, ours.known[str(i)]) for i in range(len(prompts))]
        drafts = [spoilt(k, acceptance, ours.vocab_size, f"0/{i}") for i, k in enumerate(known)]
        completed = replay(prompts, known, drafts)
        own.update(enumerate(completed.outputs))
        share = same(completed.outputs, known)
        return replace(completed, facts={**completed.facts, "as_replayed": share})

    return complete


HOW: dict[tuple[str, str], str] = {
    (OURS, NONE): "all prompts at once, no drafts",
    (OURS, REPLAYED): "all prompts at once; drafts are its own output at depth off, spoilt",
    (OURS, DRAFT_MODEL): "all prompts at once; drafts by the draft model",
    (ENGINE, NONE): "all prompts at once, as one padded batch or with continuous batching",
    (ENGINE, REPLAYED): (
        f"assisted generation with a candidate generator that offers its own last output, spoilt; "
        f"it refuses batches, so {ONE_BY_ONE} prompts were timed one after another, at every N"
    ),
    (ENGINE, LOOKUP): f"its own prompt lookup; {ONE_BY_ONE} prompts, one after another",
    (ENGINE, DRAFT_MODEL): (
        f"assisted generation with the draft model; {ONE_BY_ONE} prompts, one after another"
    ),
}


def same(outputs: Outputs, definition: Outputs) -> float:
    """The share of the outputs that are as defined; there may be more definitions than outputs."""
    return round(sum(a == b for a, b in zip(outputs, definition, strict=False)) / len(outputs), 4)


def described(entries: Sequence[Entry], how: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """What each entry did, by engine and kind of drafts."""
    found: dict[str, Any] = {}
    for entry in entries:
        found.setdefault(entry.engine, {})[entry.drafts] = how[entry.engine, entry.drafts]
    return found
