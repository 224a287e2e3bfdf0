"""The store's tables. They know nothing of pydantic or records; `mapper.py` connects them.

Times are seconds since the epoch by the store's clock. A unit without a holder has `lease_until`
0, so "ready, or its lease expired" is one comparison. A column that a migration added to a table
has a default in the database: workers of the version before still insert rows without it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    REAL,
    BigInteger,
    Boolean,
    ColumnElement,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    bindparam,
    event,
    false,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from specbatch.schemas import months, token_record
from specbatch.schemas.placement import DEFAULT_POOL
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.text_columns import SHOWN_WITHOUT_KEY, EncryptedText
from specbatch.schemas.text_columns import AnyText as AnyText  # of other modules' tables too
from specbatch.schemas.token_arrays import Numbers, Origins, Repeated, Steps, TokenArray

JOB_WORK = ("ingest", "publish")  # stages of a job that can be claimed
JOB_LIVE = ("ingest", "run")  # stages of a job that may have open groups
GROUP_WORK = ("propose", "verify", "record")  # stages of an open group


class Base(DeclarativeBase):
    """Constraint names are spelled out so that migrations can name them on both databases."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it from the class
        str: Text,
        float: Double,
        int: Integer,
        bool: Boolean,
        dict[str, Any]: JSON(none_as_null=True),
    }


class Leased:
    """Columns of what can be claimed: the stage, the fencing token and the lease."""

    stage: Mapped[str]
    generation: Mapped[int] = mapped_column(default=0)  # the fencing token: rises with each claim
    lease_owner: Mapped[str | None]
    lease_until: Mapped[float] = mapped_column(default=0.0)  # 0: no worker holds it
    attempts: Mapped[int] = mapped_column(default=0)  # claims since its last progress
    ready_at: Mapped[float]
    last_error: Mapped[str | None] = mapped_column(EncryptedText("last_error", SHOWN_WITHOUT_KEY))


class Job(Leased, Base):
    """One submitted spec."""

    __tablename__ = "jobs"

    job_id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    tenant: Mapped[str]
    spec: Mapped[dict[str, Any]]
    spec_digest: Mapped[str]
    verifier: Mapped[str]
    proposer: Mapped[str | None]
    output_uri: Mapped[str]
    workspace_uri: Mapped[str]
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    priority: Mapped[int] = mapped_column(SmallInteger, default=1)  # 0 goes first
    deadline_at: Mapped[float | None]
    budget_usd: Mapped[float | None]
    stop_reason: Mapped[str | None] = mapped_column(  # why it was cancelled
        EncryptedText("jobs.stop_reason", SHOWN_WITHOUT_KEY)
    )
    state: Mapped[str]
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    error: Mapped[str | None] = mapped_column(EncryptedText("jobs.error", SHOWN_WITHOUT_KEY))
    ingest_done: Mapped[bool] = mapped_column(default=False)
    cursor: Mapped[dict[str, Any] | None]  # SourcePosition to read on from
    next_row: Mapped[int] = mapped_column(BigInteger, default=0)
    ingest_resumes_at: Mapped[int | None]  # open groups; NULL: reading is not paused
    groups_total: Mapped[int] = mapped_column(default=0)  # planned; also the next one's index
    groups_cut: Mapped[int] = mapped_column(default=0)  # cut off from others, numbered by rules
    rows_total: Mapped[int] = mapped_column(BigInteger, default=0)
    rows_rejected: Mapped[int] = mapped_column(BigInteger, default=0)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    report: Mapped[dict[str, Any]] = mapped_column(default=dict)
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    # Pinned when submitted.
    privacy: Mapped[str] = mapped_column(default=PrivacyMode.FULL.value, server_default="full")
    # The complete spec, if `spec` omits texts.
    sealed_spec: Mapped[str | None] = mapped_column(EncryptedText("jobs.sealed_spec", ""))
    purged_at: Mapped[float | None]  # its texts and files are deleted, or are being so ...
    purged_to: Mapped[int | None] = mapped_column(BigInteger)  # ... up to this row; NULL: all
    log_number: Mapped[int] = mapped_column(
        BigInteger, default=0, server_default="0"
    )  # of its audit log's last entry
    log_head: Mapped[bytes | None] = mapped_column(LargeBinary)  # that entry's hash
    # In which its groups are verified, `unknown` of jobs from before there were any; NULL: the
    # first claim for VERIFY will choose one.
    numeric_class: Mapped[str | None]
    # By whose files its tokens are decided, `unknown` of jobs from before; NULL: ingest will tell.
    model_fingerprint: Mapped[str | None]
    model_parts: Mapped[dict[str, Any] | None]  # of that fingerprint: a digest for each
    proposer_fingerprint: Mapped[str | None]  # of its draft model, where outputs depend on it


