"""Log records as JSON, one object per line, with the ids of what their thread works on."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from specbatch.pipeline.observe.tracing.context import CurrentWork, current_work, trace_id_of
from specbatch.schemas.masking import masked_log
from specbatch.schemas.visible import visible_json


class JsonFormatter(logging.Formatter):
    """Masks passwords and personal data as the text format does.

    A record that was made with `extra={"request": its id}`, or with `job`, is about that. Other
    extras that a library adds to a record are left out: nobody has checked them for personal data.
    """

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": masked_log(record.getMessage()),
        }
        fields: dict[str, object] = {**said, **_ids(record)}
        if record.exc_info and record.exc_info[0] is not None:
            fields["error"] = record.exc_info[0].__name__
            traceback = record.exc_text or self.formatException(record.exc_info)
            fields["traceback"] = masked_log(traceback)
        if record.stack_info:
            fields["stack"] = masked_log(self.formatStack(record.stack_info))
        return visible_json(fields, default=str)


def job_of(record: logging.LogRecord) -> str | None:
    """The id of the job that a record is about; None if it is about none."""
    job_id = _ids(record).get("job")
    return None if job_id is None else str(job_id)


def _ids(record: logging.LogRecord) -> dict[str, object]:
    """The ids of what the record is about, else of what this thread works on."""
    request, work = getattr(record, "request", None), current_work()
    about: dict[str, object] = {} if request is None else {"request": str(request)}
    job_id = getattr(record, "job", None) if request is None else str(request).partition("/")[0]
    if job_id is not None and (work is None or work.job_id != job_id):
        # An engine's or a sweeper's thread, which works for all jobs.
        return {"job": job_id, **about, "trace_id": f"{trace_id_of(str(job_id)):032x}"}
    found = about if work is None else _of(work) | about
    return {name: value for name, value in found.items() if value is not None}


def _of(work: CurrentWork) -> dict[str, object]:
    span_id = work.span_id
    return {
        "job": work.job_id,
        "stage": work.stage,
        "group": work.group,
        "generation": work.generation,
        "attempt": work.attempt,
        "worker": work.worker,
        "trace_id": f"{trace_id_of(work.job_id):032x}",
        "span_id": None if span_id is None else f"{span_id:016x}",
    }
