"""Finds everything that is wrong with a job before anything is stored or started.

It uses the same parts as the stages, so a job that passes here passes there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specbatch.pipeline.engines.exact.model.quantised import check_weights
from specbatch.pipeline.engines.models.model_folder import (
    check_architecture,
    check_pair,
    inspect_model,
)
from specbatch.pipeline.inputs.contract import READER_BYTES, Source
from specbatch.pipeline.inputs.planner import PlannedGroup, plan
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.moderation.patterns import Patterns
from specbatch.pipeline.outputs.outputs import OutputWriter
from specbatch.pipeline.outputs.table_output import check_apart, prepare
from specbatch.pipeline.stages.tables import check_key, columns_of
from specbatch.pipeline.storage.objects import ASKED_RETRY_SEC, Objects
from specbatch.schemas.best_by import NO_JUDGE_HERE, why_no_choice
from specbatch.schemas.errors import InputError, ObjectError, SpecError, UsageError
from specbatch.schemas.openai_formats import OPENAI_FORMATS
from specbatch.schemas.policies import JUDGE, PATTERNS
from specbatch.schemas.settings import EXACT
from specbatch.schemas.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Checked:
    """A valid job: its input, its row checker and its tokenizer."""

    spec: JobSpec
    source: Source
    checker: RowChecker
    tokenizer: TextTokenizer
    context_tokens: int

    def groups(self) -> Iterator[PlannedGroup]:
        """The groups that the job would have, one by one. Raises `InputError`, `ObjectError`."""
        return plan(self.source, self.checker, self.spec.group_size)


def check_policies(spec: JobSpec, engine: str) -> None:
    """Raise `UsageError` for a pattern that is invalid, and for a judge of `best_by` where `engine`
    cannot be one. Policies and scorers of other packages need not be installed here."""
    for policy in spec.policies:
        if policy.use == PATTERNS:
            Patterns(policy)
    best_by = spec.output.best_by
    if best_by is not None and best_by.use == JUDGE and engine != EXACT:
        raise UsageError(NO_JUDGE_HERE)


def check_best_by(spec: JobSpec, source: Source) -> None:
    """Raise `SpecError` where no row can have more completions than are published."""
    output, column = spec.output, spec.input.sampling_column
    own_n = source.format in OPENAI_FORMATS or column is not None
    problem = why_no_choice(output.best_by, output.keep_best, spec.sampling.n, own_n)
    if problem is not None:
        raise SpecError(f"job spec: {problem}")


def check_job(
    spec: JobSpec,
    s3_endpoint_url: str | None = None,
    is_mine: Callable[[str], bool] = lambda _: False,
    reader_bytes: int = READER_BYTES,
    engine: str = EXACT,
) -> Checked:
    """Raise a `UsageError` that names what is wrong with the models, the input or the output.

    An output that belongs to a job is refused unless `is_mine` accepts that job's id. `engine` will
    verify. Writes nothing.
    """
    objects = Objects(s3_endpoint_url, s3_retry_sec=ASKED_RETRY_SEC)
    verifier = inspect_model(spec.verifier)
    if engine == EXACT:
        check_architecture(verifier, may_be_vllm=True)
    check_weights(spec.engine.verifier_weights)
    if spec.vllm_proposer:
        from specbatch.pipeline.engines.vllm.own_speculation import check_needs  # reads models

        check_needs(spec.vllm_proposer.as_config, verifier)
    if spec.draft_model:
        proposer = inspect_model(spec.draft_model)
        check_architecture(proposer)
        check_pair(verifier, proposer)
        check_weights(spec.engine.proposer_weights)
    check_policies(spec, engine)
    try:
        source = open_source(spec.input, objects, reader_bytes)
        source.check()
        check_best_by(spec, source)
        columns = columns_of(spec, source)
        if spec.output.table is not None:
            check_apart(spec.output.table, spec.output.uri)
            check_key(spec, source)
            prepare(spec.output.table, objects, columns, makes=False)
    except ObjectError as error:
        raise InputError(str(error)) from None
    OutputWriter(objects, spec.output.uri, job_id="").check(is_mine)
    tokenizer = TextTokenizer.load(str(verifier.path))  # last: it imports transformers
    checker = RowChecker(
        spec, tokenizer, verifier.context_tokens, verifier.vocab_size, today=time.time()
    )
    return Checked(spec, source, checker, tokenizer, verifier.context_tokens)
