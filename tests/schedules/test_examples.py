"""The shipped examples: schedule files, a crontab, systemd's units."""

from __future__ import annotations

import configparser
import re
import shlex
import shutil
import subprocess
from datetime import datetime
from itertools import count, islice
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest
import typer
from schedules.conftest import Site, at

from specbatch.jobs.cli.main import app
from specbatch.jobs.cli.submit_job import app as submit_job_app
from specbatch.jobs.schedules.definition import ScheduleFields, built_in, load_folder, load_schedule
from specbatch.jobs.schedules.kinds import JOB, KINDS
from specbatch.schemas.schedules import RunState
from specbatch.schemas.settings import Settings
from support.tree import ROOT

EXAMPLES = ROOT / "jobs" / "schedules" / "examples"
UNITS = sorted(EXAMPLES.glob("*.service")) + sorted(EXAMPLES.glob("*.timer"))


def test_the_schedule_files_are_right() -> None:
    schedules, problems = load_folder(EXAMPLES)
    assert (problems, len(schedules)) == ([], 8)
    assert {one.fields.kind for one in schedules} == {JOB, *KINDS}


def test_the_first_example_has_every_field_at_its_default_unless_it_says_otherwise() -> None:
    text = (EXAMPLES / "nightly-summaries.yaml").read_text()
    fields = load_schedule(EXAMPLES / "nightly-summaries.yaml").fields
    assert fields.model_fields_set == set(ScheduleFields.model_fields)
    for name, field in ScheduleFields.model_fields.items():
        (line,) = re.findall(rf"^{name}:.*", text, re.MULTILINE)
        if not field.is_required() and "default:" not in line and name not in ("variables", "job"):
            assert getattr(fields, name) == field.default, name
    (line,) = re.findall(r"^kind:.*", text, re.MULTILINE)
    assert set(KINDS) <= set(re.findall(r"\w+", line))


def test_the_first_example_fills_in_partitions() -> None:
    spec = load_schedule(EXAMPLES / "nightly-summaries.yaml").spec_at(at("2026-01-01T01:30Z"))
    assert spec.input.uri == "s3://warehouse/articles/day=2025-12-31/*.parquet"
    assert spec.output.uri == "s3://warehouse/summaries/year=2025/month=12/day=31"
    assert (spec.name, spec.sampling.max_tokens) == ("nightly-summaries", 256)


def commands() -> list[tuple[str, list[str]]]:
    """(file, command) of every command in a crontab or a unit."""
    found = []
    for file in (EXAMPLES / "crontab", *UNITS):
        for line in file.read_text().splitlines():
            if file.name == "crontab" and re.match(r"[*\d]", line):
                found.append((file.name, shlex.split(line)[5:]))
            if line.startswith("ExecStart="):
                found.append((file.name, shlex.split(line.removeprefix("ExecStart="))))
    return found


@pytest.mark.parametrize(("file", "command"), commands())
def test_commands_of_timers_are_commands(file: str, command: list[str]) -> None:
    program, *arguments = command
    known = typer.main.get_command(
        {"submit-job": submit_job_app, "specbatch": app}[Path(program).name]
    )
    context = known.make_context(program, arguments.copy(), resilient_parsing=False)
    if subcommands := getattr(known, "commands", None):
        assert arguments[0] in subcommands
    else:
        assert str(context.params["schedule"]).endswith(".yaml"), file
        assert (EXAMPLES / Path(context.params["schedule"]).name).is_file()


def test_there_is_a_command_in_each() -> None:
    assert [file for file, _ in commands()] == [
        "crontab",
        "specbatch-nightly.service",
        "specbatch-scheduler.service",
    ]


def test_variables_of_the_examples_are_settings() -> None:
    names = {f"SPECBATCH_{name.upper()}" for name in Settings.model_fields} | {"SPECBATCH_SETTINGS"}
    for file in (EXAMPLES / "crontab", *UNITS):
        assert set(re.findall(r"SPECBATCH_[A-Z_]+", file.read_text())) <= names, file


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_what_systemd_reads(unit: Path) -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[method-assign, assignment]  # keys keep their case
    parser.read(unit)
    assert "Description" in parser["Unit"]
    if unit.suffix == ".service":
        assert Path(parser["Service"]["ExecStart"].split()[0]).is_absolute()
    else:
        assert (EXAMPLES / f"{unit.stem}.service").is_file()


SOON_SEC = 600.0


