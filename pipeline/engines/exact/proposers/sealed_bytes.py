"""Bytes that are known again: what they are, and that not one of them changed."""

from __future__ import annotations

import hashlib

_DIGEST_BYTES = 16


def seal(kind: bytes, *parts: bytes) -> bytes:
    """`kind`, a checksum and the parts behind one another. A kind names a layout for ever."""
    digest = hashlib.blake2b(kind, digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return b"".join([kind, digest.digest(), *parts])


def unseal(kind: bytes, data: bytes | memoryview) -> memoryview:
    """What was sealed as `kind`, not copied. Raises ValueError if this is anything else."""
    view = memoryview(data)
    begin = len(kind) + _DIGEST_BYTES
    if view[: len(kind)] != kind:
        raise ValueError(f"not a file of kind {kind.decode('ascii', 'replace')!r}")
    digest = hashlib.blake2b(kind, digest_size=_DIGEST_BYTES)
    digest.update(view[begin:])
    if view[len(kind) : begin] != digest.digest():
        raise ValueError(f"{kind.decode('ascii', 'replace')!r}: the checksum is another")
    return view[begin:]
