"""The tables of how far it scales: computed from results, in a straight line, and shown."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from specbatch.tools.site import hooks
from specbatch.tools.site.figures import result
from specbatch.tools.site.scaling import (
    NIGHT_SEC,
    NIGHTS,
    SOURCES,
    TABLES,
    Part,
    parts,
    parts_table,
    tokens_of_group,
)
from support.tree import ROOT

PAGE = ROOT / "docs" / "explanation" / "how-far-it-scales.md"
PARTS = {part.name: part for part in parts()}


def need(name: str, night: int) -> float:
    part: Part = PARTS[name]
    return part.of_token * night / part.scale


def test_a_night_s_need_is_what_a_group_took_times_its_groups() -> None:
    found: dict[str, Any] = result("per-group")
    groups = 10**9 / tokens_of_group()
    seconds = groups * found["stages"]["verify"]["cpu_sec_per_group"]
    assert need("verify: processor", 10**9) == pytest.approx(seconds / NIGHT_SEC)
    sent = groups * found["redis"]["messages_per_group"]
    assert need("Redis: messages", 10**9) == pytest.approx(sent / NIGHT_SEC)
    size = 10**9 * found["object_store"]["bytes_per_token"]
    assert need("object store: stored", 10**9) == pytest.approx(size / 1e9)


def test_gpus_and_a_publication_follow_from_their_own_results() -> None:
    (rate,) = (
        row["tokens_per_sec"]
        for row in result("gpu-nvidia-h200")["llama-8b"]["rows"]
        if row["n"] == 128 and row["contender"] == "depth 0, bitwise"
    )
    gpus = need("one worker: llama-8b on an H200", 10**11)
    assert gpus * rate * NIGHT_SEC == pytest.approx(10**11)
    drain = result("drain")
    seconds = drain["seconds"]["published"] - drain["seconds"]["drained"]
    tokens = drain["rows"] * result("per-group")["tokens_per_row"]
    assert need("publish: end of one job, short rows", tokens) == pytest.approx(seconds)


def test_the_table_has_a_line_for_each_part_and_says_where_it_is_from() -> None:
    made = parts_table()
    lines = [line for line in made.splitlines() if line.startswith("| ")]
    assert [re.split(r" *\| *", line)[1] for line in lines[2:]] == list(PARTS)
    assert {part.source for part in PARTS.values()} <= set(SOURCES)
    assert all(f"`{source}`: " in made for source in SOURCES)
    assert all(f"10^{len(str(night)) - 1} tokens" in lines[0] for night in NIGHTS)


def test_the_page_shows_every_table() -> None:
    config: Any = SimpleNamespace(docs_dir=str(ROOT / "docs"))
    shown = hooks.on_page_markdown(PAGE.read_text(), config=config)
    assert "<!-- table" not in shown
    assert all(made() in shown for made in TABLES.values())


def test_a_row_that_other_groups_gave_names_their_size() -> None:
    drain, group = result("drain"), result("scale")["store_group"]
    rows = drain["rows"] // drain["groups"]
    for server in ("PostgreSQL", "Redis"):
        assert f"of {rows} rows of " in PARTS[f"{server}: processor"].measured
    size = f"of {group['rows']} rows of {group['tokens_per_row']} tokens"
    assert size in PARTS["PostgreSQL: commits of one server"].measured
    assert "processor time only" in PARTS["publish: processor, these rows"].measured
