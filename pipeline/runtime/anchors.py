"""Anchors: signed statements of where audit logs end, kept outside the store.

    <SPECBATCH_ANCHOR_URI>/<job>/<number>-<hash>.json     one line of JSON

An anchor says that entry `number` of the job's log had that hash at that time. The hash follows
from all entries before it. Restoring an older copy of the store, or cutting the log's end off, does
not remove anchors, unless their place lets them be deleted. Statements are signed with Ed25519. An
RFC 3161 authority may stamp them too, which counts where the key is not trusted.

A worker may die between the publication and the anchor, or the anchors' place or the authority may
be out of reach just then. So workers look for logs without an anchor while they run (`Anchoring`).
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import orjson

from specbatch.pipeline.audit.digests import canonical_json
from specbatch.pipeline.audit.timestamps import Timestamps
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.storage.objects import Objects, join, tidy
from specbatch.schemas.audit import EntryKind, Finding, FindingKind, Head
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.encryption import NEW_KEY
from specbatch.schemas.errors import MissingExtraError, ObjectError, SpecbatchError, UsageError
from specbatch.schemas.refusals import should_log
from specbatch.schemas.settings import Settings

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger(__name__)

URI, KEY, PUBLIC = "SPECBATCH_ANCHOR_URI", "SPECBATCH_ANCHOR_KEY", "SPECBATCH_ANCHOR_PUBLIC_KEYS"
_NAME = re.compile(r"(\d{8,18})-[0-9a-f]{16}\.json")
_DOMAIN = b"specbatch anchor 1\n"
_KEY_BYTES = 32
INTERVAL_SEC = 300.0  # between two searches for logs without an anchor
MOST_JOBS = 100  # the newest ones, which are searched
MOST_AGE_SEC = DAY_SEC  # since a job ended; later `specbatch audit --anchor` anchors its log
_CLOSE_SEC = 5.0  # to wait for a place that does not answer
_NEXT = "this worker tries again"


@dataclass(frozen=True, slots=True)
class Anchor:
    """An anchor with a valid signature."""

    job_id: str
    number: int
    hash: bytes
    at: float  # by the signer's clock
    key: str  # the public key
    stamp: bytes | None = None  # what the RFC 3161 authority answered

    @property
    def statement(self) -> bytes:
        """The bytes that are signed and stamped."""
        return _statement(self.job_id, self.number, self.hash.hex(), self.at)


@dataclass
class AnchorCounts:
    """What anchors say of a job's log."""

    is_set: bool = False  # a place for anchors is set
    last: Anchor | None = None  # that the log agrees with
    stamped: Anchor | None = None  # the last of these that an authority stamped …
    stamped_at: str = ""  # … then …
    stamped_by: str = ""  # … by this one
    remarks: list[str] = field(default_factory=list)


