"""Completions with an account of every pass, and what each of their tokens is by that account.

    record, tokens = traced(random.Random(1), row=0)

`tokens` is told pass by pass as the passes are made up, not read from the record: what is made of
the record can be compared with it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from specbatch.schemas.provenance import Provenance, Ticks
from specbatch.schemas.records import CompletionRecord, FinishReason, Origin

SOURCES = ("small", "ngram", "block")


@dataclass(frozen=True, slots=True)
class TracedToken:
    """One token as it came about."""

    position: int
    token_id: int
    origin: str
    proposer: str | None
    step: int
    logprob: float
    draft_position: int | None
    rejected_token: int | None
    pass_ticks: int  # of its pass …
    pass_tokens: int  # … which decided so many


def traced(
    draw: random.Random, row: int, sample: int = 0, tag: str | None = None, passes: int = 6
) -> tuple[CompletionRecord, list[TracedToken]]:
    """A completion of some passes: without a draft, corrected, whole, or cut by its end."""
    tokens: list[TracedToken] = []
    steps, pass_ticks, makers, drafted, rejected = [], [], [], [], []
    names = draw.sample(SOURCES, len(SOURCES))
    step = draw.randrange(1000)
    proposed = accepted = 0
    for number in range(passes):
        step += draw.randrange(1, 4)
        took = draw.randrange(100_000)
        steps.append(step)
        pass_ticks.append(took)
        length = draw.choice([0, 0, 1, 2, 5])
        agreed = draw.randrange(length + 1)
        is_cut = number == passes - 1 and agreed > 0 and draw.random() < 0.5
        made = [Origin.ACCEPTED] * agreed
        if not is_cut:
            made.append(_last(length, agreed))
        source = draw.randrange(len(names))
        if length:
            makers.append(source)
            drafted.append(length)
            proposed += length
            accepted += agreed
        for place, origin in enumerate(made):
            refused = draw.randrange(300) if origin is Origin.CORRECTED else None
            if refused is not None:
                rejected.append(refused)
            in_draft = origin in (Origin.ACCEPTED, Origin.CORRECTED)
            tokens.append(
                TracedToken(
                    position=len(tokens),
                    token_id=draw.randrange(300),
                    origin=origin.name.lower(),
                    proposer=names[source] if length else None,
                    step=step,
                    logprob=-draw.randrange(1, 64) / 8,  # the same in single precision
                    draft_position=place if in_draft else None,
                    rejected_token=refused,
                    pass_ticks=took,
                    pass_tokens=len(made),
                )
            )
    record = CompletionRecord(
        row_index=row,
        sample_index=sample,
        row_id=f"row-{row}",
        tag=tag,
        seed=row * 7 + sample,
        prompt_tokens=3,
        token_ids=tuple(t.token_id for t in tokens),
        text="some text",
        finish_reason=draw.choice([FinishReason.STOP, FinishReason.LENGTH]),
        origins=tuple(int(Origin[t.origin.upper()]) for t in tokens),
        logprobs=tuple(t.logprob for t in tokens),
        proposed=proposed,
        accepted=accepted,
        verifier_passes=passes,
        cost_usd=0.0,
        verifier="big",
        proposer="small",
        provenance=Provenance(
            steps=tuple(steps),
            pass_ticks=tuple(pass_ticks),
            sources=tuple(names),
            makers=tuple(makers),
            drafted=tuple(drafted),
            rejected=tuple(rejected),
        ),
        ticks=Ticks(prefill=draw.randrange(10_000), verify=sum(pass_ticks)),
        price_microusd=draw.randrange(1, 4_000_000),
        ahead_ticks=draw.randrange(1000),
        ahead_price_microusd=50_000,
    )
    return record, tokens


def _last(drafted: int, agreed: int) -> Origin:
    if not drafted:
        return Origin.PLAIN
    return Origin.BONUS if agreed == drafted else Origin.CORRECTED


def naive_ticks(record: CompletionRecord, tokens: list[TracedToken]) -> list[int]:
    """Each token's share of its pass: equal parts, and of what is left one to each of the first.

    The first token has the rest of its completion's as well.
    """
    shares: list[int] = []
    by_pass: dict[int, list[TracedToken]] = {}
    for token in tokens:
        by_pass.setdefault(token.step, []).append(token)
    for members in by_pass.values():
        left = members[0].pass_ticks
        for place in range(len(members)):
            share = -(-left // (len(members) - place))
            shares.append(share)
            left -= share
        assert left == 0
    shares[0] += record.ticks.total - sum(shares)
    return shares
