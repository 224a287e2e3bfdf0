"""Checks an uploaded batch file before its job is submitted: line by line, in little memory.

Here a whole batch is refused, as OpenAI does: what is no request, another endpoint than the
batch's, an unknown model or a second one, an id twice. What is wrong within a request's body
concerns that request alone, and ingest says so in the batch's error file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any, BinaryIO

import orjson

MOST_LINE_BYTES = 16 << 20  # what ingest reads of a line
MOST_ERRORS = 20  # that are listed
_BOM = b"\xef\xbb\xbf"
_LOOK_BYTES = 1 << 20  # between two looks at whether to stop
_LINE_BYTES = 1 << 10  # what a line costs at least: an empty one takes its time too


@dataclass(slots=True)
class Checked:
    """What a file asks for; with errors it is refused."""

    model: str | None = None
    requests: int = 0
    sha256: str | None = None  # of the file; None: it was not read to its end
    errors: list[dict[str, Any]] = field(default_factory=list)

    def refuse(
        self, code: str, message: str, line: int | None = None, param: str | None = None
    ) -> None:
        self.errors.append({"code": code, "message": message, "line": line, "param": param})


def check_file(
    path: Path,
    endpoint: str,
    models: Collection[str],
    most_requests: int,
    must_stop: Callable[[], bool] = lambda: False,
) -> Checked | None:
    """Read it to its end, or until there are too many errors or lines. None: it was to stop."""
    checked, seen, digest, since_look = Checked(), set[bytes](), sha256(), 0
    with path.open("rb") as file:
        for number, line, size in _numbered(file, digest):
            since_look += max(size, _LINE_BYTES)
            if since_look >= _LOOK_BYTES:
                since_look = 0
                if must_stop():
                    return None
            if line is None:
                said = f"a line has at most {MOST_LINE_BYTES:,} bytes"
                checked.refuse("line_too_long", said, number)
            elif text := line.strip():
                checked.requests += 1
                if checked.requests == 1 and text.startswith(b"["):
                    said = "a batch file has one object per line, and no list around them"
                    checked.refuse("invalid_json_line", said, number)
                    return checked
                _check_line(checked, seen, text, number, endpoint, models)
            if number > most_requests:  # empty ones count: each takes its time
                said = f"the file has more than {most_requests:,} lines: split it"
                checked.refuse("too_many_requests", said)
            if len(checked.errors) >= MOST_ERRORS or number > most_requests:
                return checked
    checked.sha256 = digest.hexdigest()
    if not checked.requests and not checked.errors:
        checked.refuse("empty_file", "the file has no requests: it must have one per line")
    return checked


def _numbered(file: BinaryIO, digest: Any) -> Iterator[tuple[int, bytes | None, int]]:
    """(line number from 1, line, its bytes); no line where it is too long. `digest` takes all."""
    number = 0
    while line := file.readline(MOST_LINE_BYTES + 1):
        number += 1
        digest.update(line)
        size = len(line)
        if size > MOST_LINE_BYTES and not line.endswith(b"\n"):
            while rest := file.readline(1 << 20):
                digest.update(rest)
                size += len(rest)
                if rest.endswith(b"\n"):
                    break
            yield number, None, size
        else:
            yield number, line.removeprefix(_BOM) if number == 1 else line, size


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
        said = "this line is not JSON, or is nested too deeply"
        if not _is_utf8(line):
            said = "this line is not UTF-8: save the file as UTF-8"
        checked.refuse("invalid_json_line", said, number)
        return
    if not isinstance(value, dict) or not isinstance(value.get("body"), dict):
        said = "a line is an object with custom_id, method, url and body"
        checked.refuse("invalid_request", said, number, "body")
        return
    _check_id(checked, seen, value.get("custom_id"), number)
    wanted = {"url": endpoint, "method": "POST"}
    if others := [name for name, one in wanted.items() if value.get(name, one) != one]:
        said = f"each request of this batch must be POST {endpoint}"
        checked.refuse("mismatched_endpoint", said, number, others[0])
    _check_model(checked, value["body"].get("model"), number, models)


def _is_utf8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_id(checked: Checked, seen: set[bytes], custom_id: Any, number: int) -> None:
    if custom_id is not None and not isinstance(custom_id, str):
        said = 'custom_id must be a text, as in "1"'
        checked.refuse("invalid_custom_id", said, number, "custom_id")
        return
    if not custom_id:
        checked.refuse("missing_custom_id", "each request needs a custom_id", number, "custom_id")
        return
    digest = blake2b(custom_id.encode("utf-8", "replace"), digest_size=16).digest()
    if digest in seen:
        said = "an earlier request has this custom_id: ids must differ"
        checked.refuse("duplicate_custom_id", said, number, "custom_id")
    seen.add(digest)


def _check_model(checked: Checked, model: Any, number: int, models: Collection[str]) -> None:
    if model is None:
        said = "`model` is missing: GET /v1/models lists those there are"
        checked.refuse("missing_model", said, number, "body.model")
    elif not isinstance(model, str) or model not in models:
        name = f" {model!r}" if isinstance(model, str) and len(model) <= 100 else " of this name"
        said = f"there is no model{name}: GET /v1/models lists those there are"
        checked.refuse("model_not_found", said, number, "body.model")
    elif checked.model is None:
        checked.model = model
    elif model != checked.model:
        said = f"the requests of a batch name one model, and earlier ones name {checked.model!r}"
        checked.refuse("mismatched_model", said, number, "body.model")