class Group(Leased, Base):
    """The unit of work. Its totals are written once, at commit, so progress never scans tokens."""

    __tablename__ = "groups"

    job_id: Mapped[str] = mapped_column(
        ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True
    )
    group_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    first_stage: Mapped[str]
    source: Mapped[dict[str, Any]]  # SourcePosition of its first row
    rows: Mapped[int]
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    # Of prompts and outputs, all samples: the most that its rows can have, and that one can.
    most_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    most_row_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # Of its tenant's budget, by its last claim for VERIFY; counts as `sql/budgets.py` says.
    reserved_tokens: Mapped[int] = mapped_column(BigInteger, default=0, server_default="0")
    # Its tenant, when it was claimed.
    charged_sec: Mapped[float] = mapped_column(default=0.0, server_default="0")
    prompts: Mapped[dict[str, Any]]  # Artefact
    row_start: Mapped[int] = mapped_column(default=0)  # of the artefact's rows: its first …
    row_stop: Mapped[int | None]  # … and behind its last; NULL: to the end
    cut_wanted: Mapped[bool] = mapped_column(default=False)  # an idle worker asks for half of it
    rows_kept: Mapped[int] = mapped_column(default=0)  # finished when its job was stopped
    in_flight_usd: Mapped[float] = mapped_column(default=0.0)  # of who holds it, so far
    drafts: Mapped[dict[str, Any] | None]
    results: Mapped[dict[str, Any] | None]
    waited_sec: Mapped[float] = mapped_column(default=0.0)  # of the current attempt
    queue_sec: Mapped[float] = mapped_column(default=0.0)
    compute_sec: Mapped[float] = mapped_column(default=0.0)
    device_usd: Mapped[float] = mapped_column(default=0.0)  # what its attempts spent on devices
    completions: Mapped[int] = mapped_column(default=0)
    rows_failed: Mapped[int] = mapped_column(default=0)
    completion_tokens: Mapped[int] = mapped_column(BigInteger, default=0)
    proposed: Mapped[int] = mapped_column(BigInteger, default=0)
    accepted: Mapped[int] = mapped_column(BigInteger, default=0)
    verifier_passes: Mapped[int] = mapped_column(BigInteger, default=0)
    cost_usd: Mapped[float] = mapped_column(default=0.0)  # what its completions were charged
    # Written by earlier versions: what drafting saves is in the job's report, see `controls.py`.
    taken_usd: Mapped[float] = mapped_column(default=0.0, server_default="0")
    baseline_usd: Mapped[float] = mapped_column(default=0.0, server_default="0")


