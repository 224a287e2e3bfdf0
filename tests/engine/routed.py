"""A simulated machine with draft models of known acceptance and price, and the real speculator."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from engine.replaying import PLAIN

from specbatch.pipeline.engines.contract import Cohort
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.speculation.speculator import Speculator
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.knowledge import Knowledge
from specbatch.pipeline.policy.step_cost import LinearCost
from specbatch.schemas.speculation import Decision

PROMPT_TOKENS = 40
STEP_SEC, ROW_SEC = 0.1, 1e-3  # of the verifier


class FakeModel(Proposer):
    """Drafts are right as often as said, by tag; a pass takes as long as said."""

    def __init__(
        self, name: str, rates: Mapping[str, float], pass_sec: float, row_sec: float = 1e-4
    ) -> None:
        self.name = name
        self.rates = rates
        self.price = (1e-3, pass_sec, row_sec)
        self.pass_time: LinearCost = Knowledge().draft_time_of(name)
        self.read: dict[Sequence, int] = {}
        self.seconds = 0.0
        self.fed = 0

    def available(self, sequence: Sequence) -> int:  # noqa: ARG002 - the contract's
        return 8

    def behind(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self.read.get(sequence, 0)

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        fed = sum(self.behind(s) for s in sequences)
        self.fed += fed
        sizes = (1.0, float(max(depths)), fed + sum(depths) - len(sequences))
        took = sum(size * price for size, price in zip(sizes, self.price, strict=True))
        self.pass_time.observe(sizes, took)
        self.seconds += took
        for sequence in sequences:
            self.read[sequence] = len(sequence.tokens)
        return [[7] * depth for depth in depths]

    def on_verified(self, sequence: Sequence) -> None:
        assert sequence in self.read

    def forget(self, sequence: Sequence) -> None:
        self.read.pop(sequence, None)


@dataclass
class Run:
    """What came of it, since the last `clear`."""

    tokens: int = 0
    seconds: float = 0.0
    drafted: Counter[tuple[str | None, str]] = field(default_factory=Counter)  # by (tag, model)
    mixed: int = 0  # steps in which several models drafted
    moves: int = 0  # of a sequence from one model to another

    @property
    def tokens_per_sec(self) -> float:
        return self.tokens / self.seconds

    def share(self, tag: str, model: str) -> float:
        """Of the tag's draft tokens, those that the model made."""
        whole = sum(n for (of, _), n in self.drafted.items() if of == tag)
        return self.drafted[tag, model] / whole


class Simulation:
    """Sequences of some tags in turn; as one ends, another of its tag begins."""

    def __init__(
        self,
        models: Seq[FakeModel],
        tags: Seq[str],
        count: int = 8,
        length: int = 400,
        free: Seq[Proposer] = (),
        draft_model: str | None = None,
        seed: int = 0,
    ) -> None:
        self.models = {model.name: model for model in models}
        coin = random.Random(seed + 1).random
        self.speculator = Speculator([*free, *models], coin=coin)
        self._generator = random.Random(seed)
        self._length = length
        self._draft_model = draft_model
        self._last: dict[Sequence, str] = {}
        self.running = [self._new(tags[i % len(tags)]) for i in range(count)]
        self.run = Run()

    def steps(self, count: int) -> Run:
        """What came of so many more steps."""
        self.run = Run()
        for _ in range(count):
            self._step()
        return self.run

    def decisions(self) -> tuple[Decision, ...]:
        """What was noted since this was last asked."""
        return self.speculator.decision_log.lessons("job").decisions

    def _new(self, tag: str) -> Sequence:
        prompt = tuple(self._generator.randrange(200) for _ in range(PROMPT_TOKENS))
        request = replace(
            PLAIN, prompt_ids=prompt, route=Cohort("job", tag), draft_model=self._draft_model
        )
        return Sequence(request, frozenset(), max_length=PROMPT_TOKENS + self._length)

    def _step(self) -> None:
        before = sum(model.seconds for model in self.models.values())
        self.speculator._controller.replan_sec = 0.0  # what this machine takes is no part of it
        drafts = self.speculator.propose(self.running, lambda _, wanted: wanted).drafts
        drafting = sum(model.seconds for model in self.models.values()) - before
        count, drafted = len(self.running), sum(map(len, drafts))
        seconds = STEP_SEC + ROW_SEC * (count + drafted)
        self.speculator.knowledge.step_time.observe(count + drafted, count, seconds)
        self.run.seconds += seconds + drafting
        self.run.mixed += len({draft.proposer for draft in drafts if draft}) > 1
        for i, draft in enumerate(drafts):
            sequence = self.running[i]
            tag = sequence.request.route.tag
            right = 0
            if draft:
                self.run.drafted[tag, draft.proposer] += len(draft)
                self.run.moves += self._last.get(sequence, draft.proposer) != draft.proposer
                self._last[sequence] = draft.proposer
                rate = self.models[draft.proposer].rates[str(tag)]
                while right < len(draft) and self._generator.random() < rate:
                    right += 1
            sequence.accept(draft.token_ids, [7] * (right + 1), [0.0] * (right + 1))
            self.run.tokens += right + 1
            self.speculator.on_verified(sequence, draft, right)
            if sequence.finish_reason is not None:
                self.speculator.forget(sequence)
                self.running[i] = self._new(str(tag))
