"""What an audit says of a store, an output or a log that somebody has been at: never "intact"."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import forks
from support.databases import migrated
from support.models import tiny_llama
from support.timestamping import authority
from support.workers import WAIT_SEC, wait_until, worker

ROWS, GROUP, TOKENS = 48, 8, 24
KEY = base64.urlsafe_b64encode(bytes(range(32))).decode()
INTACT = ": intact"
Environment = dict[str, str]


class Place:
    """A folder in which jobs ran, with a store, outputs and, where a test wants them, anchors."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.database = home / "specbatch-data" / "specbatch.db"
        migrated(self.database)
        self.model = tiny_llama(home / "model", vocab_size=300, hidden=64, layers=3, heads=4)
        self.draft = tiny_llama(home / "draft", vocab_size=300, hidden=32, layers=1, seed=1)
        prompts = [f"prompt number {i} of many" for i in range(ROWS)]
        ids = [f"row-{i}" for i in range(ROWS)]
        pq.write_table(pa.table({"id": ids, "prompt": prompts}), home / "prompts.parquet")
        bodies = [{"messages": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
        requests = [
            {"custom_id": f"c{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            for i, body in enumerate([*bodies, {"messages": "none"}])
        ]
        lines = "".join(json.dumps(request) + "\n" for request in requests)
        (home / "requests.jsonl").write_text(lines)

    def environment(self, **more: str) -> Environment:
        return {"SPECBATCH_WORKSPACE": str(self.database.parent), **more}

    def anchored(self, **more: str) -> Environment:
        """The environment of who anchors logs."""
        at = {"SPECBATCH_ANCHOR_URI": str(self.home / "elsewhere"), "SPECBATCH_ANCHOR_KEY": KEY}
        return self.environment(**at, **more)

    def submitting(self, output: str, *more: object, given: str = "prompts.parquet") -> list[str]:
        return [
            *("submit-job", "--input", given, "--output", output, "--local"),
            *("--verifier", str(self.model), "--dtype", "float32", "--group-size", str(GROUP)),
            *("--max-tokens", str(TOKENS), "--temperature", "0.8", *map(str, more)),
        ]

    def run(self, *arguments: str, environment: Environment | None = None) -> Any:
        """A command to its end: its return code and what it wrote."""
        done = forks.run(
            *arguments,
            environment=environment or self.environment(),
            cwd=self.home,
            timeout=WAIT_SEC,
        )
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        return done

    def submit(
        self, output: str, *more: object, given: str = "prompts.parquet", **environment: str
    ) -> str:
        """A job that is done; its id."""
        call = self.submitting(output, *more, "--json", given=given)
        done = self.run(*call, environment=self.environment(**environment))
        return str(orjson.loads(done.stdout.strip().splitlines()[-1])["job"])

    def audit(
        self, job_id: str, *more: str, environment: Environment | None = None
    ) -> tuple[int, str]:
        done = self.run(
            "specbatch", "audit", job_id, "--sample", "0", *more, environment=environment
        )
        return done.returncode, done.stdout + done.stderr

    def covered(self, job_id: str, environment: Environment | None = None) -> dict[str, Any]:
        """The table of what an audit covers, by its first column."""
        _, said = self.audit(job_id, "--json", environment=environment)
        return {row["what"]: row for row in json.loads(said.splitlines()[0])["covered"]}

    def sql(self, *statements: str) -> list[tuple[Any, ...]]:
        """What the last one finds."""
        database = sqlite3.connect(self.database)
        with database:
            found = [database.execute(statement).fetchall() for statement in statements]
        database.close()
        return found[-1]

    def copy_store(self, name: str) -> Path:
        """The store as it is now, also while a job runs."""
        copy = self.home / name
        source, target = sqlite3.connect(self.database), sqlite3.connect(copy)
        source.backup(target)
        source.close()
        target.close()
        return copy

    def restore_store(self, copy: Path) -> None:
        for beside in ("-wal", "-shm"):
            self.database.with_name(self.database.name + beside).unlink(missing_ok=True)
        shutil.copy(copy, self.database)

    def cut_log(self, job_id: str, last: int) -> None:
        """Take away the log's entries behind one, and have the job's row name that one."""
        self.sql(
            "DROP TRIGGER audit_log_no_delete",
            f"DELETE FROM audit_log WHERE job_id = '{job_id}' AND number > {last}",
            f"UPDATE jobs SET log_number = {last}, log_head = (SELECT hash FROM audit_log "
            f"WHERE job_id = '{job_id}' AND number = {last}) WHERE job_id = '{job_id}'",
        )

    def entry(self, job_id: str, kind: str) -> int:
        """The number of the last entry of a kind."""
        query = f"SELECT max(number) FROM audit_log WHERE job_id = '{job_id}' AND kind = '{kind}'"
        return int(self.sql(query)[0][0])


class Jobs:
    """What ran in the place."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.plain = self._plain()
        self.openai = place.submit("chats", given="requests.jsonl")
        self.stopped = place.submit("stopped", "--deadline-sec", 0.001)
        [state] = place.sql(f"SELECT state FROM jobs WHERE job_id = '{self.stopped}'")[0]
        assert state == "cancelled"

    def _plain(self) -> str:
        """A job with drafts; meanwhile the store is copied."""
        place = self.place
        log_path = place.home / "job.log"
        with log_path.open("wb") as log:
            process = forks.fork(
                *place.submitting("out", "--proposer", place.draft),
                environment=place.environment(),
                cwd=place.home,
                stdout=log,
                stderr=log,
            )
            try:
                done = "SELECT count(*) FROM completions"
                wait_until(
                    "some rows are recorded", lambda: place.sql(done)[0][0] or process.poll()
                )
                self.older = place.copy_store("older.db")
                assert process.wait(WAIT_SEC) == 0, log_path.read_text()[-3000:]
            finally:
                process.kill()
                process.wait()
        copy = sqlite3.connect(self.older)
        [(job_id, state)] = copy.execute("SELECT job_id, state FROM jobs").fetchall()
        copy.close()
        assert state == "running", "the copy is of a job that was under way"
        return str(job_id)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(Place(tmp_path_factory.mktemp("audited")))


@pytest.fixture
def place(jobs: Jobs, tmp_path: Path) -> Iterator[Place]:
    """The place; what a test does there is undone."""
    home = jobs.place.home
    shutil.copytree(home, tmp_path / "before")
    yield jobs.place
    shutil.rmtree(home)
    shutil.copytree(tmp_path / "before", home)


def flip(path: Path, at: int) -> None:
    """One bit of one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_what_nobody_touched_is_intact_and_what_is_not_covered_is_told(
    jobs: Jobs, place: Place
) -> None:
    for job_id in (jobs.plain, jobs.openai, jobs.stopped):
        code, said = place.audit(job_id)
        assert (code, INTACT in said) == (0, True), said
        assert "not anchored (SPECBATCH_ANCHOR_URI is not set)" in said
        assert "a restored older copy of the store cannot be seen" in said
    code, said = place.audit(jobs.plain, "--json")
    table = {row["what"]: row for row in json.loads(said.splitlines()[0])["covered"]}
    assert table["output files"]["extent"] == "covered"
    assert table["output files"]["how"].startswith("size and SHA-256 of 1 file, ")
    assert table["end of the log"]["extent"] == "not covered"
    assert table["device time of attempts"]["extent"] != "not covered"
    assert table["tokens are the verifier's choice"]["how"] == "no completion was replayed"
    assert table["who wrote it all"]["extent"] == "not covered"


# --- outputs --------------------------------------------------------------------------------

OUTPUTS = [
    ("plain", "out/data/part-00000.parquet"),
    ("openai", "chats/output.jsonl"),
    ("openai", "chats/errors.jsonl"),
    ("stopped", "stopped/remainder-{}.parquet"),
    ("stopped", "stopped/remainder-{}.yaml"),
]


@pytest.mark.parametrize(("which", "name"), OUTPUTS)
@pytest.mark.parametrize("deed", ["flip", "cut", "delete"])
def test_a_file_of_the_output_is_as_it_was_published_or_named(
    jobs: Jobs, place: Place, which: str, name: str, deed: str
) -> None:
    job_id = getattr(jobs, which)
    path = place.home / name.format(job_id)
    if deed == "flip":
        flip(path, path.stat().st_size // 2)
        expected = "was changed: its SHA-256 differs from the published one"
    elif deed == "cut":
        path.write_bytes(path.read_bytes()[:-1])
        expected = " bytes, and was published with "
    else:
        path.unlink()
        expected = "is missing"
    code, said = place.audit(job_id)
    assert code == 3
    assert "NOT intact" in said
    [line] = [line for line in said.splitlines() if line.startswith("output: ")]
    assert path.name in line
    assert expected in line
    assert line.endswith(": restore it from a copy")


def test_two_parts_that_changed_places_and_one_more_are_named(jobs: Jobs, place: Place) -> None:
    out = place.home / "out"
    part = out / "data/part-00000.parquet"
    other = place.home / "chats" / "data/part-00000.parquet"
    swapped = bytearray(other.read_bytes())
    swapped += bytes(max(0, part.stat().st_size - len(swapped)))  # of the same size
    (out / "data/part-00001.parquet").write_bytes(part.read_bytes())
    part.write_bytes(swapped[: part.stat().st_size])
    code, said = place.audit(jobs.plain)
    assert code == 3
    changed, added = (line for line in said.splitlines() if line.startswith("output: "))
    assert "data/part-00000.parquet was changed" in changed
    assert "data/part-00001.parquet is not named by the manifest" in added
    assert added.endswith("remove it")


def test_a_file_that_would_be_read_as_completions_is_named(jobs: Jobs, place: Place) -> None:
    stranger = place.home / "out" / "data" / "more.parquet"
    shutil.copy(place.home / "prompts.parquet", stranger)
    (place.home / "out" / "data" / ".DS_Store").write_bytes(b"hidden, so no reader opens it")
    code, said = place.audit(jobs.plain)
    assert code == 3
    [line] = (line for line in said.splitlines() if line.startswith("output: "))
    assert f"{stranger} is not named by the manifest" in line


def test_an_output_of_an_earlier_version_is_audited(jobs: Jobs, place: Place) -> None:
    """Its parts lie beside the manifest."""
    out = place.home / "out"
    before = (out / "manifest.json").read_bytes()
    (out / "data/part-00000.parquet").rename(out / "part-00000.parquet")
    after = before.replace(b"data/part-", b"part-")
    (out / "manifest.json").write_bytes(after)
    code, said = place.audit(jobs.plain)
    findings = [line for line in said.splitlines() if line.startswith("output: ")]
    assert code == 3
    assert len(findings) == 1
    assert "manifest.json is not the manifest that was published" in findings[0]
    flip(out / "part-00000.parquet", 100)
    _, said = place.audit(jobs.plain)
    assert "/out/part-00000.parquet was changed" in said


def test_a_missing_manifest_and_that_of_another_job_are_named(jobs: Jobs, place: Place) -> None:
    manifest = place.home / "out" / "manifest.json"
    kept = manifest.read_bytes()
    manifest.unlink()
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False)
    assert f"{manifest} is missing" in said
    assert "restore it from a copy" in said
    shutil.copy(place.home / "chats" / "manifest.json", manifest)
    code, said = place.audit(jobs.plain)
    assert code == 3
    assert f"is the manifest of job {jobs.openai}, not of {jobs.plain}" in said
    manifest.write_bytes(kept)
    assert place.audit(jobs.plain)[0] == 0
    (place.home / "out" / "_specbatch_job.json").unlink()
    code, said = place.audit(jobs.plain)
    assert code == 3
    assert "_specbatch_job.json, which keeps other jobs away from this output" in said


def spoil_size(manifest: Path, size: Any) -> None:
    """Have the manifest say this of the size of its first file; nothing where it is `None`."""
    values = json.loads(manifest.read_bytes())
    [file, *_] = values["parts"]
    del file["size_bytes"]
    file |= {} if size is None else {"size_bytes": size}
    manifest.write_text(json.dumps(values))


@pytest.mark.parametrize("size", [None, "12", [1], True, 1e300])
def test_a_manifest_with_a_size_that_is_none_is_named_and_the_audit_is_kept(
    jobs: Jobs, place: Place, size: Any
) -> None:
    spoil_size(place.home / "out" / "manifest.json", size)
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said
    assert "manifest.json is not the manifest that was published: it was changed" in said
    assert "and the manifest does not say with how many it was published" in said
    assert place.sql("SELECT what FROM audit_findings WHERE what LIKE '%it was changed%'")


def test_a_manifest_that_names_an_entry_beyond_all_numbers_is_named(
    jobs: Jobs, place: Place
) -> None:
    manifest = place.home / "out" / "manifest.json"
    values = json.loads(manifest.read_bytes())
    values["info"]["audit_log"]["number"] = 2**63
    manifest.write_text(json.dumps(values))
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said
    assert "manifest.json is not the manifest that was published: it was changed" in said


@pytest.mark.parametrize("name", ["manifest.json", "_specbatch_job.json"])
def test_a_file_that_is_far_too_large_is_not_read(jobs: Jobs, place: Place, name: str) -> None:
    os.truncate(place.home / "out" / name, 1 << 40)
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said
    assert f"{name}" in said
    assert "1,099,511,627,776 bytes" in said


@pytest.mark.parametrize("deed", ["gone", "another's", "no JSON", "other names"])
def test_an_output_that_nobody_could_compare_is_not_called_covered(
    jobs: Jobs, place: Place, deed: str
) -> None:
    manifest = place.home / "out" / "manifest.json"
    if deed == "gone":
        manifest.unlink()
    elif deed == "another's":
        shutil.copy(place.home / "chats" / "manifest.json", manifest)
    elif deed == "no JSON":
        manifest.write_bytes(b"\x00\xff")
    else:
        values = json.loads(manifest.read_bytes())
        values["parts"] = [{**values["parts"][0], "name": "a\0b"}]
        manifest.write_text(json.dumps(values))
    row = place.covered(jobs.plain)["output files"]
    assert row["extent"] == "not covered", row
    assert "size and SHA-256" not in row["how"]
    assert str(manifest) in row["how"]


def test_files_that_are_missing_make_the_output_covered_in_part(jobs: Jobs, place: Place) -> None:
    (place.home / "chats" / "errors.jsonl").unlink()
    row = place.covered(jobs.openai)["output files"]
    assert row["extent"] == "in part", row
    assert row["how"].endswith("; not compared: 1 of 3 files that the manifest names")


def test_an_output_that_was_purged_is_not_missed(jobs: Jobs, place: Place) -> None:
    purged = place.run("specbatch", "purge", "--job", jobs.plain, "--output")
    assert purged.returncode == 0, purged.stderr
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (0, True), said
    assert "deleted by a purge, as the log says" in said


def test_an_output_in_a_bucket_is_compared_too(place: Place, s3: Any) -> None:
    environment = {"SPECBATCH_S3_ENDPOINT_URL": s3.endpoint_url}
    job_id = place.submit(f"{s3.uri}/nightly", **environment)
    code, said = place.audit(job_id, environment=place.environment(**environment))
    assert (code, INTACT in said) == (0, True), said
    assert f"{s3.uri}/nightly/manifest.json" in said
    client = s3.client()
    key = {"Bucket": s3.bucket, "Key": "nightly/data/part-00000.parquet"}
    data = bytearray(client.get_object(**key)["Body"].read())
    data[len(data) // 2] ^= 1
    client.put_object(**key, Body=bytes(data))
    code, said = place.audit(job_id, environment=place.environment(**environment))
    assert code == 3
    assert f"{s3.uri}/nightly/data/part-00000.parquet was changed" in said
    client.delete_object(Bucket=s3.bucket, Key="nightly/manifest.json")
    code, said = place.audit(job_id, environment=place.environment(**environment))
    assert code == 3
    assert f"{s3.uri}/nightly/manifest.json is missing" in said


# --- the log and the store ------------------------------------------------------------------


def test_an_older_copy_of_the_store_is_told_from_its_output(jobs: Jobs, place: Place) -> None:
    """It was made before the job was published, so the manifest knows more of the log."""
    place.restore_store(jobs.older)
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said
    assert "names entry " in said
    assert "the store is an older copy, or the log's end was cut off" in said
    assert "restore the newer store" in said


def test_a_job_that_is_not_published_yet_is_told_so(jobs: Jobs, place: Place) -> None:
    place.restore_store(jobs.older)
    shutil.rmtree(place.home / "out")
    code, said = place.audit(jobs.plain)
    assert code == 0
    assert "the job is not published yet: there is no output to compare" in said


def test_a_log_that_was_cut_together_with_its_head_is_told(jobs: Jobs, place: Place) -> None:
    """All that the cut entry tells of is undone as well, so the store by itself fits."""
    published = place.entry(jobs.plain, "published")
    place.cut_log(jobs.plain, published - 1)
    place.sql(
        "UPDATE jobs SET state = 'running', stage = 'publish', finished_at = NULL "
        f"WHERE job_id = '{jobs.plain}'"
    )
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said
    assert "no entry says that the job was published" in said
    assert "or the log's end was cut off" in said


COSTS = [
    "UPDATE time_slices SET {} WHERE job_id = '{job}' AND kept".format(
        ", ".join(
            f"{kind}_ticks = {kind}_ticks * 10"
            for kind in ("prefill", "verify", "draft", "rejected", "padding", "overhead")
        ),
        job="{job}",
    ),
    "UPDATE groups SET device_usd = device_usd * 10 WHERE job_id = '{job}'",
    "UPDATE groups SET cost_usd = cost_usd / 2, compute_sec = 0 WHERE job_id = '{job}'",
    "UPDATE worker_sessions SET price_microusd = price_microusd * 10",
    "UPDATE worker_sessions SET overhead_ticks = overhead_ticks + 100000000",
    "DELETE FROM time_slices WHERE job_id = '{job}' AND kept",
    "UPDATE time_slices SET kept = 0 WHERE job_id = '{job}'",
    "UPDATE jobs SET prompt_tokens = prompt_tokens * 2 WHERE job_id = '{job}'",
    "UPDATE jobs SET report = '{{}}' WHERE job_id = '{job}'",
    "DELETE FROM groups WHERE job_id = '{job}' AND group_index = 0",
]


@pytest.mark.parametrize("statement", COSTS)
def test_device_time_and_money_that_were_changed_are_named(
    jobs: Jobs, place: Place, statement: str
) -> None:
    [[changed]] = place.sql(statement.format(job=jobs.plain), "SELECT changes()")
    assert changed
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said


def test_a_group_that_is_said_to_have_failed_is_named(jobs: Jobs, place: Place) -> None:
    place.sql("UPDATE groups SET stage = 'failed', last_error = 'forged' WHERE group_index = 0")
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said
    assert "job: group 0 is failed, but by entry" in said


def test_device_time_of_completions_is_in_the_log(jobs: Jobs, place: Place) -> None:
    place.sql(
        f"UPDATE completions SET verify_ticks = verify_ticks * 10 WHERE job_id = '{jobs.plain}'"
    )
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM decisions",
        "UPDATE decisions SET reason = 'it was always so'",
        "UPDATE decisions SET acceptance = 0.99",
    ],
)
def test_decisions_that_are_gone_or_others_are_named(
    jobs: Jobs, place: Place, statement: str
) -> None:
    [count] = place.sql(f"SELECT count(*) FROM decisions WHERE job_id = '{jobs.plain}'")[0]
    assert count, "the job has noted decisions"
    place.sql(statement)
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said
    assert "decisions about drafting" in said


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM stage_usage WHERE stage = 'record'",
        "UPDATE stage_usage SET cpu_ticks = cpu_ticks / 2",
        "UPDATE stage_usage SET prices = '{\"cpu_hour\":1}' WHERE stage = 'ingest'",
    ],
)
def test_what_attempts_used_and_its_prices_are_pinned(
    jobs: Jobs, place: Place, statement: str
) -> None:
    place.sql(statement)
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said
    assert "attempts used beside devices, or its prices, was changed" in said


