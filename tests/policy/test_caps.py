"""How deep a route may be drafted for: the least of all that is said about it."""

from __future__ import annotations

import pytest

from specbatch.pipeline.policy.depth import depth_cap

TAGS = {"code": 6, "poem": 0}
BY_PROMPT = ((4000, 1), (1000, 3))  # the longest first: the order must not matter


@pytest.mark.parametrize(
    ("tenant", "job", "tag", "prompt_tokens", "cap"),
    [
        (None, None, None, 10, None),  # nobody says anything
        (None, None, "prose", 10, None),  # a tag that nothing is said about
        (5, None, None, 10, 5),
        (None, 4, None, 10, 4),
        (5, 4, None, 10, 4),
        (3, 4, None, 10, 3),
        (None, None, "code", 10, 6),
        (2, None, "code", 10, 2),
        (9, 9, "code", 10, 6),
        (9, 9, "poem", 10, 0),  # 0 is a cap, not the want of one
        (0, None, "code", 10, 0),
        (None, 0, None, 10, 0),
        (None, None, None, 999, None),
        (None, None, None, 1000, 3),  # from so many tokens on
        (None, None, None, 3999, 3),
        (None, None, None, 4000, 1),
        (None, None, "code", 4000, 1),
        (2, None, None, 1000, 2),
    ],
)
def test_the_least_cap_counts(
    tenant: int | None, job: int | None, tag: str | None, prompt_tokens: int, cap: int | None
) -> None:
    for by_prompt in (BY_PROMPT, BY_PROMPT[::-1]):
        found = depth_cap(
            tenant=tenant,
            job=job,
            tags=TAGS,
            tag=tag,
            by_prompt_tokens=by_prompt,
            prompt_tokens=prompt_tokens,
        )
        assert found == cap