class Completion(Base):
    """One finished (row, sample), with one array entry per token, or per pass of the verifier.

    Columns stand in this order because PostgreSQL fills gaps between wide and narrow ones.
    """

    __tablename__ = "completions"
    __table_args__ = (
        PrimaryKeyConstraint("job_id", "row_index", "sample_index", "month"),
        {"postgresql_partition_by": "RANGE (month)"},
    )

    row_index: Mapped[int] = mapped_column(BigInteger, autoincrement=False)
    seed: Mapped[int] = mapped_column(BigInteger)
    cost_usd: Mapped[float]
    decode_sec: Mapped[float]
    baseline_sec: Mapped[float]
    compute_sec: Mapped[float | None]  # NULL: as its ticks say
    draft_sec: Mapped[float | None]  # NULL: as `ahead_ticks` says
    # Device time, in 100-ns units.
    prefill_ticks: Mapped[int] = mapped_column(BigInteger)
    verify_ticks: Mapped[int] = mapped_column(BigInteger)
    draft_ticks: Mapped[int] = mapped_column(BigInteger)
    rejected_ticks: Mapped[int] = mapped_column(BigInteger)
    padding_ticks: Mapped[int] = mapped_column(BigInteger)
    overhead_ticks: Mapped[int] = mapped_column(BigInteger)
    ahead_ticks: Mapped[int] = mapped_column(BigInteger)  # of the device that drafted ahead
    price_microusd: Mapped[int] = mapped_column(BigInteger)  # of an hour of the device
    ahead_price_microusd: Mapped[int] = mapped_column(BigInteger)
    month: Mapped[int] = mapped_column(autoincrement=False)  # its job was made in, as yyyymm
    sample_index: Mapped[int] = mapped_column(autoincrement=False)
    group_index: Mapped[int]
    prompt_tokens: Mapped[int]
    proposed: Mapped[int]
    accepted: Mapped[int]
    verifier_passes: Mapped[int]
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"))
    row_id: Mapped[str] = mapped_column(EncryptedText("completions.row_id"))
    tag: Mapped[str | None] = mapped_column(AnyText)
    finish_reason: Mapped[str]
    verifier: Mapped[str | None]  # NULL: its job's
    proposer: Mapped[str | None]  # NULL: its job's; empty: none
    error: Mapped[str | None] = mapped_column(EncryptedText("completions.error"))
    text: Mapped[str] = mapped_column(EncryptedText("completions.text"))
    token_ids: Mapped[tuple[int, ...]] = mapped_column(Numbers())
    logprobs: Mapped[tuple[float, ...]] = mapped_column(TokenArray(REAL))
    origins: Mapped[tuple[int, ...]] = mapped_column(Origins())
    # Pass by pass, see `provenance.py`; NULL where there is nothing.
    steps: Mapped[tuple[int, ...] | None] = mapped_column(Steps())
    pass_ticks: Mapped[tuple[int, ...] | None] = mapped_column(Numbers())
    makers: Mapped[tuple[int, ...] | None] = mapped_column(Repeated())
    drafted: Mapped[tuple[int, ...] | None] = mapped_column(Repeated())
    rejected: Mapped[tuple[int, ...] | None] = mapped_column(Numbers())
    sources: Mapped[list[str] | None] = mapped_column(JSON(none_as_null=True))
    # By depth; NULL where `origins` and `drafted` tell it.
    proposed_at_depth: Mapped[tuple[int, ...] | None] = mapped_column(TokenArray(Integer))
    accepted_at_depth: Mapped[tuple[int, ...] | None] = mapped_column(TokenArray(Integer))
    # Equally many per token, token after token; NULL where nobody asked, empty for none of them.
    top_token_ids: Mapped[tuple[int, ...] | None] = mapped_column(TokenArray(Integer))
    top_logprobs: Mapped[tuple[float, ...] | None] = mapped_column(TokenArray(REAL))
    # Of its content (`digests.py`); stays when that is purged. NULL: recorded before there was an
    # audit log.
    digest: Mapped[bytes | None] = mapped_column(LargeBinary)
    numeric_class: Mapped[str | None]  # that its tokens were decided in; NULL: not known
    model_fingerprint: Mapped[str | None]  # of the model that decided them; NULL: not known
    # Proves its prompt and output after these are purged (`receipts.py`); NULL: there was no key.
    receipt: Mapped[bytes | None] = mapped_column(LargeBinary)
    reused_from: Mapped[str | None]  # job/row/sample that it is a copy of; NULL: decided here
    score: Mapped[float | None]  # by which the best of a prompt are chosen; NULL: it has none


class ReusableOutput(Base):
    """Which completion answered a request. Entries of purged jobs are gone; losing others costs
    speed only."""

    __tablename__ = "reusable_outputs"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    request: Mapped[bytes] = mapped_column(LargeBinary, primary_key=True)  # digest: `reuse.py`
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"), index=True)
    row_index: Mapped[int] = mapped_column(BigInteger)
    sample_index: Mapped[int]


class Rejected(Base):
    """One quarantined input row."""

    __tablename__ = "rejected_rows"

    job_id: Mapped[str] = mapped_column(
        ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True
    )
    row_index: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    row_id: Mapped[str | None] = mapped_column(EncryptedText("rejected_rows.row_id"))
    code: Mapped[str]
    reason: Mapped[str] = mapped_column(EncryptedText("rejected_rows.reason"))


