"""Training data for draft models: prompts, the verifier's tokens, and where drafts were wrong.

A batch is complete in itself: `prompt_ids` and `token_ids` are what the verifier read and decided,
`logprobs` how sure it was. Only completions that ended well are included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa

from specbatch.pipeline.outputs.export_columns import MASKED
from specbatch.pipeline.outputs.token_table import Bools, Ints, TokenTable, token_table
from specbatch.schemas import export_arrow
from specbatch.schemas.exports import Selection
from specbatch.schemas.records import FINISHED, CompletionRecord

# Reasons for omitting completions, as messages name them.
ENDED_BADLY = "did not end well"
OTHER_TAG = "have another tag"
TOKENS_GONE = "have no tokens any more"
MASKED_TOKENS = "have masked tokens"
COPIED = "are copies of others"
UNTRACED = "are older than the records of drafts"
OTHER_PROPOSER = "were not drafted by this proposer"
FEW_REJECTIONS = "have fewer rejections"

PromptIds = Sequence[int] | None


@dataclass(slots=True)
class Corrections:
    """Chooses completions and makes batches of them. Counts those that it omits."""

    job_id: str
    selection: Selection
    left_out: Counter[str] = field(default_factory=Counter)
    without_prompt: int = 0

    def batch(
        self, records: Sequence[CompletionRecord], prompts: Sequence[PromptIds]
    ) -> pa.RecordBatch:
        """`prompts`: the prompt of each record, None if it is gone."""
        taken = [
            self._is_taken(record, prompt) for record, prompt in zip(records, prompts, strict=True)
        ]
        records, prompts = list(compress(records, taken)), list(compress(prompts, taken))
        table = token_table(records)
        rejections, taken_here = self._rejections(table, records)
        self.without_prompt += sum(p is None for p in compress(prompts, taken_here))
        return _batch(self.job_id, records, prompts, table, rejections, taken_here)

    def _is_taken(self, record: CompletionRecord, prompt: PromptIds) -> bool:
        """Whether a completion is usable, as far as that shows without its drafts."""
        reason = None
        if self.selection.tag is not None and record.tag != self.selection.tag:
            reason = OTHER_TAG
        elif record.finish_reason not in FINISHED:
            reason = ENDED_BADLY
        elif not record.token_ids:
            reason = TOKENS_GONE
        elif _is_masked(record, prompt):
            reason = MASKED_TOKENS
        elif record.reused_from is not None:
            reason = COPIED
        elif not record.provenance.steps or len(record.logprobs) != len(record.token_ids):
            reason = UNTRACED
        if reason is not None:
            self.left_out[reason] += 1
        return reason is None

    def _rejections(
        self, table: TokenTable, records: Sequence[CompletionRecord]
    ) -> tuple[Bools, list[bool]]:
        """Which tokens count as rejections, and which completions have enough of them."""
        rejections, size = table.is_rejection, len(records)
        drafted = np.ones(size, dtype=np.bool_)
        if (name := self.selection.proposer) is not None:
            known = table.sources.index(name) if name in table.sources else len(table.sources)
            by_it = table.source == known
            rejections = rejections & by_it
            drafted = np.bincount(table.completion[by_it], minlength=size) > 0
        enough = np.bincount(table.completion[rejections], minlength=size) >= self.selection.fewest
        self.left_out[OTHER_PROPOSER] += int((~drafted).sum())
        self.left_out[FEW_REJECTIONS] += int((drafted & ~enough).sum())
        return rejections, list(map(bool, drafted & enough))


def _batch(
    job_id: str,
    records: Sequence[CompletionRecord],
    prompts: Sequence[PromptIds],
    table: TokenTable,
    rejections: Bools,
    taken: Sequence[bool],
) -> pa.RecordBatch:
    # The draft tokens that each rejection discarded: its own and those behind it.
    lost = table.drafted - table.draft_position
    weights = np.where(rejections, lost, 1)
    places = np.flatnonzero(rejections)
    sizes = np.bincount(table.completion[places], minlength=len(records))
    names = pa.array(table.sources, pa.string())

    def by_token(name: str, values: Any) -> pa.Array:
        return _lists(name, values, table.counts)

    def by_rejection(name: str, values: Any) -> pa.Array:
        return _lists(name, values, sizes)

    columns = {
        "job_id": pa.repeat(job_id, len(records)),
        **{
            name: [getattr(record, name) for record in records]
            for name in ("row_index", "sample_index", "row_id", "tag", "verifier")
        },
        "prompt_ids": prompts,
        "token_ids": by_token("token_ids", table.token_id),
        "logprobs": by_token("logprobs", [p for r in records for p in r.logprobs]),
        "weights": by_token("weights", weights),
        "rejected_positions": by_rejection("rejected_positions", table.position[places]),
        "rejected_tokens": by_rejection("rejected_tokens", table.rejected[places]),
        "rejected_proposers": by_rejection(
            "rejected_proposers", names.take(pa.array(table.source[places]))
        ),
        "draft_positions": by_rejection("draft_positions", table.draft_position[places]),
        "lost_tokens": by_rejection("lost_tokens", lost[places]),
    }
    schema = export_arrow.CORRECTIONS
    arrays = [
        value if isinstance(value, pa.Array) else pa.array(value, type=schema.field(name).type)
        for name, value in columns.items()
    ]
    whole = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return whole.filter(pa.array(taken, pa.bool_()))


def _lists(name: str, values: Any, sizes: Ints) -> pa.Array:
    """One list per completion, of so many values each."""
    kind = export_arrow.CORRECTIONS.field(name).type
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    flat = values if isinstance(values, pa.Array) else pa.array(np.asarray(values))
    return pa.ListArray.from_arrays(pa.array(offsets), flat.cast(kind.value_type), type=kind)


def _is_masked(record: CompletionRecord, prompt: PromptIds) -> bool:
    return (
        MASKED in record.token_ids
        or MASKED in record.provenance.rejected
        or (prompt is not None and MASKED in prompt)
    )
