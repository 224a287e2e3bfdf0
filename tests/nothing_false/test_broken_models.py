"""A model that cannot be what it says is named in one sentence: no row is blamed, nothing hangs."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.settings import Settings
from support import forks
from support.databases import migrated
from support.models import TinyPair
from support.workers import wait_until, worker

WAIT_SEC = 120.0
WEIGHTS = "model.safetensors"


@pytest.fixture
def model(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A good model in `tmp_path`, to spoil, beside twelve prompts."""
    lines = [{"id": f"row-{i}", "prompt": f"def f{i}(x):"} for i in range(12)]
    (tmp_path / "prompts.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    return shutil.copytree(tiny_pair.verifier, tmp_path / "model")


def run(folder: Path, *arguments: object) -> Any:
    """A command to its end; it may not take longer than `WAIT_SEC`."""
    environment = {"SPECBATCH_WORKSPACE": str(folder / "specbatch-data")}
    return forks.run(*map(str, arguments), environment=environment, cwd=folder, timeout=WAIT_SEC)


def submit(folder: Path, *more: object) -> Any:
    return run(
        folder, "specbatch", "submit-job", "--local", "--input", "prompts.jsonl",
        "--output", "out", "--max-tokens", 4, "--verifier", "model", *more,
    )  # fmt: skip


def complaint(done: Any) -> str:
    """The one `error:` line of a command that wrote no traceback and stored no job's rows."""
    text = done.stdout + done.stderr
    assert "Traceback" not in text, text
    (line,) = [line for line in text.splitlines() if line.startswith("error: ")]
    return line.removeprefix("error: ")


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def header(model: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the weight file says of itself; the weights stay."""
    data = (model / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    told = json.loads(data[8 : 8 + length])
    change(told)
    text = json.dumps(told).encode()
    (model / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def first(told: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in sorted(told.items()) if name != "__metadata__")


def truncate(model: Path) -> None:
    os.truncate(model / WEIGHTS, 1000)


def lose_a_byte(model: Path) -> None:
    os.truncate(model / WEIGHTS, (model / WEIGHTS).stat().st_size - 1)


def long_header(model: Path) -> None:
    data = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(struct.pack("<Q", 1 << 60) + data[8:])


def pipe_of_weights(model: Path) -> None:
    (model / WEIGHTS).unlink()
    os.mkfifo(model / WEIGHTS)


def link_in_a_subfolder(model: Path) -> None:
    (model / "deep" / "er").mkdir(parents=True)
    (model / "deep" / "er" / "secret.json").symlink_to("/etc/passwd")


def shards_without_one(model: Path) -> None:
    (model / WEIGHTS).rename(model / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"somewhere.else.weight": "model-00001-of-00002.safetensors"}}
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps(index))


def fewer_layers_than_told(model: Path) -> None:
    edit(model / "config.json", num_hidden_layers=3)


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "cannot be read (invalid header length)"),
    "a byte less": (lose_a_byte, "cannot be read (incomplete metadata, file not fully covered)"),
    "header too long": (long_header, "cannot be read (header too large)"),
    "no header": (
        lambda m: (m / WEIGHTS).write_bytes(struct.pack("<Q", 4) + b"{{{{"),
        "cannot be read (invalid JSON in header: key must be a string",
    ),
    "empty": (lambda m: (m / WEIGHTS).write_bytes(b""), "cannot be read (header too small)"),
    "shape": (
        lambda m: header(m, lambda t: first(t).update(shape=[1 << 40])),
        "cannot be read (invalid shape, data type, or offset for tensor)",
    ),
    "offsets": (
        lambda m: header(m, lambda t: first(t).update(data_offsets=[1 << 40, (1 << 40) + 4])),
        "cannot be read (invalid offset for tensor",
    ),
    "dtype": (
        lambda m: header(m, lambda t: first(t).update(dtype="Q7")),
        "cannot be read (invalid JSON in header: unknown variant `Q7`",
    ),
    "positions": (
        lambda m: edit(m / "config.json", max_position_embeddings=10**9),
        "max_position_embeddings 1000000000, which must be a whole number from 1 to 4194304",
    ),
    "layers": (
        lambda m: edit(m / "config.json", num_hidden_layers=100_000),
        "num_hidden_layers 100000, which must be a whole number from 1 to 1024",
    ),
    "one layer more": (fewer_layers_than_told, "declares 3 layers, but the weights have 2"),
    "vocabulary": (
        lambda m: edit(m / "config.json", vocab_size="abc"),
        "vocab_size 'abc', which must be a whole number",
    ),
    "other vocabulary": (
        lambda m: edit(m / "config.json", vocab_size=301),
        "has the shape [300, 32], by its config it is [301, 32]",
    ),
    "heads": (
        lambda m: edit(m / "config.json", num_key_value_heads=3),
        "4 attention heads for 3 heads of keys and values",
    ),
    "rope": (lambda m: edit(m / "config.json", rope_parameters="x"), "which must be an object"),
    "end tokens": (
        lambda m: (m / "generation_config.json").write_text('{"eos_token_id": "x"}'),
        "generation_config.json of model",
    ),
    "pipe": (pipe_of_weights, "model.safetensors, which is neither a file nor a folder"),
    "link": (link_in_a_subfolder, "the file deep/er/secret.json, which is a link out of its"),
    "shards": (shards_without_one, "names the tensor somewhere.else.weight, which is in none of"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_it_is_named_before_a_job_starts(model: Path, name: str) -> None:
    spoil, words = SPOILED[name]
    spoil(model)
    done = submit(model.parent)
    said = complaint(done)
    assert done.returncode == 2
    assert words in said
    assert str(model) in said
    assert ": " in said, "the remedy"
    assert not (model.parent / "out").exists()


def test_no_worker_begins_with_it(model: Path, redis_url: str) -> None:
    migrated(model.parent / "specbatch-data" / "specbatch.db")
    truncate(model)
    environment = {
        "SPECBATCH_WORKSPACE": str(model.parent / "specbatch-data"),
        "SPECBATCH_BROKER_URL": redis_url,
    }
    flags = ("verify", "--verifier", str(model))
    with worker(*flags, environment=environment, cwd=model.parent) as one:
        assert one.process.wait(WAIT_SEC) == 2
        assert "Traceback" not in one.text()
        assert "cannot be read (invalid header length)" in one.text()


def test_a_worker_takes_no_job_while_its_files_are_broken(model: Path, redis_url: str) -> None:
    """The folder was good when the worker started. A copy that is still running breaks it too, so
    the worker waits for whole files, and `show` says what the job lacks."""
    migrated(model.parent / "specbatch-data" / "specbatch.db")
    environment = {
        "SPECBATCH_WORKSPACE": str(model.parent / "specbatch-data"),
        "SPECBATCH_BROKER_URL": redis_url,
    }
    store = make_store(Settings(workspace=environment["SPECBATCH_WORKSPACE"]))
    place: dict[str, Any] = {"environment": environment, "cwd": model.parent}
    with worker("verify", "--verifier", str(model), **place) as one, worker("ingest", **place):
        wait_until("it listens", lambda: "ready" in one.text(), [one])
        one.freeze()
        flags = ("--max-tokens", "4", "--verifier", str(model), "--group-size", "4")
        given = forks.run(
            *("submit-job", "--input", "prompts.jsonl", "--output", "out", *flags),
            **place,
            timeout=WAIT_SEC,
        )
        assert given.returncode == 0, given.stderr
        (job,) = store.list_jobs()
        wait_until("the input is read", lambda: store.progress(job.job_id).ingest_done)
        whole = (model / WEIGHTS).read_bytes()
        os.truncate(model / WEIGHTS, 1000)
        one.thaw()
        words = "cannot be read (invalid header length)"
        wait_until("it says so", lambda: words in one.text(), [one])

        def shown() -> str:
            done = forks.run("specbatch", "show", job.job_id, **place, timeout=WAIT_SEC)
            assert done.returncode == 0, done.stderr
            return done.stdout

        lacks = "waits for a worker with model fingerprint"
        wait_until("show says what is missing", lambda: lacks in shown(), [one])
        assert "files that cannot be read" in shown()
        counts = store.progress(job.job_id)
        assert (counts.rows_failed, counts.groups_total, counts.groups_done) == (0, 3, 0)
        (model / WEIGHTS).write_bytes(whole)
        with worker("record", **place):
            wait_until("it is done", lambda: store.progress(job.job_id).groups_done == 3, [one])
    assert "Traceback" not in one.text()
    assert one.text().count(words) == 1
    assert store.progress(job.job_id).rows_failed == 0
    store.close()


def chats(folder: Path, *contents: str) -> None:
    lines = [
        {"id": f"{i}", "prompt": [{"role": "user", "content": content}]}
        for i, content in enumerate(contents)
    ]
    (folder / "prompts.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GROWING = (
    "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (LOOP, "did not finish for 3 chats in a row: it took too much processor time"),
        (GROWING, "needed more than 512 MiB for 3 chats in a row"),
        ("{% for m in messages %}", "cannot be compiled"),
    ],
    ids=["loop", "growing", "syntax"],
)
def test_a_template_without_end_fails_the_job(model: Path, template: str, words: str) -> None:
    (model / "chat_template.jinja").write_text(template)
    chats(model.parent, *"abcdef")
    done = submit(model.parent)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert words in done.stdout + done.stderr
    assert str(model) in done.stdout + done.stderr


def test_a_chat_that_a_template_does_not_end_with_is_one_bad_row(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% if m.content == 'evil' %}" + LOOP
        + "{% endif %}{% endfor %}"
    )  # fmt: skip
    chats(model.parent, "a", "evil", "b")
    done = submit(model.parent, "--json")
    assert done.returncode in (0, 3, 5), done.stderr
    counts = json.loads(done.stdout.strip().splitlines()[-1])
    assert counts["rows_failed"] == 1
