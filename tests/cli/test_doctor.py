"""What `specbatch doctor` finds on a good machine, and what it says to do on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from specbatch.jobs.cli import doctor
from specbatch.pipeline.ledger.sql.migrate import head


def by_name(cli: Any) -> tuple[int, dict[str, dict[str, Any]]]:
    done = cli("doctor", "--json")
    return done.code, {one["what"]: one for one in done.json}


def test_on_a_good_machine_nothing_is_wrong(cli: Any) -> None:
    code, found = by_name(cli)
    assert code == 0, found
    assert "kernels at" in found["processor"]["found"]
    assert f"revision {head()}" in found["store"]["found"]
    assert found["broker"]["remedy"] is not None, "workers need one"
    assert not any(one["is_problem"] for one in found.values())


def test_it_prints_a_table_with_a_mark_at_each_line(cli: Any) -> None:
    done = cli("doctor")
    assert done.code == 0
    assert "✓ processor" in done.out
    assert "· broker" in done.out


def test_the_store_of_the_first_job_is_still_to_be_made(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", f"sqlite:///{tmp_path}/none.db")
    code, found = by_name(cli)
    assert code == 0
    assert "made by the first job" in found["store"]["found"]
    assert not (tmp_path / "none.db").exists(), "looking makes nothing"


def test_an_older_store_is_to_be_migrated(cli: Any, folder: Path) -> None:
    engine = create_engine(f"sqlite:///{folder}/specbatch-data/specbatch.db")
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0010'"))
    engine.dispose()
    code, found = by_name(cli)
    assert code == 0
    assert "specbatch migrate" in found["store"]["remedy"]


def test_a_broker_out_of_reach_is_a_problem_and_the_rest_is_looked_at(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", "redis://:secret@127.0.0.1:9/0")
    code, found = by_name(cli)
    assert code == 1
    assert found["broker"]["is_problem"]
    assert "check SPECBATCH_BROKER_URL" in found["broker"]["remedy"]
    assert "secret" not in str(found)
    assert "terminal" in found


def test_a_store_that_cannot_be_read_is_a_problem(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.db").write_bytes(b"no database" * 100)
    monkeypatch.setenv("SPECBATCH_DATABASE_URL", f"sqlite:///{tmp_path}/broken.db")
    code, found = by_name(cli)
    assert code == 1
    assert found["store"]["is_problem"]


def test_a_forced_level_that_the_processor_lacks_is_a_problem(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_NATIVE_ISA", "vliw")
    code, found = by_name(cli)
    assert code == 1
    assert "use one of" in found["processor"]["remedy"]


def test_little_memory_is_a_problem(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_bytes", lambda: 1 << 30)
    code, found = by_name(cli)
    assert code == 1
    assert found["memory"]["found"] == "1.0 GiB free"


def test_an_extra_that_a_setting_needs_is_a_problem_and_another_is_a_remark(
    cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        doctor, "_EXTRAS", {"s3": ("nothing-of-the-name", "for s3"), "report": ("nor-this", "")}
    )
    monkeypatch.setenv("SPECBATCH_WORKSPACE", "s3://bucket/work")
    code, found = by_name(cli)
    assert code == 1
    assert found["extra s3"]["is_problem"]
    assert "pip install 'specbatch[s3]'" in found["extra s3"]["remedy"]
    assert not found["extra report"]["is_problem"]


def test_targets_are_looked_at(cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "notify.yaml"
    path.write_text("ops: {url: https://example.org/hook}\n")
    monkeypatch.setenv("SPECBATCH_NOTIFY_FILE", str(path))
    assert by_name(cli)[1]["notifications"]["found"] == "ops (webhook)"
    path.write_text("ops: {}\n")
    assert by_name(cli)[1]["notifications"]["is_problem"]