def timer_sec() -> float:
    """How often the timer comes, from each full hour on."""
    timer = (EXAMPLES / "specbatch-nightly.timer").read_text()
    (minutes,) = re.findall(r"^OnCalendar=\*:0/(\d+)$", timer, re.MULTILINE)
    assert 60 % int(minutes) == 0
    return 60.0 * int(minutes)


def test_the_timer_comes_at_each_time_of_its_schedule_and_often_between() -> None:
    schedule = load_schedule(EXAMPLES / "nightly-summaries.yaml")
    for run_at in islice(schedule.times.after(at("2026-01-01T00:00Z")), 366):
        assert run_at % timer_sec() == 0
    assert timer_sec() <= SOON_SEC


def test_after_a_night_that_is_too_long_the_timer_catches_up(site: Site) -> None:
    """The first run takes thirty hours; each look is a process of its own."""
    schedule = load_schedule(EXAMPLES / "nightly-summaries.yaml")
    begin = at("2026-01-01T00:00Z")
    run_times = list(islice(schedule.times.after(begin), 5))
    ends: dict[str, float] = {}
    submitted: dict[float, float] = {}
    for look in count(begin, timer_sec()):
        if look > run_times[-1] + 86_400.0:
            break
        for job_id, end in list(ends.items()):
            if end <= look:
                site.end(job_id)
                del ends[job_id]
        site.tick(schedule, look)
        for run_at, state in site.states(schedule).items():
            if state is RunState.SUBMITTED and run_at not in submitted:
                submitted[run_at] = look
                hours = 30.0 if run_at == run_times[0] else 1.0
                ends[site.job_of(schedule, run_at)] = look + hours * 3600.0
    late = [submitted[run_at] - run_at for run_at in run_times]
    long = submitted[run_times[0]] + 30.0 * 3600.0 - run_times[1]  # into the second run
    assert late[1] <= long + SOON_SEC
    assert max(late[0], *late[2:]) <= SOON_SEC


def test_systemd_verifies_the_units(tmp_path: Path) -> None:
    """Where systemd is; the units are parsed by the test above everywhere."""
    program = shutil.which("systemd-analyze")
    if program is None:
        return
    for unit in UNITS:
        text = unit.read_text().replace("/opt/specbatch/bin/", "/bin/true ")
        (tmp_path / unit.name).write_text(text.replace("User=specbatch\n", ""))
    done = subprocess.run(
        [program, "verify", "--man=no", *(str(tmp_path / unit.name) for unit in UNITS)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    complaints = [line for line in done.stderr.splitlines() if str(tmp_path) in line]
    assert complaints == []


PAGE = (ROOT / "docs" / "howto" / "schedules.md").read_text()


def test_the_pages_schedules_are_some(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for name, block in zip(("nightly", "upkeep"), blocks, strict=True):
        (tmp_path / f"{name}.yaml").write_text(block)
    assert load_schedule(tmp_path / "upkeep.yaml").fields.kind == "purge"
    spec = load_schedule(tmp_path / "nightly.yaml").spec_at(at("2026-01-01T01:30Z"))
    assert spec.output.uri == "s3://warehouse/summaries/day=2025-12-31"


def test_the_page_has_every_field_and_its_default() -> None:
    for name, field in ScheduleFields.model_fields.items():
        (line,) = re.findall(rf"^\| `{name}` \| (.*?) \|", PAGE, re.MULTILINE)
        if isinstance(field.default, str | int | float):
            assert line.strip("`") == str(field.default).lower().replace("utc", "UTC").removesuffix(
                ".0"
            )


def test_the_page_has_every_variable_and_its_value() -> None:
    schedule = "nightly"
    at_night = datetime(2026, 1, 1, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"))
    table = PAGE.split("### Variables")[1].split("##")[0]
    named = set(re.findall(r"\{\{ ([\w.]+) \}\}", table)) - {"name", "limit"}
    values = built_in(schedule, at_night)
    assert named == {n for n in values if not n.startswith(("yesterday.", "tomorrow."))} - {
        "date.month", "date.day",
    }  # fmt: skip
    for name in named:
        assert f"`{values[name]}`" in table, name


def test_paths_of_a_lesson_are_relative_to_its_file(tmp_path: Path) -> None:
    (tmp_path / "models" / "verifier").mkdir(parents=True)
    file = tmp_path / "learn.yaml"
    file.write_text((EXAMPLES / "upkeep-learn.yaml").read_text())
    options = load_schedule(file).options_at(at("2026-01-01T06:00Z"))
    assert options["verifier"] == str(tmp_path / "models" / "verifier")
    assert options["folder"] == str(tmp_path / "trained")