class Decision(Base):
    """One decision about drafting on a job. Rows are only added."""

    __tablename__ = "decisions"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True
    )  # in the order they were noted; SQLite counts up INTEGER keys only
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id", ondelete="CASCADE"))
    at: Mapped[float]
    action: Mapped[str]
    proposer: Mapped[str]
    reason: Mapped[str] = mapped_column(AnyText)
    acceptance: Mapped[float | None]
    break_even: Mapped[float | None]
    sequences: Mapped[int]


class MachineKnowledge(Base):
    """What engines learned about a kind of machine and its models, for later engines."""

    __tablename__ = "machine_knowledge"

    key: Mapped[str] = mapped_column(primary_key=True)
    state: Mapped[dict[str, Any]]
    updated_at: Mapped[float]


class Tenant(Base):
    """How much device time a tenant has had. The tenant with the least is next."""

    __tablename__ = "tenants"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    weight: Mapped[float] = mapped_column(default=1.0)
    served: Mapped[float] = mapped_column(default=0.0)  # virtual time: device seconds by weight
    started: Mapped[float] = mapped_column(default=0.0)  # where its last claim began on it
    # By how much estimates were too high.
    credit: Mapped[float] = mapped_column(default=0.0, server_default="0")
    # Of its groups; 0: not known.
    sec_per_token: Mapped[float] = mapped_column(default=0.0, server_default="0")


class AcceptancePrior(Base):
    """How often a proposer was right in a tenant's earlier jobs of one name."""

    __tablename__ = "acceptance_priors"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    job_name: Mapped[str] = mapped_column(primary_key=True)
    proposer: Mapped[str] = mapped_column(primary_key=True)
    fingerprint: Mapped[str] = mapped_column(primary_key=True)  # of its model; '': it has none
    tag: Mapped[str] = mapped_column(AnyText, primary_key=True)  # of the rows; '': without one
    agreed: Mapped[float]
    tested: Mapped[float]
    learned_at: Mapped[float]  # when it was added to last


class AcceptanceDay(Base):
    """The same of one day, nothing scaled down: what slow falls are found in."""

    __tablename__ = "acceptance_days"

    tenant: Mapped[str] = mapped_column(primary_key=True)
    job_name: Mapped[str] = mapped_column(primary_key=True)
    proposer: Mapped[str] = mapped_column(primary_key=True)  # all confidence buckets of it
    fingerprint: Mapped[str] = mapped_column(primary_key=True)  # of its model; '': it has none
    tag: Mapped[str] = mapped_column(AnyText, primary_key=True)  # of the rows; '': without one
    day: Mapped[int] = mapped_column(primary_key=True, autoincrement=False, index=True)  # UTC
    agreed: Mapped[float]
    tested: Mapped[float]
    superseded: Mapped[bool] = mapped_column(default=False)  # no baseline for later days any more


# --- the model registry -----------------------------------------------------------------------
class Model(Base):
    """One registered model. Rows are added and retired."""

    __tablename__ = "models"

    fingerprint: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    version: Mapped[int]  # from 1, by name
    ref: Mapped[str]
    parent: Mapped[str | None]  # a fingerprint; it need not be registered
    origin: Mapped[dict[str, Any]]
    added_at: Mapped[float]
    added_by: Mapped[str] = mapped_column(AnyText)
    retired_at: Mapped[float | None]
    retired_by: Mapped[str | None] = mapped_column(AnyText)


Index("uq_models_name_version", Model.name, Model.version, unique=True)


class Deployment(Base):
    """A model that drafts for a scope, an empty column being any. Rows are added and ended."""

    __tablename__ = "deployments"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True
    )  # in the order they began; SQLite counts up INTEGER keys only
    fingerprint: Mapped[str] = mapped_column(ForeignKey("models.fingerprint"))
    tenant: Mapped[str]
    job_name: Mapped[str]
    tag: Mapped[str]
    started_at: Mapped[float]
    started_by: Mapped[str] = mapped_column(AnyText)
    reason: Mapped[str] = mapped_column(AnyText)
    restores: Mapped[int | None] = mapped_column(
        BigInteger
    )  # the id of what a rollback brought back
    ended_at: Mapped[float | None]
    ended_by: Mapped[str | None] = mapped_column(AnyText)
    end_reason: Mapped[str | None] = mapped_column(AnyText)  # of a rollback


