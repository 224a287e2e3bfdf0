"""What drafting taught: decisions, machine knowledge, acceptance, and past outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import (
    BigInteger,
    Connection,
    Double,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    select,
    update,
)

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql import residency
from specbatch.pipeline.ledger.sql.reading import BY_ROW
from specbatch.pipeline.ledger.sql.transactions import Now, Transactions, upsert
from specbatch.pipeline.policy.slow_fall import BLOCK_DAYS, BLOCKS, by_series, slow_fall
from specbatch.schemas import mapper
from specbatch.schemas.days import DAY_SEC
from specbatch.schemas.figures import SlowFalls
from specbatch.schemas.placement import ANYWHERE, PlacementSpec
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import FINISHED
from specbatch.schemas.speculation import (
    VOCABULARY,
    AcceptanceCount,
    AcceptanceDay,
    Decision,
    PastOutput,
)
from specbatch.schemas.tables import AcceptanceDay as AcceptanceDayRow
from specbatch.schemas.tables import AcceptancePrior, Completion, Job, MachineKnowledge
from specbatch.schemas.tables import Decision as DecisionTable

_OUTPUTS_PER_PAGE = 200  # completions are long; few are read beyond the caller's bound


# --- decisions ------------------------------------------------------------------------------


def note_decisions(conn: Connection, _now: Now, job_id: str, decisions: Sequence[Decision]) -> None:
    if decisions:
        conn.execute(insert(DecisionTable), [mapper.decision_values(job_id, d) for d in decisions])


def decisions(conn: Connection, job_id: str) -> list[Decision]:
    """By time, then as they were noted."""
    query = (
        select(*DecisionTable.__table__.c)
        .where(DecisionTable.job_id == job_id)
        .order_by(DecisionTable.at, DecisionTable.id)
    )
    return [mapper.decision(row) for row in conn.execute(query)]


# --- machines -------------------------------------------------------------------------------


def keep_knowledge(conn: Connection, now: Now, key: str, state: Mapping[str, Any]) -> None:
    values = {"state": dict(state), "updated_at": now}
    conn.execute(
        upsert(conn.dialect.name, MachineKnowledge)
        .values(key=key, **values)
        .on_conflict_do_update(index_elements=["key"], set_=values)
    )


def knowledge(conn: Connection, key: str) -> Mapping[str, Any] | None:
    query = select(MachineKnowledge.state).where(MachineKnowledge.key == key)
    return conn.execute(query).scalar()


# --- acceptance -----------------------------------------------------------------------------


def learn_acceptance(
    conn: Connection, now: Now, tenant: str, job_name: str, counts: Sequence[AcceptanceCount]
) -> None:
    """One statement for all counts, and one for their day, both in one order everywhere: workers
    never deadlock."""
    tested = [c for c in counts if c.tested > 0]
    if tested:
        ordered = sorted(tested, key=rules.prior_key)
        conn.execute(_learning(conn, now), [_learned_values(tenant, job_name, c) for c in ordered])
        of_day = sorted(rules.by_proposer(tested), key=rules.prior_key)
        conn.execute(_adding(conn, now), [_added_values(tenant, job_name, c) for c in of_day])


_KEY = ("tenant", "job_name", "proposer", "fingerprint", "tag")


def _key_values(tenant: str, job_name: str, count: AcceptanceCount) -> dict[str, Any]:
    """Parameters for `_KEY`."""
    values = (tenant, job_name, *rules.prior_key(count))
    return {f"of_{name}": value for name, value in zip(_KEY, values, strict=True)}


def _added_values(tenant: str, job_name: str, count: AcceptanceCount) -> dict[str, Any]:
    more = {"more_agreed": float(count.agreed), "more_tested": float(count.tested)}
    return {**_key_values(tenant, job_name, count), **more}


def _learned_values(tenant: str, job_name: str, count: AcceptanceCount) -> dict[str, Any]:
    """Parameters of `_learning` for one count: a new row's values, a known one's additions."""
    agreed, tested = rules.learned(0.0, 0.0, count)
    first = {"first_agreed": agreed, "first_tested": tested}
    return {**_added_values(tenant, job_name, count), **first}


def _more(name: str) -> Any:
    return bindparam(f"more_{name}", type_=Double)


def _learning(conn: Connection, now: Now) -> Any:
    """`rules.learned` in SQL, so that no addition is lost between reading and writing."""
    most = literal(rules.MOST_TESTED, Double)
    agreed_sum = AcceptancePrior.agreed + _more("agreed")
    tested_sum = AcceptancePrior.tested + _more("tested")
    return (
        upsert(conn.dialect.name, AcceptancePrior)
        .values(
            **{name: bindparam(f"of_{name}") for name in _KEY},
            agreed=bindparam("first_agreed"),
            tested=bindparam("first_tested"),
            learned_at=now,
        )
        .on_conflict_do_update(
            index_elements=_KEY,
            set_={
                "agreed": case(
                    (tested_sum > most, agreed_sum * most / tested_sum), else_=agreed_sum
                ),
                "tested": case((tested_sum > most, most), else_=tested_sum),
                "learned_at": now,
            },
        )
    )


def _adding(conn: Connection, now: Now) -> Any:
    """To the counts of today, by the store's clock."""
    return (
        upsert(conn.dialect.name, AcceptanceDayRow)
        .values(
            **{name: bindparam(f"of_{name}") for name in _KEY},
            day=_day(now),
            agreed=_more("agreed"),
            tested=_more("tested"),
            superseded=False,
        )
        .on_conflict_do_update(
            index_elements=[*_KEY, "day"],
            set_={
                "agreed": AcceptanceDayRow.agreed + _more("agreed"),
                "tested": AcceptanceDayRow.tested + _more("tested"),
            },
        )
    )


