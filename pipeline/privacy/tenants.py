"""Which tenant's texts are kept how, and what a job of each looks like when it is submitted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from specbatch.pipeline.privacy.redactor import Redactor, presidio_finder
from specbatch.pipeline.privacy.retention import EVERYTHING, Everything, Keepers
from specbatch.schemas.encryption import SETTING, Cipher
from specbatch.schemas.errors import UsageError
from specbatch.schemas.privacy import SEALED, PrivacyMode
from specbatch.schemas.records import JobRow, NewJob
from specbatch.schemas.settings import Settings

# Of a spec: token ids, of which text can be made; and what is configuration, and shown as it is.
_TOKEN_FIELDS = ("stop_token_ids", "logit_bias", "bad_token_ids", "bad_words")
_BY_TAG = ("tag_depths", "routes")
_SHOWN = ("input", "output", "verifier", "proposer", "engine", "tenant", "priority")


class Privacy:
    """The modes of an installation, and what they need. Thread-safe."""

    def __init__(
        self,
        modes: Mapping[str, PrivacyMode] | None = None,
        default: PrivacyMode = PrivacyMode.FULL,
        redactor: Redactor | None = None,
        cipher: Cipher | None = None,
    ) -> None:
        self._modes = dict(modes or {})
        self._default = default
        self.redactor = redactor or Redactor()
        self.cipher = cipher
        self._keepers = Keepers.of(self.redactor, self._hashed)

    @classmethod
    def of_settings(cls, settings: Settings) -> Privacy:
        """Raises `UsageError` for a pattern or key that cannot be used."""
        more = partial(presidio_finder, settings.presidio_language) if settings.presidio else None
        redactor = Redactor(settings.redaction_patterns, more)
        cipher = Cipher.of_setting(settings.encryption_key)
        return cls(settings.tenant_privacy, settings.privacy, redactor, cipher)

    @property
    def is_anybody_private(self) -> bool:
        return any(not mode.is_full for mode in (self._default, *self._modes.values()))

    def mode_of(self, tenant: str) -> PrivacyMode:
        return self._modes.get(tenant, self._default)

    # --- who submits ------------------------------------------------------------------------
    def order(self, job: NewJob) -> NewJob:
        """The job as it goes into the store, with its tenant's mode pinned.

        Raises `UsageError` where the mode needs a key and there is none.
        """
        mode = self.mode_of(job.tenant)
        keeper = self._keeper(job.tenant, mode)
        if keeper.is_full:
            return job
        return replace(
            job,
            name=keeper.words(job.name),
            spec=_shown(job.spec, keeper, self.redactor),
            sealed_spec=json.dumps(dict(job.spec), sort_keys=True),
            spec_digest=self._hashed(job.spec_digest, "spec"),  # a short spec could be guessed
            idempotency_key=self.idempotency_key(job.tenant, job.idempotency_key),
            privacy=mode,
        )

    def idempotency_key(self, tenant: str, key: str | None) -> str | None:
        """The key as the store has it."""
        if not key or self.mode_of(tenant).is_full:
            return key
        return self._hashed(f"{tenant}\0{key}", "idempotency key")

    # --- who works on it --------------------------------------------------------------------
    def keeper(self, job: JobRow) -> Everything:
        """What keeps the job's texts. Raises `UsageError` where that needs a key."""
        return self._keeper(job.tenant, job.privacy)

    def check(self, job: JobRow) -> None:
        """Before a job's input is read. Raises `UsageError` also where it was submitted by somebody
        whose settings keep more of its tenant than those here."""
        self.keeper(job)
        here = self.mode_of(job.tenant)
        if here.strictness > job.privacy.strictness:
            raise UsageError(
                f"job {job.job_id} was submitted to be kept {job.privacy}, and the settings here "
                f"say {here} for tenant {job.tenant!r}: submit it with the same SPECBATCH_PRIVACY "
                "and SPECBATCH_TENANT_PRIVACY"
            )

    def words(self, job: JobRow, message: str) -> str:
        """What may be stored of a sentence about the job. Needs no key."""
        return self._keepers.keeper(job.privacy).words(message)

    def row_id(self, job: JobRow, row_id: str) -> str:
        """The id as the store has it; what is shown of one that was read from a file."""
        return self.keeper(job).row_id(row_id)

    def error(self, job: JobRow | None, error: BaseException) -> str:
        """What may be stored and logged of an error; `job`: None where that is not known."""
        mode = PrivacyMode.HASH_ONLY if job is None else job.privacy
        if job is None and not self.is_anybody_private:
            mode = PrivacyMode.FULL
        return self._keepers.keeper(mode).error(error)

    def _keeper(self, tenant: str, mode: PrivacyMode) -> Everything:
        if mode.is_full:
            return EVERYTHING
        if self.cipher is None:
            raise UsageError(
                f"texts of tenant {tenant!r} are kept {mode}, which needs {SETTING}, the same for "
                "who submits and for every worker"
            )
        return self._keepers.keeper(mode)

    def _hashed(self, text: str, about: str) -> str:
        assert self.cipher is not None, "who has no key has no keeper that hashes"
        return self.cipher.hashed(text, about)


NOBODY_PRIVATE = Privacy()


def _shown(spec: Mapping[str, Any], keeper: Everything, redactor: Redactor) -> dict[str, Any]:
    """A spec without what the tenant keeps to itself: its texts, tags and token ids."""
    shown = {
        name: value if name in _SHOWN else _marked(value, redactor) for name, value in spec.items()
    }
    asked = spec.get("sampling") or {}
    sampling = dict(shown.get("sampling") or {})
    sampling |= {name: [] for name in _TOKEN_FIELDS if name in sampling}
    sampling["stop"] = [keeper.tag(text) for text in asked.get("stop") or ()]
    speculation = dict(shown.get("speculation") or {})
    for name in _BY_TAG:
        pairs = (spec.get("speculation") or {}).get(name) or ()
        speculation[name] = [[keeper.tag(tag), value] for tag, value in pairs]
    return {**shown, "sampling": sampling, "speculation": speculation, SEALED: True}


def _marked(value: Any, redactor: Redactor) -> Any:
    """Plain JSON with marks in its texts."""
    if isinstance(value, str):
        return redactor.redacted(value)
    if isinstance(value, list | tuple):
        return [_marked(item, redactor) for item in value]
    if isinstance(value, Mapping):
        return {key: _marked(item, redactor) for key, item in value.items()}
    return value
