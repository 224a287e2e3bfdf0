"""One step of the engine: its drafts, its sequences, and how its time is shared."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from specbatch.pipeline.engines.state.accounting import Pass, Rows
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.policy.costs.controls import Arm


class Planned(NamedTuple):
    """`take` pending tokens of a sequence; when that is all of them, its next token is decided."""

    sequence: Sequence
    take: int

    @property
    def decides(self) -> bool:
        return self.take == self.sequence.pending


@dataclass(frozen=True, slots=True)
class Draft:
    """One proposer's guess at what follows one sequence: a hint, and nothing more."""

    token_ids: list[int] = field(default_factory=list)  # [num_draft_tokens]; empty: depth 0
    proposer: str = ""  # the proposer's name; "": nobody was asked, or had anything to say
    token_ns: int = 0  # price of each token, where a draft model made them
    # float32 [num_draft_tokens, vocab_size]: what each token was drawn from, processed. Computed
    # when a ratio test asks for it; None where the proposer does not know.
    probs: Callable[[], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def dropped(self) -> Draft:
        """The same without its tokens: its proposer still hears that the step is over."""
        return replace(self, token_ids=[])


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """The speculator's decision for one step."""

    drafts: list[Draft]  # [num_sequences], in the order of the sequences that decide a token
    arm: Arm = Arm.PLAIN  # what the step is in the experiment that measures savings
    odds: float = 0.0  # of drafting in this step, by those of its being a control
    drafting_sec: float = 0.0  # in models of proposers …
    replanning_sec: float = 0.0  # … and in choosing who drafts
    # Nothing is verified, or drafted in shadow: each pass needs only the tokens of the one before.
    multi_step: bool = False


@dataclass(slots=True)
class Step:
    """One step's sequences that decide tokens, with their drafts."""

    plan: list[Planned]
    deciding: list[Sequence]
    draft_plan: DraftPlan
    begun: int  # by `clock.now`
    drafting_ticks: int  # in proposers' models, before the verifier's part
    pass_ticks: int = 0  # of a pass that did not raise, until its verdict is on the host
    emitted: dict[Sequence, int] = field(default_factory=dict)  # tokens decided
    passes_made: int = 1  # in one call
    is_watched: bool = False  # its logits show how far a draft model has drifted
    ordinary: bool = True  # one call did it all, recorded before; else its times say nothing

    @property
    def drafts(self) -> list[Draft]:
        """Of the sequences in `deciding`."""
        return self.draft_plan.drafts

    def part(self, plan: list[Planned]) -> Step:
        """Some of it, without drafts, which are only hints; their proposers still hear the end."""
        draft_of = dict(zip(self.deciding, self.drafts, strict=True))
        deciding = [p.sequence for p in plan if p.decides]
        drafts = [draft_of.get(sequence, NO_DRAFT).dropped() for sequence in deciding]
        draft_plan = replace(self.draft_plan, drafts=drafts)
        return replace(self, plan=plan, deciding=deciding, draft_plan=draft_plan, pass_ticks=0)

    def passes(self, parts: Seq[Step]) -> list[Pass]:
        """What shares the step's time: `parts`, and the rest, which failed or must wait."""
        if len(parts) == 1 and len(parts[0].plan) == len(self.plan):
            return [parts[0]._as_pass()]
        seen = {planned.sequence for part in parts for planned in part.plan}
        rest = [planned for planned in self.plan if planned.sequence not in seen]
        pieces = [self.part(rest), *parts] if rest else parts
        return [piece._as_pass() for piece in pieces if piece.plan]

    def _as_pass(self) -> Pass:
        sequences = [planned.sequence for planned in self.plan]
        weights = self._draft_weights() if self.drafting_ticks else []
        return Pass(sequences, self._rows(), weights, self.pass_ticks)

    def _draft_weights(self) -> list[int]:
        """Of each sequence in the pass: tokens that a draft model made for it, at its price.

        Where none were (they were dropped, or kept to be compared), 1 for each that decides.
        """
        weight_of = {
            sequence: len(draft) * draft.token_ns
            for sequence, draft in zip(self.deciding, self.drafts, strict=True)
        }
        if not any(weight_of.values()):
            weight_of = dict.fromkeys(self.deciding, 1)
        return [weight_of.get(planned.sequence, 0) for planned in self.plan]

    def _rows(self) -> list[Rows]:
        """Rows of each sequence in the pass: of its prompt, that decided, and rejected ones.

        One that failed with its verdict had one row that decided.
        """
        found, at = [], 0
        deciding, emitted = self.deciding, self.emitted
        for planned in self.plan:
            if at < len(deciding) and deciding[at] is planned.sequence:
                kept = emitted.get(planned.sequence) or 1
                refused = max(0, len(self.drafts[at]) + 1 - kept)
                found.append((planned.take - 1, kept, refused))
                at += 1
            else:
                found.append((planned.take, 0, 0))
        return found

    def first_tokens(self, budget: int) -> list[Planned]:
        """The plan's first `budget` tokens."""
        cut = []
        for planned in self.plan:
            take = min(planned.take, budget)
            if take:
                cut.append(Planned(planned.sequence, take))
            budget -= take
        return cut

    @property
    def decoding(self) -> bool:
        """No prompt takes part."""
        return len(self.deciding) == len(self.plan) and all(p.take == 1 for p in self.plan)