OF_THE_STORE = ("order and actions", "which prompts and quarantined rows", "completions")
OF_THE_FIGURES = (
    *("figures of job and groups", "device time of attempts", "decisions about drafting"),
    "what else attempts used",
)


def test_a_job_whose_row_is_gone_is_compared_with_nothing(jobs: Jobs, place: Place) -> None:
    place.sql(f"DELETE FROM jobs WHERE job_id = '{jobs.plain}'")
    table = place.covered(jobs.plain)
    assert {table[name]["extent"] for name in (*OF_THE_STORE, *OF_THE_FIGURES)} == {"not covered"}
    assert table["audit log"]["extent"] == "covered", "its log outlives it"


def test_of_a_job_that_only_its_anchors_know_nothing_is_covered(jobs: Jobs, place: Place) -> None:
    gone = place.submit("gone", **place.anchored())
    place.restore_store(jobs.older)
    table = place.covered(gone, place.anchored())
    assert {row["extent"] for row in table.values()} == {"not covered"}
    assert table["audit log"]["how"] == "the store has no entry of this job's log"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE time_slices SET stage = 'nonsense'",
        "UPDATE decisions SET action = 'nonsense'",
    ],
)
def test_figures_that_cannot_be_read_are_not_covered(
    jobs: Jobs, place: Place, statement: str
) -> None:
    place.sql(statement)
    code, said = place.audit(jobs.plain)
    assert (code, INTACT in said) == (3, False), said
    assert "the figures of the job cannot be read" in said
    table = place.covered(jobs.plain)
    for name in OF_THE_FIGURES:
        assert (table[name]["extent"], table[name]["how"]) == (
            "not covered",
            "the figures cannot be read",
        )


