"""What a job will cost, by what earlier ones of its name did, and when it ends. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PastJob:
    """What a finished job cost: reading its prompts, and all else, lost time included."""

    prefill_usd: float
    other_usd: float
    prompt_tokens: int
    completion_tokens: int
    completions: int
    seconds: float  # of devices

    @property
    def usd_per_1k_prompt(self) -> float:
        return 1000 * self.prefill_usd / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def usd_per_1k_completion(self) -> float:
        return 1000 * self.other_usd / self.completion_tokens if self.completion_tokens else 0.0

    @property
    def tokens_per_completion(self) -> float:
        return self.completion_tokens / self.completions if self.completions else 0.0


@dataclass(frozen=True, slots=True)
class Range:
    """The middle one of some values, the least and the largest."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Each figure is what one of the jobs would say: they differ, and the next one may, too."""

    jobs: int
    usd: Range
    completion_tokens: Range
    usd_per_1k_prompt: Range
    usd_per_1k_completion: Range
    sec: Range  # of one device


def forecast(
    history: Sequence[PastJob], prompt_tokens: int, completions: int, most_completion_tokens: int
) -> Forecast | None:
    """None without history. `most_completion_tokens`: what the job allows in all."""
    past = [job for job in history if job.completion_tokens]
    if not past:
        return None
    tokens = [min(completions * j.tokens_per_completion, most_completion_tokens) for j in past]
    usd = [
        (prompt_tokens * job.usd_per_1k_prompt + expected * job.usd_per_1k_completion) / 1000
        for job, expected in zip(past, tokens, strict=True)
    ]
    sec = [
        job.seconds * expected / job.completion_tokens
        for job, expected in zip(past, tokens, strict=True)
    ]
    return Forecast(
        jobs=len(past),
        usd=_range(usd),
        completion_tokens=_range(tokens),
        usd_per_1k_prompt=_range([job.usd_per_1k_prompt for job in past]),
        usd_per_1k_completion=_range([job.usd_per_1k_completion for job in past]),
        sec=_range(sec),
    )


def ends_at(
    now: float, begun: float, rows_done: int, rows: int, usual_sec: float | None
) -> float | None:
    """When a job ends at its speed since it began; before the first row, after the usual time from
    now on. `rows` is 0 until all of the input is read. None: nobody knows."""
    if rows_done and rows:
        return now + (now - begun) * max(rows - rows_done, 0) / rows_done
    if rows_done or usual_sec is None:
        return None
    return now + usual_sec


def _range(values: Sequence[float]) -> Range:
    ordered = sorted(values)
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return Range(middle, ordered[0], ordered[-1])
