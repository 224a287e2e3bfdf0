"""`token_record` of a job with drafts, beside a naive recount of what its engine did."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from end_to_end.test_drafting import Done, Night

from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.batch import to_host
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.stages.requests import row_and_sample

PRICE_USD = 0.37
KINDS = ("plain", "accepted", "corrected", "bonus")


@dataclass
class Pass:
    """What one step of the verifier gave one sequence."""

    step: int
    proposer: str | None
    draft: list[int]
    agreed: int
    tokens: list[int]
    logprobs: list[float]
    ticks: int = 0


@dataclass
class Trace:
    """Sees every verdict as the engine does, and what each step was charged for."""

    passes: dict[str, list[Pass]] = field(default_factory=lambda: defaultdict(list))
    ticks: Counter[str] = field(default_factory=Counter)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        commit, account = Engine._commit, Engine._account

        def see_commit(engine: Engine, work: Any, verdict: Any) -> None:
            before = {sequence: sequence.num_output for sequence in work.deciding}
            commit(engine, work, verdict)
            if verdict is not None:
                self._note(engine.stats.steps + 1, work, verdict, before)

        def see_account(engine: Engine, work: Any, parts: Any) -> None:
            before = {p.sequence: sum(p.sequence.time) for p in work.plan}
            account(engine, work, parts)
            for sequence, spent in before.items():
                request_id, share = sequence.request.request_id, sum(sequence.time) - spent
                self.ticks[request_id] += share
                last = self.passes[request_id][-1:]
                if last and last[0].step == engine.stats.steps:
                    last[0].ticks = share

        patch.setattr(Engine, "_commit", see_commit)
        patch.setattr(Engine, "_account", see_account)

    def _note(self, step: int, work: Any, verdict: Any, before: dict[Sequence, int]) -> None:
        tokens, logprobs, accepted = to_host(verdict)
        row = 0
        for sequence, draft, agreed in zip(work.deciding, work.drafts, accepted, strict=True):
            kept = sequence.num_output - before[sequence]
            self.passes[sequence.request.request_id].append(
                Pass(
                    step,
                    draft.proposer if draft else None,
                    list(draft.token_ids),
                    agreed,
                    tokens[row : row + kept],
                    logprobs[row : row + kept],
                )
            )
            row += len(draft) + 1

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """As the view should have them, token by token."""
        for request_id, passes in self.passes.items():
            row, sample = row_and_sample(request_id)
            position = 0
            for one in passes:
                for place, (token, logprob) in enumerate(
                    zip(one.tokens, one.logprobs, strict=True)
                ):
                    kind = _kind(one, place)
                    ticks = one.ticks // len(one.tokens) + (place < one.ticks % len(one.tokens))
                    if position == 0:
                        ticks += self.ticks[request_id] - sum(p.ticks for p in passes)
                    yield (
                        *(row, sample, position, token, kind, one.proposer, one.step),
                        float(np.float32(logprob)),
                        place if kind in ("accepted", "corrected") else None,
                        one.draft[one.agreed] if kind == "corrected" else None,
                        *(ticks, round(PRICE_USD * 1e6)),
                    )
                    position += 1


def _kind(one: Pass, place: int) -> str:
    if place < one.agreed:
        return "accepted"
    if not one.draft:
        return "plain"
    return "bonus" if one.agreed == len(one.draft) else "corrected"


def view_of(night: Night, done: Done) -> list[tuple[Any, ...]]:
    mine = [row for row in night.table("token_record") if row["job_id"] == done.job.job_id]
    assert list(mine[0]) == [
        *("job_id", "row_index", "sample_index", "position", "token_id", "origin", "proposer"),
        *("verifier_step", "logprob", "draft_position", "rejected_token", "ticks"),
        "price_microusd",
    ]
    return sorted(tuple(row.values())[1:] for row in mine)


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_the_view_is_what_the_engine_did_token_for_token(
    database: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {"price_per_device_hour_usd": PRICE_USD}
    if database == "postgres":
        settings["database_url"] = request.getfixturevalue("postgres_url")
    trace = Trace()
    trace.watch(monkeypatch)
    night = Night(tmp_path, **settings)
    try:
        with night.worker():
            done = night.run(depth=4, prompt_depths=[[60, 0]])
        found = view_of(night, done)
        assert found == sorted(trace.rows())
        assert {row[4] for row in found} == set(KINDS)
        assert len({row[5] for row in found}) > 2, "several proposers and none"
        spent = Counter[tuple[int, int]]()
        for row in found:
            spent[row[:2]] += row[10]
        for c in done.completions:
            assert spent[c.row_index, c.sample_index] == c.ticks.total
            assert c.cost_usd == pytest.approx(c.compute_sec * PRICE_USD / 3600)
    finally:
        night.store.close()
