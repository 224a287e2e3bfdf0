"""What a store must do about leases. Part of the contract in `contract.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.records import Beat, DueWork, GroupWork, JobWork, Lease, Released, Stage


class LeaseStore(Protocol):
    """Claims, heartbeats and releases; every claim raises the unit's generation."""

    def claim_job(self, job_id: str, stage: Stage, owner: str, lease_sec: float) -> JobWork | None:
        """Claim the job's INGEST or PUBLISH; None when it is not at that stage or leased.

        The first claim of INGEST starts the job (RUNNING, `started_at`). INGEST of a job with the
        cancel flag is left instead: for PUBLISH, or RUN while groups are open. One that is paused
        is not to be had until few enough of its groups are open. A job whose attempts
        are used up becomes FAILED instead; attempts count from the last `add_groups`.
        """
        ...

    def claim_group(
        self,
        job_id: str,
        index: int,
        stage: Stage,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None:
        """Claim a group at `stage`; None when somebody else has it or it is elsewhere.

        Raises the generation and the attempt count in the same statement. A group whose attempts
        are used up (`max_attempts` of the store) becomes FAILED instead, and None is returned; at
        PROPOSE it goes on to VERIFY without drafts instead, for a draft is only a hint. A group of
        a job with the cancel flag becomes CANCELLED instead (not at RECORD: finished work is kept).

        A group of several rows whose attempts are used up at VERIFY or RECORD does not fail: it is
        cut in halves (`cut_rules`), and the first of them is claimed. A group that may be what
        its workers died of (`cut_rules.is_suspect`) is refused to an owner who holds another one.

        `serves` is what the owner verifies with. A job that has no numeric class yet pins one
        then, once and for all: the one that most live workers of its model offer. A group of a job
        with another class than the owner's is refused. None: classes are not looked at.
        """
        ...

    def claim_next(
        self,
        stage: Stage,
        model: str,
        owner: str,
        lease_sec: float,
        serves: Serves | None = None,
    ) -> GroupWork | None:
        """Claim the group at PROPOSE or VERIFY whose turn it is; None when none is to be had.

        Of jobs that name `model` for that stage, and have no cancel flag: by `turns`, the highest
        class first, then the tenant that was served least, then its oldest job, then the group
        with most prompt tokens (the lowest index of several). The tenant is charged. A group whose
        attempts are used up is passed by: `close_over` and `claim_group` see to those. `serves`:
        as with `claim_group`; jobs of other classes are passed by.
        """
        ...

    def close_over(self, limit: int = 1000) -> int:
        """Close free groups that nobody may claim any more, as `claim_group` would; how many."""
        ...

    def heartbeat(self, leases: Sequence[Lease], lease_sec: float) -> Beat:
        """Extend leases; tells which are lost, which jobs are cancelled, which groups to cut."""
        ...

    def release(
        self, lease: Lease, error: str, forgiven: bool = False, whole: bool = False
    ) -> Released:
        """Give a unit back after an error: ready again, or FAILED when attempts are used up.

        `forgiven` takes the attempt off the count: the worker was stopped, not the work at fault.
        A group of several rows at VERIFY or RECORD is cut in halves instead of failing; not so if
        its job is cancelled, some of its rows were kept (`keep_part`), or the error is known to lie
        with no single row: `whole`.

        At PROPOSE, used up attempts lead to VERIFY without drafts. A lost lease is ignored. A job
        lease (INGEST, PUBLISH) that runs out of attempts fails the job. With the cancel flag, a
        group becomes CANCELLED (not at RECORD) and INGEST is left.
        """
        ...

    def cancel_group(self, lease: Lease) -> None:
        """The worker stopped this group because its job was cancelled: CANCELLED.

        When it was the last open group the job moves to PUBLISH (unless its input is being read).
        """
        ...

    def cut_group(self, lease: Lease, keep: int) -> int:
        """Give back all but the first `keep` rows of a group held at VERIFY.

        They become a group of their own, ready at VERIFY with all attempts; returns its index. The
        lease stays. `ValueError` unless both parts have rows.
        """
        ...

    def want_cut(
        self, model: str, owner: str, serves: Serves | None = None
    ) -> tuple[str, int] | None:
        """`owner` has nothing to verify with `model`: ask somebody who has for half of a group.

        Its holder learns it from heartbeats. Of the groups that others hold at VERIFY that is the
        one with most rows, of these the one claimed last; each is asked for once per claim or cut.
        Returns its job and index. None, and nothing is asked for, while anything is due at VERIFY
        for the model, and of jobs whose input is still read, that have groups at PROPOSE, or are
        cancelled. `serves`: jobs of other classes are passed by, and what is due of them.
        """
        ...

    def due(self, limit: int = 256, job_id: str | None = None) -> list[DueWork]:
        """Units that are ready, or whose lease expired: what the sweeper enqueues.

        Jobs first, then groups; of each stage, model and class the `limit` that are ready longest.
        With `job_id`, of that job only.
        """
        ...

    def holders(self, job_id: str) -> list[str]:
        """Who holds the job or groups of it under leases that have not run out, by name."""
        ...

    def expire_leases(self, job_id: str, owner: str) -> int:
        """End the leases on the job and its groups of an owner who is known to be dead; how many.

        It is as if they had run out now: attempts count, and others may claim at once.
        """
        ...

    def skip_proposals(self, patience_sec: float) -> list[tuple[str, int]]:
        """Send groups that waited too long for drafts on to VERIFY; returns (job id, index).

        These are groups at PROPOSE that nobody holds, and that were ready, or lost their last
        holder, more than `patience_sec` ago; and no group of their job is held at PROPOSE, or has
        got on from there within that time: who waits behind a busy proposer goes on waiting. It
        raises their generation and resets their attempts: a proposer that comes late after all is
        fenced.
        """
        ...
