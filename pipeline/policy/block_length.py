"""How far a proposer writes ahead of a verifier: as long as a further token is likely worth it.

A block token at place L is of use when the block is still followed there and the verifier agrees.
After a disagreement the block is mostly found again; with what remains of the chance it is lost:

    P(used at L) = (1 − (1 − a) · lost)^L · a       a: acceptance of block tokens

Writing on pays while that is above the price of a drafted token in verified ones.
"""

from __future__ import annotations

import math

PILOT_TOKENS = 16  # while nothing is known, and at most a quarter of a completion
JUDGED_TESTS = 64  # block tokens looked at, before acceptance is believed
USUAL_PRICE = 0.25  # of a drafted token in verified ones, while it is not measured
_LOST = 0.25  # disagreements after which a block is not found again
SHORTEST = 4  # shorter ones are not worth their trip through the queue


def block_length(acceptance: float, tested: float, most: int, price: float | None = None) -> int:
    """Tokens to write ahead, at most `most`; 0: none are worth it.

    `acceptance` of block tokens on this job, measured over `tested` of them; `price` of a drafted
    token beside a verified one, as of now.
    """
    if tested < JUDGED_TESTS:
        return min(PILOT_TOKENS, max(SHORTEST, most // 4), most)
    price = USUAL_PRICE if price is None else price
    if acceptance <= price:
        return 0
    kept = 1.0 - (1.0 - min(acceptance, 1.0)) * _LOST
    if kept >= 1.0 or price <= 0.0:
        return most
    length = int(math.log(price / acceptance) / math.log(kept))
    return 0 if length < SHORTEST else min(length, most)