def _day(now: Now) -> Any:
    """Whole days since the epoch, in UTC."""
    return cast(now, BigInteger) // 86_400


def acceptance(conn: Connection, tenant: str, job_name: str) -> list[AcceptanceCount]:
    rows = conn.execute(
        select(*AcceptancePrior.__table__.c).where(
            AcceptancePrior.tenant == tenant, AcceptancePrior.job_name == job_name
        )
    )
    return sorted(map(mapper.acceptance_count, rows), key=rules.prior_key)


def acceptance_days(conn: Connection, tenant: str, job_name: str) -> list[AcceptanceDay]:
    rows = conn.execute(
        select(*AcceptanceDayRow.__table__.c)
        .where(AcceptanceDayRow.tenant == tenant, AcceptanceDayRow.job_name == job_name)
        .order_by(*(getattr(AcceptanceDayRow, name) for name in _KEY), AcceptanceDayRow.day)
    )
    return [mapper.acceptance_day(row) for row in rows]


_ACTIVE_DAYS = 3  # within which a job ran whose falls matter
_TESTED_DAYS = (BLOCKS + 1) * BLOCK_DAYS + _ACTIVE_DAYS
_MOST_SERIES = 200  # that are tested: those with the most tokens


def slow_falls(conn: Connection, now: Now) -> SlowFalls:
    today = int(conn.execute(select(_day(now))).scalar_one())
    key = [getattr(AcceptanceDayRow, name) for name in _KEY if name != "fingerprint"]
    active = (
        select(*key)
        .where(AcceptanceDayRow.day > today - _ACTIVE_DAYS)
        .group_by(*key)
        .order_by(func.sum(AcceptanceDayRow.tested).desc(), *key)
        .limit(_MOST_SERIES)
        .subquery()
    )
    query = (
        select(*AcceptanceDayRow.__table__.c)
        .join(active, and_(*(column == active.c[column.key] for column in key)))
        .where(AcceptanceDayRow.day > today - _TESTED_DAYS)
        .order_by(*key, AcceptanceDayRow.day)
    )
    private = _private_names(conn, (today - _TESTED_DAYS) * DAY_SEC)
    found: dict[tuple[str | None, str], bool] = {}
    for job, rows in groupby(conn.execute(query), key=lambda row: (row.tenant, row.job_name)):
        name = None if job in private else job[1]
        for (proposer, *_), days in by_series(map(mapper.acceptance_day, rows)).items():
            if (fall := slow_fall(days)) is not None:
                found[name, proposer] = fall.falls or found.get((name, proposer), False)
    return found


def _private_names(conn: Connection, since: float) -> set[tuple[str, str]]:
    """(tenant, name) of newer jobs of which no texts are kept."""
    query = select(Job.tenant, Job.name).where(
        Job.created_at >= since, Job.privacy == PrivacyMode.HASH_ONLY.value
    )
    return {(job.tenant, job.name) for job in conn.execute(query.distinct())}


def supersede_acceptance(conn: Connection, now: Now, tenant: str, job_name: str) -> int:
    old = (
        update(AcceptanceDayRow)
        .where(AcceptanceDayRow.tenant == tenant, AcceptanceDayRow.job_name == job_name)
        .where(AcceptanceDayRow.day < _day(now), ~AcceptanceDayRow.superseded)
    )
    return conn.execute(old.values(superseded=True)).rowcount


def forget_old_acceptance(conn: Connection, now: Now, keep_days: int) -> int:
    old = AcceptanceDayRow.day < _day(now) - keep_days
    return conn.execute(delete(AcceptanceDayRow).where(old)).rowcount


# --- past outputs ---------------------------------------------------------------------------


def past_outputs(
    database: Transactions,
    tenant: str,
    job_name: str,
    vocabulary: str,
    max_tokens: int,
    except_job: str,
    placement: PlacementSpec = ANYWHERE,
) -> Iterator[PastOutput]:
    """Job by job, a page at a time: no long transaction, and nothing is read ahead."""
    jobs = (
        select(Job.job_id)
        .where(
            Job.tenant == tenant,
            Job.job_id != except_job,
            Job.privacy != PrivacyMode.HASH_ONLY.value,
            Job.purged_at.is_(None),
            Job.report[VOCABULARY].as_string() == vocabulary,
            *residency.readable(placement),
        )
        .order_by(
            case((Job.name == job_name, 0), else_=1), Job.created_at.desc(), Job.job_id.desc()
        )
    )
    tokens = 0
    for job in database.rows(jobs):
        for output in _finished_outputs(database, job.job_id):
            if not rules.is_whole(output.token_ids):
                continue
            tokens += len(output.token_ids)
            if tokens > max_tokens:
                return
            yield output


def _finished_outputs(database: Transactions, job_id: str) -> Iterator[PastOutput]:
    query = select(*BY_ROW, Completion.job_id, Completion.row_id, Completion.token_ids).where(
        Completion.job_id == job_id,
        Completion.finish_reason.in_([reason.value for reason in FINISHED]),
        Completion.error.is_(None),
    )
    for rows in database.pages(query, BY_ROW, _OUTPUTS_PER_PAGE):
        yield from map(mapper.past_output, rows)
