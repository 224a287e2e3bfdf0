"""Wrong input gets one sentence and exit code 2, before anything is stored or started."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest
import typer
from cli.test_results import in_store
from ledger.builders import JOB

from specbatch.jobs.cli.submit_job import app
from specbatch.pipeline.ledger.sql import migrate
from specbatch.schemas.errors import SpecError
from specbatch.schemas.field_errors import flag_of
from support.models import TinyPair, tiny_llama

BAD_FLAGS = {
    "missing file": (["--input", "nope.parquet"], "nope.parquet does not exist"),
    "truncated": (["--input", "cut.parquet"], "cut.parquet is truncated or not Parquet"),
    "not parquet": (["--input", "text.parquet"], "text.parquet is truncated or not Parquet"),
    "missing column": (["--prompt-column", "p"], "no column `p`; its columns are id, prompt"),
    "wrong type": (["--prompt-column", "number"], "column `number` of"),
    "no glob match": (["--input", "x*.parquet"], "no file matches input"),
    "no model": (["--verifier", "./nowhere"], "does not exist"),
    "not a model": (["--verifier", "empty"], "no config.json"),
    "other vocabulary": (["--proposer", "other"], "they must share one vocabulary"),
    "architecture": (["--verifier", "mamba"], "architecture `mamba`, which is not supported"),
    "remote code": (["--verifier", "remote"], "trust_remote_code"),
    "pickle weights": (["--verifier", "pickled"], "only pickle weights (pytorch_model.bin)"),
    "output is a file": (["--output", "prompts.parquet"], "is a file; name a folder"),
    "output cannot be made": (["--output", "prompts.parquet/x"], "cannot be"),
    "output has parts": (["--output", "taken"], "already holds data/part-00000.parquet"),
    "temperature": (
        ["--temperature", "-1"],
        "--temperature (field `sampling.temperature`): must be at least 0 (got -1.0)",
    ),
    "top_p": (["--top-p", "1.5"], "`sampling.top_p`"),
    "dtype": (["--dtype", "float8"], "'auto', 'bfloat16', 'float16' or 'float32'"),
    "exactness": (["--exactness", "roughly"], "'bitwise' or 'fast'"),
    "depth": (
        ["--depth", "deep"],
        "--depth (field `speculation.depth`): must be 'auto', 'off' or 'shadow', or a whole number "
        "(got 'deep')",
    ),
    "depth of odd digits": (["--depth", "²"], "must be 'auto', 'off' or 'shadow', or a whole"),
    "depth of two signs": (["--depth", "--4"], "must be 'auto', 'off' or 'shadow', or a whole"),
    "depth too long": (["--depth", "9" * 5000], "must be 'auto', 'off' or 'shadow', or a whole"),
    "max depth": (["--max-depth", "99"], "--max-depth (field `speculation.max_depth`): must be at"),
    "source": (
        ["--sources", "ngram,psychic"],
        "no source of drafts is called 'psychic': name some of grammar, block, history, ngram, "
        "draft-model",
    ),
    "no source": (["--sources", ","], "no sources of drafts are left: name some, or set depth to"),
    "history tokens": (["--history-tokens", "-1"], "`speculation.history_tokens`"),
    "shadow of a test": (
        ["--depth", "shadow", "--verification", "rejection"],
        "rejection and depth shadow exclude each other",
    ),
    "test without its source": (
        ["--sources", "ngram", "--verification", "block"],
        "add draft-model to sources",
    ),
    "verification": (["--verification", "loose"], "'coupled', 'rejection' or 'block'"),
    "test without a model": (
        ["--verification", "block", "--proposer", "none"],
        "block needs a draft model",
    ),
    "test without drafts": (
        ["--verification", "rejection", "--depth", "off"],
        "needs drafts, and depth is off",
    ),
    "format": (["--format", "xml"], "'auto', 'parquet', 'arrow', 'csv', 'jsonl', 'openai', "),
    "kept column of the output": (["--keep-columns", "id"], "column `id` of the input cannot be"),
    "kept column": (["--keep-columns", "number,nowhere"], "has no column `nowhere`"),
    "kept twice": (["--keep-columns", "number,number"], "a column occurs twice"),
    "output format": (["--output-format", "csv"], "`output.format`"),
    "prompt kind": (["--prompt-kind", "audio"], "'text', 'token_ids' or 'messages'"),
    "stop ids": (["--stop-token-ids", "1,x"], "`sampling.stop_token_ids.1`"),
    "min above max": (["--min-tokens", "9"], "min_tokens 9 is above max_tokens 6"),
    "stop": (["--stop", ""], "`sampling.stop.0`"),
    "penalty": (["--presence-penalty", "3"], "`sampling.presence_penalty`"),
    "sampling column": (["--sampling-column", "number"], "must be a struct or JSON text"),
    "seed": (["--seed", "-1"], "`sampling.seed`"),
    "name": (["--name", "a/b"], "--name (field `name`): must be text that matches"),
    "no number": (
        ["--deadline-sec", "nan"],
        "--deadline-sec (field `deadline_sec`): must be above 0",
    ),
    "priority": (["--priority", "urgent"], "--priority (field `priority`): must be 'high', 'nor"),
}


@pytest.fixture
def things(folder: Path, tiny_pair: TinyPair) -> Path:
    """Everything that `BAD_FLAGS` names."""
    whole = (folder / "prompts.parquet").read_bytes()
    (folder / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "text.parquet").write_text("hello")
    (folder / "empty").mkdir()
    tiny_llama(folder / "other", vocab_size=280)
    for name, changes in {
        "mamba": {"model_type": "mamba"},
        "remote": {"auto_map": {"AutoModel": "x.Y"}},
        "pickled": {},
    }.items():
        shutil.copytree(tiny_pair.verifier, folder / name)
        config = folder / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    (folder / "pickled" / "model.safetensors").rename(folder / "pickled" / "pytorch_model.bin")
    (folder / "taken" / "data").mkdir(parents=True)
    (folder / "taken" / "data" / "part-00000.parquet").touch()
    return folder


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_a_wrong_flag_is_named_and_nothing_is_started(
    cli: Any, job: Any, things: Path, name: str
) -> None:
    flags, words = BAD_FLAGS[name]
    refused = cli("submit-job", *job, "--local", *flags)
    assert refused.code == 2
    assert words in refused.complaint
    assert not refused.out
    assert not (things / "out").exists()
    assert cli("jobs", "--json").json == []


def test_each_field_names_the_flag_that_sets_it(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def keep(_file: Any, flags: dict[str, Any]) -> NoReturn:
        asked.update(flags)
        raise SpecError("enough")

    monkeypatch.setattr("specbatch.jobs.cli.submit_job.build_spec", keep)
    assert cli("submit-job").complaint == "enough"
    options = {flag for option in typer.main.get_command(app).params for flag in option.opts}
    assert len(asked) > 30
    assert {flag_of(field) for field in asked} <= options


def test_a_wrong_value_of_a_file_names_no_flag(cli: Any, folder: Path) -> None:
    (folder / "spec.yaml").write_text(
        "{input: {uri: a}, output: {uri: b}, verifier: c, sampling: {n: 0}}"
    )
    refused = cli("submit-job", "spec.yaml", "--local")
    assert refused.complaint == "job spec: field `sampling.n`: must be at least 1 (got 0)"


BAD_FILES = {
    "no file": (None, "does not exist"),
    "not yaml": ("a: [b", "is not valid YAML"),
    "no date": ("a: 2026-02-30", "is not valid YAML: day is out of range"),
    "a list": ("- x", "must hold a mapping"),
    "binary": (b"\xff\xfe\x00", "is not a text file"),
    "nothing given": ("name: x", "add --input --output --verifier"),
    "unknown field": (
        "{input: {uri: a, colum: x}, output: {uri: b}, verifier: c}",
        "unknown field `input.colum` (did you mean `id_column`?); allowed here: delimiter, format,",
    ),
    "unknown section": (
        "{inputs: {uri: a}, output: {uri: b}, verifier: c}",
        "unknown field `inputs` (did you mean `input`?); allowed here: budget_usd,",
    ),
    "wrong kind": ("{input: a, output: {uri: b}, verifier: c}", "field `input`"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_wrong_spec_file_gets_one_sentence(cli: Any, folder: Path, name: str) -> None:
    content, words = BAD_FILES[name]
    if content is not None:
        data = content if isinstance(content, bytes) else content.encode()
        (folder / "spec.yaml").write_bytes(data)
    refused = cli("submit-job", "spec.yaml", "--local")
    assert refused.code == 2
    assert words in refused.complaint


def test_a_spec_file_that_is_none_is_named_for_what_it_is(cli: Any, folder: Path) -> None:
    (folder / "link.yaml").symlink_to("nowhere")
    refused = cli("submit-job", ".")
    assert refused.complaint == "spec file . is a folder: name a file"
    refused = cli("submit-job", "link.yaml")
    assert refused.complaint == ("spec file link.yaml is a link to nowhere, which does not exist")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["submit-job", "--wat"], "No such option"),
        (["submit-job", "--max-tokens", "many"], "Invalid value for '--max-tokens'"),
        (["worker", "dance"], "is not one of"),
        (["jobs", "--state", "odd"], "is not one of"),
        (["show"], "Missing argument"),
        (["nonesuch"], "No such command"),
    ],
)
def test_wrong_usage_ends_with_2(cli: Any, arguments: list[str], words: str) -> None:
    refused = cli(*arguments)
    assert refused.code == 2
    assert words in " ".join(refused.err.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["worker", "verify"], "needs --verifier"),
        (["worker", "all", "--proposer", "x"], "needs --verifier"),
        (["worker", "propose", "--verifier", "x"], "needs --proposer"),
        (["worker", "ingest"], "the broker is memory://"),
        (["worker", "verify", "--verifier", "none"], "needs --verifier, the model it serves"),
        (["worker", "all", "--verifier", "none"], "needs --verifier, the model it serves"),
        (["spot-check", "j", "--by", "m", "--timeout", "5"], "needs --wait or --local"),
        (["show", "nonesuch"], "no job 'nonesuch'"),
        (["cancel", "nonesuch"], "no job 'nonesuch'"),
        (["retry", "nonesuch"], "no job 'nonesuch'"),
    ],
)
def test_what_a_command_cannot_do_is_said_in_a_sentence(
    cli: Any, arguments: list[str], words: str
) -> None:
    refused = cli(*arguments)
    assert refused.code == 2
    assert words in refused.complaint


@pytest.mark.parametrize("number", [2**63, 10**22])
@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (["figures"], "--days"),
        (["jobs"], "--limit"),
        (["results", JOB], "--head"),
        (["results", JOB, "--failed"], "--head"),
        (["diff", JOB, JOB], "--max"),
    ],
)
def test_a_number_that_no_store_or_calendar_holds_is_refused(
    cli: Any, folder: Path, command: list[str], flag: str, number: int
) -> None:
    in_store(folder)
    refused = cli(*command, flag, number)
    assert refused.code == 2
    assert f"Invalid value for '{flag}'" in refused.err
    assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--timeout", 1], "--timeout needs --wait or --local"),
        (["--tokens-per-sec", 1], "--tokens-per-sec needs --dry-run"),
        ([], "the broker is memory://"),
    ],
)
def test_flags_that_do_not_fit_together_are_refused(
    cli: Any, job: Any, flags: list[object], words: str
) -> None:
    refused = cli("submit-job", *job, *flags)
    assert refused.code == 2
    assert words in refused.complaint


@pytest.mark.parametrize(
    ("name", "value", "code", "words"),
    [
        ("LEASE_SEC", "soon", 2, "setting SPECBATCH_LEASE_SEC"),
        ("SETTINGS", "nope.toml", 2, "which is not a file"),
        ("DATABASE_URL", "mysql://u:secret@h/d", 2, "use sqlite or postgresql"),
        ("DATABASE_URL", "postgresql://u:secret@127.0.0.1:1/d", 4, "did not answer until"),
    ],
)
def test_a_wrong_setting_is_named_without_its_password(
    cli: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str, code: int, words: str
) -> None:
    monkeypatch.setenv(f"SPECBATCH_{name}", value)
    # Else it is patient.
    monkeypatch.setattr(migrate, "SqlStore", partial(migrate.SqlStore, retry_sec=1.0))
    refused = cli("jobs")
    assert refused.code == code
    assert words in refused.complaint
    assert "secret" not in refused.err


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("redis://u:secret@127.0.0.1:1/0", 4, "redis://u:***@127.0.0.1:1/0 cannot be reached"),
        ("carrier-pigeon://u:secret@h", 2, "use redis://, amqp:// or memory://"),
    ],
)
def test_a_wrong_broker_is_named_before_a_job_is_stored(
    cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch, url: str, code: int, words: str
) -> None:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", url)
    refused = cli("submit-job", *job)
    assert refused.code == code
    assert words in refused.complaint
    assert "secret" not in refused.err
    monkeypatch.delenv("SPECBATCH_BROKER_URL")
    assert cli("jobs", "--json").json == []


def test_a_setting_that_is_no_json_does_not_blame_the_settings_file(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "settings.toml").write_text("lease_sec = 60.0\n")
    monkeypatch.setenv("SPECBATCH_SETTINGS", "settings.toml")
    monkeypatch.setenv("SPECBATCH_TENANT_WEIGHTS", "search=2")
    refused = cli("jobs")
    assert refused.code == 2
    assert "tenant_weights" in refused.complaint
    assert "is not the JSON" in refused.complaint
    assert "settings.toml" not in refused.complaint


def test_a_settings_file_that_may_not_be_read_is_named(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the system is spoken for."""
    (folder / "settings.toml").write_text("lease_sec = 60.0\n")
    monkeypatch.setenv("SPECBATCH_SETTINGS", "settings.toml")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("specbatch.jobs.cli.connect.Settings", refuse)
    refused = cli("jobs")
    assert refused.code == 2
    assert "settings file settings.toml cannot be read: permission denied" in refused.complaint
