"""Files that are damaged at random: a completion, a quarantined row or one sentence comes of each.

Every case is drawn from its number, so a failing one is repeated by it. Inputs are planned
(`--dry-run` reads and checks all rows); a model is loaded and run, where it passes the first look.
Its folder's config, weights, generation config, tokenizer or chat template is damaged.

20 cases run by default; the tier `long` has the rest of 2,000, most of an hour on two busy cores.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import forks
from support.models import TinyPair
from support.peak_memory import PeakMemory

FEW = {"parquet": 7, "jsonl": 4, "model": 9}
ALL = {"parquet": 900, "jsonl": 300, "model": 800}
MOST_SEC = 30.0  # of processor time
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
NAMES = (
    *["config.json"] * 4, *["model.safetensors"] * 4, *["generation_config.json"] * 2,
    *["tokenizer.json"] * 3, "tokenizer_config.json", *["chat_template.jinja"] * 3,
)  # fmt: skip
TEMPLATE = """{% for m in messages %}<|{{ m['role'] }}|>{{ m.content | trim }}{{ eos_token }}
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""
BAD_TEMPLATES = (
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ messages }}{% endfor %}" * 20,
    "{{ 'x' * 10**9 }}", "{{ [0] * 10**9 }}", "{{ 9 ** 9 ** 9 }}", "{{ '%999999999d' % 1 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ raise_exception('no ' * 10**7) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include '/etc/passwd' %}",
    "{{ messages[99].content }}", "{{ nothing.at.all }}", "{{ messages | tojson(indent=10**8) }}",
    "{% set x = namespace(a='x') %}{% for i in range(60) %}{% set x.a = x.a ~ x.a %}{% endfor %}",
    "{{ lipsum(n=10**6) }}", "{{ 1 / 0 }}", "{% if %}", "\udcff", "{{ '\x00' }}", "(" * 5000,
    "{{" + "(" * 5000, "{{ messages }}", "", " ", "{% generation %}x{% endgeneration %}",
    "{{ strftime_now('%' * 10**6) }}",
)  # fmt: skip


def model(good: Path, folder: Path, draw: random.Random) -> Path:
    spoiled = shutil.copytree(good, folder / "model")
    name = draw.choice([n for n in NAMES if n == "chat_template.jinja" or (spoiled / n).exists()])
    path = spoiled / name
    if name == "model.safetensors":
        path.write_bytes(spoiled_weights(path.read_bytes(), draw))
    elif name == "chat_template.jinja":
        path.write_bytes(spoiled_template(draw))
    elif draw.random() < 0.25:
        path.write_bytes(damaged(path.read_bytes(), draw))
    else:
        value = json.loads(path.read_text())
        spoil(value, draw)
        path.write_text(json.dumps(value))
    return spoiled


def spoil(value: Any, draw: random.Random) -> None:
    """Something in it, at whatever depth, is taken away or becomes strange."""
    key = draw.choice(range(len(value)) if isinstance(value, list) else sorted(value))
    inner = value[key]
    if isinstance(inner, dict | list) and inner and draw.random() < 0.7:
        spoil(inner, draw)
    elif draw.random() < 0.15:
        del value[key]
    else:
        value[key] = draw.choice(STRANGE)


def spoiled_template(draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        return draw.choice(BAD_TEMPLATES).encode(errors="surrogateescape")
    return damaged(TEMPLATE.encode(), draw)


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
@dataclass(frozen=True)
class Came:
    """What came of a case."""

    code: int
    out: str
    err: str
    peak_mib: float  # above a warm process
    computed_sec: float


def run(folder: Path, *flags: object) -> Came:
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
    return Came(code, texts[0], texts[1], peak, memory.computed_sec)


def check(case: str, came: Came) -> None:
    told = f"{case}: {came}"
    assert "Traceback" not in came.out + came.err, told
    assert came.code >= 0, f"a crash: {told}"
    errors = [line for line in came.err.splitlines() if line.startswith("error: ")]
    if errors:
        assert len(errors) == 1, told
    else:
        result = json.loads(came.out.strip().splitlines()[-1])
        assert result.get("dry_run") or "rows_failed" in result, told
    assert came.peak_mib < MOST_MIB, told
    assert came.computed_sec < MOST_SEC, told


def of_input(number: int, form: str, folder: Path, pair: TinyPair) -> Came:
    path = INPUTS[form](folder, random.Random(f"{form} {number}"))
    return run(folder, "--dry-run", "--input", path, "--verifier", pair.verifier)


def of_model(number: int, folder: Path, pair: TinyPair) -> Came:
    lines = [{"id": "a", "prompt": "hello"}, {"id": "b", "prompt": CHAT[:1]}]
    (folder / "in.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    spoiled = model(pair.verifier, folder, random.Random(f"model {number}"))
    return run(folder, "--input", "in.jsonl", "--verifier", spoiled)


def cases(form: str) -> list[Any]:
    """The few, and all others in hundreds."""
    few, every = FEW[form], ALL[form]
    others = [range(first, min(first + 100, every)) for first in range(few, every, 100)]
    return [range(few), *(pytest.param(some, marks=pytest.mark.long) for some in others)]


INPUTS: dict[str, Callable[[Path, random.Random], Path]] = {"parquet": parquet, "jsonl": jsonl}


def check_inputs(form: str, numbers: range, tmp_path: Path, pair: TinyPair) -> None:
    for number in numbers:
        folder = tmp_path / f"{number}"
        folder.mkdir()
        check(f"{form} {number}", of_input(number, form, folder, pair))
        shutil.rmtree(folder)


@pytest.mark.parametrize("numbers", cases("parquet"), ids=str)
def test_damaged_tables(tmp_path: Path, tiny_pair: TinyPair, numbers: range) -> None:
    check_inputs("parquet", numbers, tmp_path, tiny_pair)


@pytest.mark.parametrize("numbers", cases("jsonl"), ids=str)
def test_damaged_lines(tmp_path: Path, tiny_pair: TinyPair, numbers: range) -> None:
    check_inputs("jsonl", numbers, tmp_path, tiny_pair)


@pytest.mark.parametrize("numbers", cases("model"), ids=str)
def test_damaged_models(tmp_path: Path, tiny_pair: TinyPair, numbers: range) -> None:
    for number in numbers:
        folder = tmp_path / f"{number}"
        folder.mkdir()
        check(f"model {number}", of_model(number, folder, tiny_pair))
        shutil.rmtree(folder)
