"""Completions whose texts are not kept are replayed from the caller's own, which receipts prove."""

from __future__ import annotations

import io
import json
import sqlite3
import sys
from pathlib import Path

import pytest
from cli.conftest import Cli, called_in, write

from support.models import TinyPair

KEY = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
OTHER_KEY = "HwECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
MODES = ("full", "redacted", "hash-only")
TEXT = "def f3(x):"  # of row 3


@pytest.fixture(autouse=True)
def with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_ENCRYPTION_KEY", KEY)


def submitted(cli: Cli, job: list[object], *more: object) -> str:
    flags = ("--temperature", 0.8, "--seed", 7, "--tenant", "clinic", "--local", "--json")
    return str(cli("submit-job", *job, *flags, *more).json["job"])


def purged(cli: Cli, job_id: str) -> str:
    assert cli("purge", "--job", job_id).code == 0
    return job_id


def text_file(folder: Path, text: str = TEXT) -> Path:
    path = folder / "text.txt"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def made(shared_folder: Path, tiny_pair: TinyPair) -> tuple[Path, str]:
    """Where a purged job is whose texts were kept in full, and its id."""
    models = ("--verifier", tiny_pair.verifier, "--proposer", tiny_pair.draft)
    job = ("--input", "prompts.parquet", "--output", "out", "--max-tokens", 6, *models)
    flags = ("--temperature", 0.8, "--seed", 7, "--tenant", "clinic", "--local", "--json")
    key = {"SPECBATCH_ENCRYPTION_KEY": KEY}
    job_id = called_in(shared_folder, "submit-job", *job, *flags, **key).json["job"]
    called_in(shared_folder, "purge", "--job", job_id, **key)
    return shared_folder, job_id


