"""Which models a job runs with: checked before it starts, and noted in its report."""

from __future__ import annotations

from collections.abc import Callable

from specbatch.pipeline.engine.model_folder import ModelFolder, check_pair
from specbatch.pipeline.engine.quantised import fingerprint_of
from specbatch.schemas.spec import JobSpec


def check_models(
    models: Callable[[str], ModelFolder], spec: JobSpec
) -> tuple[ModelFolder, ModelFolder | None]:
    """The job's verifier and its proposer, if it names one. Raises `ModelError`."""
    verifier = models(spec.verifier)
    proposer = models(spec.proposer) if spec.proposer else None
    if proposer is not None:
        check_pair(verifier, proposer)
    return verifier, proposer


def identity_of(
    spec: JobSpec, input_format: str, verifier: ModelFolder, proposer: ModelFolder | None
) -> dict[str, str]:
    """What the report keeps of input and models, so that it can be told later what decided."""
    engine = spec.engine
    identity = {
        "input_format": input_format,
        "verifier_sha256": fingerprint_of(verifier.fingerprint, engine.verifier_weights),
        "verifier_weights": engine.verifier_weights,
    }
    if proposer is not None:
        identity["proposer_sha256"] = fingerprint_of(proposer.fingerprint, engine.proposer_weights)
    return identity
