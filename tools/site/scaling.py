"""Tables of how far an installation scales: a night's need beside what was measured.

A row is one resource: what one group takes of it, which a benchmark measured, and what nights of
10^6, 10^9 and 10^11 tokens take of it, which is computed. A measured rate is never drawn out of its
unit: a second row of the same part says what one process or one server reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from specbatch.tools.site.figures import machines, result
from specbatch.tools.site.markdown import table

NIGHT_SEC = 8 * 3600
NIGHTS = (10**6, 10**9, 10**11)  # tokens
SOURCES = ("per-group", "drain", "scale", "gpu-nvidia-h200")
STAGES = ("ingest", "propose", "verify", "record")


@dataclass(frozen=True, slots=True)
class Part:
    """One resource. `of_token`: what a token takes, in `unit`; a night's need is shown in
    `shown`, `scale` times as large a unit, or as so many of what one does a night."""

    name: str
    measured: str
    of_token: float
    shown: str
    scale: float
    source: str


@cache
def group() -> Mapping[str, Any]:
    """What a group took of each part, and its tokens."""
    found: Mapping[str, Any] = result("per-group")
    return found


def tokens_of_group() -> int:
    return int(group()["rows_per_group"] * group()["tokens_per_row"])


def parts() -> Iterator[Part]:
    """All rows, in the order of a group's way."""
    tokens, found = tokens_of_group(), group()
    yield from _model()
    for name in STAGES:
        sec = found["processes"][name]["cpu_sec_per_group"]
        both = "record and publish" if name == "record" else name
        yield _cores(f"{both}: processor", sec, tokens)
    yield _publishing()
    yield _cores("PostgreSQL: processor", found["postgres"]["cpu_sec_per_group"], tokens)
    statements = sum(stage["statements_per_group"] for stage in found["stages"].values())
    yield _a_sec("PostgreSQL: statements", statements, tokens, "per-group")
    best = max(row["groups_per_sec"] for row in result("scale")["store"])
    yield _of_one("PostgreSQL: one server's commits", best, "groups/s", tokens, "scale")
    of_record = found["postgres"]["bytes_per_token"]
    yield _gigabytes("PostgreSQL: written", of_record, "per-group")
    yield _cores("Redis: processor", found["redis"]["cpu_sec_per_group"], tokens)
    yield _a_sec("Redis: messages", found["redis"]["messages_per_group"], tokens, "per-group")
    objects = found["object_store"]
    yield _millions("object store: objects", objects["objects_per_group"], tokens)
    requests = sum(
        stage[kind]
        for stage in found["stages"].values()
        for kind in ("object_writes_per_group", "object_reads_per_group")
    )
    yield _a_sec("object store: requests", requests, tokens, "per-group")
    yield _gigabytes("object store: stored", objects["bytes_per_token"], "per-group")
    serve = found["serve"]
    each = sum(
        serve[f"{what}_cpu_sec_per_1000_requests"] for what in ("upload", "batch", "download")
    )
    rows = int(found["rows_per_group"])
    yield _cores("serve: processor", each / 1000 * rows, tokens)


def parts_table() -> str:
    """A night of each size, by part."""
    heads = ("part", "measured", *(f"10^{_power(night)} tokens" for night in NIGHTS), "file")
    rows = [
        (
            part.name,
            part.measured,
            *(f"{_number(part.of_token * night / part.scale)} {part.shown}" for night in NIGHTS),
            f"`{part.source}`",
        )
        for part in parts()
    ]
    return table(heads, rows) + "\n" + _notes()


def counts_table() -> str:
    """Tokens a second, groups and rows of each night."""
    tokens, rows = tokens_of_group(), int(group()["tokens_per_row"])
    made: list[tuple[str, Callable[[int], float]]] = [
        ("tokens a second", lambda night: night / NIGHT_SEC),
        ("rows", lambda night: night / rows),
        ("groups", lambda night: night / tokens),
        ("groups a second", lambda night: night / tokens / NIGHT_SEC),
    ]
    heads = ("", *(f"10^{_power(night)} tokens" for night in NIGHTS))
    return table(heads, [(name, *(_number(of(night)) for night in NIGHTS)) for name, of in made])


TABLES: Mapping[str, Callable[[], str]] = {"scaling": parts_table, "nights": counts_table}


def _model() -> Iterator[Part]:
    for model, sequences in (("llama-8b", 128), ("llama-230m", 128)):
        (rate,) = (
            row["tokens_per_sec"]
            for row in result("gpu-nvidia-h200")[model]["rows"]
            if row["n"] == sequences and row["contender"] == "depth 0, bitwise"
        )
        name = f"one worker: {model} on an H200"
        measured = f"{rate:,.0f} tokens/s at {sequences} sequences, depth 0"
        yield Part(name, measured, 1 / rate, "GPUs", NIGHT_SEC, "gpu-nvidia-h200")


def _publishing() -> Part:
    drain = result("drain")
    seconds = drain["seconds"]["published"] - drain["seconds"]["drained"]
    rate = drain["rows"] / seconds
    of_row = int(group()["tokens_per_row"])
    measured = f"{rate:,.0f} rows/s, one job's output by one process"
    return Part("publish: one job's end", measured, 1 / rate / of_row, "s", 1, "drain")


def _cores(name: str, sec: float, tokens: int, source: str = "per-group") -> Part:
    return Part(name, f"{sec * 1000:.3g} ms a group", sec / tokens, "cores", NIGHT_SEC, source)


def _a_sec(name: str, count: float, tokens: int, source: str) -> Part:
    return Part(name, f"{count:.3g} a group", count / tokens, "a second", NIGHT_SEC, source)


def _of_one(name: str, rate: float, unit: str, tokens: int, source: str) -> Part:
    measured = f"at most {rate:,.0f} {unit} on two cores"
    return Part(name, measured, 1 / rate / tokens, "of one", NIGHT_SEC, source)


def _gigabytes(name: str, of_token: float, source: str) -> Part:
    return Part(name, f"{of_token:.3g} bytes a token", of_token, "GB", 1e9, source)


def _millions(name: str, count: float, tokens: int) -> Part:
    return Part(name, f"{count:.3g} a group", count / tokens, "million", 1e6, "per-group")


def _number(value: float) -> str:
    """Two digits that count, and no power of ten."""
    if value >= 100:
        return f"{float(f'{value:.2g}'):,.0f}"
    return f"{float(f'{value:.2g}'):.10f}".rstrip("0").rstrip(".")


def _power(value: int) -> int:
    return len(str(value)) - 1


def _notes() -> str:
    lines = []
    for name in SOURCES:
        data = result(name)
        noted = f" Note: {data['note']}." if data.get("note") else ""
        lines.append(f"`{name}`: {machines(data)}.{noted}")
    return f"<small>{' '.join(lines)}</small>"
