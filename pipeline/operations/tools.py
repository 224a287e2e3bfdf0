"""What commands need besides a worker: exports, replays and results, wired."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.schemas.errors import (
    MissingExtraError,
    ModelError,
    SpecbatchError,
    UsageError,
)
from specbatch.schemas.extras import require_engine_extra
from specbatch.schemas.fingerprint import TEMPLATE, Models
from specbatch.schemas.picks import Pick
from specbatch.schemas.policies import Decided, Place, PolicyInput, Reviews
from specbatch.schemas.records import CompletionRecord, JobRow, PromptRow, Prompts
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec, spec_of

if TYPE_CHECKING:  # the light install has no torch and no pyarrow
    from specbatch.pipeline.inputs.tokenizer import TextTokenizer
    from specbatch.pipeline.operations.audit import Auditor
    from specbatch.pipeline.operations.export import Exporter
    from specbatch.pipeline.operations.picks import Picks
    from specbatch.pipeline.operations.replay import Replays
    from specbatch.pipeline.operations.results import Results
    from specbatch.pipeline.operations.spot_checks import SpotChecks
    from specbatch.pipeline.storage.objects import Objects

log = logging.getLogger(__name__)

UNREAD = "its text cannot be read here: run this where the workspace and the model are"


def make_auditor(settings: Settings, store: Store) -> Auditor:
    """An auditor of jobs. Only its replays need the engine extra."""
    from specbatch.pipeline.operations.audit import Auditor
    from specbatch.pipeline.runtime.anchors import Anchors

    objects = _objects(settings)
    anchors = Anchors.of_settings(settings, objects)
    return Auditor(store, objects, partial(make_replays, settings, store), anchors)


def make_replays(
    settings: Settings,
    store: Store,
    job: JobRow,
    verifier: str | None = None,
    given_spec: Mapping[str, Any] | None = None,
    proposer: str | None = None,
    tests_again: bool = False,
) -> Replays:
    """What replays a job's completions; `verifier` and `proposer` are the folders of its models, if
    these moved. `given_spec`: the job's, if it was purged. `tests_again`: ratio tests are done
    again, with the draft model that they need.

    Raises `ModelError` for another model than the job's, `MissingExtraError` and `UsageError`.
    """
    require_engine_extra()
    from specbatch.pipeline.engines.exact.model.device import DeviceOptions
    from specbatch.pipeline.engines.exact.replayer import Replayer
    from specbatch.pipeline.engines.models.model_folder import inspect_model
    from specbatch.pipeline.inputs.rows import RowChecker
    from specbatch.pipeline.inputs.tokenizer import TextTokenizer
    from specbatch.pipeline.operations.given import proved_spec
    from specbatch.pipeline.operations.replay import (
        Replays,
        check_draft_model,
        check_model,
        uses_ratio_tests,
    )

    objects = _objects(settings)
    spec = proved_spec(objects.cipher, job, given_spec)
    folder = inspect_model(verifier or spec.verifier)
    check_model(job, spec, folder)
    drafting = None
    if tests_again and uses_ratio_tests(spec) and (ref := proposer or spec.draft_model) is not None:
        drafting = inspect_model(ref)
        check_draft_model(job, drafting)
    device = DeviceOptions(settings.device, settings.cuda_graphs)
    device.check()
    replayer = Replayer(
        folder,
        spec.engine.resolved(job.numeric_class),
        device,
        settings.kv_cache_bytes,
        settings.max_batch_tokens,
        drafting,
    )
    tokenizer = TextTokenizer.load(str(folder.path))
    checker = RowChecker(
        spec, tokenizer, folder.context_tokens, folder.vocab_size, today=job.created_at
    )
    return Replays(store, objects, job, spec, tokenizer, replayer, checker)


def held_completions(
    settings: Settings, store: Store, job: JobRow, reviews: Reviews
) -> dict[Place, CompletionRecord]:
    """The completions that wait for a review, as they would be published. Those that cannot be read
    here are missing: the files or the model's tokenizer are elsewhere, or the light install cannot
    read them."""
    waiting = {place: reviews.held[place] for place in reviews.pending}
    if not waiting or find_spec("pyarrow") is None or find_spec("transformers") is None:
        return {}
    from specbatch.pipeline.stages.whole_results import held_back

    try:
        spec = spec_of(job)
        decode = _tokenizer_of(job.verifier).decode
        return held_back(store, _objects(settings), job, spec, decode, waiting)
    except SpecbatchError as error:
        log.info("texts that are held back are out of reach: %s", error)
        return {}


def check_readable(
    job: JobRow,
    reviews: Reviews,
    decided: Mapping[Place, Decided],
    found: Collection[Place],
) -> None:
    """Raise `UsageError` if a text that would be released is not among those that were found."""
    for place in reviews.pending:
        if decided.get(place) is Decided.RELEASED and place not in found:
            raise UsageError(f"row {called(place)} of job {job.job_id} is not released: {UNREAD}")


def called(place: Place, several: bool = False) -> str:
    """`3` or `3/1`. `several`: prompts have several completions."""
    row, sample = place
    return f"{row}/{sample}" if sample or several else f"{row}"


def models_now(spec: JobSpec) -> Models:
    """The models that a job of this spec would pin here and now. Raises `ModelError`."""
    require_engine_extra()
    from specbatch.pipeline.engines.models.identity import check_models, models_of
    from specbatch.pipeline.engines.models.model_folder import inspect_model

    return models_of(spec, *check_models(inspect_model, spec))


def first_rows(
    settings: Settings, job: JobRow, groups: Sequence[Prompts]
) -> list[PromptRow] | None:
    """The first row of each group of a job, with its id as the store has it.

    None if prompts cannot be read: they are not here, or the light install cannot read Arrow files.
    """
    if find_spec("pyarrow") is None:
        return None
    from specbatch.pipeline.storage.prompts import reader

    try:
        privacy = Privacy.of_settings(settings)
        read = reader(_objects(settings), job, files=2)
        found = [read(prompts)[0] for prompts in groups]
        return [replace(row, row_id=privacy.row_id(job, row.row_id)) for row in found]
    except SpecbatchError as error:
        log.info("prompts are out of reach: %s", error)
        return None


def prompt_row(
    settings: Settings, job: JobRow, prompts: Prompts, row_index: int
) -> PromptRow | None:
    """One row of a group's prompts; None in a light install, or if the row does not exist.

    Raises `ObjectError` if the file cannot be read.
    """
    if find_spec("pyarrow") is None:
        return None
    from specbatch.pipeline.storage.prompts import rows_of

    rows = rows_of(_objects(settings), job, prompts)
    return next((row for row in rows if row.row_index == row_index), None)


def make_exporter(settings: Settings, store: Store) -> Exporter:
    """An exporter for jobs of a store. Raises `MissingExtraError` without pyarrow."""
    _require_arrow("exports are Parquet and need", "export where the workers are")
    from specbatch.pipeline.operations.export import Exporter
    from specbatch.pipeline.storage.objects import Objects

    return Exporter(store, Objects.of_settings(settings), _objects(settings))


def make_results(settings: Settings, store: Store, job: JobRow) -> Results:
    """The rows of a job, from its output or the store. Raises `MissingExtraError`."""
    _require_arrow("reading results needs", "look at them where the workers are")
    from specbatch.pipeline.operations.results import results_of

    return results_of(store, _objects(settings), job)


def make_spot_checks(settings: Settings, store: Store) -> SpotChecks:
    """What checks jobs by lot. Raises `MissingExtraError`."""
    _require_arrow("spot checks need", "check where the workers are")
    from specbatch.pipeline.operations.spot_checks import SpotChecks

    return SpotChecks(store, _objects(settings))


def make_picks(settings: Settings, store: Store, pick: Pick) -> Picks:
    """What puts a pick of the input as it is now together.

    Raises `MissingExtraError`, `InputError` and `ObjectError`.
    """
    _require_arrow("picks need", "pick where the workers are")
    from specbatch.pipeline.operations.picks import Picks, input_identity

    objects = _objects(settings)
    tokenizer = cache(lambda: _tokenizer_of(pick.job.verifier))
    pick = replace(pick, input=input_identity(pick, objects))
    return Picks(store, objects, pick, lambda ids: tokenizer().decode(ids))


def judge_tokenizer(pick: Pick) -> TextTokenizer:
    """The tokenizer of the verifier that is asked about candidates.

    Raises `UsageError` if its chat template takes no question, `ModelError` and
    `MissingExtraError`.
    """
    tokenizer = _tokenizer_of(pick.job.verifier)
    from specbatch.pipeline.inputs.contract import RowError
    from specbatch.pipeline.moderation.judge import question_ids

    anything = PolicyInput("text", "prompt", "id", None, "stop")
    try:
        question_ids(pick.section.by.prompt or "", [anything], tokenizer, time.time())
    except RowError as error:
        raise UsageError(f"`{pick.job.verifier}` cannot be asked as a judge: {error}") from None
    return tokenizer


def have_one_chat_template(first: str, second: str) -> bool:
    """Whether two models render chats alike, as far as their files are here."""
    from specbatch.pipeline.engines.models.model_folder import inspect_model

    try:
        parts = [inspect_model(ref).fingerprint.parts for ref in (first, second)]
    except ModelError:
        return True
    return parts[0].get(TEMPLATE) == parts[1].get(TEMPLATE)


def check_share_a_vocabulary(first: str, second: str) -> None:
    """Raise `ModelError` for two models of different tokens, as far as their files are here."""
    from specbatch.pipeline.engines.models.model_folder import check_pair, inspect_model

    try:
        folders = inspect_model(first), inspect_model(second)
    except ModelError as error:
        log.info("models are not compared before the check: %s", error)
        return
    check_pair(*folders)


def _require_arrow(what: str, otherwise: str) -> None:
    missing = [name for name in ("pyarrow", "numpy") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f"{what} {' and '.join(missing)}, which this install lacks: "
            f"`pip install 'specbatch[engine]'`, or {otherwise}"
        )


def _objects(settings: Settings) -> Objects:
    """For commands that a person waits for: an S3 that does not answer is reported in seconds."""
    from specbatch.pipeline.storage.objects import ASKED_RETRY_SEC, Objects

    return Objects.of_settings(settings, ASKED_RETRY_SEC)


def _tokenizer_of(model: str) -> TextTokenizer:
    require_engine_extra()
    from specbatch.pipeline.engines.models.model_folder import inspect_model
    from specbatch.pipeline.inputs.tokenizer import TextTokenizer

    return TextTokenizer.load(str(inspect_model(model).path))
