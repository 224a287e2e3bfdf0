"""A verifier that only writes a known text, so that proposers can be judged without a model."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from specbatch.pipeline.engines.contract import Request
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.records import SamplingParams

PLAIN = Request("r", (1, 2, 3), SamplingParams(max_tokens=10_000), seed=1)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What drafts were worth."""

    passes: int
    proposed: int
    accepted: int

    @property
    def mean_accepted(self) -> float:
        """Draft tokens kept per pass."""
        return self.accepted / self.passes


def sequence_of(request: Request = PLAIN) -> Sequence:
    return Sequence(request, frozenset(), max_length=10_000)


def sequence_with(prompt: Seq[int], output: Seq[int] = ()) -> Sequence:
    sequence = sequence_of(replace(PLAIN, prompt_ids=tuple(prompt)))
    decide(sequence, output)
    return sequence


def decide(sequence: Sequence, tokens: Seq[int]) -> None:
    """The verifier writes `tokens`, in one pass."""
    if tokens:
        sequence.accept([0] * (len(tokens) - 1), list(tokens), [0.0] * len(tokens))


def replay(proposer: Proposer, sequence: Sequence, truth: Seq[int], depth: int) -> Replayed:
    """The verifier writes `truth` with drafts of `proposer`."""
    passes = proposed = accepted = 0
    while (at := sequence.num_output) < len(truth):
        cap = min(depth, len(truth) - at - 1, proposer.available(sequence))
        draft = proposer.propose([sequence], [cap])[0] if cap > 0 else []
        assert len(draft) == max(cap, 0), "it offers what it said it could"
        agreed = 0
        while agreed < len(draft) and draft[agreed] == truth[at + agreed]:
            agreed += 1
        sequence.accept(draft, list(truth[at : at + agreed + 1]), [0.0] * (agreed + 1))
        proposer.on_verified(sequence)
        passes, proposed, accepted = passes + 1, proposed + len(draft), accepted + agreed
    return Replayed(passes, proposed, accepted)


def text(length: int, seed: int = 0, vocab: int = 250) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(vocab) for _ in range(length)]


def edited(tokens: Seq[int], share: float, kinds: Seq[str], seed: int = 0) -> list[int]:
    """`tokens` with about `share` of them replaced, or one inserted or removed at them."""
    generator = random.Random(seed)
    result: list[int] = []
    for token in tokens:
        kind = generator.choice(list(kinds)) if generator.random() < share else "kept"
        if kind in ("replaced", "inserted"):
            result.append(250 + generator.randrange(50))
        if kind in ("kept", "inserted"):
            result.append(token)
    return result
