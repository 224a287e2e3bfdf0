"""The models of a job: checked before it starts, and recorded in its report."""

from __future__ import annotations

from collections.abc import Callable

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.models.fingerprint import fingerprint_of
from specbatch.pipeline.engines.models.model_folder import check_architecture, check_pair
from specbatch.schemas.fingerprint import Models
from specbatch.schemas.numeric_class import UNKNOWN
from specbatch.schemas.records import JobRow, Verification
from specbatch.schemas.spec import JobSpec


def check_models(
    models: Callable[[str], ModelFolder], spec: JobSpec
) -> tuple[ModelFolder, ModelFolder | None]:
    """The job's verifier and its draft model, if it names one. Raises `ModelError`.

    What vLLM drafts with itself is checked where vLLM is.
    """
    verifier = models(spec.verifier)
    if spec.engine.exactness == "bitwise":
        check_architecture(verifier, may_be_vllm=True)  # no engine but ours gives that
    proposer = models(spec.draft_model) if spec.draft_model else None
    if proposer is not None:
        check_pair(verifier, proposer)
    return verifier, proposer


def models_of(spec: JobSpec, verifier: ModelFolder, proposer: ModelFolder | None) -> Models:
    """The models a job pins. Under ratio tests outputs depend on the draft model too."""
    counts = spec.speculation.enabled and spec.speculation.verification is not Verification.COUPLED
    drafts = proposer.fingerprint.digest if proposer is not None and counts else None
    return Models(verifier.fingerprint, drafts)


def identity_of(
    job: JobRow,
    spec: JobSpec,
    input_format: str,
    verifier: ModelFolder,
    proposer: ModelFolder | None,
) -> dict[str, str]:
    """The identity of input and models that the report keeps."""
    engine = spec.engine
    if job.model_fingerprint == UNKNOWN:  # from before: it knows its models otherwise
        return {"input_format": input_format} | {
            name: value for name, value in job.report.items() if name.endswith("_sha256")
        }
    identity = {
        "input_format": input_format,
        "verifier_sha256": fingerprint_of(verifier.fingerprint.digest, engine.verifier_weights),
        "verifier_weights": engine.verifier_weights,
    }
    if verifier.revision is not None:
        identity["verifier_revision"] = verifier.revision
    if proposer is not None:
        drafts = fingerprint_of(proposer.fingerprint.digest, engine.proposer_weights)
        identity["proposer_sha256"] = drafts
    return identity
