"""How deep drafts may reach on a route: the least of what its tenant, job, tag and prompt allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def depth_cap(
    *,
    tenant: int | None,
    job: int | None,
    tags: Mapping[str, int],
    tag: str | None,
    by_prompt_tokens: Sequence[tuple[int, int]],
    prompt_tokens: int,
) -> int | None:
    """Draft tokens per step at most; None: no cap, 0: the route is not drafted for.

    `by_prompt_tokens`: (prompts from so many tokens on, cap) pairs, in any order. A long
    prompt's KV is read again for every block of draft tokens.
    """
    caps = [cap for least, cap in by_prompt_tokens if prompt_tokens >= least]
    if tag is not None and tag in tags:
        caps.append(tags[tag])
    caps += [cap for cap in (tenant, job) if cap is not None]
    return min(caps, default=None)