# --- anchors --------------------------------------------------------------------------------


def test_with_an_anchor_a_restored_older_copy_fails(jobs: Jobs, place: Place) -> None:
    """Also where the manifest cannot tell: what came after the publication is gone."""
    older = place.copy_store("published.db")
    exported = place.run("specbatch", "export", jobs.plain, "--what", "tokens", "--to", "exported")
    assert exported.returncode == 0, exported.stderr
    code, said = place.audit(jobs.plain, "--anchor", environment=place.anchored())
    assert (code, INTACT in said) == (0, True), said
    last = place.entry(jobs.plain, "exported")
    assert f"anchored up to entry {last} of {last} with key " in said
    place.restore_store(older)
    assert place.audit(jobs.plain)[0] == 0, "it cannot be seen without"
    code, said = place.audit(jobs.plain, environment=place.anchored())
    assert (code, INTACT in said) == (3, False), said
    assert f"names entry {last} of the log, which ends at entry {last - 1} in the store" in said
    assert "restore the newer store" in said


def test_a_job_is_anchored_when_it_is_published(jobs: Jobs, place: Place) -> None:
    job_id = place.submit("anchored", **place.anchored())
    [anchor] = (place.home / "elsewhere" / job_id).iterdir()
    said = json.loads(anchor.read_text())
    assert (said["job_id"], said["number"]) == (job_id, place.entry(job_id, "published"))
    public = {"SPECBATCH_ANCHOR_PUBLIC_KEYS": said["key"]}
    auditor = place.environment(SPECBATCH_ANCHOR_URI=str(place.home / "elsewhere"), **public)
    code, told = place.audit(job_id, environment=auditor)
    assert (code, f"anchored up to entry {said['number']} of {said['number']}" in told) == (0, True)
    code, told = place.audit(jobs.plain, environment=auditor)
    assert (code, "not anchored (there is no anchor of this job)" in told) == (0, True)
    place.restore_store(jobs.older)
    code, told = place.audit(job_id, environment=auditor)
    assert code == 3, "the whole job is gone with the newer store"
    assert "the store is an older copy" in told


