"""Column types for any Python string, plain or encrypted with the store's key."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy import Dialect, Text
from sqlalchemy.types import TypeDecorator

from specbatch.schemas.encryption import Cipher, is_encrypted_text, no_key
from specbatch.schemas.errors import UnknownKeyError

_UNSTORABLE = re.compile("[\x00\x1a\ud800-\udfff]")
_ESCAPED = re.compile("\x1a([0-9a-f]{4})")

SHOWN_WITHOUT_KEY = "[encrypted, and its key is not in SPECBATCH_ENCRYPTION_KEY here]"


def escape_text(text: str) -> str:
    """Text that every database can hold: NUL and lone surrogates become \\x1a and four digits."""
    return _UNSTORABLE.sub(lambda match: f"\x1a{ord(match[0]):04x}", text)


def unescape_text(text: str) -> str:
    """The inverse of `escape_text`."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 16)), text)


class AnyText(TypeDecorator[str]):
    """Any Python string. A model may emit NUL, which PostgreSQL's text refuses."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002 - the hook's signature
        return None if value is None else escape_text(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:  # noqa: ARG002 - the hook's signature
        return None if value is None else unescape_text(value)


class EncryptedText(TypeDecorator[str]):
    """Any Python string, encrypted if the engine's store has a key, and bound to its column's name.

    Texts from before there was a key stay readable. Two equal texts differ in the database, so no
    statement may compare such a column with a value.
    """

    impl = Text
    cache_ok = True

    def __init__(self, about: str, placeholder: str | None = None) -> None:
        """`placeholder`: the value that a process without a key reads; None: reading fails.

        A placeholder that is not empty also replaces texts under an unknown key. During a key
        rollout a worker with only the old key can then claim and close units that hold an error of
        other workers. An empty placeholder could pass for the stored text, so it does not.
        """
        super().__init__()
        self.about = about
        self.placeholder = placeholder

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        cipher = cipher_of(dialect)
        return escape_text(value) if cipher is None else cipher.encrypt_text(value, self.about)

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        if value is None:
            return None
        if not is_encrypted_text(value):
            return unescape_text(value)
        cipher = cipher_of(dialect)
        if cipher is not None:
            return self._opened(cipher, value)
        if self.placeholder is None:
            raise no_key(self.about)
        return self.placeholder

    def _opened(self, cipher: Cipher, value: str) -> str:
        try:
            return cipher.decrypt_text(value, self.about)
        except UnknownKeyError:
            if not self.placeholder:
                raise
            return self.placeholder


def use_cipher(dialect: Dialect, cipher: Cipher | None) -> None:
    """Encrypt with this cipher what an engine with this dialect reads and writes."""
    dialect.specbatch_cipher = cipher  # type: ignore[attr-defined]  # a place of ours, one per engine


def cipher_of(dialect: Dialect) -> Cipher | None:
    found: Cipher | None = getattr(dialect, "specbatch_cipher", None)
    return found
