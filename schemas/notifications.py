"""Notifications of jobs' ends: their events, the targets, and what waits to be sent."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote, urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from specbatch.schemas.errors import UsageError
from specbatch.schemas.field_errors import explain

FILE = "SPECBATCH_NOTIFY_FILE"
SECRET_PREFIX = "whsec_"
NAME_PATTERN = r"^[\w.-]{1,64}$"
_ADDRESS = r"^[^\s@,;<>]+@[^\s@,;<>]+$"


class Event(StrEnum):
    """What happened to a job."""

    STARTED = "started"  # its input is open; only lineage tells it
    DONE = "done"
    PARTIAL = "partial"  # published, and some rows have no completion
    FAILED = "failed"
    CANCELLED = "cancelled"  # published after a stop, with what was finished
    STOPPED = "stopped"  # its deadline or budget is reached: it ends soon


TOLD = tuple(event for event in Event if event is not Event.STARTED)  # to targets of the file
ENDS = (Event.DONE, Event.PARTIAL, Event.FAILED, Event.CANCELLED)


class Due(NamedTuple):
    """One notification that is to be sent now."""

    job_id: str
    number: int  # of the event's entry in the job's audit log; 0: it has none
    target: str
    event: Event
    at: float  # of the event, in seconds since the epoch
    attempts: int  # so far

    @property
    def event_id(self) -> str:
        """The same for every attempt and target: receivers know by it what they have."""
        return f"{self.job_id}-{self.number}"


@dataclass(frozen=True, slots=True)
class NotificationRow:
    """One notification in the store."""

    number: int  # of the event's entry in the job's audit log; 0: it has none
    target: str
    event: Event
    at: float
    attempts: int
    due_at: float | None  # None: it was sent, or given up
    sent_at: float | None
    error: str | None  # of the last attempt; None while it is being sent


class Target(BaseModel):
    """One entry of the file that `SPECBATCH_NOTIFY_FILE` names. Exactly one place to send to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")  # a webhook
    secret: str | None = Field(default=None, pattern=r"^whsec_[A-Za-z0-9+/=]{16,}$")
    slack: str | None = Field(default=None, pattern=r"^https?://[^\s]+$")
    email: tuple[Annotated[str, Field(pattern=_ADDRESS)], ...] = ()
    smtp: str | None = Field(default=None, pattern=r"^smtps?://[^\s]+$")
    sender: str | None = Field(default=None, pattern=_ADDRESS)
    events: tuple[Event, ...] = TOLD

    @model_validator(mode="after")
    def _one_place(self) -> Target:
        if sum(map(bool, (self.url, self.slack, self.email))) != 1:
            raise ValueError("name exactly one of url, slack and email")
        if self.secret is not None and self.url is None:
            raise ValueError("secret goes with url: only webhooks are signed")
        if Event.STARTED in self.events:
            raise ValueError("targets hear of ends and stops alone: leave started out of events")
        if bool(self.email) != (self.smtp is not None and self.sender is not None):
            raise ValueError("email needs smtp and sender, and they need email")
        return self

    @field_validator("url", "slack", "smtp")
    @classmethod
    def _can_be_read(cls, value: str | None) -> str | None:
        if value is not None and not _names_host(value):
            raise ValueError(
                "must name a host, and a port in digits; in a password write / ? # [ ] as %2F %3F "
                "%23 %5B %5D"
            )
        return value

    @field_validator("smtp")
    @classmethod
    def _has_ascii_login(cls, value: str | None) -> str | None:
        """Mail servers get nothing else."""
        if value is not None and not unquote(urlsplit(value).netloc.rpartition("@")[0]).isascii():
            raise ValueError("must have a user name and a password of ASCII characters alone")
        return value

    @field_validator("secret")
    @classmethod
    def _is_base64(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                b64decode(value.removeprefix(SECRET_PREFIX), validate=True)
            except ValueError:
                raise ValueError(f"must be {SECRET_PREFIX} and base64") from None
        return value

    @property
    def kind(self) -> Literal["webhook", "slack", "email"]:
        return "webhook" if self.url else "slack" if self.slack else "email"


def _names_host(url: str) -> bool:
    """Whether its parts can be read. The library's own words would quote parts of a password."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def load_targets(path: str) -> Mapping[str, Target]:
    """The targets of a YAML file by name. Raises `UsageError` that names the entry."""
    try:
        values: Any = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{FILE} names {path}, which cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError):  # ValueError: no text, or a date that is none
        raise UsageError(f"{FILE} names {path}, which is not YAML") from None
    if not isinstance(values, dict):
        raise UsageError(f"{path} must map names to targets, such as `ops: {{url: https://…}}`")
    return {str(name): _target(path, str(name), value) for name, value in values.items()}


def _target(path: str, name: str, value: object) -> Target:
    try:
        return Target.model_validate(value)
    except ValidationError as error:
        # Its values may be secrets, so no message has them.
        problems = [problem | {"input": None} for problem in error.errors()]
        raise UsageError(f"target {name} of {path}: {explain(problems, Target)}") from None