Index(
    "uq_deployments_live",
    *(Deployment.tenant, Deployment.job_name, Deployment.tag),
    unique=True,
    sqlite_where=Deployment.ended_at.is_(None),
    postgresql_where=Deployment.ended_at.is_(None),
)


class PairTrial(Base):
    """The newest trial of a draft model with a verifier, on machines of a numeric class."""

    __tablename__ = "pair_trials"

    verifier: Mapped[str] = mapped_column(primary_key=True)  # fingerprints
    proposer: Mapped[str] = mapped_column(primary_key=True)
    numeric_class: Mapped[str] = mapped_column(primary_key=True)  # '': they do not fit
    pays: Mapped[bool]
    reason: Mapped[str] = mapped_column(AnyText)
    figures: Mapped[dict[str, Any]]
    tried_at: Mapped[float]
    tried_by: Mapped[str] = mapped_column(AnyText)


class Rollout(Base):
    """A candidate that drafts for a growing share of a scope's groups. Rows are added and ended."""

    __tablename__ = "rollouts"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True
    )  # in the order they began
    fingerprint: Mapped[str] = mapped_column(ForeignKey("models.fingerprint"))
    tenant: Mapped[str]
    job_name: Mapped[str]
    tag: Mapped[str]
    present: Mapped[str]  # the model that it is compared with
    steps: Mapped[list[float]] = mapped_column(JSON)
    step: Mapped[int] = mapped_column(default=0)
    started_at: Mapped[float]
    started_by: Mapped[str] = mapped_column(AnyText)
    reason: Mapped[str] = mapped_column(AnyText)
    better: Mapped[float] = mapped_column(default=1.0)
    worse: Mapped[float] = mapped_column(default=1.0)
    outcome: Mapped[str | None]
    ended_at: Mapped[float | None]
    ended_by: Mapped[str | None] = mapped_column(AnyText)
    end_reason: Mapped[str | None] = mapped_column(AnyText)


Index(
    "uq_rollouts_live",
    *(Rollout.tenant, Rollout.job_name, Rollout.tag),
    unique=True,
    sqlite_where=Rollout.ended_at.is_(None),
    postgresql_where=Rollout.ended_at.is_(None),
)


class RolloutGroup(Base):
    """What one group showed of a rollout. It outlives the job: there is no text in it."""

    __tablename__ = "rollout_groups"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True
    )  # in the order they ended
    rollout_id: Mapped[int] = mapped_column(ForeignKey("rollouts.id"))
    job_id: Mapped[str]
    group_index: Mapped[int]
    share: Mapped[float]
    is_candidate: Mapped[bool]
    tokens: Mapped[int] = mapped_column(BigInteger)
    cost: Mapped[float]
    accepted: Mapped[int] = mapped_column(BigInteger)
    shadow_drafts: Mapped[int] = mapped_column(BigInteger)
    shadow_candidate: Mapped[int] = mapped_column(BigInteger)
    shadow_serving: Mapped[int] = mapped_column(BigInteger)


Index(
    "uq_rollout_groups_group",
    *(RolloutGroup.rollout_id, RolloutGroup.job_id, RolloutGroup.group_index),
    unique=True,
)


# --- device time: counters in ticks, which only grow (see `ledger/contract.py`) ---------------
def _ticks() -> Any:  # and other counters
    return mapped_column(BigInteger, default=0)


