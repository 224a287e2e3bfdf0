"""What drafting taught: decisions, machine knowledge, acceptance, and past outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Double, bindparam, case, insert, literal, select

from specbatch.pipeline.ledger import rules
from specbatch.pipeline.ledger.sql.reading import BY_ROW
from specbatch.pipeline.ledger.sql.transactions import Now, Transactions, upsert
from specbatch.schemas import mapper
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.speculation import VOCABULARY, AcceptanceCount, Decision, PastOutput
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
    """One statement for all counts, in one order everywhere: workers never deadlock."""
    ordered = sorted((c for c in counts if c.tested > 0), key=rules.prior_key)
    if ordered:
        conn.execute(_learning(conn, now), [_learned_values(tenant, job_name, c) for c in ordered])


def _learned_values(tenant: str, job_name: str, count: AcceptanceCount) -> dict[str, Any]:
    """Parameters of `_learning` for one count: a new row's values, a known one's additions."""
    agreed, tested = rules.learned(0.0, 0.0, count)
    proposer, fingerprint, tag = rules.prior_key(count)
    return {
        "of_tenant": tenant,
        "of_job_name": job_name,
        "of_proposer": proposer,
        "of_fingerprint": fingerprint,
        "of_tag": tag,
        "first_agreed": agreed,
        "first_tested": tested,
        "more_agreed": float(count.agreed),
        "more_tested": float(count.tested),
    }


def _learning(conn: Connection, now: Now) -> Any:
    """`rules.learned` in SQL, so that no addition is lost between reading and writing."""
    most = literal(rules.MOST_TESTED, Double)
    agreed_sum = AcceptancePrior.agreed + bindparam("more_agreed", type_=Double)
    tested_sum = AcceptancePrior.tested + bindparam("more_tested", type_=Double)
    return (
        upsert(conn.dialect.name, AcceptancePrior)
        .values(
            tenant=bindparam("of_tenant"),
            job_name=bindparam("of_job_name"),
            proposer=bindparam("of_proposer"),
            fingerprint=bindparam("of_fingerprint"),
            tag=bindparam("of_tag"),
            agreed=bindparam("first_agreed"),
            tested=bindparam("first_tested"),
            learned_at=now,
        )
        .on_conflict_do_update(
            index_elements=["tenant", "job_name", "proposer", "fingerprint", "tag"],
            set_={
                "agreed": case(
                    (tested_sum > most, agreed_sum * most / tested_sum), else_=agreed_sum
                ),
                "tested": case((tested_sum > most, most), else_=tested_sum),
                "learned_at": now,
            },
        )
    )


def acceptance(conn: Connection, tenant: str, job_name: str) -> list[AcceptanceCount]:
    rows = conn.execute(
        select(*AcceptancePrior.__table__.c).where(
            AcceptancePrior.tenant == tenant, AcceptancePrior.job_name == job_name
        )
    )
    return sorted(map(mapper.acceptance_count, rows), key=rules.prior_key)


# --- past outputs ---------------------------------------------------------------------------


def past_outputs(
    database: Transactions,
    tenant: str,
    job_name: str,
    vocabulary: str,
    max_tokens: int,
    except_job: str,
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
        Completion.finish_reason.in_([reason.value for reason in rules.FINISHED]),
        Completion.error.is_(None),
    )
    for rows in database.pages(query, BY_ROW, _OUTPUTS_PER_PAGE):
        yield from map(mapper.past_output, rows)
