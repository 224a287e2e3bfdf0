"""Files that are damaged at random: a completion, a quarantined row or one sentence comes of each.

Every case is drawn from its number, so a failing one is repeated by it. Inputs are planned
(`--dry-run` reads and checks all rows); a model is loaded and run, where it passes the first look.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import forks
from support.models import TinyPair
from support.peak_memory import PeakMemory

FEW = {"parquet": 16, "jsonl": 6, "model": 14}
ALL = {"parquet": 900, "jsonl": 300, "model": 800}
MOST_SEC = 30.0
MOST_MIB = 1500.0
GIVEN_UP_SEC = 240.0  # a busy machine is no hang: what counts is the time that was computed
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
STRANGE: tuple[Any, ...] = (
    None, 0, -1, 1, 2, 3, 7, 10**6, 10**9, 2**31, 2**63, 10**30, -(2**70), 0.5, 1e308, True, "abc",
    "", [], {}, [1], {"a": 1}, "\0", "9" * 500, [[[[]]]],
)  # fmt: skip


# --- inputs ---------------------------------------------------------------------------------
def parquet(folder: Path, draw: random.Random) -> Path:
    path = folder / "in.parquet"
    rows = draw.choice([1, 5, 60])
    columns: dict[str, list[Any]] = {"id": [f"row-{i}" for i in range(rows)]}
    match draw.randrange(4):
        case 0:
            columns["prompt"] = [f"say {i % 3}" for i in range(rows)]
        case 1:
            columns["prompt"] = [[i, 65, 66] for i in range(rows)]
        case 2:
            columns["prompt"] = [CHAT] * rows
        case _:
            columns["prompt"] = [None if i % 2 else "x" * 300 * i for i in range(rows)]
    pq.write_table(
        pa.table(columns),
        path,
        compression=draw.choice(["none", "zstd", "snappy", "gzip"]),
        use_dictionary=draw.random() < 0.5,
        row_group_size=draw.choice([7, 1000]),
        data_page_version=draw.choice(["1.0", "2.0"]),
        write_page_checksum=draw.random() < 0.3,
    )
    path.write_bytes(damaged(path.read_bytes(), draw))
    return path


def jsonl(folder: Path, draw: random.Random) -> Path:
    path = folder / "in.jsonl"
    lines = []
    for i in range(draw.choice([1, 8, 40])):
        value: dict[str, Any] = {"id": f"{i}", "prompt": draw.choice(["say it", CHAT, [1, 2]])}
        if draw.random() < 0.3:
            value[draw.choice(["id", "prompt", "tag", "more"])] = draw.choice(
                [v for v in STRANGE if not isinstance(v, int) or abs(v) < 2**63]
            )
        lines.append(orjson.dumps(value))
    if draw.random() < 0.2:
        lines.insert(0, b"[" * 200_000)
    if draw.random() < 0.2:
        lines.append(b'{"id": "deep", "prompt": ' + b'{"a":' * 900 + b"1" + b"}" * 901)
    if draw.random() < 0.1:
        lines.append(b'{"id": "long", "prompt": "' + b"x" * (20 << 20) + b'"}')
    path.write_bytes(damaged(b"\n".join(lines), draw))
    return path


def damaged(data: bytes, draw: random.Random) -> bytes:
    """One to four times something that happens to bytes."""
    found = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        if not found:
            break
        at = draw.randrange(len(found))
        if draw.random() < 0.5:  # where formats keep what they say of themselves
            at = max(0, len(found) - 1 - draw.randrange(min(len(found), 400)))
        size = draw.randint(1, 40)
        match draw.randrange(7):
            case 0:
                found[at] ^= 1 << draw.randrange(8)
            case 1:
                found[at] = draw.randrange(256)
            case 2:
                del found[at:]
            case 3:
                found[at : at + size] = bytes(size)
            case 4:
                found[at : at + 4] = struct.pack("<I", draw.choice([2**31 - 1, 2**32 - 1, 1 << 28]))
            case 5:
                other = draw.randrange(len(found))
                found[at : at + size] = found[other : other + size]
            case _:
                del found[at : at + size]
    return bytes(found)


# --- models ---------------------------------------------------------------------------------
def model(good: Path, folder: Path, draw: random.Random) -> Path:
    spoiled = shutil.copytree(good, folder / "model")
    names = ["config.json"] * 4 + ["model.safetensors"] * 4
    names += ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    name = draw.choice([n for n in names if (spoiled / n).exists()])
    path = spoiled / name
    if name == "model.safetensors":
        path.write_bytes(spoiled_weights(path.read_bytes(), draw))
    elif draw.random() < 0.25:
        path.write_bytes(damaged(path.read_bytes(), draw))
    else:
        value = json.loads(path.read_text())
        key = draw.choice(sorted(value))
        if draw.random() < 0.15:
            del value[key]
        else:
            value[key] = draw.choice(STRANGE)
        path.write_text(json.dumps(value))
    return spoiled


def spoiled_weights(data: bytes, draw: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    head, rest = data[8 : 8 + length], data[8 + length :]
    match draw.randrange(4):
        case 0:
            return damaged(data, draw)
        case 1:
            return struct.pack("<Q", draw.choice([0, length + 1, 2**40, 2**63])) + head + rest
        case 2:
            return struct.pack("<Q", length) + damaged(head, draw).ljust(length)[:length] + rest
        case _:
            told = json.loads(head)
            entry = told[draw.choice(sorted(told))]
            key = draw.choice(sorted(entry))
            entry[key] = draw.choice((*STRANGE, [2**40, 4], [0, 4], "F8_E4M3", "I64", "BF16"))
            text = json.dumps(told).encode()
            return struct.pack("<Q", len(text)) + text + rest


# --- what comes of it -----------------------------------------------------------------------
def run(folder: Path, *flags: object) -> tuple[int, str, str, float]:
    """Return code, stdout, stderr, peak MiB above a warm process."""
    command = ("submit-job", "--local", "--json", "--output", "out", "--max-tokens", "2", *flags)
    with forks.open_memory() as out, forks.open_memory() as err:
        process = forks.fork(
            *map(str, command),
            environment={
                "SPECBATCH_WORKSPACE": str(folder / "data"),
                "SPECBATCH_KV_CACHE_MIB": "64",
            },
            cwd=folder,
            stdout=out,
            stderr=err,
        )
        memory = PeakMemory(process.pid)
        try:
            code = process.wait(GIVEN_UP_SEC)
        finally:
            process.kill()
            peak = memory.end() - memory.first_mib
        texts = []
        for stream in (out, err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
    return code, texts[0], texts[1], peak


def check(case: str, code: int, out: str, err: str, peak_mib: float) -> None:
    told = f"{case}: {code}\n{out}\n{err}"
    assert "Traceback" not in out + err, told
    assert code >= 0, f"a crash: {told}"
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    if errors:
        assert len(errors) == 1, told
    else:
        result = json.loads(out.strip().splitlines()[-1])
        assert result.get("dry_run") or "rows_failed" in result, told
    assert peak_mib < MOST_MIB, f"{peak_mib:.0f} MiB: {told}"


def cases(form: str, request: pytest.FixtureRequest) -> Iterator[int]:
    counts = ALL if request.config.getoption("--long") else FEW
    yield from range(counts[form])


INPUTS: dict[str, Callable[[Path, random.Random], Path]] = {"parquet": parquet, "jsonl": jsonl}


@pytest.mark.parametrize("form", INPUTS)
def test_damaged_inputs(
    tmp_path: Path, tiny_pair: TinyPair, request: pytest.FixtureRequest, form: str
) -> None:
    for number in cases(form, request):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        path = INPUTS[form](folder, random.Random(f"{form} {number}"))
        begun = time.monotonic()
        found = run(folder, "--dry-run", "--input", path, "--verifier", tiny_pair.verifier)
        check(f"{form} {number}", *found)
        assert time.monotonic() - begun < GIVEN_UP_SEC
        shutil.rmtree(folder)


def test_damaged_models(
    tmp_path: Path, tiny_pair: TinyPair, request: pytest.FixtureRequest
) -> None:
    for number in cases("model", request):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        lines = [{"id": "a", "prompt": "hello"}, {"id": "b", "prompt": "there"}]
        (folder / "in.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
        spoiled = model(tiny_pair.verifier, folder, random.Random(f"model {number}"))
        found = run(folder, "--input", "in.jsonl", "--verifier", spoiled)
        check(f"model {number}", *found)
        shutil.rmtree(folder)
