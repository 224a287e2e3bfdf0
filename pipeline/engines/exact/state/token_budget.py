"""How many tokens a pass may have: the setting, or less after memory ran out."""

from __future__ import annotations

from dataclasses import dataclass

RECOVER_AFTER_PASSES = 64  # passes without trouble until twice as much is tried again


@dataclass(slots=True)
class TokenBudget:
    """Halved when a pass runs out of memory, doubled again up to `most` when passes go well."""

    most: int
    now: int = 0
    _passes: int = 0

    def __post_init__(self) -> None:
        self.now = self.most

    @property
    def strained(self) -> bool:
        """Memory ran out a short while ago: drafts must wait."""
        return self.now < self.most

    def halve(self, used: int) -> bool:
        """After a pass of `used` tokens ran out of memory. False: there is no smaller pass."""
        if used <= 1:
            return False
        # Draft tokens may come on top of the most: half of those would be more than that.
        self.now, self._passes = max(1, min(used, self.most) // 2), 0
        return True

    def passed(self) -> None:
        """A pass went well."""
        if not self.strained:
            return
        self._passes += 1
        if self._passes >= RECOVER_AFTER_PASSES:
            self.now, self._passes = min(self.most, 2 * self.now), 0
