"""What is sealed can be opened with its key and in its place, and nowhere else."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbatch.schemas.errors import StoreError, UsageError
from specbatch.schemas.sealing import Sealer, is_sealed, is_sealed_text
from specbatch.schemas.text_columns import escape_text

OLD, NEW = bytes(32), bytes(range(32))


def named(*keys: bytes) -> str:
    return ", ".join(base64.urlsafe_b64encode(key).decode() for key in keys)


@given(text=st.text(), data=st.binary(max_size=500))
def test_what_was_sealed_comes_back(text: str, data: bytes) -> None:
    sealer = Sealer([NEW])
    assert sealer.open_text(sealer.seal_text(text, "column"), "column") == text
    for seal in (sealer.seal, sealer.seal_same):
        assert sealer.open(seal(data, "job/file"), "job/file") == data


@given(text=st.text(alphabet=st.characters(codec=None)))
def test_no_plain_text_looks_sealed(text: str) -> None:
    assert not is_sealed_text(escape_text(text))
    assert not is_sealed_text(escape_text(f"\x1aS1.{text}"))


def test_equal_texts_differ_and_equal_files_do_not() -> None:
    sealer = Sealer([NEW])
    assert sealer.seal_text("a", "column") != sealer.seal_text("a", "column")
    assert sealer.seal_same(b"a", "job/file") == sealer.seal_same(b"a", "job/file")
    assert sealer.seal_same(b"a", "job/file") != sealer.seal_same(b"a", "job/other")
    assert sealer.seal_same(b"a", "job/file") != sealer.seal_same(b"b", "job/file")


def test_a_value_of_another_column_or_a_changed_one_is_refused() -> None:
    sealer = Sealer([NEW])
    sealed = sealer.seal_text("a", "completions.text")
    with pytest.raises(StoreError, match="moved here from elsewhere"):
        sealer.open_text(sealed, "completions.error")
    data = bytearray(sealer.seal(b"abc", "job/file"))
    data[-1] ^= 1
    with pytest.raises(StoreError, match="was changed"):
        sealer.open(bytes(data), "job/file")


def test_keys_are_rotated_by_putting_a_new_one_in_front() -> None:
    before, between, after = (Sealer.of_setting(named(*keys)) for keys in
                              ((OLD,), (NEW, OLD), (NEW,)))  # fmt: skip
    assert before is not None
    assert between is not None
    assert after is not None
    old, new = before.seal_text("a", "c"), between.seal_text("b", "c")
    assert between.open_text(old, "c") == "a"
    assert after.open_text(new, "c") == "b"
    with pytest.raises(StoreError, match="not among those of SPECBATCH_ENCRYPTION_KEY"):
        after.open_text(old, "c")
    assert between.hashed("id", "row id") == before.hashed("id", "row id")
    assert after.hashed("id", "row id") != before.hashed("id", "row id")


def test_hashes_differ_by_what_they_are_about_and_by_key() -> None:
    sealer = Sealer([NEW])
    assert sealer.hashed("a", "row id") == sealer.hashed("a", "row id")
    assert sealer.hashed("a", "row id") != sealer.hashed("a", "tag")
    assert sealer.hashed("a", "row id") != Sealer([OLD]).hashed("a", "row id")


@pytest.mark.parametrize("text", ["short", "*" * 44, named(b"a" * 31), f"{named(NEW)},x"])
def test_a_key_that_is_none_is_refused_without_showing_it(text: str) -> None:
    with pytest.raises(UsageError, match="must be one key of 32 bytes") as caught:
        Sealer.of_setting(text)
    assert text not in str(caught.value)
    assert named(NEW) not in repr(Sealer([NEW]))


def test_no_key_is_no_sealer() -> None:
    assert Sealer.of_setting(" , ") is None
    assert not is_sealed(b"ARROW1")
