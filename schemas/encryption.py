"""Encryption at rest: AES-256-GCM with keys that only the environment knows.

    encrypted = magic, key id (4 bytes), nonce (12), ciphertext with its tag

Every ciphertext is bound to what it is `about` (a column, a file of a job) and cannot be decrypted
as anything else. The first of several keys, the newest, encrypts; any of them decrypts. The last
key hashes ids, so that hashes stay the same when a new key is put in front.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from specbatch.schemas.errors import MissingExtraError, StoreError, UnknownKeyError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

SETTING = "SPECBATCH_ENCRYPTION_KEY"
NEW_KEY = "python -c 'import base64, os; print(base64.urlsafe_b64encode(os.urandom(32)).decode())'"

_MAGIC = b"\x1aSB1"  # no Arrow file and no text of ours begins with it
_TEXT_MAGIC = "\x1aS1."  # `escape_text` writes hexadecimal digits after \x1a, so no text has it
_KEY_BYTES, _ID_BYTES, _NONCE_BYTES = 32, 4, 12
_HEADER_BYTES = len(_MAGIC) + _ID_BYTES + _NONCE_BYTES
_HASH_CHARS = 32  # of a keyed hash: 128 bits
_SEAL_BYTES = 16


class Cipher:
    """Encrypts and decrypts with the keys of one installation. Thread-safe."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        """Keys of 32 bytes each, the newest first. Raises `UsageError`."""
        if not keys or any(len(key) != _KEY_BYTES for key in keys):
            raise UsageError(
                f"{SETTING} must be one key of 32 bytes in URL-safe base64, or several with "
                f"commas, the newest first; `{NEW_KEY}` makes one"
            )
        self._newest, self._oldest = keys[0], keys[-1]
        self._keys = {_derived(key, "id")[:_ID_BYTES]: key for key in keys}

    @classmethod
    def of_setting(cls, text: str) -> Cipher | None:
        """The cipher of a setting's value, None if the setting is empty.

        Raises `UsageError`, and `MissingExtraError` if `cryptography` is not installed.
        """
        parts = [part.strip() for part in text.split(",") if part.strip()]
        if parts and find_spec("cryptography") is None:
            raise MissingExtraError(
                f"{SETTING} is set and cryptography is not installed here: "
                "`pip install 'specbatch[sealed]'`"
            )
        return cls([_decoded(part) for part in parts]) if parts else None

    def __repr__(self) -> str:
        return f"Cipher({len(self._keys)} keys)"

    def encrypt(self, data: bytes, about: str) -> bytes:
        """Encrypts with a random nonce, so two calls never return the same bytes."""
        return self._encrypted(data, about, os.urandom(_NONCE_BYTES))

    def encrypt_repeatably(self, data: bytes, about: str) -> bytes:
        """Encrypts equal bytes about the same thing alike, so that a file may be written twice.

        The nonce is a keyed hash of the bytes, so it repeats only with them.
        """
        nonce = hmac.digest(_derived(self._newest, f"nonce {about}"), data, "sha256")
        return self._encrypted(data, about, nonce[:_NONCE_BYTES])

    def decrypt(self, encrypted: bytes, about: str) -> bytes:
        """The inverse of both.

        Raises `UnknownKeyError` if the key is not here, and `StoreError` if the bytes were changed
        or are about something else.
        """
        from cryptography.exceptions import InvalidTag

        key = self._keys.get(encrypted[len(_MAGIC) :][:_ID_BYTES])
        if key is None or not is_encrypted(encrypted):
            raise UnknownKeyError(
                f"{about} was encrypted with a key that is missing from {SETTING}: add it "
                "after the others"
            )
        nonce = encrypted[_HEADER_BYTES - _NONCE_BYTES : _HEADER_BYTES]
        try:
            return _aes(key, about).decrypt(nonce, encrypted[_HEADER_BYTES:], about.encode())
        except InvalidTag:
            raise StoreError(
                f"{about} was changed or copied from elsewhere, so it cannot be decrypted"
            ) from None

    def encrypt_text(self, text: str, about: str) -> str:
        """Encrypts to text that a text column can hold."""
        encrypted = self.encrypt(text.encode("utf-8", "surrogatepass"), about)
        return _TEXT_MAGIC + base64.b64encode(encrypted[len(_MAGIC) :]).decode()

    def decrypt_text(self, encrypted: str, about: str) -> str:
        """The inverse of `encrypt_text`. Raises what `decrypt` raises."""
        try:
            packed = base64.b64decode(encrypted.removeprefix(_TEXT_MAGIC), validate=True)
        except binascii.Error:
            raise StoreError(f"{about} was changed after it was encrypted") from None
        return self.decrypt(_MAGIC + packed, about).decode("utf-8", "surrogatepass")

    def hashed(self, text: str, about: str) -> str:
        """A keyed hash of the text. Nobody without the key can guess it."""
        key = _derived(self._oldest, f"hash {about}")
        return hmac.digest(key, text.encode("utf-8", "surrogatepass"), "sha256").hex()[:_HASH_CHARS]

    def sealed(self, about: str, parts: Sequence[bytes]) -> bytes:
        """The key's id, then a keyed digest of each part. Nobody without the key can guess one."""
        key = self._oldest
        digests = (_seal(key, about, place, part) for place, part in enumerate(parts))
        return b"".join((_derived(key, "id")[:_ID_BYTES], *digests))

    def unseals(self, seal: bytes, about: str, place: int, part: bytes) -> bool:
        """Whether this is the part that was sealed at this place. Raises `UnknownKeyError`."""
        key = self._keys.get(seal[:_ID_BYTES])
        if key is None:
            raise UnknownKeyError(
                f"a {about} was sealed with a key that is missing from {SETTING}: add it after the "
                "others"
            )
        digest = seal[_ID_BYTES:][place * _SEAL_BYTES :][:_SEAL_BYTES]
        return hmac.compare_digest(digest, _seal(key, about, place, part))

    def _encrypted(self, data: bytes, about: str, nonce: bytes) -> bytes:
        key = self._newest
        ciphertext = _aes(key, about).encrypt(nonce, data, about.encode())
        return b"".join((_MAGIC, _derived(key, "id")[:_ID_BYTES], nonce, ciphertext))


def is_encrypted(data: bytes) -> bool:
    return data.startswith(_MAGIC)


def is_encrypted_text(text: str) -> bool:
    return text.startswith(_TEXT_MAGIC)


def no_key(what: str) -> UsageError:
    """The error of a process that lacks the key."""
    return UsageError(f"{what} is encrypted: set {SETTING} to the key it was written with")


def _decoded(part: str) -> bytes:
    try:
        return base64.b64decode(part, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return b""


def _seal(key: bytes, about: str, place: int, part: bytes) -> bytes:
    return hmac.digest(_derived(key, f"{about} {place}"), part, "sha256")[:_SEAL_BYTES]


@lru_cache(maxsize=1024)
def _derived(key: bytes, purpose: str) -> bytes:
    """A key for one purpose; no key serves two."""
    return hmac.digest(key, b"specbatch " + purpose.encode(), "sha256")


@lru_cache(maxsize=256)
def _aes(key: bytes, about: str) -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # not for those without a key

    return AESGCM(_derived(key, f"seal {about.partition('/')[0]}"))
