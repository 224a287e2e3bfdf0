"""What a group's records add to its job's report."""

from __future__ import annotations

from collections.abc import Sequence

from specbatch.pipeline.outputs.best import best_of_each
from specbatch.pipeline.policy.costs.controls import weight
from specbatch.schemas.malformed import QUARANTINED
from specbatch.schemas.records import CompletionRecord
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.timekeeping import usd_of


def group_report(records: Sequence[CompletionRecord]) -> dict[str, float]:
    """Figures by name; `savings.py` reads them."""
    report: dict[str, float] = {
        "tokens": sum(len(r.token_ids) for r in records if r.reused_from is None),
        "proposed": sum(r.proposed for r in records),
        "compute_sec": sum(r.compute_sec for r in records),
        "draft_sec": sum(r.draft_sec for r in records),
        "decode_sec": sum(r.decode_sec for r in records),
        "baseline_sec": sum(r.baseline_sec for r in records),
    }
    if any(r.ahead_ticks for r in records):
        report |= {
            "ahead_taken": sum(weight(r.ahead_price_microusd) * r.draft_sec for r in records),
            "ahead_usd": usd_of(sum(r.ahead_ticks * r.ahead_price_microusd for r in records)),
        }
    if any(r.shadow_proposed for r in records):
        report |= {
            "shadow_proposed": sum(r.shadow_proposed for r in records),
            "shadow_accepted": sum(r.shadow_accepted for r in records),
        }
    if any(r.recheck.tokens for r in records):
        report |= {
            "rechecked_tokens": sum(r.recheck.tokens for r in records),
            "differing_tokens": sum(r.recheck.differing for r in records),
            "largest_margin": max(r.recheck.largest_margin for r in records),
        }
    return report


def quarantine_report(records: Sequence[CompletionRecord], spec: JobSpec) -> dict[str, float]:
    """How many of a group's whole rows' outputs are published without their texts, because they do
    not have their form."""
    if spec.output.malformed.then != "quarantine":
        return {}
    ordered = sorted(records, key=lambda r: (r.row_index, r.sample_index))
    count = sum(r.is_malformed for r in best_of_each(ordered, spec.output.keep_best))
    return {QUARANTINED: float(count)} if count else {}
