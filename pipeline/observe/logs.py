"""Log records as JSON, one object on a line, with the ids of what their thread works on."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

import orjson

from specbatch.pipeline.observe.context import Work, current_work, trace_id_of
from specbatch.schemas.masking import masked_log


class JsonFormatter(logging.Formatter):
    """Passwords and personal data are masked as in the text that it takes the place of.

    `request` is of records that were made with `extra={"request": its id}`. What else a library
    puts into a record is left out: nobody has looked at it.
    """

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": masked_log(record.getMessage()),
        }
        fields: dict[str, object] = {**said, **_ids(getattr(record, "request", None))}
        if record.exc_info and record.exc_info[0] is not None:
            fields["error"] = record.exc_info[0].__name__
            traceback = record.exc_text or self.formatException(record.exc_info)
            fields["traceback"] = masked_log(traceback)
        if record.stack_info:
            fields["stack"] = masked_log(self.formatStack(record.stack_info))
        return orjson.dumps(fields, default=str).decode()


def _ids(request: object) -> dict[str, object]:
    """Of a request, of what this thread works on, or none."""
    work = current_work()
    if isinstance(request, str):
        job_id = request.partition("/")[0]
        if work is None or work.job_id != job_id:  # an engine's thread works for all
            return {"job": job_id, "request": request, "trace_id": f"{trace_id_of(job_id):032x}"}
    if work is None:
        return {}
    found = _of(work) | ({"request": request} if isinstance(request, str) else {})
    return {name: value for name, value in found.items() if value is not None}


def _of(work: Work) -> dict[str, object]:
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
