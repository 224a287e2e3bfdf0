"""Settings that were renamed still count under their old names."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from specbatch.schemas.settings import Settings


def test_an_old_name_counts_in_the_environment_and_the_new_one_wins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPECBATCH_BELL_PATIENCE_SEC", "7")
    assert Settings().message_patience_sec == 7.0
    monkeypatch.setenv("SPECBATCH_MESSAGE_PATIENCE_SEC", "8")
    assert Settings().message_patience_sec == 8.0


@pytest.mark.parametrize("name", ["bell_patience_sec", "message_patience_sec"])
def test_both_names_count_in_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"{name} = 9\n")
    monkeypatch.setenv("SPECBATCH_SETTINGS", str(file))
    assert Settings().message_patience_sec == 9.0


def test_a_workspace_is_not_on_a_store_that_is_only_read() -> None:
    with pytest.raises(ValidationError, match="gs:// is for inputs alone: use a folder or s3://"):
        Settings(workspace="gs://bucket/work")
