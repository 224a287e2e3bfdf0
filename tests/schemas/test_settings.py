"""Settings that were renamed still count under their old names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from specbatch.jobs.cli.connect import load_settings
from specbatch.schemas.errors import UsageError
from specbatch.schemas.settings import Settings

# Of each setting that is a number or holds some by name, which variable's text has infinity in it.
INFINITE = {
    name: json.dumps({"acme": float("inf")}) if str(field.annotation).startswith("dict") else "inf"
    for name, field in Settings.model_fields.items()
    if "float" in str(field.annotation)
}


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


@pytest.mark.parametrize("name", INFINITE)
def test_infinity_is_refused_because_child_processes_are_given_json(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variable = f"SPECBATCH_{name.upper()}"
    monkeypatch.setenv(variable, INFINITE[name])
    with pytest.raises(UsageError) as refused:
        load_settings()
    assert str(refused.value).startswith(f"setting {variable}")
    assert " must be " in str(refused.value)
    assert "\n" not in str(refused.value)
