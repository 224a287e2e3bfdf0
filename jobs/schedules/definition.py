"""Schedule files: what to run, when, and what to do with times that were missed.

`{{ variable }}` in a text of it becomes its value; nothing is ever executed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from specbatch.jobs.schedules.cron import CronTimes
from specbatch.jobs.schedules.kinds import JOB, KINDS
from specbatch.pipeline.operations.spec_input import read_spec_file, resolved_spec
from specbatch.schemas.errors import SpecError, UsageError
from specbatch.schemas.field_errors import explain
from specbatch.schemas.notifications import NAME_PATTERN
from specbatch.schemas.schedules import PAUSED
from specbatch.schemas.spec import JobSpec

Value = str | int | float | bool

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"\{\{((?:(?!\}\}).)*)\}\}", re.DOTALL)
_BEGIN = "{{"


def built_in(schedule: str, logical: datetime) -> dict[str, Value]:
    """Variables of every schedule. `logical` is the run's time in the schedule's zone."""
    utc = logical.astimezone(UTC)
    values: dict[str, Value] = {
        "schedule": schedule,
        "logical_time": logical.isoformat(),
        "logical_time.utc": f"{utc:%Y-%m-%dT%H:%M:%SZ}",
        "logical_time.compact": f"{utc:%Y%m%dT%H%M%SZ}",
        "time_zone": str(logical.tzinfo),
        "hour": f"{logical:%H}",
        "minute": f"{logical:%M}",
    }
    day = logical.date()
    for name, days in (("date", 0), ("yesterday", -1), ("tomorrow", 1)):
        values |= _of_day(name, day + timedelta(days=days))
    return values


def _of_day(name: str, day: date) -> dict[str, Value]:
    year, week, _ = day.isocalendar()
    return {
        name: day.isoformat(),
        f"{name}.year": f"{day:%Y}",
        f"{name}.month": f"{day:%m}",
        f"{name}.day": f"{day:%d}",
        f"{name}.compact": f"{day:%Y%m%d}",
        f"{name}.week": f"{year}-W{week:02}",
    }


_WITH_BRACES_OF_THEIR_OWN = ("job.input.template", "job.input.system")


def filled(value: Any, variables: Mapping[str, Value], where: str) -> Any:
    """The value with variables replaced in its texts, at any depth.

    Prompt templates stay as they are: braces are their own. A text that is exactly one variable
    becomes that variable's value, which may be a number. Raises a `SpecError` that names the field
    and the unknown variable.
    """
    if isinstance(value, Mapping):
        return {
            key: filled(inner, variables, f"{where}.{key}" if where else str(key))
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [filled(inner, variables, f"{where}.{n}") for n, inner in enumerate(value)]
    if not isinstance(value, str) or _BEGIN not in value or where in _WITH_BRACES_OF_THEIR_OWN:
        return value
    if whole := _VARIABLE.fullmatch(value.strip()):
        return _value_of(whole, variables, where)
    text = _VARIABLE.sub(lambda found: str(_value_of(found, variables, where)), value)
    if _BEGIN in _VARIABLE.sub("", value):
        raise SpecError(f"field `{where}`: {{{{ without }}}} in {value!r}")
    return text


def _value_of(found: re.Match[str], variables: Mapping[str, Value], where: str) -> Value:
    name = found[1].strip()
    if name not in variables:
        raise SpecError(
            f"field `{where}`: unknown variable {{{{ {name} }}}}; there are "
            f"{', '.join(sorted(variables))}"
        )
    return variables[name]


CatchUp = Literal["none", "latest", "all"]
Overlap = Literal["skip", "queue", "cancel-old"]
SUFFIXES = (".yaml", ".yml")
_EXAMPLE_TIME = datetime(2024, 2, 29, 12, 30, tzinfo=UTC).timestamp()
_BUILT_IN = frozenset(built_in("", datetime.fromtimestamp(0, UTC)))


class ScheduleFields(BaseModel):
    """The fields of a schedule file."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schedule: str | None = Field(
        default=None, pattern=r"^[\w.@+-]{1,100}$", description="its name; default: the file's"
    )
    cron: str = Field(description="five fields of cron, or a nickname such as @daily")
    time_zone: str = Field(default="UTC", description="time zone of the expression")
    catch_up: CatchUp = Field(
        default="latest", description="which of the times run that passed without a scheduler"
    )
    catch_up_limit: int = Field(
        default=7, ge=1, le=1000, description="for `all`: at most this many of the newest times"
    )
    overlap: Overlap = Field(
        default="queue", description="what to do at a time that comes while a run is active"
    )
    grace_sec: float = Field(
        default=300.0,
        gt=0,
        description="a time that a scheduler finds at most so much later is still on time",
    )
    paused: bool = Field(default=False, description="true: times pass without runs")
    variables: dict[str, StrictStr | StrictInt | StrictFloat | StrictBool] = {}
    kind: str = Field(default=JOB, description="what is run: a job, or upkeep")
    job: dict[str, Any] = Field(
        default={}, description="the job spec, with {{ variables }} in its texts"
    )
    options: dict[str, Any] = Field(default={}, description="of another kind than `job`")
    notify: tuple[Annotated[str, Field(pattern=NAME_PATTERN)], ...] = Field(
        default=(), description="of another kind than `job`: targets that hear how runs end"
    )

    @field_validator("kind")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in (JOB, *KINDS):
            raise ValueError(f"must be one of {', '.join((JOB, *KINDS))}")
        return value

    @field_validator("job")
    @classmethod
    def _of_jobs(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if value and info.data.get("kind", JOB) != JOB:
            raise ValueError(f"goes with `kind: {JOB}` alone; {info.data['kind']} has `options`")
        return value

    @field_validator("options", "notify")
    @classmethod
    def _of_other_kinds(cls, value: Any, info: ValidationInfo) -> Any:
        if value and info.data.get("kind", JOB) == JOB:
            raise ValueError(f"goes with another kind than `{JOB}`, which has a spec: `job`")
        return value

    @field_validator("variables")
    @classmethod
    def _names_of_their_own(cls, value: dict[str, Value]) -> dict[str, Value]:
        for name in value:
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not a name: use letters, digits and _")
            if name in _BUILT_IN:
                raise ValueError(f"{name!r} is the name of a built-in variable")
        return value


@dataclass(frozen=True, slots=True)
class Schedule:
    """A checked schedule file."""

    name: str
    file: Path
    fields: ScheduleFields
    times: CronTimes

    @property
    def timing(self) -> str:
        """The expression and zone in words. The count of times restarts when they change."""
        if self.fields.paused:
            return PAUSED
        return f"{' '.join(self.fields.cron.split())} in {self.fields.time_zone}"

    @property
    def is_job(self) -> bool:
        return self.fields.kind == JOB

    def spec_at(self, logical_at: float) -> JobSpec:
        """The job of one time. Raises `SpecError` naming the file and the field."""
        try:
            values = self._filled(self.fields.job, "job", logical_at)
            values.setdefault("name", self.name)
            return resolved_spec(values, self.file.absolute().parent)
        except SpecError as error:
            raise SpecError(f"schedule file {self.file}: {error}") from None

    def options_at(self, logical_at: float) -> dict[str, Any]:
        """The options of one time of another kind, checked. Raises `SpecError` as `spec_at`."""
        model = KINDS[self.fields.kind].options
        try:
            values = self._filled(self.fields.options, "options", logical_at)
            options = model.model_validate(values).beside(self.file.parent)
            return options.model_dump(mode="json")
        except ValidationError as error:
            problem = f"options of kind {self.fields.kind}: {explain(error.errors(), model)}"
        except SpecError as error:
            problem = str(error)
        raise SpecError(f"schedule file {self.file}: {problem}")

    def _filled(self, values: dict[str, Any], where: str, logical_at: float) -> dict[str, Any]:
        fixed = built_in(self.name, self.times.local(logical_at))
        own = filled(self.fields.variables, fixed, "variables")
        return dict(filled(values, {**fixed, **own}, where))


def load_schedule(file: Path) -> Schedule:
    """Read and check a schedule file and what it runs. Raises `SpecError` with one sentence."""
    values = read_spec_file(file, "schedule file", "cron and job")
    try:
        fields = ScheduleFields.model_validate(values)
    except ValidationError as error:
        raise SpecError(
            f"schedule file {file}: {explain(error.errors(), ScheduleFields)}"
        ) from None
    zone = _checked(file, "time_zone", lambda: zone_of(fields.time_zone))
    times = _checked(file, "cron", lambda: CronTimes(fields.cron, zone))
    name = fields.schedule or file.stem
    if fields.schedule is None:
        _checked(
            file, "schedule", lambda: ScheduleFields.model_validate({**values, "schedule": name})
        )
    made = Schedule(name, file, fields, times)
    if not made.is_job:
        made.options_at(_EXAMPLE_TIME)
    elif not fields.job:
        raise SpecError(f"schedule file {file}: field `job` is required")
    else:
        made.spec_at(_EXAMPLE_TIME)
    return made


def schedule_files(folder: Path) -> list[Path]:
    """The files of a folder, sorted by name. Raises `UsageError` if it does not exist."""
    if not folder.is_dir():
        raise UsageError(
            f"there is no folder {folder} with schedules: set SPECBATCH_SCHEDULES_DIR, or name one "
            "with --folder"
        )
    return sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)


