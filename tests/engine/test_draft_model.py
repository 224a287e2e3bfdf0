"""What the draft model notes of its own passes, by which the depth is chosen."""

from __future__ import annotations

import pytest
from engine.decoding import runner_of
from engine.replaying import sequence_with

from specbatch.pipeline.engines.exact import draft_model
from specbatch.pipeline.engines.exact.draft_model import DraftModelProposer
from support.engines import loaded
from support.models import TinyPair


@pytest.mark.parametrize("most", [8, 2048])
def test_the_time_of_a_draft_is_noted_with_all_that_was_fed_in_it(
    tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Also with what was fed in passes of its own, since it was too much for one."""
    monkeypatch.setattr(draft_model, "MAX_PASS_TOKENS", most)
    proposer = DraftModelProposer(runner_of(loaded(tiny_pair.draft, "float32"), 64))
    noted: list[tuple[float, ...]] = []
    monkeypatch.setattr(
        type(proposer.pass_time), "observe", lambda _, sizes, __: noted.append(tuple(sizes))
    )
    sequences = [sequence_with(range(1, 21)), sequence_with(range(31, 51))]
    drafts = proposer.propose(sequences, [3, 2])
    assert [len(draft) for draft in drafts] == [3, 2]
    assert noted == [(1.0, 3, 40 + 2 + 1)]
    for sequence in sequences:
        proposer.forget(sequence)