class Anchors:
    """The place of anchors, who signs them, and whose signatures are trusted. Thread-safe."""

    def __init__(
        self,
        objects: Objects,
        uri: str,
        signer: Ed25519PrivateKey | None,
        trusted: Sequence[str],
        timestamps: Timestamps | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._objects = objects
        self._uri = tidy(uri)
        self._signer = signer
        self._trusted = tuple(trusted)
        self._timestamps = timestamps
        self._clock = clock

    @classmethod
    def of_settings(cls, settings: Settings, objects: Objects) -> Anchors | None:
        """None where no place is set. Raises `UsageError`, and `MissingExtraError`."""
        if not settings.anchor_uri:
            return None
        if find_spec("cryptography") is None:
            raise MissingExtraError(
                f"{URI} is set and cryptography is not installed here: "
                "`pip install 'specbatch[sealed]'`"
            )
        signer = _signer(settings.anchor_key) if settings.anchor_key else None
        keys = [key.strip() for key in settings.anchor_public_keys.split(",") if key.strip()]
        for key in keys:
            _public_key(key)
        if signer is not None:
            keys.append(_text_of(signer))
        if not keys:
            raise UsageError(
                f"{URI} is set, and no key: set {KEY} to sign anchors, or {PUBLIC} to check them"
            )
        return cls(objects, settings.anchor_uri, signer, keys, Timestamps.of_settings(settings))

    def put(self, job_id: str, head: Head) -> None:
        """Anchor the end of a job's log. An existing anchor stays.

        Raises `UsageError` without a key to sign with, and `ObjectError`.
        """
        if self._signer is None:
            raise UsageError(f"anchors are signed: set {KEY}; `{NEW_KEY}` makes a key")
        at = round(self._clock(), 3)
        said = _statement(job_id, head.number, head.hash.hex(), at)
        values: dict[str, Any] = {
            "job_id": job_id,
            "number": head.number,
            "hash": head.hash.hex(),
            "at": at,
            "key": _text_of(self._signer),
            "signature": _encoded(self._signer.sign(said)),
        }
        if self._timestamps is not None and self._timestamps.asks:
            values["timestamp"] = _encoded(self._timestamps.stamp(said))
        uri = join(self._folder(job_id), _name(head.number, head.hash.hex()))
        self._objects.put_new(uri, orjson.dumps(values) + b"\n")

    def known(self, job_id: str) -> bool:
        """Whether the job has any. Raises `ObjectError`."""
        return bool(self._objects.list(self._folder(job_id) + "/"))

    def last_number(self, job_id: str) -> int:
        """The last entry of a job's log that a file here names, trusted or not; 0 if none does.

        Raises `ObjectError`.
        """
        files = self._objects.list(self._folder(job_id) + "/")
        names = (_NAME.fullmatch(file.uri.rpartition("/")[2]) for file in files)
        return max((int(name[1]) for name in names if name is not None), default=0)

    def findings(
        self, job_id: str, log: Mapping[int, bytes], counts: AnchorCounts
    ) -> Iterator[Finding]:
        """Where the job's log differs from its anchors. `log`: the hash of each existing entry."""
        counts.is_set = True
        last = max(log, default=0)
        try:
            files = self._objects.list(self._folder(job_id) + "/")
            for file in files:
                if file.uri.rpartition("/")[2].startswith("."):
                    continue  # a process that was killed left it; no anchor has such a name
                anchor = self._read(job_id, file.uri)
                if isinstance(anchor, str):
                    yield _found(f"{file.uri} {anchor}")
                elif anchor.number > last:
                    yield _found(
                        f"{file.uri} names entry {anchor.number} of the log, which ends at entry "
                        f"{last} in the store: the store is an older copy, or the log's end was "
                        "cut off; restore the newer store",
                        anchor.number,
                    )
                elif log.get(anchor.number) != anchor.hash:
                    yield _found(
                        f"entry {anchor.number} of the log is not the one that {file.uri} names: "
                        "the log was rewritten",
                        anchor.number,
                    )
                else:
                    yield from self._stamp(anchor, file.uri, counts)
                    if counts.last is None or anchor.number >= counts.last.number:
                        counts.last = anchor
        except ObjectError as error:
            yield _found(
                f"the anchors in {self._uri} cannot be read: {error}; make them readable and audit "
                "again"
            )

    def _stamp(self, anchor: Anchor, uri: str, counts: AnchorCounts) -> Iterator[Finding]:
        """Check the authority's stamp, if there is one and it can be checked."""
        if anchor.stamp is None:
            return
        if self._timestamps is None or not self._timestamps.checks:
            counts.remarks.append(
                f"the time stamp in {uri} was not checked: set SPECBATCH_TIMESTAMP_ROOTS to the "
                "file with the authority's root certificate"
            )
            return
        stamped = self._timestamps.check(anchor.stamp, anchor.statement)
        if isinstance(stamped, str):
            yield _found(f"the time stamp in {uri} does not hold: {stamped}", anchor.number)
        elif counts.stamped is None or anchor.number >= counts.stamped.number:
            counts.stamped, (counts.stamped_at, counts.stamped_by) = anchor, stamped

    def _read(self, job_id: str, uri: str) -> Anchor | str:
        """The anchor, or what is wrong with it. Raises `ObjectError`."""
        try:
            values = orjson.loads(self._objects.get_bytes(uri))
            stamp = values.get("timestamp")
            anchor = Anchor(
                job_id=str(values["job_id"]),
                number=int(values["number"]),
                hash=bytes.fromhex(values["hash"]),
                at=float(values["at"]),
                key=str(values["key"]),
                stamp=None if stamp is None else _decoded(stamp),
            )
            signature = _decoded(values["signature"])
        except (ValueError, TypeError, KeyError, AttributeError):
            return "is no anchor: it was changed, or is none of ours; remove it or restore it"
        if anchor.job_id != job_id or not uri.endswith(_name(anchor.number, anchor.hash.hex())):
            return "is an anchor of something else than its name says: it was moved"
        if anchor.key not in self._trusted:
            return f"is signed with the key {anchor.key}, which is not among those of {PUBLIC}"
        if not _is_signed(anchor, signature):
            return "was changed: its signature does not fit"
        return anchor

    def _folder(self, job_id: str) -> str:
        return join(self._uri, job_id)


def _statement(job_id: str, number: int, hashed: str, at: float) -> bytes:
    said = {"job_id": job_id, "number": number, "hash": hashed, "at": at}
    return _DOMAIN + canonical_json(said).encode()


def _name(number: int, hashed: str) -> str:
    return f"{number:08d}-{hashed[:16]}.json"


def _is_signed(anchor: Anchor, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(_public_key(anchor.key))
        key.verify(signature, anchor.statement)
    except InvalidSignature:
        return False
    return True


def _signer(text: str) -> Ed25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = _key_bytes(text)
    if key is None:
        raise UsageError(
            f"{KEY} must be one key of {_KEY_BYTES} bytes in URL-safe base64; `{NEW_KEY}` makes one"
        )
    return Ed25519PrivateKey.from_private_bytes(key)


def _public_key(text: str) -> bytes:
    key = _key_bytes(text)
    if key is None:
        raise UsageError(
            f"{PUBLIC} must be a comma-separated list of keys of {_KEY_BYTES} bytes in URL-safe "
            "base64; an anchor's `key` field holds its signer's public key"
        )
    return key


def _key_bytes(text: str) -> bytes | None:
    try:
        key = _decoded(text)
    except ValueError:
        return None
    return key if len(key) == _KEY_BYTES else None


def _text_of(signer: Ed25519PrivateKey) -> str:
    return _encoded(signer.public_key().public_bytes_raw())


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode()


def _decoded(text: str) -> bytes:
    """Raises `ValueError`."""
    try:
        return base64.b64decode(text, altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _found(what: str, number: int | None = None) -> Finding:
    return Finding(FindingKind.ANCHOR, what, number=number)


class Anchoring:
    """Anchors the logs of published jobs at once, and later, in its own thread, any without one."""

    def __init__(
        self,
        store: Store,
        anchors: Anchors,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._anchors = anchors
        self._clock = clock
        self._done: set[tuple[str, float | None]] = set()  # jobs with an anchor, and their ends
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="anchoring", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SEC)

    def published(self, job_id: str) -> None:
        """Anchor the log of a job that was published; the job stays published if that fails."""
        try:
            self._anchors.put(job_id, self._store.log_head(job_id))
        except SpecbatchError as error:
            log.warning(
                "job %s is published and its log is not anchored: %s; `specbatch audit %s "
                "--anchor` tries again",
                *(job_id, error, job_id),
                extra={"job": job_id},
            )

    def catch_up(self) -> list[str]:
        """Anchor the logs that lack an anchor of their publication; returns the jobs' ids.

        Raises what the store, the anchors' place and the authority raise; the rest can wait.
        """
        oldest, anchored = self._clock() - MOST_AGE_SEC, []
        ended = {
            (job.job_id, job.finished_at)
            for job in self._store.list_jobs(MOST_JOBS)
            if job.state.is_final and (job.finished_at or 0.0) >= oldest
        }
        self._done &= ended
        for job_id, finished_at in sorted(ended - self._done, key=str):
            if self._stop.is_set():
                break
            if self._is_missed(job_id):
                self._anchors.put(job_id, self._store.log_head(job_id))
                log.warning(
                    "job %s was published without an anchor; now its log has one",
                    job_id,
                    extra={"job": job_id},
                )
                anchored.append(job_id)
            self._done.add((job_id, finished_at))
        return anchored

    def _is_missed(self, job_id: str) -> bool:
        """Whether a publication is behind all that is anchored."""
        later = self._store.log(job_id, self._anchors.last_number(job_id))
        return any(entry.kind == EntryKind.PUBLISHED for entry in later)

    def _run(self) -> None:
        while True:
            try:
                self.catch_up()
            except SpecbatchError as error:
                if should_log(error):
                    log.warning(
                        "could not anchor the logs that lack an anchor: %s; %s", error, _NEXT
                    )
            except Exception:
                if not self._stop.is_set():  # else the store is closed
                    log.exception("could not anchor the logs that lack an anchor; %s", _NEXT)
            if self._stop.wait(INTERVAL_SEC):
                return
