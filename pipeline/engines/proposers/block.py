"""Drafts from the propose stage: a long continuation made beforehand, followed while it fits.

When a block runs low, or its sequence is lost in it, a proposer worker may be asked to continue it
(`wanting`). The answer (`extend`) may come late or never.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specbatch.pipeline.engines.contract import Wanted
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.schemas.speculation import PRE_GENERATED

LOW_WATER = 8  # block tokens left, below which more are wanted
LOST_FOR = 16  # tokens decided without a position in the block, after which another is wanted
ASK_AGAIN_AFTER = 64  # tokens decided without an answer, beyond twice what is usual
WANTED_AT_ONCE = 8  # in one step
MOST_LATE = 256  # tokens by which answers are expected to be late, at most
_NEWEST = 0.25  # weight of the newest answer in how late they are
CONTEXT = 3  # newest output tokens that must be the block's, to resume elsewhere
TAIL = 8  # newest output tokens that are looked at, at most
_SURE = 3  # tokens in agreement after which other readings are dropped
_NEAR = 4  # positions around the expected one where one token fewer is enough
_FAR = 32  # positions beyond which `_FAR_CONTEXT` tokens must fit
_FAR_CONTEXT = 6
_SKIPS = 3  # tokens that the output may have left out at once, by the first reading
_LOOKED_AT = 8  # positions with the same context that are compared


@dataclass(slots=True)
class _Progress:
    """A sequence in its block."""

    cursor: BlockCursor
    seen: int = 0  # output tokens it was led along
    drafted: bool = False  # from this block: only then is more of its kind worth asking for
    asked_at: int | None = None  # output tokens there were

    def wants(self, late: float) -> bool:
        """Early enough for an answer that is `late`, unless that is most of the block."""
        enough = max(LOW_WATER, min(late, len(self.cursor.block) / 2))
        low = self.cursor.remaining() < enough
        lost = self.cursor.at is None and self.cursor.lost_for < LOST_FOR  # it may yet be found
        patience = ASK_AGAIN_AFTER + 2 * late
        waits = self.asked_at is not None and self.seen < self.asked_at + patience
        return low and self.drafted and not lost and not waits


class BlockProposer(Proposer):
    """Proposes from each request's own pre-generated block."""

    name = PRE_GENERATED

    def __init__(self) -> None:
        self._progress: dict[Sequence, _Progress] = {}
        self._low: dict[Sequence, None] = {}  # in the order in which they ran low
        self._late = 0.0  # tokens that are decided between a question and its answer

    def available(self, sequence: Sequence) -> int:
        if not sequence.request.draft_ids and sequence not in self._progress:
            return 0
        return self._progress_of(sequence).cursor.remaining()

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> list[list[int]]:
        drafts = []
        for sequence, depth in zip(sequences, depths, strict=True):
            progress = self._progress_of(sequence)
            progress.drafted = True
            drafts.append(progress.cursor.draft(depth))
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._progress.pop(sequence, None)
        self._low.pop(sequence, None)

    # --- more of a block -----------------------------------------------------------------------
    def wanting(self) -> list[Wanted]:
        """Some of those that need more. Each is listed once until it is extended, or until an
        answer is overdue."""
        wanted: list[Wanted] = []
        while self._low and len(wanted) < WANTED_AT_ONCE:
            sequence = next(iter(self._low))
            del self._low[sequence]
            self._progress[sequence].asked_at = sequence.num_output
            if sequence.remaining > LOW_WATER:  # else it is over before an answer is there
                output = tuple(sequence.output)
                wanted.append(Wanted(sequence.request.request_id, output, round(self._late)))
        return wanted

    def extend(self, sequence: Sequence, position: int, token_ids: Seq[int]) -> bool:
        """`token_ids` may follow the sequence's first `position` output tokens; it may be ahead of
        that by now. False: this leads no further than the present block."""
        if sequence.finish_reason is not None or not 0 <= position <= sequence.num_output:
            return False
        progress = self._progress_of(sequence)
        output = sequence.output
        late = min(len(output) - position, MOST_LATE)
        self._late += _NEWEST * (late - self._late)
        cursor = BlockCursor(tuple(token_ids))
        cursor.follow(output[position:], output[-TAIL:])
        if cursor.remaining() <= progress.cursor.remaining():
            return False
        self._progress[sequence] = _Progress(cursor, len(output))
        self._low.pop(sequence, None)
        return True

    def _progress_of(self, sequence: Sequence) -> _Progress:
        """Its progress, brought up to the output decided so far."""
        progress = self._progress.get(sequence)
        if progress is None:
            progress = self._progress[sequence] = _Progress(BlockCursor(sequence.request.draft_ids))
        decided = sequence.num_output
        if progress.seen < decided:
            tokens, prompt = sequence.tokens, len(sequence.request.prompt_ids)
            tail = tokens[max(prompt, len(tokens) - TAIL) :]
            progress.cursor.follow(tokens[prompt + progress.seen :], tail)
            progress.seen = decided
            if progress.wants(self._late):
                self._low[sequence] = None
        return progress