def test_a_worker_anchors_what_was_published_without_an_anchor(
    jobs: Jobs, place: Place, redis_url: str
) -> None:
    """As where another worker died just after it had published the job."""
    environment = place.anchored(SPECBATCH_BROKER_URL=redis_url)
    with worker("record", environment=environment, cwd=place.home) as one:
        folder = place.home / "elsewhere" / jobs.plain
        wait_until("the anchor", lambda: any(folder.glob("[0-9]*.json")), [one])
        wait_until("its line in the log", lambda: f"job {jobs.plain} was pub" in one.text(), [one])
    code, said = place.audit(jobs.plain, environment=environment)
    last = place.entry(jobs.plain, "published")
    assert (code, f"anchored up to entry {last} of {last} with" in said) == (0, True), said


def test_half_an_anchor_of_a_killed_process_is_no_finding(jobs: Jobs, place: Place) -> None:
    assert place.audit(jobs.plain, "--anchor", environment=place.anchored())[0] == 0
    folder = place.home / "elsewhere" / jobs.plain
    [anchor] = folder.iterdir()
    (folder / f".{anchor.name}.0123456789abcdef.tmp").write_bytes(anchor.read_bytes()[:40])
    code, said = place.audit(jobs.plain, environment=place.anchored())
    assert (code, INTACT in said) == (0, True), said


