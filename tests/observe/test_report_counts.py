"""What a report counts, in small numbers that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbatch.pipeline.observe.report.counts import (
    MOMENTS,
    OTHER_TAGS,
    UNKNOWN_SOURCE,
    Fill,
    Largest,
    Tally,
    Timeline,
    spread,
)
from specbatch.pipeline.observe.report.facts import Bar
from specbatch.schemas.job_figures import GroupFigures, RowFigures
from specbatch.schemas.provenance import passes_of
from specbatch.schemas.records import NO_TAG, FinishReason, Stage

P, A, C, B = 0, 1, 2, 3  # plain, accepted, corrected, bonus


def group(index: int, done_at: float | None, proposed: int = 10, accepted: int = 5) -> GroupFigures:
    stage = Stage.VERIFY if done_at is None else Stage.DONE
    return GroupFigures(index, stage, 4, done_at, 2.0, 1.0, 4, 40, proposed, accepted, 8, 0.5)


def row(index: int = 0, **values: object) -> RowFigures:
    plain = RowFigures(
        row_index=index,
        sample_index=0,
        group_index=0,
        tag="news",
        finish_reason=FinishReason.STOP,
        prompt_tokens=5,
        proposed=6,
        accepted=3,
        verifier_passes=3,
        cost_usd=0.25,
        ticks=100,
        origins=(P, A, C, A, A, B),
        steps=(1, 2, 3),
        sources=("ngram", "model"),
        makers=(1, 0),
        drafted=(4, 2),
    )
    return replace(plain, **values)  # type: ignore[arg-type]  # the tests' own words


def tally(groups: list[GroupFigures] | None = None, samples: int = 2) -> Tally:
    return Tally(Timeline(groups or [group(0, 5.0)], None), Fill({}), samples, "job")


@pytest.mark.parametrize(
    ("origins", "kept", "plain"),
    [
        ((), [], 0),
        ((P, P), [], 2),
        ((A, A, C, B, P), [2, 0], 1),
        ((C, A), [0, 1], 0),  # the text ended inside of a draft
        ((A, A), [2], 0),
    ],
)
def test_passes_end_with_the_first_token_that_was_not_accepted(
    origins: tuple[int, ...], kept: list[int], plain: int
) -> None:
    assert passes_of(origins) == (kept, plain)


def test_drafts_are_counted_by_source_depth_and_place() -> None:
    counted = tally()
    counted.see(row())
    model, ngram = counted.by_source()
    assert (model.name, model.proposed, model.accepted, model.drafts) == ("model", 4, 1, 1)
    assert (ngram.name, ngram.proposed, ngram.accepted, ngram.rate) == ("ngram", 2, 2, 1.0)
    assert counted.depths() == (Bar("0", 1), Bar("1", 0), Bar("2", 1), Bar("3", 0), Bar("4", 1))
    places = [(d.name, d.proposed, d.accepted) for d in counted.positions()]
    assert places == [("1", 2, 2), ("2", 2, 1)]  # nobody looked further than the refused one
    (moment,) = counted.timeline.moments()
    assert moment.by_source == {"model": (4, 1), "ngram": (2, 2)}


def test_accepted_tokens_that_a_stop_cut_off_count_as_accepted() -> None:
    """The first draft was refused at once; the second was right, and its second token a stop."""
    counted = tally()
    counted.see(row(origins=(P, C, A, A), proposed=7, accepted=4, drafted=(3, 4)))
    model, ngram = sorted(counted.by_source(), key=lambda drafts: drafts.name)
    assert (model.proposed, model.accepted) == (3, 0)
    assert (ngram.proposed, ngram.accepted) == (4, 4)
    places = [(d.proposed, d.accepted) for d in counted.positions()]
    assert places == [(2, 1), (1, 1), (1, 1), (1, 1)]
    (moment,) = counted.timeline.moments()
    assert moment.by_source == {"model": (3, 0), "ngram": (4, 4)}


def test_drafts_of_before_their_makers_were_kept_still_count() -> None:
    counted = tally()
    counted.see(row(sources=(), makers=(), drafted=()))
    (known,) = counted.by_source()
    assert (known.name, known.accepted) == (UNKNOWN_SOURCE, 3)


def test_tags_are_summed_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbatch.pipeline.observe.report.counts.MOST_TAGS", 2)
    counted = tally()
    for index, tag in enumerate((None, "a", "a", "b", "c")):
        counted.see(row(index, tag=tag))
    lines, left_out = counted.by_tag()
    assert [(d.name, d.completions) for d in lines] == [
        (OTHER_TAGS, 2), ("a", 2), (NO_TAG, 1),
    ]  # fmt: skip
    assert left_out == 0
    assert lines[1].usd == 0.5


def test_those_that_stand_out_are_kept_and_no_others() -> None:
    counted = tally(samples=3)
    for index in range(50):
        counted.see(row(index, ticks=index, proposed=20, accepted=index % 10))
    assert [r.ticks for r in counted.slowest.rows] == list(range(49, 41, -1))
    assert [r.row_index for r in counted.least_accepted.rows[:6]] == [0, 10, 20, 30, 40, 1]
    shown = [r.row_index for r in counted.shown.rows]
    assert len(shown) == 3
    again = tally(samples=3)
    for index in reversed(range(50)):
        again.see(row(index))
    assert [r.row_index for r in again.shown.rows] == shown  # by the job and the row alone
    assert not Largest(0).rows


def test_prompts_with_few_drafts_have_no_rate_worth_telling() -> None:
    counted = tally()
    counted.see(row(proposed=15, accepted=0))
    assert not counted.least_accepted.rows


def test_fill_is_counted_by_session_and_step() -> None:
    fill = Fill({0: 0, 1: 1})
    for index in range(3):
        fill.see(row(index))
    fill.see(row(3, group_index=1, steps=(2, 3)))
    assert fill.mean == (9 + 2) / 5
    assert fill.bars() == (Bar("1", 2), Bar("2", 0), Bar("3–4", 3))
    assert fill.stride == 1


def test_fill_of_many_steps_looks_at_some_of_them_exactly() -> None:
    fill = Fill({}, most=50)
    for index in range(4):
        fill.see(row(index, steps=tuple(range(400))))
    assert fill.stride == 8
    assert fill.mean == 4.0
    assert fill.bars()[-1] == Bar("3–4", 50)


def test_groups_are_put_where_they_were_done() -> None:
    groups = [group(i, 100.0 + i, accepted=i % 10) for i in range(200)] + [group(999, None)]
    moments = Timeline(groups, started_at=90.0).moments()
    assert len(moments) == MOMENTS
    assert moments[0].begin == 90.0
    assert moments[-1].end == pytest.approx(299.0)
    assert sum(m.groups for m in moments) == 200
    assert sum(m.accepted for m in moments) == sum(i % 10 for i in range(200))
    assert Timeline([], None).moments() == ()
    (one,) = Timeline([group(0, 5.0)], 5.0).moments()
    assert (one.groups, one.queue_sec, one.compute_sec) == (1, 2.0, 1.0)


def test_a_spread_tells_quantiles() -> None:
    assert spread([]) is None
    told = spread([float(i) for i in range(1, 101)])
    assert told is not None
    assert (told.middle, told.p90, told.p99, told.most, told.values) == (50, 90, 99, 100, 100)
    assert told.total == 5050