def load_folder(folder: Path) -> tuple[list[Schedule], list[str]]:
    """The schedules of a folder, and a sentence about each invalid file.

    Two files with one name would take each other's times, so the second one is invalid.
    """
    found: dict[str, Schedule] = {}
    problems = []
    for file in schedule_files(folder):
        try:
            schedule = load_schedule(file)
        except UsageError as error:
            problems.append(str(error))
            continue
        if other := found.get(schedule.name):
            problems.append(_taken(schedule, other))
        else:
            found[schedule.name] = schedule
    return list(found.values()), problems


def _taken(schedule: Schedule, other: Schedule) -> str:
    taken = f"{schedule.name!r} is the name of {other.file.name} too"
    return f"schedule file {schedule.file}: field `schedule`: {taken}"


def zone_of(name: str) -> ZoneInfo:
    """The zone of this name. Raises `UsageError` if it is unknown here."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise UsageError(
            f"unknown time zone {name!r}: write one as Europe/Berlin or UTC, and see that the "
            "system's time zones (tzdata) are installed"
        ) from None


def _checked(file: Path, field: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except ValidationError as error:
        problem = explain(error.errors(), ScheduleFields)
        raise SpecError(f"schedule file {file}: {problem}; give it another name") from None
    except UsageError as error:
        raise SpecError(f"schedule file {file}: field `{field}`: {error}") from None


log = logging.getLogger(__name__)

Stamp = tuple[int, int]


@dataclass(slots=True)
class Folder:
    """The schedules of a folder, read again when files change.

    A file that becomes invalid keeps its last valid schedule. It is read again each time, because
    what was wrong may lie outside of it, and a problem is logged once.
    """

    path: Path
    _stamps: dict[Path, Stamp] = field(default_factory=dict)  # of the versions in force
    _problems: dict[Path, str] = field(default_factory=dict)  # of the versions that are not
    _schedules: dict[Path, Schedule] = field(default_factory=dict)

    def schedules(self) -> list[Schedule]:
        """The current schedules; of several with one name the first. Raises `UsageError`."""
        files = schedule_files(self.path)
        for gone in (self._stamps.keys() | self._problems.keys()) - set(files):
            for known in (self._stamps, self._problems, self._schedules):
                known.pop(gone, None)
        for file in files:
            self._refresh(file)
        return list({s.name: s for s in reversed(list(self._schedules.values()))}.values())[::-1]

    def _refresh(self, file: Path) -> None:
        try:
            found = file.stat()
        except OSError:  # deleted meanwhile
            return
        stamp = (found.st_mtime_ns, found.st_size)
        if self._stamps.get(file) == stamp:
            self._problems.pop(file, None)
            return
        try:
            made = load_schedule(file)
        except UsageError as error:
            goes_on = " (its last valid version stays in force)" if file in self._schedules else ""
            problem = f"{error}{goes_on}"
            if self._problems.get(file) != problem:
                log.error("%s", problem)
            self._problems[file] = problem
            return
        self._problems.pop(file, None)
        self._stamps[file] = stamp
        for other, schedule in self._schedules.items():
            if schedule.name == made.name and other != file:
                log.error("%s", _taken(made, schedule))
        self._schedules[file] = made
