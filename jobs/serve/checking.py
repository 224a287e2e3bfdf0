"""Checks an uploaded batch file before its job is submitted: line by line, in little memory.

Here a whole batch is refused, as OpenAI does: what is no request, another endpoint than the
batch's, an unknown model or a second one, an id twice. What is wrong within a request's body
concerns that request alone, and ingest says so in the batch's error file.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import orjson

MOST_LINE_BYTES = 16 << 20  # what ingest reads of a line
MOST_ERRORS = 20  # that are listed
_BOM = b"\xef\xbb\xbf"


@dataclass(slots=True)
class Checked:
    """What a file asks for; with errors it is refused."""

    model: str | None = None
    requests: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)

    def refuse(
        self, code: str, message: str, line: int | None = None, param: str | None = None
    ) -> None:
        self.errors.append({"code": code, "message": message, "line": line, "param": param})


def check_file(path: Path, endpoint: str, models: Collection[str], most_requests: int) -> Checked:
    """Read it to its end, or until there are too many errors or lines."""
    checked, seen = Checked(), set[bytes]()
    with path.open("rb") as file:
        for number, line in _numbered(file):
            if line is None:
                said = f"a line has at most {MOST_LINE_BYTES:,} bytes"
                checked.refuse("line_too_long", said, number)
            elif line.strip():
                checked.requests += 1
                _check_line(checked, seen, line, number, endpoint, models)
            if number > most_requests:  # empty ones count: each takes its time
                said = f"the file has more than {most_requests:,} lines: split it"
                checked.refuse("too_many_requests", said)
            if len(checked.errors) >= MOST_ERRORS or number > most_requests:
                return checked
    if not checked.requests and not checked.errors:
        checked.refuse("empty_file", "the file has no requests: it must have one per line")
    return checked


def _numbered(file: BinaryIO) -> Any:
    """(line number from 1, line); None for one that is too long, which is passed over."""
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        if len(line) > MOST_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        else:
            yield number, line.removeprefix(_BOM) if number == 1 else line


def _check_line(
    checked: Checked,
    seen: set[bytes],
    line: bytes,
    number: int,
    endpoint: str,
    models: Collection[str],
) -> None:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        checked.refuse(
            "invalid_json_line", "this line is not JSON, or is nested too deeply", number
        )
        return
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        said = "a line is an object with custom_id, method, url and body"
        checked.refuse("invalid_request", said, number, "body")
        return
    _check_id(checked, seen, value.get("custom_id"), number)
    if value.get("url", endpoint) != endpoint or value.get("method", "POST") != "POST":
        said = f"each request of this batch must be POST {endpoint}"
        checked.refuse("mismatched_endpoint", said, number, "url")
    _check_model(checked, value["body"].get("model"), number, models)


def _check_id(checked: Checked, seen: set[bytes], custom_id: Any, number: int) -> None:
    if not isinstance(custom_id, str) or not custom_id:
        checked.refuse("missing_custom_id", "each request needs a custom_id", number, "custom_id")
        return
    digest = blake2b(custom_id.encode("utf-8", "replace"), digest_size=16).digest()
    if digest in seen:
        said = "an earlier request has this custom_id: ids must differ"
        checked.refuse("duplicate_custom_id", said, number, "custom_id")
    seen.add(digest)


def _check_model(checked: Checked, model: Any, number: int, models: Collection[str]) -> None:
    if not isinstance(model, str) or model not in models:
        name = f" {model!r}" if isinstance(model, str) and len(model) <= 100 else " of this name"
        said = f"there is no model{name}: GET /v1/models lists those there are"
        checked.refuse("model_not_found", said, number, "body.model")
    elif checked.model is None:
        checked.model = model
    elif model != checked.model:
        said = f"the requests of a batch name one model, and earlier ones name {checked.model!r}"
        checked.refuse("mismatched_model", said, number, "body.model")
