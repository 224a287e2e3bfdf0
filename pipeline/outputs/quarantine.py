"""Outputs in quarantine: `malformed.jsonl` beside the data, of a job that does not publish texts
without the form that they were asked for.

Each line is one completion: `id`, `row_index`, `sample_index`, `reason`, `finish_reason`, `text`,
`token_ids`, `completion_tokens`, `seed`, `cost_usd`. In the data its row is an error without a
text. The file holds what the data would have held: of a job whose texts are private elsewhere they
are whole in its output, and what a policy has changed is as the policy left it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from specbatch.pipeline.outputs.names import MALFORMED
from specbatch.schemas.malformed import CODE
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.records import CompletionRecord, FinishReason


class QuarantineFile:
    """Takes malformed completions out of rows while they stream through it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / MALFORMED
        self._count = 0

    def watching(self, rows: Iterable[CompletionRecord]) -> Iterator[CompletionRecord]:
        """The rows in their order; in the place of a malformed one its error."""
        with self._path.open("wb") as file:
            for row in rows:
                if not row.is_malformed:
                    yield row
                    continue
                self._count += 1
                file.write(orjson.dumps(_line(row), option=orjson.OPT_APPEND_NEWLINE))
                yield _error(row)

    def finish(self) -> list[tuple[Path, int]]:
        """(file, lines) after all rows have passed; nothing if there are none."""
        return [(self._path, self._count)] if self._count else []


def _line(row: CompletionRecord) -> dict[str, Any]:
    return {
        "id": row.row_id,
        "row_index": row.row_index,
        "sample_index": row.sample_index,
        "reason": row.error,
        "finish_reason": row.finish_reason.value,
        "text": row.text,
        "token_ids": None if NOT_KEPT in row.token_ids else row.token_ids,
        "completion_tokens": len(row.token_ids),
        "seed": row.seed,
        "cost_usd": row.cost_usd,
    }


def _error(row: CompletionRecord) -> CompletionRecord:
    """Like a quarantined input row, with what it cost."""
    return replace(
        row,
        text="",
        token_ids=(NOT_KEPT,) * len(row.token_ids),
        top_logprobs=None,
        finish_reason=FinishReason.ERROR,
        error=f"{CODE}: {row.error}",
    )
