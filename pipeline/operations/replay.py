"""Checks a job's completions again: sampled ones teacher-forced, or one generated anew.

Prompts come from the job's workspace, everything else from the store. Only the model that decided a
completion can replay it, so its fingerprint is checked first.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from specbatch.pipeline.audit.receipts import differing
from specbatch.pipeline.engines.contract import Completion, Grammar, ModelFolder, Request
from specbatch.pipeline.engines.exact.recheck import Difference
from specbatch.pipeline.engines.exact.replayer import Comparison, Replayer
from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL
from specbatch.pipeline.engines.models.fingerprint import fingerprint_of
from specbatch.pipeline.engines.models.model_folder import config_and_weights_sha256
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.operations.audit import Replayed
from specbatch.pipeline.operations.given import Given, proved_row
from specbatch.pipeline.stages.requests import requests_of
from specbatch.pipeline.stages.texts import with_text
from specbatch.pipeline.storage.objects import Objects
from specbatch.pipeline.storage.prompts import reader
from specbatch.schemas.audit import Finding, FindingKind, KeptCompletion
from specbatch.schemas.errors import ModelError, ObjectError, UsageError
from specbatch.schemas.fingerprint import compared, shown
from specbatch.schemas.mapper import as_float32
from specbatch.schemas.numeric_class import UNKNOWN, class_note, samples_by_seed
from specbatch.schemas.privacy import NOT_KEPT
from specbatch.schemas.provenance import pass_depths
from specbatch.schemas.records import FINISHED, CompletionRecord, JobRow, PromptRow, Verification
from specbatch.schemas.spec import JobSpec

_SAMPLED = "sampled by vLLM, whose choices also depend on its drafts and its batch"
_OUT_OF_REACH = "its prompt is out of reach"


@dataclass(frozen=True, slots=True)
class Twice:
    """A completion as stored and as generated now."""

    kept: CompletionRecord
    fresh: CompletionRecord
    unsealed: tuple[str, ...] | None = None  # parts that differ from a receipt; None: without one

    @property
    def differing(self) -> list[str]:
        """Names of the fields, or parts of the receipt, that are not equal bit for bit."""
        if self.unsealed is not None:
            return list(self.unsealed)
        old, new = self.kept, self.fresh
        same = {
            "token_ids": tuple(old.token_ids) == tuple(new.token_ids),
            "logprobs": _bits(old.logprobs) == _bits(new.logprobs),
            "text": old.text == new.text,
            "finish_reason": old.finish_reason == new.finish_reason,
        }
        return [name for name, is_same in same.items() if not is_same]


class Replays:
    """Checks one job's completions with one verifier."""

    def __init__(
        self,
        store: Store,
        objects: Objects,
        job: JobRow,
        spec: JobSpec,
        tokenizer: TextTokenizer,
        replayer: Replayer,
        checker: RowChecker,
    ) -> None:
        self._store = store
        self._objects = objects
        self._checker = checker
        self._job = job
        self._is_private = not job.privacy.is_full or job.purged_at is not None
        self._spec = spec
        self._tokenizer = tokenizer
        self._replayer = replayer
        self._read = reader(objects, job, files=2)

    def check(self, keys: Iterable[tuple[int, int]]) -> Iterator[Replayed]:
        """Each of these completions, teacher-forced."""
        out_of_reach = False
        for row, sample in keys:
            if self._is_private:
                yield Replayed(skipped="its tenant's texts are not kept")
                continue
            kept = self._store.kept_one(self._job.job_id, row, sample)
            if kept is None or kept.record is None:
                yield Replayed(skipped="it cannot be read")
                continue
            if out_of_reach:  # all others would be too, each after a timeout
                yield Replayed(skipped=_OUT_OF_REACH)
                continue
            try:
                yield self._compare(kept, kept.record)
            except ObjectError as error:
                out_of_reach = error.passing
                yield Replayed(skipped=_OUT_OF_REACH if out_of_reach else "its prompt is gone")

    def _compare(self, kept: KeptCompletion, record: CompletionRecord) -> Replayed:
        if any(token < 0 for token in record.token_ids):
            return Replayed(skipped="its tokens are not kept")
        if (other := self._of_another_model(record)) is not None:
            return Replayed(skipped=f"decided by another model ({shown(other)})")
        row = self._prompt(kept)
        if row is None:
            what = f"{_name(record)} has no prompt in its group"
            return Replayed(findings=[_finding(FindingKind.INPUT, record, what)])
        request = self._request(row, record)
        findings = list(_of_input(record, row, request))
        if is_tested(self._spec, request):
            return Replayed(findings=findings, skipped="it was decided by a ratio test")
        if request.params.temperature and not samples_by_seed(record.numeric_class):
            return Replayed(findings=findings, skipped=f"it was {_SAMPLED}")
        compared = self._replayer.replay(request, record.token_ids, record.finish_reason)
        if compared is None:
            return Replayed(findings=findings, skipped="it does not fit the KV cache here")
        findings += self._found(record, compared)
        done = self._with_text(replace(record, error=None), row)
        if done.text != record.text:
            what = f"{_name(record)} has a text that its tokens do not make"
            findings.append(_finding(FindingKind.ENDING, record, what))
        if done.finish_reason is not record.finish_reason:
            what = f"{_name(record)} ended by {done.finish_reason}, and says another reason"
            findings.append(_finding(FindingKind.ENDING, record, what))
        if record.finish_reason in FINISHED and done.error != record.error:
            what = f"{_name(record)} has another verdict on its response format than its text gives"
            findings.append(_finding(FindingKind.ENDING, record, what))
        note = class_note(record.numeric_class, self._replayer.numeric_class)
        return Replayed(len(record.token_ids), findings, note=note)

    def _found(self, record: CompletionRecord, compared: Comparison) -> Iterator[Finding]:
        for difference in compared.differences:
            yield self._difference(record, difference)
        if compared.ending is not None:
            what = f"{_name(record)} {compared.ending}"
            yield _finding(FindingKind.ENDING, record, what)

    def _difference(self, record: CompletionRecord, found: Difference) -> Finding:
        near = self._replayer.near_tie(found.margin)
        kind = FindingKind.NEAR_TIE if near else FindingKind.TOKEN
        called = "a near tie" if near else "a fault"
        margin = found.margin if math.isfinite(found.margin) else None
        by = f"by {margin:.3g} logits" if margin is not None else "by more than any number"
        what = (
            f"{_name(record)} has token {found.written} at position {found.position}, where the "
            f"verifier decides {found.decided} {by}: {called} in {self._replayer.dtype}"
        )
        return Finding(
            kind,
            what,
            row=record.row_index,
            sample=record.sample_index,
            position=found.position,
            written=found.written,
            decided=found.decided,
            margin=margin,
        )

    def again(self, row_index: int, sample: int, given: Given | None = None) -> Twice:
        """Generate one completion again, without drafts. `given`: its row, which its receipt has
        to prove; then the receipt is also what the new output is compared with.

        Raises `UsageError` if there is no completion, or none that can be compared, and
        `ObjectError` if its prompt is gone.
        """
        if self._is_private and given is None:
            raise UsageError(
                f"texts of job {self._job.job_id} are not kept: give the text of row {row_index} "
                "with --prompt FILE, or the whole row with --row FILE"
            )
        kept = self._store.kept_one(self._job.job_id, row_index, sample)
        if kept is None or kept.record is None:
            raise UsageError(
                f"job {self._job.job_id} has no readable completion of row {row_index}, "
                f"sample {sample}"
            )
        if not self._is_private and NOT_KEPT in kept.record.token_ids:
            raise UsageError(
                f"row {row_index}, sample {sample}, is not written again: a content policy "
                "withholds or redacts it"
            )
        if (other := self._of_another_model(kept.record)) is not None:
            raise UsageError(
                f"row {row_index} was decided by another model (fingerprint {shown(other)}) than "
                f"here ({shown(str(self._replayer.model_fingerprint))}): it cannot be compared"
            )
        row = self._prompt(kept) if given is None else self._proved(kept.record, given)
        if row is None:
            raise UsageError(f"row {row_index} is not among the prompts of its group")
        request = self._request(row, kept.record)
        if request.params.temperature and not samples_by_seed(kept.record.numeric_class):
            raise UsageError(f"row {row_index} was {_SAMPLED}: it cannot be written again")
        if given is not None:
            request = replace(request, seed=kept.record.seed)  # as sampled: the row lost its own
        written = self._tested_again if is_tested(self._spec, request) else self._written_again
        fresh = self._as_record(kept.record, row, written(request, kept.record))
        return Twice(kept.record, fresh, None if given is None else self._unsealed(fresh))

    def _written_again(self, request: Request, _kept: CompletionRecord) -> Completion:
        return self._replayer.again(request)

    def _tested_again(self, request: Request, kept: CompletionRecord) -> Completion:
        """By the ratio test, with drafts as deep as they were. Raises `UsageError`."""
        sources, drafted = kept.provenance.sources, kept.provenance.drafted
        if set(sources) - {DRAFT_MODEL}:
            raise UsageError(
                f"row {kept.row_index} was decided by a ratio test with drafts of "
                f"{', '.join(sources)}: only drafts of the job's main draft model can be made again"
            )
        return self._replayer.tested_again(request, pass_depths(kept.origins, drafted))

    def _proved(self, record: CompletionRecord, given: Given) -> PromptRow:
        objects = self._objects
        of = (objects, objects.cipher, self._job, self._spec, self._checker)
        return proved_row(*of, record, given)

    def _unsealed(self, fresh: CompletionRecord) -> tuple[str, ...]:
        assert self._objects.cipher is not None, "the row was proved with it"
        assert fresh.receipt is not None, "and by this"
        return differing(self._objects.cipher, fresh.receipt, self._job.job_id, fresh)

    def _as_record(
        self, kept: CompletionRecord, row: PromptRow, fresh: Completion
    ) -> CompletionRecord:
        record = replace(
            kept,
            token_ids=fresh.token_ids,
            logprobs=as_float32(fresh.logprobs),
            finish_reason=fresh.finish_reason,
            error=fresh.error,
            numeric_class=self._replayer.numeric_class,
            model_fingerprint=self._replayer.model_fingerprint,
        )
        return self._with_text(record, row)

    def _of_another_model(self, record: CompletionRecord) -> str | None:
        """The fingerprint of the model that decided a completion; None if it is the one here."""
        found = record.model_fingerprint
        return None if found in (None, self._replayer.model_fingerprint) else found

    def _prompt(self, kept: KeptCompletion) -> PromptRow | None:
        prompts = self._store.prompts_of(self._job.job_id, kept.group_index)
        if prompts is None:
            return None
        rows = (row for row in self._read(prompts) if row.row_index == kept.row_index)
        return next(rows, None)

    def _request(self, row: PromptRow, record: CompletionRecord) -> Request:
        """The request that a completion answers: if it was mended, a longer one or a retry."""
        decode = self._tokenizer.decode
        made = requests_of(self._job.job_id, self._spec, row, decode, grammar_of=self._grammar_of)
        request = made[record.sample_index]
        tokens = len(record.origins)  # which a purge leaves
        of = (request.params, request.seed, record.seed, tokens)
        params, seed = self._spec.output.malformed.decided_by(*of)
        return replace(request, params=params, seed=seed)

    def _grammar_of(self, response_format: str) -> Grammar:
        return self._tokenizer.grammar(response_format, self._replayer.vocab_size)

    def _with_text(self, record: CompletionRecord, row: PromptRow) -> CompletionRecord:
        texts = self._tokenizer.decode_batch([record.token_ids])
        [done] = with_text([record], texts, [row], self._spec, self._tokenizer.decode)
        return done


