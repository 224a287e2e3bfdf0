"""The order of pages. A page that is not named here comes after the named ones of its folder."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# Folder: its title, and its pages in the order to read them.
SECTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("", "", ("index.md", "tutorial.md")),
    (
        "howto",
        "How to",
        (
            *(
                "install",
                "inputs",
                "tables",
                "templates",
                "python",
                "nightly-s3",
                "schedules",
                "airflow",
            ),
            *("dagster", "prefect", "lineage", "workers", "placement", "observing"),
            *(
                "openai-batch",
                "serve",
                "vllm-run-batch",
                "proposer",
                "train",
                "nights-that-teach",
                "policies",
                "best-of",
                "pick",
                "reuse",
                "spot-checks",
                "look-at-jobs",
                "report",
                "notifications",
                "acceptance-falls",
                "stop-and-go-on",
            ),
            *("audit", "exports", "privacy", "security", "gpu", "engines", "benchmark", "chaos"),
        ),
    ),
    (
        "explanation",
        "Explanation",
        (
            *("verification-is-sampling", "store-and-broker", "one-fused-batch", "depth"),
            *("guarantees", "exactness", "time-and-money", "how-far-it-scales", "figures"),
            *(
                "inside-the-engine",
                "inside-the-store",
                "inside-operations",
                "what-measuring-changed",
            ),
        ),
    ),
    (
        "reference",
        "Reference",
        (
            *("spec", "cli", "settings", "output", "exports", "tables", "metrics", "errors"),
            "architectures",
        ),
    ),
    ("runbooks", "Runbooks", ()),
)


LOOSE = "howto"  # pages that stand in no folder go with these


def nav_of(paths: Iterable[str]) -> list[Any]:
    """mkdocs' `nav` of the pages there are."""
    left = sorted(path for path in paths if path.endswith(".md"))
    nav: list[Any] = []
    for folder, title, names in SECTIONS:
        if not folder:
            nav += [path for path in names if path in left]
            continue
        here = [path for path in left if path.startswith(f"{folder}/")]
        if folder == LOOSE:
            here += [path for path in left if "/" not in path and path not in SECTIONS[0][2]]
        if here:
            nav.append({title: sorted(here, key=lambda path: _rank(path, folder, names))})
    return nav


def loose(paths: Iterable[str]) -> list[str]:
    """Pages that stand in no section."""
    return [path for path in paths if path.endswith(".md") and path not in flat(nav_of(paths))]


def flat(nav: Iterable[Any]) -> list[str]:
    """All pages of a `nav`."""
    found: list[str] = []
    for entry in nav:
        if isinstance(entry, str):
            found.append(entry)
        else:
            for inner in entry.values():
                found += flat(inner)
    return found


def _rank(path: str, folder: str, names: tuple[str, ...]) -> tuple[int, str]:
    name = path.removeprefix(f"{folder}/").removesuffix(".md")
    order = ("index", "README", *names)
    return (order.index(name) if name in order else len(order), name)
