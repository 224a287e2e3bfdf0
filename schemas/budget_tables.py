"""Tables of tenants' budgets and of what they have spent. Their rows outlive jobs."""

from __future__ import annotations

from sqlalchemy import BigInteger, Index, Integer
from sqlalchemy.orm import Mapped, mapped_column

from specbatch.schemas.tables import Base
from specbatch.schemas.text_columns import AnyText


class TenantBudget(Base):
    """What a tenant may spend in a period. Rows are added and ended, never changed."""

    __tablename__ = "tenant_budgets"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True
    )  # in the order in which they were set; SQLite counts up INTEGER keys only
    tenant: Mapped[str]
    period: Mapped[str]
    tokens: Mapped[int | None] = mapped_column(BigInteger)  # NULL: any number
    usd: Mapped[float | None]  # NULL: any amount
    set_at: Mapped[float]
    set_by: Mapped[str] = mapped_column(AnyText)
    reason: Mapped[str] = mapped_column(AnyText)
    ended_at: Mapped[float | None]
    ended_by: Mapped[str | None] = mapped_column(AnyText)
    end_reason: Mapped[str | None] = mapped_column(AnyText)


Index(
    "uq_tenant_budgets_active",
    *(TenantBudget.tenant, TenantBudget.period),
    unique=True,
    sqlite_where=TenantBudget.ended_at.is_(None),
    postgresql_where=TenantBudget.ended_at.is_(None),
)


class TenantSpending(Base):
    """What was recorded for a tenant on a day: added to with each commit of completions."""

    __tablename__ = "tenant_spending"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)  # since 1970, UTC
    tokens: Mapped[int] = mapped_column(BigInteger)  # of prompts and outputs, without copies
    usd: Mapped[float]  # what the completions were charged