@pytest.fixture
def sealed(cli: Cli, made: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The same for all tests, in their working folder: they change nothing."""
    assert cli
    monkeypatch.chdir(made[0])
    return made[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_receipt_is_proved_from_the_callers_text_and_refused_for_any_other(
    cli: Cli, job: list[object], folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Of a purged job, and of one whose texts were never kept."""
    monkeypatch.setenv("SPECBATCH_TENANT_PRIVACY", json.dumps({"clinic": mode}))
    job_id = submitted(cli, job, "--n", 2)
    path = text_file(folder)
    if mode != "full":
        told = cli("replay", f"{job_id}/3/1", "--prompt", path, "--json").json
        assert (told["differing"], told["by_receipt"]) == ([], True)
        assert (told["row"], told["sample"]) == (3, 1)
        kept = told["kept"]["token_ids"]
        assert mode == "redacted" or set(kept) == {-1}
        assert len(told["written"]["token_ids"]) == len(kept)
    purged(cli, job_id)
    done = cli("replay", f"{job_id}/3/0", "--prompt", path)
    assert done.code == 0, done.err
    assert "row 3, sample 0: what was given is its row, as its receipt proves" in done.out
    assert "are what was sealed, bit for bit" in done.out
    for other in ("def f4(x):", "def f3(x): "):
        refused = cli("replay", f"{job_id}/3/0", "--prompt", text_file(folder, other))
        assert refused.code != 0
        assert f"what was given is not row 3 of job {job_id}" in refused.complaint
        assert other not in refused.complaint
        assert refused.out == ""
    assert "what was given is not row 2" in cli(
        "replay", f"{job_id}/2/0", "--prompt", text_file(folder)
    ).complaint  # fmt: skip
    assert "give the text of row 3 with --prompt FILE" in cli("replay", f"{job_id}/3/0").complaint
    assert cli("audit", job_id, "--sample", "0").code == 0


def test_the_text_may_come_from_standard_input_or_end_with_an_editors_line_end(
    cli: Cli, sealed: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = sealed
    assert cli("replay", f"{job_id}/3", "--prompt", text_file(folder, TEXT + "\n")).code == 0
    given = io.TextIOWrapper(io.BytesIO(TEXT.encode()))
    monkeypatch.setattr(sys, "stdin", given)
    assert cli("replay", f"{job_id}/3", "--prompt", "-").code == 0
    assert "cannot read nowhere.txt" in cli(
        "replay", f"{job_id}/3", "--prompt", "nowhere.txt"
    ).complaint  # fmt: skip
    both = ("--prompt", text_file(folder), "--row", text_file(folder))
    assert "leave one of them out" in cli("replay", f"{job_id}/3", *both).complaint


def test_a_row_with_sampling_values_of_its_own_is_given_whole(
    cli: Cli, job: list[object], folder: Path
) -> None:
    rows = [{"id": str(i), "prompt": f"def g{i}(x):", "own": {"max_tokens": 3}} for i in range(4)]
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--input", "own.jsonl", "--sampling-column", "own")
    job_id = purged(cli, submitted(cli, job, *flags))
    alone = cli("replay", f"{job_id}/1", "--prompt", text_file(folder, "def g1(x):"))
    assert "or the whole row with --row" in alone.complaint
    row = text_file(folder, json.dumps(rows[1]))
    assert cli("replay", f"{job_id}/1", "--row", row).code == 0
    another = json.dumps(rows[1] | {"own": {"max_tokens": 4}})
    assert cli("replay", f"{job_id}/1", "--row", text_file(folder, another)).code != 0


def test_texts_of_a_purged_spec_are_given_and_proved_as_well(
    cli: Cli, job: list[object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_TENANT_PRIVACY", '{"clinic": "hash-only"}')
    job_id = purged(cli, submitted(cli, job, "--stop", "zzz", "--template", "ask {prompt} now"))
    row = text_file(folder, json.dumps({"prompt": TEXT}))
    spec = folder / "texts.yaml"
    asked = ("replay", f"{job_id}/3", "--row", row)
    assert "whose own were purged" in cli(*asked).complaint
    spec.write_text("sampling: {stop: [zzz]}\ninput: {template: 'ask {prompt} now'}\n")
    assert cli(*asked, "--spec", spec).code == 0
    spec.write_text("sampling: {stop: [zz]}\ninput: {template: 'ask {prompt} now'}\n")
    assert "other texts than the spec" in cli(*asked, "--spec", spec).complaint


def test_an_output_that_is_not_the_sealed_one_is_told(
    cli: Cli, job: list[object], folder: Path
) -> None:
    """Somebody who writes the store moves a receipt's end: the seal of the output."""
    job_id = purged(cli, submitted(cli, job))
    database = sqlite3.connect(folder / "specbatch-data" / "specbatch.db")
    with database:
        [receipt] = database.execute(
            "SELECT receipt FROM completions WHERE row_index = 3"
        ).fetchone()
        broken = receipt[:20] + bytes(16) + receipt[36:]
        database.execute("UPDATE completions SET receipt = ? WHERE row_index = 3", (broken,))
    database.close()
    told = cli("replay", f"{job_id}/3", "--prompt", text_file(folder))
    assert (told.code, "output differ from what was sealed" in told.out) == (3, True)
    assert cli("audit", job_id, "--sample", "0").code == 3, "the log pins receipts"


def test_without_the_key_nothing_is_proved(
    cli: Cli, sealed: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBATCH_ENCRYPTION_KEY", OTHER_KEY)
    asked = ("--prompt", text_file(folder))
    assert "a key that is missing" in cli("replay", f"{sealed}/3", *asked).complaint
    monkeypatch.setenv("SPECBATCH_ENCRYPTION_KEY", f"{OTHER_KEY},{KEY}")
    assert cli("replay", f"{sealed}/3", *asked).code == 0, "a new key was put in front"
    monkeypatch.delenv("SPECBATCH_ENCRYPTION_KEY")
    assert "set SPECBATCH_ENCRYPTION_KEY" in cli("replay", f"{sealed}/3", *asked).complaint


def test_without_the_key_nothing_is_sealed(
    cli: Cli, job: list[object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECBATCH_ENCRYPTION_KEY")
    bare = purged(cli, submitted(cli, job))
    assert "has no receipt" in cli("replay", f"{bare}/3", "--prompt", text_file(folder)).complaint


def test_a_receipt_says_nothing_to_who_tries_texts_without_the_key(
    cli: Cli, job: list[object], folder: Path
) -> None:
    """Two rows with the same prompt and output have other receipts, and so has another job."""
    write(folder / "same.parquet", [TEXT, TEXT])
    flags = ("--input", "same.parquet", "--temperature", 0)
    for output in ("a", "b"):
        submitted(cli, job, *flags, "--output", output)
    database = sqlite3.connect(folder / "specbatch-data" / "specbatch.db")
    found = [row[0] for row in database.execute("SELECT receipt FROM completions")]
    database.close()
    parts = [receipt[at : at + 16] for receipt in found for at in (4, 20, 36)]
    assert len(found) == 4
    assert len(set(parts)) == len(parts) == 12
    assert {len(receipt) for receipt in found} == {52}
