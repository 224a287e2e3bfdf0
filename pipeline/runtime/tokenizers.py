"""The tokenizers of jobs' verifiers, known by what their files contain and not by their path.

A job pins its tokenizer. One that was loaded for a job serves it whatever happens to the folder
later, and a folder whose files have changed is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.models.fingerprint import unchanged
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.runtime.last_used import LastUsed
from specbatch.schemas.errors import ModelChangedError, ModelError
from specbatch.schemas.fingerprint import TEXT_PARTS, Fingerprint, differing, listed
from specbatch.schemas.numeric_class import UNKNOWN
from specbatch.schemas.records import JobRow

MOST_KEPT = 16

Text = tuple[str, ...]  # `Fingerprint.text`


@contextmanager
def with_its_model(job: JobRow) -> Iterator[None]:
    """Turn a model that cannot be loaded into a `ModelChangedError`, which uses up no attempt.

    The job pinned a model that could be loaded, so its files were replaced or are being replaced.
    """
    try:
        yield
    except ModelChangedError:
        raise
    except ModelError as error:
        if job.model_fingerprint in (None, UNKNOWN):
            raise
        raise ModelChangedError(f"the model that it began with is gone: {error}") from error


class Tokenizers:
    """Loads tokenizers when they are first needed. Thread-safe."""

    def __init__(
        self, load: Callable[[str], TextTokenizer], models: Callable[[str], ModelFolder]
    ) -> None:
        """`load` makes one from a folder's path; `models` inspects a model's folder."""
        self._load = load
        self._models = models
        self._kept: LastUsed[Text, TextTokenizer] = LastUsed(MOST_KEPT)

    def of_job(self, job: JobRow) -> TextTokenizer:
        """The tokenizer that the job has pinned, or that of its verifier's folder if it has none.

        Raises `ModelChangedError` if the folder has another one or none that loads, and
        `ModelError` if the job has pinned none.
        """
        wanted = Fingerprint(job.model_fingerprint or "", job.model_parts).text
        if wanted is not None and (known := self._kept.find(wanted)) is not None:
            return known
        with with_its_model(job):
            return self._of_its_folder(job)

    def _of_its_folder(self, job: JobRow) -> TextTokenizer:
        folder = self._models(job.verifier)
        names = [n for n in differing(job.model_parts, folder.fingerprint.parts) if n in TEXT_PARTS]
        if names:
            raise ModelChangedError(
                f"model `{job.verifier}` has another {listed(names)} than job {job.job_id} began "
                "with: its tokens are of the former one"
            )
        return self.of_folder(folder)

    def of_folder(self, folder: ModelFolder) -> TextTokenizer:
        """The tokenizer of a folder that was just inspected. Raises `ModelError`, and
        `ModelChangedError` if it has changed since."""
        wanted = folder.fingerprint.text
        if wanted is not None and (known := self._kept.find(wanted)) is not None:
            return known
        load = partial(self._load, str(folder.path))
        snapshot, tokenizer = unchanged(folder.ref, folder.path, load)
        if snapshot.fingerprint.text != wanted:
            raise ModelChangedError(f"the tokenizer of model `{folder.ref}` has just changed")
        return tokenizer if wanted is None else self._kept.get(wanted, lambda: tokenizer)
