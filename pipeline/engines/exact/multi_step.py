"""Several passes in one call, for a step without drafts: Python between them would take up to two
fifths of a small model's time."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from specbatch.kernels.multi_step.contract import Generated
from specbatch.pipeline.engines.exact.model.batch import Chunk
from specbatch.pipeline.engines.exact.model.runner import ModelRunner
from specbatch.pipeline.engines.exact.sampling.sampling import Columns, sampling_rows
from specbatch.pipeline.engines.state.kv_blocks import BlockManager
from specbatch.pipeline.engines.state.sequence import Sequence
from specbatch.pipeline.engines.state.step import Step


def is_possible(step: Step) -> bool:
    """Whether each pass of the step needs only the tokens of the one before, but for sampling.

    A first token is not kept waiting for others.
    """
    if not (step.draft_plan.multi_step and step.decoding) or step.is_watched:
        return False
    return all(sequence.num_output for sequence in step.deciding)


def generate(
    runner: ModelRunner, deciding: Seq[Sequence], columns: Columns, room: Seq[int]
) -> Generated:
    """Decide a token of each sequence, and up to `room[i]` more, for which there are KV blocks."""
    one_each = [1] * len(deciding)
    rows, counters = sampling_rows(deciding, one_each, runner.device, columns=columns)
    chunks = [Chunk(s.kv, s.tokens[-1:], 1) for s in deciding]
    return runner.generate(chunks, [1 + more for more in room], columns.stops, counters, rows)


def commit(step: Step, generated: Generated, blocks: BlockManager) -> list[Sequence]:
    """Append what was decided. Returns the sequences whose last logits were NaN."""
    failed = []
    step.passes_made = max(generated.made)
    for sequence, tokens, logprobs, made in zip(step.deciding, *generated, strict=True):
        if math.isnan(logprobs[made - 1]):
            failed.append(sequence)
            made -= 1
        if made:
            sequence.append(tokens[:made], logprobs[:made])
        step.emitted[sequence] = made
        blocks.trim(sequence.kv, len(sequence.tokens) - 1)
    return failed
