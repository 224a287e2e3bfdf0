"""Which files a process's models were loaded from, or would be: what its engine host announces.

A model that was loaded keeps the fingerprint of the files that it was read from, whatever lies in
its folder since. One that was not is known as its folder is now. No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from specbatch.pipeline.engines.exact.model.fingerprint import Look, look_at
from specbatch.pipeline.engines.exact.model.model_folder import ModelFolder, inspect_folder
from specbatch.schemas.errors import ModelChangedError
from specbatch.schemas.fingerprint import Fingerprint, differing, listed

log = logging.getLogger(__name__)


class LoadedModels:
    """The verifier and the draft models of one process. One thread at a time."""

    def __init__(self, verifier: ModelFolder, draft_models: Iterable[ModelFolder] = ()) -> None:
        self.verifier = verifier
        self.draft_models = tuple(draft_models)
        self._loaded: dict[str, Fingerprint] = {}  # by name of a model: the files it was read from

    def of(self, folder: ModelFolder) -> Fingerprint:
        """Of what was loaded; of what lay there when it was looked at, where nothing was."""
        return self._loaded.get(folder.ref, folder.fingerprint)

    @property
    def drafts(self) -> tuple[str, ...]:
        """Digests of the draft models, sorted."""
        return tuple(sorted(self.of(folder).digest for folder in self.draft_models))

    def look_again(self) -> bool:
        """Know folders as they are now, if nothing was loaded from them; whether the verifier is
        another one since. Raises `ModelError`."""
        found = self._as_it_is(self.verifier)
        is_other = found is not self.verifier
        if is_other:
            log.info("model %s: its files changed before they were loaded", found.ref)
            self.verifier = found
        self.draft_models = tuple(map(self._as_it_is, self.draft_models))
        return is_other

    def note(self, folder: ModelFolder, look: Look) -> None:
        """A model was read from these files. Raises `ModelChangedError` where another engine here
        was loaded from others: one worker has one model of a name."""
        self._check(folder, look)
        self._loaded[folder.ref] = look.fingerprint

    def forget(self) -> None:
        """No engine is left: nothing is loaded, and other files may be."""
        self._loaded.clear()

    def check_changed(self) -> None:
        """Raise `ModelChangedError` where the verifier's files are others than were loaded."""
        self._check(self.verifier, look_at(self.verifier.ref, self.verifier.path))

    def _check(self, folder: ModelFolder, look: Look) -> None:
        known, found = self._loaded.get(folder.ref), look.fingerprint
        if known is not None and known != found:
            names = differing(known.parts, found.parts)
            raise ModelChangedError(
                f"the {listed(names)} of model `{folder.ref}` changed after this worker had "
                "loaded it for other jobs: restart the worker"
            )

    def _as_it_is(self, folder: ModelFolder) -> ModelFolder:
        if folder.ref in self._loaded:
            return folder
        look = look_at(folder.ref, folder.path)
        if look.fingerprint == folder.fingerprint:
            return folder
        return inspect_folder(folder.ref, folder.path)