def test_an_anchor_that_was_changed_moved_or_signed_by_others_is_named(
    jobs: Jobs, place: Place
) -> None:
    assert place.audit(jobs.plain, "--anchor", environment=place.anchored())[0] == 0
    [path] = (place.home / "elsewhere" / jobs.plain).iterdir()
    said = json.loads(path.read_text())

    def told(**changed: Any) -> str:
        path.write_text(json.dumps({**said, **changed}))
        code, text = place.audit(jobs.plain, environment=place.anchored())
        assert (code, INTACT in text) == (3, False), text
        return text

    assert "its signature does not fit" in told(at=said["at"] - 60)
    assert "of something else than its name says" in told(number=said["number"] - 1)
    assert "is no anchor" in told(signature=None)
    other = base64.urlsafe_b64encode(bytes(32)).decode()
    mine = place.audit(jobs.openai, "--anchor", environment=place.anchored())
    assert mine[0] == 0
    path.write_text(json.dumps(said))
    theirs = place.anchored() | {"SPECBATCH_ANCHOR_KEY": other}
    code, text = place.audit(jobs.plain, environment=theirs)
    assert code == 3
    assert f"is signed with the key {said['key']}, which is not among those of" in text


def test_a_log_that_was_written_anew_does_not_fit_its_anchor(jobs: Jobs, place: Place) -> None:
    assert place.audit(jobs.plain, "--anchor", environment=place.anchored())[0] == 0
    last = place.entry(jobs.plain, "published")
    forged = hashlib.sha256(b"forged").digest()
    place.sql(
        "DROP TRIGGER audit_log_no_update",
        f"UPDATE audit_log SET hash = x'{forged.hex()}' WHERE job_id = '{jobs.plain}' "
        f"AND number = {last}",
        f"UPDATE jobs SET log_head = x'{forged.hex()}' WHERE job_id = '{jobs.plain}'",
    )
    code, said = place.audit(jobs.plain, environment=place.anchored())
    assert code == 3
    assert f"anchor: entry {last} of the log is not the one that " in said


