"""Schedule files: what they may say, what is put into them, and one sentence for each mistake."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from schedules.conftest import JOB, Write, at

from specbatch.jobs.schedules.definition import Folder, built_in, filled, load_folder, load_schedule
from specbatch.schemas.errors import SpecError, UsageError


def job(**values: Any) -> dict[str, Any]:
    return {**JOB, **values}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"cron": None}, "field `cron` is required"),
        ({"job": None}, "field `job` is required"),
        ({"cron": "0 25 * * *"}, "field `cron`: '0 25 * * *' is not a cron expression: wrong hour"),
        ({"cron": "often"}, "field `cron`: 'often' is not a cron expression: write five fields"),
        ({"time_zone": "Europe/Bielefeld"}, "field `time_zone`: unknown time zone 'Europe/Biel"),
        ({"time_zone": "../etc/passwd"}, "field `time_zone`: unknown time zone"),
        ({"catch_up": "some"}, "field `catch_up`: must be 'none', 'latest' or 'all'"),
        ({"catch_up_limit": 0}, "field `catch_up_limit`: must be at least 1 (got 0)"),
        ({"overlap": "cancel"}, "field `overlap`: must be 'skip', 'queue' or 'cancel-old'"),
        ({"grace_sec": -1}, "field `grace_sec`: must be above 0"),
        ({"timezone": "UTC"},
         "unknown field `timezone` (did you mean `time_zone`?); allowed here:"),
        ({"schedule": "a b"}, "field `schedule`: must be text that matches"),
        ({"variables": {"date": "x"}}, "field `variables`: 'date' is the name of a built-in"),
        ({"variables": {"a-b": "x"}}, "field `variables`: 'a-b' is not a name"),
        ({"variables": {"a": [1]}}, "field `variables.a`: must be text"),
        ({"variables": {"a": "{{ b }}", "b": ""}}, "field `variables.a`: unknown variable {{ b }}"),
        ({"job": job(verifier=None)}, "field `verifier`: must be text"),
        ({"job": {"verifier": "m"}}, "field `input` is required"),
        ({"job": job(sampling={"max_tokens": "{{ limit }}"})},
         "field `job.sampling.max_tokens`: unknown variable {{ limit }}; there are date, "),
        ({"job": job(output={"uri": "out/{{ date"})}, "field `job.output.uri`: {{ without }}"),
        ({"job": job(sampling={"temperature": "{{ schedule }}"})},
         "field `sampling.temperature`: must be a number"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_with_the_file_and_the_field(
    write: Write, fields: dict[str, Any], sentence: str
) -> None:
    file = write(**fields)
    with pytest.raises(SpecError) as raised:
        load_schedule(file)
    assert str(raised.value).startswith(f"schedule file {file}: ")
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cron: [", "is not valid YAML"),
        ("- a", "must hold a mapping with cron and job"),
        ("cron: * * * * *", "is not valid YAML"),
    ],
)
def test_what_is_no_yaml_mapping_is_told(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "nightly.yaml"
    file.write_text(text)
    with pytest.raises(SpecError, match=f"schedule file {file} {sentence}"):
        load_schedule(file)


def test_a_job_has_the_names_and_paths_of_its_file(write: Write, tmp_path: Path) -> None:
    schedule = load_schedule(write("weekly.yaml", time_zone="Europe/Berlin"))
    spec = schedule.spec_at(at("2026-03-29T01:00Z"))
    assert (schedule.name, spec.name) == ("weekly", "weekly")
    assert spec.input.uri == f"{tmp_path}/in/2026-03-29.jsonl"
    assert spec.output.uri == f"{tmp_path}/out/20260329T010000Z"
    named = load_schedule(write("x.yaml", schedule="nightly", job=job(name="{{ schedule }} job")))
    assert (named.name, named.spec_at(0.0).name) == ("nightly", "nightly job")


def test_variables_are_put_in_with_their_values(write: Write) -> None:
    values = {"bucket": "s3://warehouse/{{ date.year }}", "limit": 32, "warm": 0.5, "whole": True}
    schedule = load_schedule(
        write(
            variables=values,
            job=job(
                input={"uri": "{{bucket}}/{{ yesterday }}/*.jsonl"},
                sampling={"max_tokens": "{{ limit }}", "temperature": "{{warm}}",
                          "ignore_eos": "{{ whole }}", "stop": ["END {{ date }}", "{%"]},
                speculation={"depth": False},
            ),
        )
    )  # fmt: skip
    spec = schedule.spec_at(at("2026-01-01T02:30Z"))
    assert spec.input.uri == "s3://warehouse/2026/2025-12-31/*.jsonl"
    assert (spec.sampling.max_tokens, spec.sampling.temperature) == (32, 0.5)
    assert (spec.sampling.ignore_eos, spec.sampling.stop) == (True, ("END 2026-01-01", "{%"))
    assert spec.speculation.depth == "off"


def test_what_is_there_for_every_schedule(write: Write) -> None:
    schedule = load_schedule(write(time_zone="America/New_York"))
    values = built_in("nightly", schedule.times.local(at("2026-01-01T03:30Z")))
    assert values == {
        "schedule": "nightly",
        "logical_time": "2025-12-31T22:30:00-05:00",
        "logical_time.utc": "2026-01-01T03:30:00Z",
        "logical_time.compact": "20260101T033000Z",
        "time_zone": "America/New_York",
        "hour": "22",
        "minute": "30",
        "date": "2025-12-31",
        "date.year": "2025",
        "date.month": "12",
        "date.day": "31",
        "date.compact": "20251231",
        "date.week": "2026-W01",
        "yesterday": "2025-12-30",
        "yesterday.year": "2025",
        "yesterday.month": "12",
        "yesterday.day": "30",
        "yesterday.compact": "20251230",
        "yesterday.week": "2026-W01",
        "tomorrow": "2026-01-01",
        "tomorrow.year": "2026",
        "tomorrow.month": "01",
        "tomorrow.day": "01",
        "tomorrow.compact": "20260101",
        "tomorrow.week": "2026-W01",
    }


@pytest.mark.parametrize(
    "expression",
    ["date.__class__", "7 * 7", "date | upper", "''.__class__", "date['year']", "", "env.HOME",
     "__import__('os').system('true')", "date.year.real", "{{ date }}"],
)  # fmt: skip
def test_nothing_is_executed(expression: str) -> None:
    with pytest.raises(SpecError, match="unknown variable"):
        filled({"a": f"x{{{{ {expression} }}}}"}, {"date": "2026-01-01"}, "")


def test_templates_keep_braces_of_their_own() -> None:
    inputs = {"uri": "{{ date }}/*.parquet", "template": "{{ title }}", "system": "{{x}} {date}"}
    found = filled({"input": inputs}, {"date": "2026-01-31"}, "job")
    assert found == {"input": {**inputs, "uri": "2026-01-31/*.parquet"}}


def test_values_are_put_in_once() -> None:
    assert filled(["{{ a }} {{ b }}"], {"a": "{{ b }}", "b": "x"}, "") == ["{{ b }} x"]


# --- folders --------------------------------------------------------------------------------


def test_a_folder_tells_of_each_wrong_file_and_has_the_others(write: Write, tmp_path: Path) -> None:
    write("a.yaml")
    write("b.yaml", cron="x")
    write("c.yml", schedule="a")
    (tmp_path / "notes.txt").write_text("not a schedule")
    schedules, problems = load_folder(tmp_path)
    assert [schedule.name for schedule in schedules] == ["a"]
    assert [problem.partition(": ")[0] for problem in problems] == [
        f"schedule file {tmp_path}/b.yaml",
        f"schedule file {tmp_path}/c.yml",
    ]
    assert problems[1].endswith("'a' is the name of a.yaml too")
    with pytest.raises(UsageError, match="SPECBATCH_SCHEDULES_DIR"):
        load_folder(tmp_path / "nowhere")


def test_files_are_read_again_when_they_change(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Folder(tmp_path)

    def crons() -> dict[str, str]:
        return {s.name: s.fields.cron for s in folder.schedules()}

    assert crons() == {}
    file = write("a.yaml", cron="1 * * * *")
    write("b.yaml", cron="2 * * * *")
    assert crons() == {"a": "1 * * * *", "b": "2 * * * *"}
    write("a.yaml", cron="wrong")
    assert crons()["a"] == "1 * * * *"  # what it said last
    crons()
    assert [
        r.getMessage().endswith("(its last valid version stays in force)") for r in caplog.records
    ] == [True]
    write("a.yaml", cron="3 * * * *")
    os.utime(file, ns=(1, 1))
    assert crons()["a"] == "3 * * * *"
    file.unlink()
    assert crons() == {"b": "2 * * * *"}
    write("c.yaml", schedule="b", cron="4 * * * *")
    assert crons() == {"b": "2 * * * *"}
    assert "'b' is the name of b.yaml too" in caplog.text


def test_a_file_that_could_not_be_read_once_is_read_when_it_can_be(
    write: Write, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, file = Folder(tmp_path), write("a.yaml")

    def no_access(_file: Path, **_how: str) -> str:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as unreadable:
        unreadable.setattr(Path, "read_text", no_access)
        assert folder.schedules() == folder.schedules() == []
    assert [record.getMessage() for record in caplog.records] == [
        f"schedule file {file} cannot be read: permission denied"
    ]
    assert [schedule.name for schedule in folder.schedules()] == ["a"]
