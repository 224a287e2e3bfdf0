"""What a task does with its job, by the calls of one process: no scheduler, and workers by hand."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from specbatch.jobs.client import JobClient, Outcome, Standing, as_spec
from specbatch.jobs.dags.attaching import (
    SPEC_CHANGED,
    Place,
    Verdict,
    Watch,
    attach,
    cancel_with_task,
    check_earlier,
    check_on_partial,
    judge,
    revive,
    wait,
    with_input,
)
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.errors import OutputError, StoreError, UsageError
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.records import JobState, Stage
from specbatch.schemas.spec import JobSpec
from support.databases import sqlite_store
from support.stand_ins import Site

pytestmark = pytest.mark.unit

PLACE = Place("airflow", "nightly", "scheduled__2026-11-22", "summarise", "-1")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


@pytest.fixture
def client(site: Site) -> JobClient:
    return JobClient(
        site.store, Client(site.store, site.enqueued.append, f"{site.folder}/workspace")
    )


def spec(site: Site, *prompts: str, **more: Any) -> JobSpec:
    lines = "\n".join(f'{{"prompt": "{prompt}"}}' for prompt in prompts)
    (site.folder / "in.jsonl").write_text(lines)
    values: dict[str, Any] = {
        "input": {"uri": "in.jsonl"},
        "output": {"uri": "out"},
        "verifier": site.model,
        "sampling": {"max_tokens": 4},
        "group_size": 1,
    }
    return as_spec(values | more, site.folder)


def work(site: Site) -> None:
    site.work(site.worker("worker", site.host()))


def test_a_place_and_a_spec_are_one_job_whatever_the_try(site: Site, client: JobClient) -> None:
    first = attach(client, spec(site, "a"), PLACE, "fail")
    assert attach(client, spec(site, "a"), PLACE, "fail") == first


@pytest.mark.parametrize(
    "other",
    [
        Place("dagster", "nightly", "scheduled__2026-11-22", "summarise", "-1"),
        Place("airflow", "weekly", "scheduled__2026-11-22", "summarise", "-1"),
        Place("airflow", "nightly", "scheduled__2026-11-23", "summarise", "-1"),
        Place("airflow", "nightly", "scheduled__2026-11-22", "translate", "-1"),
        Place("airflow", "nightly", "scheduled__2026-11-22", "summarise", "0"),
    ],
    ids=["scheduler", "dag", "run", "task", "map index"],
)
def test_another_place_is_another_job(site: Site, client: JobClient, other: Place) -> None:
    assert attach(client, spec(site, "a"), PLACE, "fail") != attach(
        client, spec(site, "a"), other, "fail"
    )


def test_another_spec_is_another_job(site: Site, client: JobClient) -> None:
    changed = spec(site, "a", sampling={"max_tokens": 5})
    assert attach(client, spec(site, "a"), PLACE, "fail") != attach(client, changed, PLACE, "fail")


def put(client: JobClient, wanted: JobSpec) -> str:
    """What a try does."""
    place = with_input(client, wanted, PLACE)
    return attach(client, wanted, place, "fail")


def move_output(site: Site, name: str) -> None:
    (site.folder / "out").rename(site.folder / name)


def test_an_input_that_changed_after_it_was_read_is_another_job(
    site: Site, client: JobClient
) -> None:
    first = put(client, spec(site, "a"))
    assert put(client, spec(site, "a longer one")) == first, "it is not read yet"
    work(site)
    assert put(client, as_spec(dict(site.store.get_job(first).spec))) == first
    changed = spec(site, "b", "c", output={"uri": "other"})
    assert put(client, changed) != first, "the spec is another one too"
    again = spec(site, "b", "c")
    move_output(site, "the first")
    second = put(client, again)
    assert second != first
    assert put(client, again) == second
    work(site)
    assert cancel_with_task(client, again, PLACE) == second, "the newest of them"
    move_output(site, "the second")
    spec(site, "a third one", "and a fourth")
    third = put(client, again)
    assert third not in (first, second)
    work(site)
    (site.folder / "in.jsonl").unlink()
    assert put(client, again) == third, "the input is gone, and the newest job stays"


def test_an_ended_job_whose_output_is_in_the_way_is_named(site: Site, client: JobClient) -> None:
    first = put(client, spec(site, "a"))
    work(site)
    changed = spec(site, "b", "c")
    with pytest.raises(OutputError) as refused:
        put(client, changed)
    assert str(refused.value) == (
        f"the input has changed since it was read by job {first} of an earlier try, which is done "
        f"and has output {site.folder}/out: move that output away or name another one, and run "
        "this task again"
    )
    assert len(site.store.list_jobs()) == 1, "nothing is submitted"
    move_output(site, "the first")
    assert put(client, changed) != first


def test_an_open_job_of_an_earlier_input_is_named_and_continues(
    site: Site, client: JobClient
) -> None:
    wanted = spec(site, "a", "b")
    first = put(client, wanted)
    site.work(site.worker("reader", site.host()), Stage.INGEST)
    before = (site.folder / "in.jsonl").stat()
    spec(site, "another one")
    with pytest.raises(OutputError) as refused:
        put(client, wanted)
    assert str(refused.value) == (
        f"the input has changed since it was read by job {first} of an earlier try, which is "
        f"running and has output {site.folder}/out: end it with `specbatch cancel {first}`, then "
        "move that output away or name another one, and run this task again"
    )
    assert client.poll(first) == Standing(first, JobState.RUNNING), "nothing is cancelled for it"
    move_output(site, "its parts")  # its end would write there again
    with pytest.raises(OutputError, match=f"`specbatch cancel {first}`"):
        put(client, wanted)
    spec(site, "a", "b")
    os.utime(site.folder / "in.jsonl", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert put(client, wanted) == first, "the input is what it has read once more"
    work(site)
    assert client.outcome(first).state is JobState.DONE


def test_a_user_ends_an_open_job_of_an_earlier_input_and_the_task_runs_again(
    site: Site, client: JobClient
) -> None:
    wanted = spec(site, "a", "b")
    first = put(client, wanted)
    site.work(site.worker("reader", site.host()), Stage.INGEST)
    spec(site, "another one")
    client.cancel(first)
    work(site)
    with pytest.raises(OutputError, match="which is cancelled and has output"):
        put(client, wanted)
    move_output(site, "the first")
    second = put(client, wanted)
    work(site)
    assert client.outcome(second).state is JobState.DONE


def test_the_open_job_of_an_earlier_spec_is_found_by_its_id(site: Site, client: JobClient) -> None:
    first = put(client, spec(site, "a"))
    moved = spec(site, "a", sampling={"max_tokens": 5}, output={"uri": "other"})
    assert check_earlier(client, moved, PLACE, None) is None, "nobody knows of one"
    assert check_earlier(client, moved, PLACE, "gone") is None
    assert check_earlier(client, spec(site, "a"), PLACE, first) is None, "it is this try's own"
    assert check_earlier(client, moved, PLACE, first) == first
    client.cancel(first, SPEC_CHANGED)
    work(site)
    assert check_earlier(client, moved, PLACE, first) is None, "it has ended"


def test_the_open_job_of_an_earlier_spec_with_the_same_output_is_named(
    site: Site, client: JobClient
) -> None:
    first = put(client, spec(site, "a"))
    changed = spec(site, "a", sampling={"max_tokens": 5})
    with pytest.raises(OutputError) as refused:
        check_earlier(client, changed, PLACE, first)
    assert str(refused.value) == (
        f"the spec has changed since it was submitted as job {first} of an earlier try, which is "
        f"queued and has output {site.folder}/out: end it with `specbatch cancel {first}`, then "
        "move that output away or name another one, and run this task again"
    )
    assert client.poll(first) == Standing(first, JobState.QUEUED)


def test_an_input_that_is_gone_leaves_the_job_that_read_it(site: Site, client: JobClient) -> None:
    wanted = spec(site, "a")
    first = put(client, wanted)
    work(site)
    (site.folder / "in.jsonl").unlink()
    assert client.input_version(wanted) is None
    assert put(client, wanted) == first


def test_an_input_that_came_late_is_read_by_the_job_that_missed_it(
    site: Site, client: JobClient
) -> None:
    wanted = spec(site, "a")
    (site.folder / "in.jsonl").unlink()
    first = put(client, wanted)
    work(site)
    assert client.outcome(first).state is JobState.FAILED
    wanted = spec(site, "a")
    assert put(client, wanted) == first
    work(site)
    assert client.outcome(first).state is JobState.DONE


def test_names_that_run_together_are_kept_apart(site: Site) -> None:
    one, other = Place("airflow", "ab", "c", "d"), Place("airflow", "a", "bc", "d")
    assert one.key(spec(site, "a")) != other.key(spec(site, "a"))


def test_the_outcome_has_counts_cost_and_output(site: Site, client: JobClient) -> None:
    job = attach(client, spec(site, "a", "b", "~c"), PLACE, "fail")
    assert client.outcome(job).as_json()["state"] == "queued"
    assert client.outcome(job).manifest_uri is None
    assert client.outcome(job).data_uri is None
    work(site)
    found = wait(client, job, PLACE, 1.0, pause=pytest.fail)
    assert (found.state, found.rows, found.rows_failed) == (JobState.PARTIAL, 3, 1)
    assert found.completions == 3
    assert found.output_uri == str(site.folder / "out")
    assert Path(str(found.manifest_uri)).is_file()
    assert pq.read_table(found.data_uri).num_rows == 3
    assert "partial" in found.in_words
    assert "1 rows failed" in found.in_words


def test_a_new_try_has_what_its_own_kill_cancelled_done(site: Site, client: JobClient) -> None:
    job = attach(client, spec(site, "a", "b"), PLACE, "fail")
    client.cancel(job, PLACE.killed)
    assert attach(client, spec(site, "a", "b"), PLACE, "fail") == job
    work(site)  # the cancel is through
    waited: list[float] = []
    done = wait(client, job, PLACE, 1.0, pause=lambda sec: (waited.append(sec), work(site)))
    assert waited == [1.0]
    assert (done.state, done.completions) == (JobState.DONE, 2)


def test_a_task_s_job_is_cancelled_without_its_id_and_no_other_is(
    site: Site, client: JobClient
) -> None:
    wanted = spec(site, "a")
    assert cancel_with_task(client, wanted, PLACE) is None  # and none was made
    other = attach(client, spec(site, "a", sampling={"max_tokens": 5}), PLACE, "fail")
    job = attach(client, wanted, PLACE, "fail")
    assert cancel_with_task(client, wanted, PLACE) == job
    assert client.poll(job).stop_reason == PLACE.killed
    assert client.poll(other).stop_reason is None


def test_a_private_tenant_s_job_is_cancelled_without_its_id(site: Site) -> None:
    private = Privacy({"acme": PrivacyMode.HASH_ONLY}, cipher=Cipher([bytes(32)]))
    store = sqlite_store()
    client = JobClient(store, Client(store, site.enqueued.append, "work", privacy=private))
    wanted = spec(site, "a", tenant="acme")
    job = attach(client, wanted, PLACE, "fail")
    assert cancel_with_task(client, wanted, PLACE) == job


def test_a_job_that_somebody_else_stopped_stays_stopped(site: Site, client: JobClient) -> None:
    job = attach(client, spec(site, "a", "b"), PLACE, "fail")
    client.cancel(job, "cancelled by the owner")
    work(site)
    assert attach(client, spec(site, "a", "b"), PLACE, "fail") == job
    done = wait(client, job, PLACE, 1.0, pause=pytest.fail)
    assert judge(done, "succeed") is Verdict.GIVE_UP
    assert not revive(client, Standing(job, JobState.DONE), PLACE)


def test_a_new_try_does_again_what_failed_and_only_that(site: Site, client: JobClient) -> None:
    wanted = spec(site, "a", input={"uri": "later.jsonl"})
    job = attach(client, wanted, PLACE, "fail")
    work(site)
    failed = client.outcome(job)
    assert judge(failed, "fail") is Verdict.FAIL
    (site.folder / "in.jsonl").rename(site.folder / "later.jsonl")
    assert attach(client, wanted, PLACE, "fail") == job
    work(site)
    assert client.outcome(job).state is JobState.DONE


@pytest.mark.parametrize(
    ("state", "failed_groups", "fail", "succeed", "skip"),
    [
        (JobState.DONE, 0, Verdict.SUCCEED, Verdict.SUCCEED, Verdict.SUCCEED),
        (JobState.PARTIAL, 1, Verdict.FAIL, Verdict.SUCCEED, Verdict.SKIP),
        # All that failed was refused by the input's check, and would be again.
        (JobState.PARTIAL, 0, Verdict.GIVE_UP, Verdict.SUCCEED, Verdict.SKIP),
        (JobState.FAILED, 1, Verdict.FAIL, Verdict.FAIL, Verdict.FAIL),
        (JobState.CANCELLED, 0, Verdict.GIVE_UP, Verdict.GIVE_UP, Verdict.GIVE_UP),
    ],
)
def test_what_an_end_means(
    state: JobState, failed_groups: int, fail: Verdict, succeed: Verdict, skip: Verdict
) -> None:
    counts = dict.fromkeys(
        ("rows", "rows_done", "rows_failed", "completions", "prompt_tokens", "completion_tokens"), 1
    )
    found = Outcome(
        job_id="j", name="n", state=state, proposed=0, accepted=0, acceptance_rate=None,
        cost_usd=0.0, queue_sec=0.0, compute_sec=0.0, wall_sec=None, output_uri="out",
        data_uri=None, manifest_uri=None, failed_groups=failed_groups, **counts,
    )  # fmt: skip
    assert judge(found, "fail") is fail
    assert judge(found, "succeed") is succeed
    assert judge(found, "skip") is skip


def test_a_store_that_is_away_for_a_while_is_waited_for(client: JobClient, site: Site) -> None:
    job = attach(client, spec(site, "a"), PLACE, "fail")
    now = [0.0]
    watch = Watch(job, clock=lambda: now[0], patience_sec=10.0)

    def away() -> JobClient:
        raise StoreError("out of reach")

    for now[0] in (0.0, 9.0):
        assert watch.poll(away) is None
    now[0] = 9.5
    assert watch.poll(lambda: client) == Standing(job, JobState.QUEUED)
    for now[0] in (10.0, 19.0):  # a new outage
        assert watch.poll(away) is None
    now[0] = 20.0
    with pytest.raises(StoreError):
        watch.poll(away)


def test_words_for_partial_are_checked() -> None:
    assert check_on_partial("skip") == "skip"
    with pytest.raises(UsageError, match="fail, succeed or skip"):
        check_on_partial("ignore")
