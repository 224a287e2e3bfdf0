"""`specbatch audit` and `specbatch replay`: what is intact is clean, what is not is named."""

from __future__ import annotations

import getpass
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from cli.conftest import Cli, flags_of_a_job, run_in, undone, write
from ledger.builders import JOB, new_job
from sqlalchemy import text, update

from specbatch.pipeline.audit import entries
from specbatch.pipeline.audit.digests import KEPT_BYTES, chained, completion_digest
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.sql.databases import make_engine
from specbatch.pipeline.ledger.sql.store import SqlStore
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.audit import EMPTY, EntryKind
from specbatch.schemas.audit_tables import AuditLog
from specbatch.schemas.errors import ObjectError
from specbatch.schemas.settings import Settings
from specbatch.schemas.tables import Completion, Job
from support import demo
from support.databases import migrated
from support.models import TinyPair


def store_here() -> SqlStore:
    store = make_store(Settings())
    assert isinstance(store, SqlStore)
    return store


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, tiny_pair: TinyPair) -> tuple[Path, str]:
    """A folder with a finished job of 12 completions, and its id."""
    folder = tmp_path_factory.mktemp("site")
    migrated(folder / "specbatch-data" / "specbatch.db")
    write(folder / "prompts.parquet", [f"def f{i}(x):" for i in range(12)])
    flags = [*flags_of_a_job(tiny_pair), "--temperature", 0.8, "--group-size", 4]
    done = run_in(folder, "submit-job", "--local", *flags, "--json")
    assert done.code == 0, done.err
    return folder, done.json["job"]


