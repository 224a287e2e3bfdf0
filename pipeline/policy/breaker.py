"""Takes a proposer out of a job where its drafts do not pay, and tries it again after a while."""

from __future__ import annotations

from dataclasses import dataclass

from specbatch.schemas.speculation import DecisionAction

STRIKES = 3  # looks behind one another at which its drafts did not pay
FIRST_REST_STEPS = 256
LONGEST_REST_STEPS = 8192


@dataclass(slots=True)
class Breaker:
    """Of one proposer on one job. Steps are the engine's."""

    strikes: int = 0
    rest_steps: int = FIRST_REST_STEPS
    out_until: int | None = None  # step; None: it takes part
    probing: bool = False  # it takes part again, and has to show that it pays

    def allows(self, step: int) -> bool:
        return self.out_until is None or step >= self.out_until

    def wakes(self, step: int) -> bool:
        """Whether its rest has just ended; told once."""
        if self.out_until is None or step < self.out_until:
            return False
        self.out_until = None
        self.probing = True
        self.strikes = 0
        return True

    def judge(self, step: int, pays: bool) -> DecisionAction | None:
        """One look's verdict on its drafts; what follows from it, if anything does."""
        if pays:
            self.strikes = 0
            if not self.probing:
                return None
            self.probing = False
            self.rest_steps = FIRST_REST_STEPS
            return DecisionAction.TAKEN_IN
        self.strikes += 1
        if self.strikes < STRIKES:
            return None
        self.out_until = step + self.rest_steps
        self.rest_steps = min(2 * self.rest_steps, LONGEST_REST_STEPS)
        self.probing = False
        self.strikes = 0
        return DecisionAction.TAKEN_OUT