class WorkerSession(Base):
    """One device in one worker process, from its start to its last known moment."""

    __tablename__ = "worker_sessions"

    session_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    device_kind: Mapped[str]
    region: Mapped[str]
    tenure: Mapped[str]
    price_microusd: Mapped[int] = mapped_column(BigInteger)  # of an hour
    pool: Mapped[str] = mapped_column(default=DEFAULT_POOL, server_default=DEFAULT_POOL)
    # Of one device, where several work as one; NULL: nobody has said, so no job is left to it.
    each_microusd: Mapped[int | None] = mapped_column(BigInteger)
    started_at: Mapped[float]
    beat_at: Mapped[float]  # when its process was heard of last
    ended_at: Mapped[float | None]
    seen_ticks: Mapped[int] = _ticks()
    idle_ticks: Mapped[int] = _ticks()
    overhead_ticks: Mapped[int] = _ticks()
    lost_ticks: Mapped[int] = _ticks()  # written when it ends, with …
    leased_ticks: Mapped[int | None] = mapped_column(BigInteger)  # … the sum of all of them
    # The model and numeric classes that it verifies with; NULL: it verifies nothing.
    serves: Mapped[dict[str, Any] | None]


class WorkerProcess(Base):
    """One live worker process. Devices and their cost are in `WorkerSession`."""

    __tablename__ = "worker_processes"

    process_id: Mapped[str] = mapped_column(primary_key=True)
    owner: Mapped[str]
    kinds: Mapped[str]  # of work, with commas between them
    verifier: Mapped[str | None]
    proposer: Mapped[str | None]
    region: Mapped[str | None]  # NULL: of an earlier version, which does not tell
    is_spot: Mapped[bool] = mapped_column(default=False, server_default=false())
    started_at: Mapped[float]
    heard_at: Mapped[float]  # its last heartbeat
    trouble: Mapped[str | None]  # why it can take no messages; NULL: it can