@pytest.fixture
def folder(
    site: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The working folder, with the finished job in it; what a test does there is undone."""
    with undone(site[0], tmp_path / "before", monkeypatch) as here:
        yield here


@pytest.fixture
def done(site: tuple[Path, str], folder: Path) -> str:
    """The id of the finished job."""
    assert folder.is_dir()
    return site[1]


def forge(job_id: str, row: int, place: int) -> tuple[int, int]:
    """Plant a wrong token, and write digest, log and the job's row anew so that they fit it.

    Returns the token that was there and the one that is there now.
    """
    store, engine = store_here(), make_engine(Settings().store_url)
    kept = store.kept_one(job_id, row, 0)
    assert kept is not None
    assert kept.record is not None
    tokens = list(kept.record.token_ids)
    before, tokens[place] = tokens[place], (tokens[place] + 1) % 250
    known = chained(completion_digest(kept.record))
    digest = completion_digest(replace(kept.record, token_ids=tuple(tokens)))
    log, head = list(store.log(job_id)), EMPTY
    with engine.begin() as conn:
        conn.execute(text("DROP TRIGGER audit_log_no_update"))
        of_row = (Completion.job_id == job_id, Completion.row_index == row)
        conn.execute(
            update(Completion).where(*of_row).values(token_ids=tokens, digest=digest[:KEPT_BYTES])
        )
        for entry in log:
            said = orjson.loads(entry.payload.replace(known, chained(digest)))
            made = entries.follow(head, job_id, EntryKind(entry.kind), entry.at, entry.actor, said)
            of_entry = (AuditLog.job_id == job_id, AuditLog.number == entry.number)
            conn.execute(update(AuditLog).where(*of_entry).values(**entries.values(made)))
            head = made.head
        conn.execute(update(Job).where(Job.job_id == job_id).values(log_head=head.hash))
    engine.dispose()
    store.close()
    return before, tokens[place]


def test_an_untouched_job_audits_at_100_percent(cli: Cli, done: str) -> None:
    called = cli("audit", done[:8], "--sample", "100%")
    assert called.code == 0
    log, heading, *covered, correctness = called.out.splitlines()
    assert heading.split() == ["what", "covered", "how"]
    assert covered[0].split()[:3] == ["audit", "log", "covered"]
    assert log == f"log of job {done}: 10 entries, 12 completions: intact"
    assert correctness == ("correctness: 100.00% of 12 completions, 72 tokens; 0 with a difference")
    shown = cli("show", done).out
    assert "audits: 1, the last at " in shown
    assert f"by {getpass.getuser()}@" in shown
    assert "the log is intact, 0 findings" in shown
    assert "correctness: 100.00% of 12 completions; 0 with a difference" in shown
    assert cli("show", done, "--json").json["audits"][0]["sampled"] == 12


def test_a_sample_is_the_same_every_time(cli: Cli, done: str) -> None:
    called = cli("audit", done, "--sample", 0.25, "--seed", 3, "--json").json
    assert (called["replayed"], called["correctness"], called["findings"]) == (3, 1.0, [])
    none = cli("audit", done, "--sample", 0)
    assert (none.code, none.out.splitlines()[-1]) == (0, "correctness: no completion was replayed")


@pytest.mark.parametrize("share", ["many", "101%", "-1", "nan"])
def test_a_share_that_is_none_is_refused(cli: Cli, share: str) -> None:
    called = cli("audit", "anything", "--sample", share)
    assert called.code == 2
    assert "is not a share: use 2%, or a number from 0 to 1" in called.complaint


@pytest.mark.long
def test_256_completions_that_nobody_touched_audit_at_100_percent(
    cli: Cli, job: list[object], folder: Path
) -> None:
    write(folder / "many.parquet", [f"def f{i}(x):" for i in range(256)])
    flags = [*job, "--input", "many.parquet", "--output", "many", "--temperature", 0.7, "--json"]
    done = cli("submit-job", *flags, "--local").json["job"]
    called = cli("audit", done, "--sample", "100%", "--json")
    assert called.code == 0
    assert called.json["findings"] == []
    assert (called.json["completions"], called.json["replayed"]) == (256, 256)
    assert called.json["correctness"] == 1.0


@pytest.mark.long
def test_the_demo_audits_at_100_percent(cli: Cli) -> None:
    flags = ["--input", demo.PROMPTS, "--verifier", demo.VERIFIER, "--proposer", demo.DRAFT]
    flags += ["--output", "demo", "--max-tokens", 48, "--temperature", 0.8, "--top-p", 0.95]
    done = cli("submit-job", *flags, "--local", "--json").json["job"]
    called = cli("audit", done, "--sample", "100%", "--json").json
    assert (called["replayed"], called["correctness"], called["findings"]) == (256, 1.0, [])
    assert cli("replay", f"{done}/17").code == 0


def test_a_planted_token_is_found_though_the_chain_fits_it(cli: Cli, done: str) -> None:
    before, after = forge(done, row=7, place=2)
    store = store_here()
    assert list(store.log(done))[-1].head == store.log_head(done)
    store.close()
    called = cli("audit", done, "--sample", "1")
    assert called.code == 3
    lines = called.out.splitlines()
    assert lines[0].startswith("entry: entry 9 of the log is not the one that ")
    assert lines[0].endswith("names: the log was rewritten")
    assert lines[1].startswith(
        f"token: the completion of row 7, sample 0 has token {after} at position 2, where the "
        f"verifier decides {before} by "
    )
    assert "a fault in " in lines[1]
    assert "11 completions" not in lines[-1]
    assert lines[-1].endswith("1 with a difference")
    found = store_here()
    (audit,) = found.audits(done)
    found.close()
    (token,) = [f for f in audit.findings if f.kind == "token" and f.position == 2]
    assert (token.row, token.written, token.decided) == (7, after, before)
    assert token.margin is not None
    assert token.margin > 0.001


def test_a_replay_says_that_all_is_the_same_or_shows_both(cli: Cli, done: str) -> None:
    called = cli("replay", f"{done[:8]}/7")
    assert called.code == 0
    assert called.out == (
        "row 7, sample 0: 6 tokens, their log-probabilities and the text come out the same, bit "
        "for bit\n"
    )
    forge(done, row=7, place=2)
    called = cli("replay", f"{done}/7/0")
    assert called.code == 3
    lines = called.out.splitlines()
    assert lines[0] == "row 7, sample 0: token_ids differ"
    assert lines[1] == "token_ids from position 2 on"
    assert lines[2].startswith("    kept:    (")
    assert lines[3].startswith("    written: (")
    told = cli("replay", f"{done}/7", "--json")
    assert (told.code, told.json["differing"]) == (3, ["token_ids"])
    assert told.json["kept"]["token_ids"] != told.json["written"]["token_ids"]


@pytest.mark.parametrize(
    "name", ["abcdef", "abcdef/x", "abcdef/1/2/3", "/1", "abcdef/-1", f"abc/{'9' * 5000}"]
)
def test_what_names_no_completion_is_refused(cli: Cli, name: str) -> None:
    called = cli("replay", name)
    assert called.code == 2
    assert "names no completion: use JOB/ROW or JOB/ROW/SAMPLE" in called.complaint


def test_a_row_that_is_not_there_is_told(cli: Cli, done: str) -> None:
    called = cli("replay", f"{done}/99")
    assert called.code == 2
    assert called.complaint.endswith("has no readable completion of row 99, sample 0")


def test_another_model_replays_nothing_and_the_log_is_checked(
    cli: Cli, done: str, tiny_pair: TinyPair
) -> None:
    called = cli("audit", done, "--verifier", tiny_pair.draft)
    assert called.code == 2
    assert "12 completions: intact" in called.out
    assert "is not the one that decides the tokens of job" in called.complaint
    called = cli("replay", f"{done}/1", "--verifier", tiny_pair.draft)
    assert called.code == 2
    assert "name that one's folder with --verifier" in called.complaint


def test_a_model_that_moved_is_found_by_its_flag(
    cli: Cli, done: str, tiny_pair: TinyPair, folder: Path
) -> None:
    shutil.copytree(tiny_pair.verifier, folder / "elsewhere")
    called = cli("audit", done, "--verifier", "./elsewhere", "--sample", "100%")
    assert called.code == 0
    assert "100.00% of 12" in called.out


def test_without_prompts_the_log_alone_is_checked(cli: Cli, done: str, folder: Path) -> None:
    for file in (folder / "specbatch-data" / "jobs").rglob("prompts-*"):
        file.unlink()
    called = cli("audit", done, "--sample", "100%")
    assert called.code == 0
    assert "12 completions: intact" in called.out
    assert "not replayed: 12, for each its prompt is gone" in called.out
    assert cli("replay", f"{done}/1").code == 4


def test_prompts_out_of_reach_are_waited_for_once(
    cli: Cli, done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    get_bytes = Objects.get_bytes

    def out_of_reach(objects: Objects, uri: str, expect: Any = None) -> bytes:
        if "/prompts-" not in uri:
            return get_bytes(objects, uri, expect)
        asked.append(uri)
        raise ObjectError(f"cannot read {uri}: no answer", passing=True)

    monkeypatch.setattr(Objects, "get_bytes", out_of_reach)
    called = cli("audit", done, "--sample", "100%")
    assert "not replayed: 12, for each its prompt is out of reach" in called.out
    assert len(asked) == 1
    assert cli("report", done, "--output", "report.html").code == 0
    assert len(asked) == 2


@pytest.mark.long
def test_what_a_ratio_test_decided_is_audited_by_its_log_alone(cli: Cli, job: list[object]) -> None:
    flags = [*job, "--output", "ratio", "--temperature", 0.9, "--verification", "rejection"]
    flags += ["--depth", 2, "--json"]
    done = cli("submit-job", *flags, "--local").json["job"]
    called = cli("audit", done, "--sample", "100%")
    assert called.code == 0
    assert "not replayed: 12, for each it was decided by a ratio test" in called.out


def test_a_changed_output_and_a_changed_text_are_found(cli: Cli, done: str, folder: Path) -> None:
    manifest = folder / "out" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"rows": 12', b'"rows": 13'))
    engine = make_engine(Settings().store_url)
    with engine.begin() as conn:
        conn.execute(text("UPDATE completions SET text = 'x' WHERE row_index = 3"))
    engine.dispose()
    called = cli("audit", done, "--sample", "100%")
    assert called.code == 3
    text_changed, output_changed, text_wrong = called.out.splitlines()[:3]
    assert text_changed.startswith("completion: the completion of row 3, sample 0 was changed")
    assert output_changed.startswith("output: ")
    assert output_changed.endswith(
        "manifest that was published: it was changed; restore it from a copy"
    )
    assert text_wrong.endswith("row 3, sample 0 has a text that its tokens do not make")


def test_the_manifest_holds_the_log_down(done: str, folder: Path) -> None:
    said = orjson.loads((folder / "out" / "manifest.json").read_bytes())["info"]["audit_log"]
    store = store_here()
    log: list[Any] = list(store.log(done))
    store.close()
    assert said == {"number": 9, "hash": log[8].hash.hex()}
    kinds = [entry.kind for entry in log]
    assert (kinds[0], kinds[-1]) == ("submitted", "published")
    assert sorted(kinds[1:-1]) == [*["group"] * 3, *["pinned"] * 2, "planned", "planned", "read"]


def test_the_log_names_whom_the_settings_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folder.is_dir()
    monkeypatch.setenv("SPECBATCH_ACTOR", "the night shift")
    store = store_here()
    store.create_job(new_job())
    (first,) = store.log(JOB)
    store.close()
    assert first.actor == "the night shift"