def test_nothing_is_anchored_of_which_something_is_wrong(jobs: Jobs, place: Place) -> None:
    place.sql("DELETE FROM decisions")
    code, said = place.audit(jobs.plain, "--anchor", environment=place.anchored())
    assert code == 3
    assert "nothing was anchored, for the audit found something" in said
    assert not (place.home / "elsewhere").exists()


def test_who_anchors_without_a_place_or_a_key_hears_what_to_set(jobs: Jobs, place: Place) -> None:
    code, said = place.audit(jobs.plain, "--anchor")
    assert code == 2
    assert "set SPECBATCH_ANCHOR_URI to a folder or bucket outside the store" in said
    at = place.environment(SPECBATCH_ANCHOR_URI=str(place.home / "elsewhere"))
    code, said = place.audit(jobs.plain, environment=at)
    assert code == 2
    assert "set SPECBATCH_ANCHOR_KEY to sign anchors, or SPECBATCH_ANCHOR_PUBLIC_KEYS" in said
    code, said = place.audit(jobs.plain, environment=at | {"SPECBATCH_ANCHOR_KEY": "short"})
    assert code == 2
    assert "SPECBATCH_ANCHOR_KEY must be one key of 32 bytes" in said


# --- time stamps ----------------------------------------------------------------------------


