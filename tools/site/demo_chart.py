"""The README's chart of the demo's two runs, from the store that `specbatch demo` left.

    python -m specbatch.tools.site.demo_chart demo-run >docs/images/two-runs.svg

A bar is the device time of a run by what it was spent on. A hollow bar is what run 2 would have
taken at depth 0, by its control steps, with the 95 % interval as a whisker. Colours follow the
reader's choice of light or dark.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from specbatch.jobs.cli.cost import cost_of
from specbatch.jobs.cli.demo import demo_settings
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.policy.costs.job_costs import JobCost
from specbatch.schemas.provenance import TimeKind

KINDS: Mapping[str, tuple[TimeKind, ...]] = {
    "prompts": (TimeKind.PREFILL,),
    "tokens that were kept": (TimeKind.VERIFY,),
    "drafting": (TimeKind.DRAFT,),
    "refused drafts": (TimeKind.REJECTED,),
    "other": (TimeKind.PADDING, TimeKind.OVERHEAD, TimeKind.LOST),
}
_TEMPLATE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1040 {{ 66 + 52 * bars|length }}" role="img"
 aria-label="{{ label }}" font-family="system-ui, sans-serif" font-size="15">
<style>
text{fill:#1f2328}.faint{fill:#59636e}.k0{fill:#8c959f}.k1{fill:#1a7f37}.k2{fill:#bf8700}
.k3{fill:#cf222e}.k4{fill:#d1d9e0}.hollow{fill:none;stroke:#59636e;stroke-dasharray:4 3}
.whisker{stroke:#1f2328;stroke-width:2}
@media(prefers-color-scheme:dark){text{fill:#f0f6fc}.faint{fill:#9198a1}.k1{fill:#3fb950}
.k2{fill:#d29922}.k3{fill:#f85149}.k4{fill:#3d444d}.hollow{stroke:#9198a1}.whisker{stroke:#f0f6fc}}
</style>
{% for bar in bars %}{% set y = 14 + 52 * loop.index0 %}
<text x="0" y="{{ y + 15 }}">{{ bar.name }}</text>
<text x="0" y="{{ y + 33 }}" class="faint" font-size="13">{{ bar.about }}</text>
{% for part in bar.parts %}<rect x="{{ x(part.begin) }}" y="{{ y }}" \
width="{{ (x(part.end) - x(part.begin))|round(1) }}" height="30" class="{{ part.style }}"/>
{% endfor %}{% if bar.interval %}{% set low, high = bar.interval %}
<path class="whisker" d="M{{ x(low) }} {{ y + 15 }}H{{ x(high) }}M{{ x(low) }} {{ y + 9 }}v12\
M{{ x(high) }} {{ y + 9 }}v12"/>
{% endif %}<text x="{{ x(bar.reach) + 10 }}" y="{{ y + 20 }}">{{ bar.said }}</text>
{% endfor %}
{% for kind in kinds %}{% set at = 230 + 160 * loop.index0 %}
<rect x="{{ at }}" y="{{ 30 + 52 * bars|length }}" width="12" height="12" \
class="k{{ loop.index0 }}"/>
<text x="{{ at + 18 }}" y="{{ 41 + 52 * bars|length }}" class="faint" font-size="13">{{ kind }}\
</text>
{% endfor %}
</svg>
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a bar, in seconds from its left end."""

    begin: float
    end: float
    style: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A run, or what it is compared with. Times in seconds."""

    name: str
    about: str
    said: str
    parts: tuple[Part, ...]
    interval: tuple[float, float] | None = None

    @property
    def reach(self) -> float:
        return max(self.parts[-1].end, *(self.interval or (0.0, 0.0)))


def bars_of(runs: Sequence[JobCost], rates: Sequence[float | None]) -> list[Bar]:
    """A bar for each run, and one for the last run at depth 0 where that was measured.

    `rates`: the runs' acceptance rates.
    """
    bars = [_run(n, cost, rate) for n, (cost, rate) in enumerate(zip(runs, rates, strict=True), 1)]
    saved, taken = runs[-1].saved, runs[-1].sheet.total.sec
    if saved is None:
        return bars
    interval = None
    if saved.low_usd is not None and saved.high_usd is not None:
        low, high = (1 + usd / saved.taken_usd for usd in (saved.low_usd, saved.high_usd))
        interval = (taken * low, taken * high)
    whole = (Part(0.0, taken * saved.speedup, "hollow"),)
    said = f"{taken * saved.speedup:.1f} s: {saved.speedup:.2f} times run {len(runs)}"
    return [*bars, Bar(f"run {len(runs)} at depth 0", "by control steps", said, whole, interval)]


def _run(number: int, cost: JobCost, rate: float | None) -> Bar:
    parts, at = [], 0.0
    for style, kinds in enumerate(KINDS.values()):
        spent = cost.sheet.of(*kinds).sec
        parts.append(Part(at, at + spent, f"k{style}"))
        at += spent
    about = "drafts by a draft model, n-grams" if number == 1 else "drafts from run 1's outputs"
    kept = "" if rate is None else f", {rate:.0%} of drafts kept"
    return Bar(f"run {number}", about, f"{at:.1f} s{kept}", tuple(parts))


def svg(bars: Sequence[Bar]) -> str:
    """The chart."""
    scale = 560 / max(bar.reach for bar in bars)
    label = "; ".join(f"{bar.name}: {bar.said}" for bar in bars)
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(_TEMPLATE).render(
        bars=bars, kinds=list(KINDS), label=label, x=lambda sec: round(230 + sec * scale, 1)
    )


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    with closing(make_store(demo_settings(folder))) as store:
        jobs = sorted(store.list_jobs(2), key=lambda job: job.created_at)
        costs = [cost_of(store, job) for job in jobs]
        rates = [store.progress(job.job_id).acceptance_rate for job in jobs]
    print(svg(bars_of(costs, rates)))


if __name__ == "__main__":
    main()