def is_tested(spec: JobSpec, request: Request) -> bool:
    """Whether a ratio test decided the output, so that it depends on drafts too."""
    return request.params.temperature != 0 and uses_ratio_tests(spec)


def uses_ratio_tests(spec: JobSpec) -> bool:
    return spec.speculation.verification is not Verification.COUPLED


def check_draft_model(job: JobRow, draft_model: ModelFolder) -> None:
    """Raise `ModelError` unless this is the draft model that the job's outputs depend on."""
    found = draft_model.fingerprint.digest
    if job.proposer_fingerprint != found:
        raise ModelError(
            f"draft model `{draft_model.ref}` ({shown(found)}) is not the one that the tokens of "
            f"job {job.job_id} depend on ({shown(job.proposer_fingerprint or UNKNOWN)}): name that "
            "one's folder with --proposer"
        )


def check_model(job: JobRow, spec: JobSpec, verifier: ModelFolder) -> None:
    """Raise `ModelError` unless this is the model that decided the job's tokens."""
    where = "name that one's folder with --verifier"
    if job.model_fingerprint not in (None, UNKNOWN):
        if job.model_fingerprint != verifier.fingerprint.digest:
            raise ModelError(
                f"model `{verifier.ref}` is not the one that decides the tokens of job "
                f"{job.job_id}, it has "
                f"{compared(job.model_fingerprint, job.model_parts, verifier.fingerprint)}: {where}"
            )
        return
    known = job.report.get("verifier_sha256")
    if known is None:
        raise ModelError(f"job {job.job_id} does not say which model decided its tokens")
    found = fingerprint_of(config_and_weights_sha256(verifier), spec.engine.verifier_weights)
    if known != found:
        raise ModelError(
            f"model `{verifier.ref}` ({found[:12]}) is not the one that decided the tokens of job "
            f"{job.job_id} ({known[:12]}): {where}"
        )


def _of_input(record: CompletionRecord, row: PromptRow, request: Request) -> Iterator[Finding]:
    """Differences between a completion's facts about its prompt and the prompts file."""
    said = {"seed": request.seed, "prompt_tokens": len(row.prompt_ids)}
    for name, value in said.items():
        if getattr(record, name) != value:
            what = f"{_name(record)} has another {name} than its prompt: {value!r}"
            yield _finding(FindingKind.INPUT, record, what)


def _name(record: CompletionRecord) -> str:
    return f"the completion of row {record.row_index}, sample {record.sample_index}"


def _finding(kind: FindingKind, record: CompletionRecord, what: str) -> Finding:
    return Finding(kind, what, row=record.row_index, sample=record.sample_index)


def _bits(values: Iterable[float]) -> bytes:
    return array("f", as_float32(values)).tobytes()