def test_an_authority_stamps_what_is_anchored(jobs: Jobs, place: Place, tmp_path: Path) -> None:
    with authority(tmp_path / "tsa") as tsa:
        stamped = place.anchored(
            SPECBATCH_TIMESTAMP_URL=tsa.url, SPECBATCH_TIMESTAMP_ROOTS=str(tsa.roots)
        )
        code, said = place.audit(jobs.plain, "--anchor", environment=stamped)
    assert code == 0, said
    last = place.entry(jobs.plain, "published")
    assert f"; entry {last} stamped at 20" in said
    assert " by CN=time stamps" in said
    [path] = (place.home / "elsewhere" / jobs.plain).iterdir()
    kept = json.loads(path.read_text())

    unchecked = place.anchored()
    code, said = place.audit(jobs.plain, environment=unchecked)
    assert code == 0
    assert f"the time stamp in {path} was not checked: set SPECBATCH_TIMESTAMP_ROOTS" in said
    assert "stamped at" not in said
    checked = place.anchored(SPECBATCH_TIMESTAMP_ROOTS=str(tsa.roots))
    assert f"; entry {last} stamped at 20" in place.audit(jobs.plain, environment=checked)[1]
    moved = place.anchored(
        SPECBATCH_TIMESTAMP_ROOTS=str(tsa.roots), SPECBATCH_TIMESTAMP_URL="http://another.invalid"
    )
    said = place.audit(jobs.plain, environment=moved)[1]
    assert " by CN=time stamps" in said, "who stamped it is who signed it, not who is set now"
    assert "another.invalid" not in said

    with authority(tmp_path / "other") as other:
        stranger = place.anchored(SPECBATCH_TIMESTAMP_ROOTS=str(other.roots))
        code, said = place.audit(jobs.plain, environment=stranger)
        assert (code, INTACT in said) == (3, False)
        assert f"the time stamp in {path} does not hold" in said
        theirs = place.anchored(SPECBATCH_TIMESTAMP_URL=other.url)
        assert place.audit(jobs.openai, "--anchor", environment=theirs)[0] == 0
    [another] = (place.home / "elsewhere" / jobs.openai).iterdir()
    of_another = json.loads(another.read_text())["timestamp"]
    path.write_text(json.dumps({**kept, "timestamp": of_another}))
    code, said = place.audit(jobs.plain, environment=checked)
    assert (code, INTACT in said) == (3, False)
    assert f"the time stamp in {path} does not hold" in said


