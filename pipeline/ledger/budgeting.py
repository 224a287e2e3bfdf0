"""What a store keeps of tenants' budgets.

A claim for VERIFY reserves the group's bound in the same transaction (`budget_rules.py`). The
reservation counts while the group is held at VERIFY, also with an expired lease until another
worker claims it, and at RECORD. The commit that stores completions books their tokens and their
cost, and ends the reservation.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from specbatch.schemas.budgets import Account, Budget, Period, Shortfall


class Budgeting(Protocol):
    """Budgets of tenants, and their accounts."""

    def set_budget(
        self, tenant: str, period: Period, tokens: int | None, usd: float | None, reason: str
    ) -> Budget:
        """Give a tenant a budget, in the place of the one that it has for this period."""

    def remove_budget(self, tenant: str, period: Period, reason: str) -> Budget | None:
        """End a tenant's budget; None: it has none for this period."""

    def budgets(self, history: bool = False) -> list[Budget]:
        """Those that hold now; with `history` all there ever were, in order."""

    def tenant_accounts(self, tenant: str | None = None) -> list[Account]:
        """Of one tenant; or of all with a budget or with anything recorded, by name."""

    def budget_shortfalls(self) -> list[Shortfall]:
        """Live jobs that no worker may continue now, by their tenants' budgets; by id."""

    def waiting_for_budget(self, job_ids: Collection[str]) -> Mapping[str, str]:
        """Of these jobs, those with nothing to be done before a budget of their tenant covers it:
        in words, what each waits for. A job that no budget will cover has to stop, and is not
        there."""