class Notification(Base):
    """One event of a job for one target, until it is sent or given up."""

    __tablename__ = "notifications"

    job_id: Mapped[str] = mapped_column(
        ForeignKey("jobs.job_id", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    target: Mapped[str] = mapped_column(primary_key=True)
    event: Mapped[str]
    at: Mapped[float]
    attempts: Mapped[int] = mapped_column(default=0)
    due_at: Mapped[float | None]  # of the next attempt; NULL: there is none
    sent_at: Mapped[float | None]
    error: Mapped[str | None]  # of the last attempt


class TimeSlice(Base):
    """The device time that one attempt at a group took from one session."""

    __tablename__ = "time_slices"

    # No key of `jobs`: what was paid for stays, whatever becomes of the job's row.
    job_id: Mapped[str] = mapped_column(primary_key=True)
    group_index: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    generation: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    session_id: Mapped[str] = mapped_column(
        ForeignKey("worker_sessions.session_id"), primary_key=True
    )
    stage: Mapped[str]
    kept: Mapped[bool]  # its results were
    prefill_ticks: Mapped[int] = _ticks()
    verify_ticks: Mapped[int] = _ticks()
    draft_ticks: Mapped[int] = _ticks()
    rejected_ticks: Mapped[int] = _ticks()
    padding_ticks: Mapped[int] = _ticks()
    overhead_ticks: Mapped[int] = _ticks()


class StageUsage(Base):
    """What one attempt used beside devices (`usage.py`): counters that only grow."""

    __tablename__ = "stage_usage"

    # No key of `jobs`: what was paid for stays, whatever becomes of the job's row.
    job_id: Mapped[str] = mapped_column(primary_key=True)
    group_index: Mapped[int] = mapped_column(
        primary_key=True, autoincrement=False
    )  # -1: an attempt at the job itself
    generation: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    stage: Mapped[str]
    kept: Mapped[bool]  # its results were
    prices: Mapped[str]  # JSON: millionths of a dollar by name, without those that are 0
    cpu_ticks: Mapped[int] = _ticks()
    store_statements: Mapped[int] = _ticks()
    object_writes: Mapped[int] = _ticks()
    object_reads: Mapped[int] = _ticks()
    stored_bytes: Mapped[int] = _ticks()
    sent_bytes: Mapped[int] = _ticks()
    received_bytes: Mapped[int] = _ticks()


class ScheduleRun(Base):
    """The run of one logical time of one schedule. It outlives jobs, so no time ever runs twice."""

    __tablename__ = "schedule_runs"

    schedule: Mapped[str] = mapped_column(primary_key=True)
    logical_at: Mapped[float] = mapped_column(primary_key=True)
    state: Mapped[str]
    job_id: Mapped[str | None]  # no key of `jobs`: the time was had, whatever becomes of the job
    noted_at: Mapped[float]
    reason: Mapped[str | None] = mapped_column(AnyText)
    attempts: Mapped[int] = mapped_column(server_default="0")
    started_at: Mapped[float | None]
    found: Mapped[dict[str, Any] | None]  # figures of a run, for metrics


class DraftSwitch(Base):
    """Drafting switched off for a scope, an empty column being any value. Rows are added and ended.

    A scope has one at most that is not ended.
    """

    __tablename__ = "draft_switches"

    id: Mapped[int] = mapped_column(
        BigInteger().with_variant(Integer, "sqlite"), primary_key=True
    )  # in the order they were made; SQLite counts up INTEGER keys only
    tenant: Mapped[str]
    job_name: Mapped[str]
    tag: Mapped[str]
    proposer: Mapped[str]
    off_at: Mapped[float]
    off_by: Mapped[str] = mapped_column(AnyText)
    reason: Mapped[str] = mapped_column(AnyText)
    on_at: Mapped[float | None]
    on_by: Mapped[str | None] = mapped_column(AnyText)


Index(
    "uq_draft_switches_off",
    *(DraftSwitch.tenant, DraftSwitch.job_name, DraftSwitch.tag, DraftSwitch.proposer),
    unique=True,
    sqlite_where=DraftSwitch.on_at.is_(None),
    postgresql_where=DraftSwitch.on_at.is_(None),
)


@event.listens_for(Completion.__table__, "after_create")
def _create_view(_table: Table, connection: Connection, **_: object) -> None:
    for statement in token_record.creating(connection.dialect.name):
        connection.exec_driver_sql(statement)


@event.listens_for(Completion.__table__, "before_drop")
def _drop_view(_table: Table, connection: Connection, **_: object) -> None:
    for statement in token_record.dropping(connection.dialect.name):
        connection.exec_driver_sql(statement)


def is_described(name: str | None, kind: str, _parents: object) -> bool:
    """Whether migrations compare this table: all but partitions, which have no class."""
    return kind != "table" or not months.is_partition(name)


def job_is_due() -> ColumnElement[bool]:
    """The condition for a claimable job, written as in the index so that the index is used."""
    return _one_of(Job.stage, JOB_WORK)


def job_is_live() -> ColumnElement[bool]:
    """The condition for a job that may have open groups, written as in the index."""
    return _one_of(Job.stage, JOB_LIVE)


def group_is_open() -> ColumnElement[bool]:
    """The condition for a group with work to do, written as in the indexes."""
    return _one_of(Group.stage, GROUP_WORK)


def _one_of(column: Any, words: tuple[str, ...]) -> ColumnElement[bool]:
    # Bound parameters would hide the constants from the planner, and the partial index with them.
    return column.in_(bindparam(None, words, expanding=True, literal_execute=True))  # type: ignore[no-any-return]  # the column is untyped on purpose


def _partial(name: str, condition: ColumnElement[bool], *columns: Any) -> Index:
    return Index(name, *columns, sqlite_where=condition, postgresql_where=condition)


_partial("ix_jobs_due", Job.stage.in_(JOB_WORK), Job.ready_at)
_partial("ix_jobs_live", Job.stage.in_(JOB_LIVE), Job.priority)
_partial("ix_groups_due", Group.stage.in_(GROUP_WORK), Group.ready_at)
_partial(  # also of whether a job has open groups; the longest group of a job comes first
    "ix_groups_next",
    Group.stage.in_(GROUP_WORK),
    Group.job_id,
    Group.stage,
    Group.prompt_tokens.desc(),
    Group.group_index,
)
Index("ix_jobs_created_at", Job.created_at)
Index("ix_decisions_job_id", Decision.job_id, Decision.at)
_open = WorkerSession.ended_at.is_(None)
Index("ix_worker_sessions_open", WorkerSession.beat_at, sqlite_where=_open, postgresql_where=_open)
_due = Notification.due_at.is_not(None)
Index("ix_notifications_due", Notification.due_at, sqlite_where=_due, postgresql_where=_due)
Index("ix_time_slices_session_id", TimeSlice.session_id)
Index("ix_schedule_runs_logical_at", ScheduleRun.logical_at)
