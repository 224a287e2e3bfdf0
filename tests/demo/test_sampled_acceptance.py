"""At temperature 1 the demo pair's drafts are kept nearly as often as any test could keep them."""

from __future__ import annotations

from specbatch.benchmarks.acceptance import complete, demo_prompts, demo_runners, one_ahead
from specbatch.schemas.records import Verification


def test_coupling_keeps_at_least_085_of_what_the_ratio_test_keeps_on_64_prompts() -> None:
    verifier, draft = demo_runners()
    prompts = demo_prompts(64)
    texts = [c.token_ids[:24] for c in complete(verifier, None, prompts, Verification.COUPLED)[0]]
    kept = one_ahead(verifier, draft, prompts, texts, noises=8)
    assert kept.contexts > 1000
    assert 0.85 * kept.ratio_test <= kept.coupled <= kept.ratio_test
