"""Stores of tests share compiled statements, and nothing else."""

from __future__ import annotations

from sqlalchemy import Column, MetaData, Table, create_engine, insert, text

from specbatch.schemas.encryption import Cipher, is_encrypted_text
from specbatch.schemas.text_columns import EncryptedText, use_cipher


def test_each_store_encrypts_with_its_own_key() -> None:
    """Whichever of them ran a statement first."""
    notes = Table("notes", MetaData(), Column("note", EncryptedText("notes.note")))
    stored = []
    for cipher in (None, Cipher([bytes(range(32))]), None):
        engine = create_engine("sqlite://")
        use_cipher(engine.dialect, cipher)
        with engine.begin() as connection:
            notes.metadata.create_all(connection)
            connection.execute(insert(notes).values(note="a text"))
            stored.append(str(connection.execute(text("SELECT note FROM notes")).scalar()))
        engine.dispose()
    assert [is_encrypted_text(value) for value in stored] == [False, True, False]
