"""Privacy modes of tenants, and what a submitted job of each looks like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from specbatch.pipeline.privacy.redactor import Redactor, presidio_finder
from specbatch.pipeline.privacy.retention import KEEP_ALL, HashOnly, Redacted, TextPolicy
from specbatch.schemas.encryption import SETTING, Cipher
from specbatch.schemas.errors import UsageError
from specbatch.schemas.privacy import SEALED, PrivacyMode
from specbatch.schemas.prompt_places import in_brief
from specbatch.schemas.records import JobRow, NewJob
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import PINNED

# Fields of a spec: token ids, which text can be made of, and plain configuration.
_TOKEN_FIELDS = ("stop_token_ids", "logit_bias", "bad_token_ids", "bad_words")
_BY_TAG = ("tag_depths", "routes")
_TEMPLATES = ("template", "system")
_FORM_FIELDS = ("response_format", "tools", "tool_choice")
TEXT_FIELDS = {
    "input": _TEMPLATES,
    "output": ("best_by",),
    "sampling": ("stop", *_TOKEN_FIELDS, *_FORM_FIELDS),
    "speculation": _BY_TAG,
}  # by part of a spec: what is reduced in it
KEPT_FIELDS = (
    *("input", "output", "verifier", "proposer", "engine", "tenant", "priority", "placement"),
)


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
        self._policies = {
            PrivacyMode.FULL: KEEP_ALL,
            PrivacyMode.REDACTED: Redacted(self.redactor, self._hashed),
            PrivacyMode.HASH_ONLY: HashOnly(self.redactor, self._hashed),
        }

    @classmethod
    def of_settings(cls, settings: Settings) -> Privacy:
        """The settings' privacy. Raises `UsageError` for an unusable pattern or key."""
        more = partial(presidio_finder, settings.presidio_language) if settings.presidio else None
        redactor = Redactor(settings.redaction_patterns, more)
        cipher = Cipher.of_setting(settings.encryption_key)
        return cls(settings.tenant_privacy, settings.privacy, redactor, cipher)

    @property
    def is_anybody_private(self) -> bool:
        return any(not mode.is_full for mode in (self._default, *self._modes.values()))

    def mode_of(self, tenant: str) -> PrivacyMode:
        return self._modes.get(tenant, self._default)

    # --- for submitters ---------------------------------------------------------------------
    def as_stored(self, job: NewJob) -> NewJob:
        """The job as the store gets it, with its tenant's mode pinned.

        Raises `UsageError` if the mode needs a key and none is set.
        """
        mode = self.mode_of(job.tenant)
        policy = self._policy(job.tenant, mode)
        if policy.is_full:
            return job
        if job.spec.get("reuse_outputs"):
            raise UsageError(
                f"reuse_outputs needs texts that are kept in full, and those of tenant "
                f"{job.tenant!r} are kept {mode}: leave it out"
            )
        return replace(
            job,
            name=policy.words(job.name),
            spec=_shown(job.spec, policy, self.redactor),
            sealed_spec=json.dumps(dict(job.spec), sort_keys=True),
            spec_digest=self._hashed(job.spec_digest, "spec"),  # a short spec could be guessed
            idempotency_key=self.idempotency_key(job.tenant, job.idempotency_key),
            privacy=mode,
        )

    def idempotency_key(self, tenant: str, key: str | None) -> str | None:
        """The idempotency key as stored. Raises `UsageError` without a needed key."""
        if not key or self.mode_of(tenant).is_full:
            return key
        self._policy(tenant, self.mode_of(tenant))
        return self._hashed(f"{tenant}\0{key}", "idempotency key")

    def label(self, tenant: str, text: str) -> str:
        """A name that the tenant gives to something, as the store has it."""
        return self._policy(tenant, self.mode_of(tenant)).tag(text) or ""

    def sentence(self, tenant: str, message: str) -> str:
        """The part of a message to the tenant that may be stored. Needs no key."""
        return self._policies[self.mode_of(tenant)].words(message)

    def check_key(self) -> None:
        """Raise `UsageError` if a tenant's mode needs a key and none is set."""
        for tenant, mode in self._modes.items():
            self._policy(tenant, mode)
        self._policy("(any other)", self._default)

    # --- for workers ------------------------------------------------------------------------
    def text_policy(self, job: JobRow) -> TextPolicy:
        """The policy for the job's texts. Raises `UsageError` if it needs a missing key."""
        return self._policy(job.tenant, job.privacy)

    def check(self, job: JobRow) -> None:
        """Check the privacy of a job before its input is read. Raises `UsageError`, also if the
        submitter's settings keep more of the tenant's texts than the settings here."""
        self.text_policy(job)
        here = self.mode_of(job.tenant)
        if here.strictness > job.privacy.strictness:
            raise UsageError(
                f"job {job.job_id} was submitted with privacy {job.privacy}, and the settings here "
                f"ask for {here} for tenant {job.tenant!r}: submit it with the same "
                "SPECBATCH_PRIVACY and SPECBATCH_TENANT_PRIVACY"
            )

    def words(self, job: JobRow, message: str) -> str:
        """The part of a message about the job that may be stored. Needs no key."""
        return self._policies[job.privacy].words(message)

    def templates(self, job: JobRow) -> list[tuple[str, str]]:
        """What a job's prompts are made with, in brief, as far as it may be shown. Needs no key."""
        mode = max(job.privacy, self.mode_of(job.tenant), key=lambda mode: mode.strictness)
        if mode is PrivacyMode.HASH_ONLY:
            return []
        return in_brief(job.spec, str if mode.is_full else self.redactor.redacted)

    def row_id(self, job: JobRow, row_id: str) -> str:
        """The row id as the store has it, for an id that was read from a file."""
        return self.text_policy(job).row_id(row_id)

    def error(self, job: JobRow | None, error: BaseException) -> str:
        """The part of an error that may be stored and logged. `job`: None if unknown."""
        mode = PrivacyMode.HASH_ONLY if job is None else job.privacy
        if job is None and not self.is_anybody_private:
            mode = PrivacyMode.FULL
        return self._policies[mode].error(error)

    def _policy(self, tenant: str, mode: PrivacyMode) -> TextPolicy:
        if self.cipher is None and not mode.is_full:
            raise UsageError(
                f"texts of tenant {tenant!r} are kept {mode}, which needs {SETTING}: set the same "
                "one for submitters and for every worker"
            )
        return self._policies[mode]

    def _hashed(self, text: str, about: str) -> str:
        assert self.cipher is not None, "only modes that need a key hash"
        return self.cipher.hashed(text, about)


