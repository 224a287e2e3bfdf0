"""What drafting saved or lost against depth 0, and how sure that is.

`controls.py` says what is measured and why its expectation is right. Here its sums become money:

    saved = level · Σ w·m - Σ T - drafting ahead,   level = Σ odds·Y / Σ odds·m

What was taken is known. Two errors remain. The level is an estimate from some control steps, and
is shared by all that is priced with it; and the drafting steps may themselves have been luckier or
less lucky than the controls. With e = Y - level·m, the ratio estimator of W. G. Cochran, Sampling
Techniques (3rd ed., 1977), section 6.3, and Neyman's variance for two arms of an experiment give

    var = (Σ w·m)² · V / (Σ odds·m)² + Σ (w·m)² · V / Σ (odds·m)²,   V = Σ (odds·e)²

Steps are drawn for control one by one, independently of each other. So slow spells that last for
many steps do not make the interval too narrow: which steps of a spell were controls is chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specbatch.pipeline.policy.costs.controls import Measured
from specbatch.schemas.job_figures import Savings

# Student's t, two-sided 95 %, by degrees of freedom from 1.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.959964

NOTHING_DRAFTED = "nothing was drafted"
NOT_MEASURED = "not measured, for no step that drafted has a control step beside it"

Span = tuple[float, float]  # seconds since the epoch, from start to end


def drafted(report: Mapping[str, Any], proposed: int = 0) -> bool:
    """Whether anything was drafted for a job: verified, compared, or only written ahead.

    `proposed`: draft tokens in the store, which reports of earlier versions do not tell.
    """
    names = ("proposed", "shadow_proposed", "ahead_taken")
    return proposed > 0 or any(report.get(name) for name in names)


def savings(report: Mapping[str, Any]) -> Savings | None:
    """Of a job, by its report. None: nothing was drafted, or no step can be compared."""
    measured = Measured.of_report(report)
    if not (drafted(report) and measured.taken > 0):
        return None
    if measured.drafting_steps and not measured.control_steps:
        return None
    # Of what was drafted ahead for all tokens, the measured steps bear their tokens' part.
    share = min(1.0, measured.tokens / max(float(report.get("tokens", 0.0)), 1.0))
    taken = measured.taken + share * float(report.get("ahead_taken", 0.0))
    usd = measured.usd + share * float(report.get("ahead_usd", 0.0))
    baseline, half = at_depth_0(measured), half_width(measured)
    dollars, saved = usd / taken, baseline - taken
    return Savings(
        dollars * saved,
        None if half is None else dollars * (saved - half),
        None if half is None else dollars * (saved + half),
        usd,
        baseline / taken,
        int(measured.control_steps),
    )


def at_depth_0(measured: Measured) -> float:
    """What the tokens of all measured steps would have taken at depth 0."""
    if not measured.drafting_steps:
        return measured.plain_baseline
    return measured.plain_baseline + _level(measured) * measured.drafting_price


def half_width(measured: Measured) -> float | None:
    """Half of the 95 % interval around `at_depth_0`; None: one control step tells of no other."""
    if not measured.drafting_steps:
        return 0.0
    if measured.control_steps < 2:
        return None
    level, m = _level(measured), measured
    off = m.control_taken_squares - 2 * level * m.control_products
    off = max(off + level * level * m.control_price_squares, 0.0)
    # Controls of larger odds stand for more steps: so many of one weight would waver as much.
    alike = max(m.control_price**2 / m.control_price_squares, 1.0 + 1e-9)
    off *= alike / (alike - 1.0)
    variance = off * (m.drafting_price / m.control_price) ** 2
    variance += off * m.drafting_price_squares / m.control_price_squares
    return t95(max(1, int(alike) - 1)) * math.sqrt(variance)


def _level(measured: Measured) -> float:
    return measured.control_taken / measured.control_price


def pooled(of_jobs: Sequence[tuple[Savings, Span]]) -> Savings | None:
    """Of some jobs together, each with when it ran.

    Jobs that ran at the same time may have shared control steps, and with them the error: theirs
    are added up. Those of other jobs are independent. None: there are no jobs.
    """
    if not of_jobs:
        return None
    found = [one for one, _ in of_jobs]
    usd, taken = math.fsum(s.usd for s in found), math.fsum(s.taken_usd for s in found)
    baseline = math.fsum(s.speedup * s.taken_usd for s in found)
    low = high = None
    if all(s.high_usd is not None for s in found):
        half = math.hypot(*(math.fsum(halves) for halves in _together(of_jobs)))
        low, high = usd - half, usd + half
    ratio = baseline / taken if taken else found[0].speedup
    return Savings(usd, low, high, taken, ratio, sum(s.controls for s in found))


def _together(of_jobs: Sequence[tuple[Savings, Span]]) -> list[list[float]]:
    """Half widths of jobs, those together that ran at the same time."""
    sets: list[list[float]] = []
    until = -math.inf
    for one, (begin, end) in sorted(of_jobs, key=lambda item: item[1]):
        half = 0.0 if one.high_usd is None else one.high_usd - one.usd
        if begin >= until:
            sets.append([])
        sets[-1].append(half)
        until = max(until, end)
    return sets


def t95(degrees: int) -> float:
    """The 97.5 % point of Student's t."""
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    # Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5: right to 1e-4 from here.
    z = _NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