# What an authority answers, and what is said of it.
REFUSALS = {
    "503": (503, "refuses with HTTP status 503 (Service Unavailable)"),
    "400": (400, "refuses with HTTP status 400 (Bad Request)"),
    "no HTTP": (None, "does not answer: "),
}


@pytest.mark.parametrize(("status", "why"), REFUSALS.values(), ids=REFUSALS)
def test_an_authority_that_stamps_nothing_anchors_nothing_and_ends_no_job(
    jobs: Jobs, place: Place, tmp_path: Path, status: int | None, why: str
) -> None:
    with authority(tmp_path / "tsa") as tsa:
        tsa.status = status
        stamped = place.anchored(SPECBATCH_TIMESTAMP_URL=tsa.url)
        code, said = place.audit(jobs.plain, "--anchor", environment=stamped)
        assert code == 4
        assert f"the time stamp authority {tsa.url} {why}" in said
        done = place.run(*place.submitting("unstamped"), environment=stamped)
    assert done.returncode == 0, done.stderr
    [[job_id]] = place.sql("SELECT job_id FROM jobs ORDER BY created_at DESC LIMIT 1")
    assert f"job {job_id} is published and its log is not anchored" in done.stderr
    assert f"`specbatch audit {job_id} --anchor` tries again" in done.stderr
    code, said = place.audit(job_id, environment=place.anchored())
    assert (code, "not anchored (there is no anchor of this job)" in said) == (0, True)
    code, said = place.audit(job_id, "--anchor", environment=place.anchored())
    assert (code, "anchored up to entry " in said) == (0, True)


def test_anchors_in_a_bucket_fail_an_older_copy_too(jobs: Jobs, place: Place, s3: Any) -> None:
    bucket = {"SPECBATCH_S3_ENDPOINT_URL": s3.endpoint_url}
    bucket["SPECBATCH_ANCHOR_URI"] = f"{s3.uri}/anchors"
    environment = place.anchored() | bucket
    code, said = place.audit(jobs.plain, "--anchor", environment=environment)
    assert (code, "anchored up to entry " in said) == (0, True), said
    place.restore_store(jobs.older)
    shutil.rmtree(place.home / "out")  # so that no manifest tells
    assert place.audit(jobs.plain)[0] == 0
    code, said = place.audit(jobs.plain, environment=environment)
    assert (code, INTACT in said) == (3, False), said
    assert f"{s3.uri}/anchors/{jobs.plain}/" in said
    assert "restore the newer store" in said
