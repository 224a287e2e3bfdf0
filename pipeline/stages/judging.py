"""Asking about a group's completions, on the worker that has verified them.

The verifier answers in tickets of its own, whose device time is the group's. An entry point of
another package answers in a process of its own, and may fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from specbatch.pipeline.engines.contract import Completion, Engines, Request, Ticket
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.moderation.hooks import HookFailedError, Hooks
from specbatch.pipeline.moderation.judge import question_ids
from specbatch.pipeline.policy.costs.pricing import cost_units
from specbatch.pipeline.runtime.tokenizers import Tokenizers
from specbatch.pipeline.stages.texts import with_text
from specbatch.schemas.policies import Place, PolicyInput
from specbatch.schemas.provenance import Ticks
from specbatch.schemas.records import (
    FINISHED,
    CompletionRecord,
    JobRow,
    PromptRow,
    SamplingParams,
    request_id_of,
)
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.timekeeping import usd_of

MOST_FAILURES = 3  # in a row; nothing more is asked about the group then

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Judging:
    """Asks the verifier about completions of a group's rows: for policies and for scores."""

    job: JobRow
    spec: JobSpec
    rows: Sequence[PromptRow]
    tokenizers: Tokenizers
    hooks: Hooks
    engines: Engines
    tickets: list[Ticket]  # questions to the verifier are added: their time is the group's
    price_microusd: int  # of an hour of the device

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.tokenizers.of_job(self.job)

    def with_texts(
        self, records: Sequence[CompletionRecord]
    ) -> tuple[list[CompletionRecord], list[str]]:
        """The records with their texts, and the texts of all their tokens."""
        tokenizer = self.tokenizer
        texts = tokenizer.decode_batch([record.token_ids for record in records])
        return with_text(records, texts, self.rows, self.spec, tokenizer.decode), texts

    def inputs(self, records: Sequence[CompletionRecord]) -> dict[Place, PolicyInput]:
        """What is shown of records with texts, of those that have finished."""
        tokenizer = self.tokenizer
        prompts = {row.row_index: tokenizer.decode(row.prompt_ids) for row in self.rows}
        return {
            place_of(record): PolicyInput(
                text=record.text,
                prompt=prompts[record.row_index],
                row_id=record.row_id,
                tag=record.tag,
                finish_reason=record.finish_reason.value,
            )
            for record in records
            if record.finish_reason in FINISHED
        }

    def of_verifier(
        self,
        name: str,
        prompt: str,
        given: Mapping[Place, PolicyInput],
        answers: Sequence[SamplingParams],
    ) -> list[tuple[Completion, ...]]:
        """What the verifier answers to the question `prompt` about each completion, once for each
        of `answers`, which say what form it has.

        Raises `RowError` if the model's chat template takes no such question, and
        `RequestCancelledError`.
        """
        if not given:
            return []
        tokenizer = self.tokenizer
        prompts = question_ids(prompt, given.values(), tokenizer, self.job.created_at)
        ends, vocab_size = tuple(tokenizer.eos_ids), self.engines.model.vocab_size
        requests = [
            Request(
                request_id=f"{request_id_of(self.job.job_id, *place)}/{name}/{number}",
                prompt_ids=tuple(ids),
                params=replace(params, stop_token_ids=ends),
                seed=0,
                depth=0,
                grammar=tokenizer.grammar(params.form, vocab_size),
            )
            for place, ids in zip(given, prompts, strict=True)
            for number, params in enumerate(answers)
        ]
        # No request of the job: what the job teaches about drafts is not told to this ticket, and
        # answers are given to the end though the job is stopped.
        service = self.engines.service(self.spec.engine)
        ticket = service.submit(f"{self.job.job_id}/policies", requests)
        self.tickets.append(ticket)
        done = ticket.wait()
        each = len(answers)
        return [tuple(done[first : first + each]) for first in range(0, len(done), each)]

    def charged(self, record: CompletionRecord, ticks: int) -> CompletionRecord:
        """With the device time of its judge, which is overhead of its own."""
        if not ticks:
            return record
        usd = usd_of(cost_units(ticks, self.price_microusd))
        return replace(
            record, ticks=record.ticks + Ticks(overhead=ticks), cost_usd=record.cost_usd + usd
        )


@dataclass(slots=True)
class Asker(Generic[T]):
    """Asks about one completion after the other what may fail."""

    ask: Callable[[PolicyInput], T]
    failures: int = 0  # completions without an answer …
    not_asked: int = 0  # … and of these, those that came after too many failures
    in_a_row: int = 0
    why: str = ""  # of the last failure

    @property
    def reason(self) -> str:
        """Why completions have no answer."""
        if not self.not_asked:
            return self.why
        return f"{self.why}; {self.not_asked} not asked after {MOST_FAILURES} failures in a row"

    def timed(self, given: PolicyInput) -> tuple[T | None, float]:
        """Its answer, None where it gave none; and the seconds that it took."""
        if self.in_a_row >= MOST_FAILURES:
            self.failures, self.not_asked = self.failures + 1, self.not_asked + 1
            return None, 0.0
        begun = time.monotonic()
        said = None
        try:
            said, self.in_a_row = self.ask(given), 0
        except HookFailedError as error:
            self.why = str(error)
            self.failures, self.in_a_row = self.failures + 1, self.in_a_row + 1
        return said, time.monotonic() - begun


def place_of(record: CompletionRecord) -> Place:
    return record.row_index, record.sample_index
