"""Settings, store and broker as commands use them; plain errors for servers that do not answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from pydantic_settings import SettingsError

from specbatch.jobs.cli.console import log_as, remark
from specbatch.schemas.encryption import SETTING as SECRET_SETTING
from specbatch.schemas.errors import SpecbatchError, UsageError, first_line
from specbatch.schemas.field_errors import must_be
from specbatch.schemas.masking import mask_url, masked
from specbatch.schemas.patience import NoAnswerError, patiently
from specbatch.schemas.records import DueWork
from specbatch.schemas.settings import Settings

if TYPE_CHECKING:  # what a command needs not to refuse a wrong flag is imported where it is used
    from celery import Celery

    from specbatch.pipeline.runtime.client import Client, Enqueue

REACH_SEC = 5.0
_OTHERS = 0o044  # of a file's mode: group or anybody may read it


class BrokerError(SpecbatchError):
    """The broker cannot be reached; the message names it."""


def load_settings(**values: Any) -> Settings:
    """The settings of the environment and the settings file; `values` win.

    Raises `UsageError` naming the variable that is wrong.
    """
    path = os.environ.get("SPECBATCH_SETTINGS")
    try:
        if path and not Path(path).is_file():
            raise UsageError(f"SPECBATCH_SETTINGS names {path}, which is not a file")
        found = Settings(**values)
    except ValidationError as error:
        problem = error.errors()[0]
        name = "SPECBATCH_" + "_".join(str(part) for part in problem["loc"]).upper()
        said = must_be([problem | {"input": None}] if name == SECRET_SETTING else [problem])
        raise UsageError(f"setting {name}: {said}") from None
    except OSError as error:
        why = (error.strerror or "error").lower()
        raise UsageError(f"the settings file {path} cannot be read: {why}") from None
    except SettingsError as error:  # of a variable that holds an object or a list
        raise UsageError(f"a SPECBATCH_ variable is not the JSON it must be: {error}") from None
    except ValueError as error:  # of the TOML reader
        raise UsageError(f"the settings file {path} cannot be read: {error}") from None
    log_as(found.log_format)
    if path and Path(path).stat().st_mode & _OTHERS and _has_password(Path(path)):
        remark(f"{path} holds a password and other users can read it: `chmod 600 {path}`")
    return found


def _has_password(path: Path) -> bool:
    text = path.read_text(errors="replace")
    return masked(text) != text


@contextmanager
def client(settings: Settings) -> Iterator[Client]:
    """A client that works without a broker: the store has the work, and the sweeper enqueues it."""
    from specbatch.pipeline.bootstrap import make_client, make_store

    with closing(make_store(settings)) as store:
        yield make_client(settings, forgiving_enqueue(settings), store)


def check_broker(settings: Settings) -> None:
    """Raise `UsageError` for a broker that cannot do, `BrokerError` for one out of reach."""
    app, shown = check_broker_url(settings), mask_url(settings.broker_url)

    def reach(_: object) -> None:
        with app.connection_for_write(connect_timeout=REACH_SEC) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0.1, timeout=REACH_SEC)

    try:
        patiently(f"the broker {shown}", 2 * REACH_SEC, reach)
    except NoAnswerError as error:
        raise BrokerError(f"{error}; check SPECBATCH_BROKER_URL") from None
    except Exception as error:  # each transport has its own kinds; all mean the same here
        raise BrokerError(
            f"the broker {shown} cannot be reached ({first_line(error)}); check "
            "SPECBATCH_BROKER_URL and that it runs"
        ) from None


def check_broker_url(settings: Settings) -> Celery:
    """The app on a broker that other processes reach. Raises `UsageError`."""
    if settings.broker_url.startswith("memory://"):
        raise UsageError(
            "the broker is memory://, which reaches no other process: set SPECBATCH_BROKER_URL to "
            "the broker that submitters and workers share, or run it here with --local"
        )
    return make_broker_app(settings)


def make_broker_app(settings: Settings) -> Celery:
    """The Celery app. Raises `UsageError` for a URL of an unknown kind."""
    from specbatch.workers.app import make_app

    app = make_app(settings)
    shown = mask_url(settings.broker_url)
    try:
        _ = app.connection_for_write().transport_cls
        app.connection_for_write().get_transport_cls()
    except Exception as error:
        raise UsageError(
            f"SPECBATCH_BROKER_URL {shown!r} cannot be used ({first_line(error)}); use redis://, "
            "amqp:// or memory://"
        ) from None
    return app


def silent(_work: DueWork) -> None:
    """Enqueues nothing, in a process that no worker listens to."""


def forgiving_enqueue(settings: Settings) -> Enqueue:
    """Enqueues work that is in the store already."""
    if settings.broker_url.startswith("memory://"):
        return silent  # it reaches no other process
    from specbatch.workers.app import make_enqueue

    enqueue = make_enqueue(make_broker_app(settings))

    def forgiving(work: DueWork) -> None:
        try:
            patiently("the broker", REACH_SEC, lambda _: enqueue(work))
        except Exception as error:  # the change is stored; workers sweep the store anyway
            remark(
                f"no message was sent to the broker ({first_line(error)}); workers find the work "
                "in the store"
            )

    return forgiving
