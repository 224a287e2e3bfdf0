"""The sections of a report, in their order. Each takes all facts, and is None where it has nothing
to tell."""

from __future__ import annotations

from collections.abc import Callable

from specbatch.pipeline.observe.report.facts import Facts
from specbatch.pipeline.observe.report.figures import acceptance, batches, depth, money
from specbatch.pipeline.observe.report.markup import Html
from specbatch.pipeline.observe.report.rows import (
    audits,
    decisions,
    outliers,
    quarantine,
    samples,
    versions,
)

Section = tuple[str, str, str, Callable[[Facts], Html | None]]
SECTIONS: tuple[Section, ...] = (
    ("money", "Money", "What the job cost, and what drafts saved.", money),
    ("acceptance", "Acceptance", "How many draft tokens the verifier agreed with.", acceptance),
    ("depth", "Depth", "How far drafts were followed, and where they broke off.", depth),
    ("batches", "Batches and waiting", "How full passes were, and what groups waited.", batches),
    ("outliers", "Prompts that stand out", "Where to look first.", outliers),
    ("decisions", "Decisions", "What was decided about drafts, and on which figures.", decisions),
    ("quarantine", "Rows without a result", "Set aside by ingest, or failed.", quarantine),
    ("audits", "Audits", "Completions that were decided again.", audits),
    ("samples", "Sampled outputs", "Where each token came from.", samples),
    ("versions", "Versions", "Models, settings and fingerprints.", versions),
)