@dataclass(slots=True)
class BlockCursor:
    """Where in its block a sequence is. `at` None: lost, until a context is found again.

    While the output follows the block this is one comparison. At the first disagreement there are
    several readings: the block has a token that the output replaced, one too many, or one too few.
    The likeliest leads (its position is drafted from), the others follow the output along with it,
    and the first that the output contradicts gives way to the next. When none is left the sequence
    is lost: its newest tokens are then looked up in the block, ahead of the last position it was
    sure of and near the one where it would be by now. What repeats itself has many such positions,
    so a distant one must fit more tokens than a near one.
    """

    block: tuple[int, ...]
    at: int | None = 0  # the next block token to draft
    lost_for: int = 0  # tokens decided since it was lost
    _others: list[int] = field(default_factory=list)  # other readings of the same output
    _run: int = _SURE  # tokens in agreement since the last disagreement
    _anchor: int = 0  # the last position it was sure of
    _since: int = 0  # tokens decided since then
    _one_too_few: bool = False  # what the last disagreement turned out to be: tried first
    _positions: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def follow(self, new: Seq[int], tail: Seq[int]) -> None:
        """Advance over `new`, the newest output tokens; `tail` ends with them, and may be cut
        to the newest `TAIL`."""
        at = self.at
        if at is not None and self._run >= _SURE and self.block[at : at + len(new)] == tuple(new):
            self.at = at + len(new)
            return
        for token in new:
            self._follow_one(token)
        if self.at is None:
            self._find(tail[-TAIL:])

    def remaining(self) -> int:
        return 0 if self.at is None else max(0, len(self.block) - self.at)

    def draft(self, count: int) -> list[int]:
        return [] if self.at is None else list(self.block[self.at : self.at + count])

    def _follow_one(self, token: int) -> None:
        at = self.at
        if self._run >= _SURE and at is not None:
            self._anchor, self._since = at, 0
        self._since += 1
        if at is None:
            self.lost_for += 1
            return
        block = self.block
        fitting = [p + 1 for p in (at, *self._others) if p < len(block) and block[p] == token]
        if fitting:
            self.at, self._others = fitting[0], fitting[1:]
            self._run += 1
            if self._run == _SURE:
                shift = fitting[0] - (self._anchor + self._since)
                self._one_too_few = shift < 0
                self._others.clear()
        elif self._run:
            self._doubt(at, token)
        else:
            self.at, self.lost_for = None, 1
            self._others.clear()

    def _doubt(self, at: int, token: int) -> None:
        """The block has another token at `at`: the readings of that, the likeliest first."""
        plain = [at, at + 1] if self._one_too_few else [at + 1, at]
        ahead = self.block[at + 1 : at + 1 + _SKIPS]
        skips = [at + 2 + i for i, other in enumerate(ahead) if other == token]
        if skips and skips[0] == at + 2:
            plain.insert(0, skips.pop(0))
        self.at, *self._others = plain + skips
        self._run = 0

    # --- lost --------------------------------------------------------------------------------
    def _find(self, tail: Seq[int]) -> None:
        expected = self._anchor + self._since
        position = self._near(expected, tail)
        if position is None:
            position = self._by_context(expected, tail)
        if position is not None:
            self.at, self._run, self.lost_for = position, 0, 0

    def _near(self, expected: int, tail: Seq[int]) -> int | None:
        """The nearest position around `expected` behind which the newest tokens occur."""
        if len(tail) < CONTEXT - 1:
            return None
        context = tuple(tail[1 - CONTEXT :])
        for distance in range(_NEAR + 1):
            for position in (expected + distance, expected - distance):
                begin = position - len(context)
                if begin >= self._anchor and self.block[begin:position] == context:
                    return position
        return None

    def _by_context(self, expected: int, tail: Seq[int]) -> int | None:
        if len(tail) < CONTEXT:
            return None
        if not self._positions:
            for end in range(CONTEXT, len(self.block)):
                self._positions.setdefault(self.block[end - CONTEXT : end], []).append(end)
        positions = self._positions.get(tuple(tail[-CONTEXT:]), ())
        right = bisect_left(positions, expected)
        left = right - 1
        for _ in range(_LOOKED_AT):  # outwards, the nearest first
            forward = positions[right] - expected if right < len(positions) else None
            backward = expected - positions[left] if left >= 0 else None
            if backward is not None and positions[left] - CONTEXT < self._anchor:
                backward = None
            if forward is not None and (backward is None or forward <= backward):
                position, distance, right = positions[right], forward, right + 1
            elif backward is not None:
                position, distance, left = positions[left], backward, left - 1
            else:
                return None
            if distance <= _FAR or self._agreeing(position, tail) >= _FAR_CONTEXT:
                return position
        return None

    def _agreeing(self, position: int, tail: Seq[int]) -> int:
        """How many of the newest tokens are those before `position`."""
        most = min(len(tail), position)
        agreed = 0
        while agreed < most and self.block[position - 1 - agreed] == tail[-1 - agreed]:
            agreed += 1
        return agreed
