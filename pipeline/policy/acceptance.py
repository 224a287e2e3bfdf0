"""How likely the verifier is to agree with the next draft token: a decayed Beta estimate."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Acceptance:
    """Probability that one draft token is accepted, given that all before it were.

    `tested` counts the draft tokens that were looked at: the accepted ones and the first rejected
    one, never those behind it. Older evidence fades by `decay` per test. The prior counts as
    `weight` tests; it may be better known later, so it is given when asked.
    """

    prior: float = 0.6
    weight: float = 4.0
    decay: float = 0.97
    agreed: float = 0.0
    tested: float = 0.0
    seen: float = 0.0  # tests in all, without fading

    @property
    def rate(self) -> float:
        return self.rate_given(self.prior)

    def rate_given(self, prior: float) -> float:
        """The estimate under another prior."""
        return (self.agreed + prior * self.weight) / (self.tested + self.weight)

    def observe(self, proposed: int, accepted: int) -> None:
        """`accepted` of `proposed` draft tokens agreed, then one did not (if any was left)."""
        tested = accepted + (accepted < proposed)
        if tested:
            self.observe_many(accepted, tested)

    def observe_many(self, accepted: int, tested: int) -> None:
        """The same for several blocks at once: `tested` tokens were looked at.

        They fade among themselves too, as if they had come one by one in no order: however many
        come at once, no more than `1 / (1 - decay)` tests ever count.
        """
        self.seen += tested
        fade = self.decay**tested
        share = (1.0 - fade) / (tested * (1.0 - self.decay)) if self.decay < 1.0 else 1.0
        self.agreed = self.agreed * fade + accepted * share
        self.tested = self.tested * fade + tested * share