NOBODY_PRIVATE = Privacy()


def _shown(spec: Mapping[str, Any], policy: TextPolicy, redactor: Redactor) -> dict[str, Any]:
    """A spec without the tenant's private parts: texts, tags and token ids."""
    shown = {
        name: value if name in KEPT_FIELDS else _marked(value, redactor)
        for name, value in spec.items()
    }
    inputs = dict(shown.get("input") or {})
    inputs |= {name: policy.tag(inputs[name]) for name in _TEMPLATES if name in inputs}
    given = spec.get("input") or {}
    inputs |= {name: given[name] for name in PINNED if name in given}  # ids, which must stay whole
    asked = spec.get("sampling") or {}
    sampling = dict(shown.get("sampling") or {})
    sampling |= {name: [] for name in _TOKEN_FIELDS if name in sampling}
    sampling |= {name: "" for name in _FORM_FIELDS if name in sampling}
    sampling["stop"] = [policy.tag(text) for text in asked.get("stop") or ()]
    speculation = dict(shown.get("speculation") or {})
    for name in _BY_TAG:
        pairs = (spec.get("speculation") or {}).get(name) or ()
        speculation[name] = [[policy.tag(tag), value] for tag, value in pairs]
    parts: dict[str, Any] = {"input": inputs, "sampling": sampling, "speculation": speculation}
    if best_by := (spec.get("output") or {}).get("best_by"):
        parts["output"] = {**spec["output"], "best_by": {"use": best_by["use"]}}
    if spec.get("policies"):
        parts["policies"] = [{"use": policy["use"]} for policy in spec["policies"]]
    return {**shown, **parts, SEALED: True}


def _marked(value: Any, redactor: Redactor) -> Any:
    """Plain JSON with its texts redacted."""
    if isinstance(value, str):
        return redactor.redacted(value)
    if isinstance(value, list | tuple):
        return [_marked(item, redactor) for item in value]
    if isinstance(value, Mapping):
        return {key: _marked(item, redactor) for key, item in value.items()}
    return value
