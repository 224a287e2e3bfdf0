"""Data can be decrypted with its key and as what it is about, and in no other way."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.schemas.encryption import Cipher, is_encrypted, is_encrypted_text
from specbatch.schemas.errors import StoreError, UsageError
from specbatch.schemas.text_columns import escape_text

OLD, NEW = bytes(32), bytes(range(32))


def named(*keys: bytes) -> str:
    return ", ".join(base64.urlsafe_b64encode(key).decode() for key in keys)


@given(text=st.text(), data=st.binary(max_size=500))
def test_what_was_encrypted_comes_back(text: str, data: bytes) -> None:
    cipher = Cipher([NEW])
    assert cipher.decrypt_text(cipher.encrypt_text(text, "column"), "column") == text
    for encrypt in (cipher.encrypt, cipher.encrypt_repeatably):
        assert cipher.decrypt(encrypt(data, "job/file"), "job/file") == data


@given(text=st.text(alphabet=st.characters(codec=None)))
def test_no_plain_text_looks_encrypted(text: str) -> None:
    assert not is_encrypted_text(escape_text(text))
    assert not is_encrypted_text(escape_text(f"\x1aS1.{text}"))


def test_equal_texts_differ_and_equal_files_do_not() -> None:
    cipher = Cipher([NEW])
    assert cipher.encrypt_text("a", "column") != cipher.encrypt_text("a", "column")
    assert cipher.encrypt_repeatably(b"a", "job/file") == cipher.encrypt_repeatably(
        b"a", "job/file"
    )
    assert cipher.encrypt_repeatably(b"a", "job/file") != cipher.encrypt_repeatably(
        b"a", "job/other"
    )
    assert cipher.encrypt_repeatably(b"a", "job/file") != cipher.encrypt_repeatably(
        b"b", "job/file"
    )


def test_a_value_of_another_column_or_a_changed_one_is_refused() -> None:
    cipher = Cipher([NEW])
    encrypted = cipher.encrypt_text("a", "completions.text")
    with pytest.raises(StoreError, match="copied from elsewhere"):
        cipher.decrypt_text(encrypted, "completions.error")
    data = bytearray(cipher.encrypt(b"abc", "job/file"))
    data[-1] ^= 1
    with pytest.raises(StoreError, match="was changed"):
        cipher.decrypt(bytes(data), "job/file")


def test_keys_are_rotated_by_putting_a_new_one_in_front() -> None:
    before, between, after = (Cipher.of_setting(named(*keys)) for keys in
                              ((OLD,), (NEW, OLD), (NEW,)))  # fmt: skip
    assert before is not None
    assert between is not None
    assert after is not None
    old, new = before.encrypt_text("a", "c"), between.encrypt_text("b", "c")
    assert between.decrypt_text(old, "c") == "a"
    assert after.decrypt_text(new, "c") == "b"
    with pytest.raises(StoreError, match="missing from SPECBATCH_ENCRYPTION_KEY"):
        after.decrypt_text(old, "c")
    assert between.hashed("id", "row id") == before.hashed("id", "row id")
    assert after.hashed("id", "row id") != before.hashed("id", "row id")


def test_hashes_differ_by_what_they_are_about_and_by_key() -> None:
    cipher = Cipher([NEW])
    assert cipher.hashed("a", "row id") == cipher.hashed("a", "row id")
    assert cipher.hashed("a", "row id") != cipher.hashed("a", "tag")
    assert cipher.hashed("a", "row id") != Cipher([OLD]).hashed("a", "row id")


@pytest.mark.parametrize("text", ["short", "*" * 44, named(b"a" * 31), f"{named(NEW)},x"])
def test_a_key_that_is_none_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(UsageError, match="must be one key of 32 bytes") as caught:
        Cipher.of_setting(text)
    assert text not in str(caught.value)
    assert named(NEW) not in repr(Cipher([NEW]))


def test_no_key_is_no_sealer() -> None:
    assert Cipher.of_setting(" , ") is None
    assert not is_encrypted(b"ARROW1")
