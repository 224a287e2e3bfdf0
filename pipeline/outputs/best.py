"""The best completions of each prompt: those that a job with `output.keep_best` publishes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter

from specbatch.schemas.records import CompletionRecord


def best_of_each(rows: Iterable[CompletionRecord], keep: int | None) -> Iterator[CompletionRecord]:
    """`keep` of every row's completions, by sample; all of them if it is None. `rows` are by (row,
    sample), with their log-probabilities.

    First those that have not failed and are not kept back. Of these the ones with the highest
    score; where there is none, behind them, the ones with the highest mean log-probability.
    """
    for _, samples in groupby(rows, key=attrgetter("row_index")):
        chosen = sorted(samples, key=_standing)[:keep]
        yield from sorted(chosen, key=attrgetter("sample_index"))


def _standing(record: CompletionRecord) -> tuple[bool, float, float, int]:
    is_out = record.has_failed or record.is_withheld
    score = -math.inf if record.score is None else record.score
    return is_out, -score, -_mean(record.logprobs), record.sample_index


def _mean(logprobs: tuple[float, ...]) -> float:
    mean = math.fsum(logprobs) / len(logprobs) if logprobs else -math.inf
    return -math.inf if math.isnan(mean) else mean
