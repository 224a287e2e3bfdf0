"""Packages of others, as they lie installed: a module and its entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch,
    site: Path,
    name: str,
    source: str,
    entry_points: Mapping[str, str],
    version: str = "1.2",
) -> None:
    """Put module `name` and its metadata into `site`, and `site` on the path. `entry_points`: by
    group, a line each."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text(source)
    named = f"Name: {name.replace('_', '-')}\nVersion: {version}\n"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\n{named}")
    groups = (f"[{group}]\n{line}\n" for group, line in entry_points.items())
    (info / "entry_points.txt").write_text("".join(groups))
    monkeypatch.syspath_prepend(str(site))
