"""Tables of how far an installation scales: a night's need beside what was measured.

A row is one resource. A benchmark measured what one group takes of it; what nights of 10^6, 10^9
and 10^11 tokens take is computed. A measured rate keeps its unit: a second row of the same part
says what one process or one server reached.
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
SOURCES = ("per-group", "drain", "scale", "ledger", "gpu-nvidia-h200")
DRAINED_TOKENS = 4  # of a row in `drain`
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
    stages = found["stages"]
    yield from _model()
    for name in STAGES:
        yield _cores(f"{name}: processor", stages[name]["cpu_sec_per_group"], tokens, "per-group")
    yield from _publishing(found, tokens)
    drain = result("drain")
    for server, shown in (("postgres", "PostgreSQL"), ("redis", "Redis")):
        sec = drain["cpu_sec"][server] / drain["groups"]
        of = f" of {drain['rows'] // drain['groups']} rows of {DRAINED_TOKENS} tokens"
        yield _cores(f"{shown}: processor", sec, tokens, "drain", of)
    statements = sum(stage["statements_per_group"] for stage in stages.values())
    yield _a_sec("PostgreSQL: statements", statements, tokens)
    yield _commits(tokens)
    yield _gigabytes("PostgreSQL: completions", _bytes_of_record(), "ledger")
    yield _a_sec("Redis: messages", found["redis"]["messages_per_group"], tokens)
    objects = found["object_store"]
    yield _millions("object store: objects", objects["objects_per_group"], tokens)
    requests = sum(
        stage[kind]
        for stage in stages.values()
        for kind in ("object_writes_per_group", "object_reads_per_group")
    )
    yield _a_sec("object store: requests", requests, tokens)
    yield _gigabytes("object store: stored", objects["bytes_per_token"], "per-group")
    # Upload and download took a tick or two of the clock of processor time: too few to count.
    each = found["serve"]["batch_cpu_sec_per_1000_requests"]
    rows = int(found["rows_per_group"])
    yield _cores("serve: processor", each / 1000 * rows, tokens, "per-group", ", batch only")


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


def _publishing(found: Mapping[str, Any], tokens: int) -> Iterator[Part]:
    """By rows of few tokens, in wall time, and by those of this page, in processor time."""
    drain = result("drain")
    seconds = drain["seconds"]["published"] - drain["seconds"]["drained"]
    rate = drain["rows"] / seconds
    of_token = 1 / rate / int(found["tokens_per_row"])
    name = "publish: end of one job, short rows"
    measured = f"{rate:,.0f} rows/s of {DRAINED_TOKENS} tokens"
    yield Part(name, measured, of_token, "s", 1, "drain")
    sec = found["stages"]["publish"]["cpu_sec_per_group"]
    wall = found["publish_wall_sec"] / found["groups"]
    measured = f"{sec * 1000:.3g} ms a group, processor time only (wall time: {wall * 1000:.3g} ms)"
    yield Part("publish: processor, these rows", measured, sec / tokens, "s", 1, "per-group")


def _commits(tokens: int) -> Part:
    """The most that one server reached, with its clients on the same cores."""
    scale = result("scale")
    best, of = max(row["groups_per_sec"] for row in scale["store"]), scale["store_group"]
    size = f"{of['rows']} rows of {of['tokens_per_row']} tokens"
    measured = f"at most {best:,.0f} groups/s of {size}, on two cores"
    name = "PostgreSQL: commits of one server"
    return Part(name, measured, 1 / best / tokens, "of one", NIGHT_SEC, "scale")


def _bytes_of_record() -> float:
    (found,) = (
        row["bytes_per_token"]
        for row in result("ledger")["postgres"]
        if (row["mean_tokens"], row["drafts"], row["clients"]) == (128, True, 1)
    )
    return float(found)


def _cores(name: str, sec: float, tokens: int, source: str, of: str = "") -> Part:
    """`of`: which group, or what of it, where that is not the whole of this page's."""
    measured = f"{sec * 1000:.3g} ms a group{of}"
    return Part(name, measured, sec / tokens, "cores", NIGHT_SEC, source)


def _a_sec(name: str, count: float, tokens: int) -> Part:
    measured = f"{count:.3g} a group"
    return Part(name, measured, count / tokens, "a second", NIGHT_SEC, "per-group")


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
        made_on = machines({"machine": data["machine"]})
        lines.append(f"`{name}`: {made_on}.{noted}")
    return f"<small>{' '.join(lines)}</small>"
