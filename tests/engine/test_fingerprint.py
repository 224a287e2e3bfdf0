"""What a model folder is known by: every part of it, as it was when it was loaded."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbatch.pipeline.engines.exact.host import EngineHost
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.models import fingerprint
from specbatch.pipeline.engines.models.fingerprint import snapshot_of, unchanged
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.runtime.tokenizers import Tokenizers
from specbatch.schemas.errors import ModelChangedError, ModelError
from specbatch.schemas.fingerprint import NONE, PARTS, Fingerprint, compared, differing
from specbatch.schemas.spec import EngineSpec
from support.models import TinyPair


@pytest.fixture
def folder(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A model of its own for each test."""
    return Path(shutil.copytree(tiny_pair.verifier, tmp_path / "model"))


def made_old(folder: Path) -> None:
    """As if its files had lain there for an hour: younger ones are digested at each look."""
    hour_ago = time.time() - 3600
    for path in folder.iterdir():
        os.utime(path, (hour_ago, hour_ago))


def parts(folder: Path) -> dict[str, str]:
    return dict(snapshot_of("m", folder).fingerprint.parts)


def rewrite(path: Path, **values: Any) -> None:
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-3, 2)
        byte = file.read(1)
        file.seek(-3, 2)
        file.write(bytes([byte[0] ^ 1]))


CHANGES: list[tuple[str, Callable[[Path], None]]] = [
    ("weights", lambda f: flip(f / "model.safetensors")),
    ("config", lambda f: rewrite(f / "config.json", rms_norm_eps=1e-4)),
    ("generation config", lambda f: rewrite(f / "generation_config.json", eos_token_id=[9])),
    ("tokenizer", lambda f: rewrite(f / "tokenizer.json", version="2.0")),
    ("tokenizer", lambda f: rewrite(f / "tokenizer_config.json", add_bos_token=True)),
    ("tokenizer", lambda f: rewrite(f / "special_tokens_map.json", eos_token="x")),
    ("chat template", lambda f: rewrite(f / "tokenizer_config.json", chat_template="{{ 1 }}")),
    ("chat template", lambda f: (f / "chat_template.jinja").write_text("{{ 2 }}") and None),
]


@pytest.mark.parametrize(("part", "change"), CHANGES)
def test_a_change_is_seen_in_the_part_that_it_is_of(
    folder: Path, part: str, change: Callable[[Path], None]
) -> None:
    before = snapshot_of("m", folder).fingerprint
    change(folder)
    after = snapshot_of("m", folder).fingerprint
    assert differing(before.parts, after.parts) == [part]
    assert before.digest != after.digest


def test_where_it_lies_and_what_else_lies_there_does_not_count(
    folder: Path, tmp_path: Path
) -> None:
    before = snapshot_of("m", folder).fingerprint
    moved = shutil.copytree(folder, tmp_path / "moved")
    (moved / "README.md").write_text("read me")
    assert snapshot_of("n", moved).fingerprint == before


def test_a_part_that_is_not_there_is_none(folder: Path) -> None:
    assert parts(folder)["weights"] != NONE
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert parts(folder)["generation config"] == NONE


def test_files_are_read_once_while_they_stay_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    digest = fingerprint.hashlib.file_digest

    def noted(file: Any, name: str) -> Any:
        read.append(Path(file.name).name)
        return digest(file, name)

    monkeypatch.setattr(fingerprint, "_YOUNG_NS", -1)  # as if all of them were old
    monkeypatch.setattr(fingerprint.hashlib, "file_digest", noted)
    first = snapshot_of("m", folder)
    assert "model.safetensors" in read
    read.clear()
    assert snapshot_of("m", folder) is first
    assert read == []
    rewrite(folder / "config.json", rms_norm_eps=1e-4)
    assert snapshot_of("m", folder) != first
    assert read == ["config.json"]


def test_a_file_of_the_same_size_and_time_is_another_by_its_inode(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_YOUNG_NS", -1)
    made_old(folder)
    before, weights = snapshot_of("m", folder), folder / "model.safetensors"
    stat = weights.stat()
    shutil.copy2(weights, other := folder / "other")
    flip(other)
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(weights)
    assert weights.stat().st_size == stat.st_size
    assert snapshot_of("m", folder).fingerprint != before.fingerprint


def test_a_file_that_was_just_written_is_read_at_each_look(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot_of("m", folder)
    stats = dict(before.stats)

    def coarse(path: Path) -> fingerprint.Stat:
        return stats[path.name]

    monkeypatch.setattr(fingerprint, "stat_of", coarse)  # a change that times do not show
    flip(folder / "model.safetensors")
    assert snapshot_of("m", folder).fingerprint != before.fingerprint


def test_what_changes_while_it_is_loaded_is_loaded_again(folder: Path) -> None:
    changes = [lambda: flip(folder / "model.safetensors")]

    def load() -> bytes:
        read = (folder / "model.safetensors").read_bytes()
        if changes:
            changes.pop()()
        return read

    snapshot, loaded = unchanged("m", folder, load)
    assert loaded == (folder / "model.safetensors").read_bytes()
    assert snapshot == snapshot_of("m", folder)


def test_what_never_stays_as_it_is_cannot_be_loaded(folder: Path) -> None:
    with pytest.raises(ModelError, match="keep changing while they are loaded"):
        unchanged("m", folder, lambda: flip(folder / "model.safetensors"))


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_loaded_tensors_are_not_the_file_s(folder: Path, native: bool) -> None:
    loaded = load_model(inspect_model(str(folder)), "float32", native=native)
    if loaded.native is None:
        module: Any = loaded.module
        tensors = list(module.parameters())
    else:
        weights = loaded.native[1]
        tensors = [weights.embedding, weights.norm, weights.layers[0].q, weights.layers[-1].down]
    before = [tensor.clone() for tensor in tensors]
    (folder / "model.safetensors").write_bytes(b"")
    assert all((old == new).all() for old, new in zip(before, tensors, strict=True))


def test_a_host_tells_of_what_lies_there_until_it_has_loaded_it(folder: Path) -> None:
    host = EngineHost(inspect_model(str(folder)), None, 4, 64, 1 << 20)
    first = host.serves().fingerprint
    flip(folder / "model.safetensors")
    second = host.serves().fingerprint
    assert first != second
    host.make_engine(EngineSpec(dtype="float32"))
    flip(folder / "model.safetensors")
    assert host.serves().fingerprint == second
    (folder / "model.safetensors").unlink()
    assert host.serves().fingerprint == second


def test_a_host_has_one_verifier(folder: Path) -> None:
    host = EngineHost(inspect_model(str(folder)), None, 4, 64, 1 << 20)
    host.make_engine(EngineSpec(dtype="float32"))
    flip(folder / "model.safetensors")
    with pytest.raises(ModelChangedError, match="restart the worker"):
        host.make_engine(EngineSpec(dtype="bfloat16"))


def test_a_host_whose_files_cannot_be_read_takes_no_pinned_job(folder: Path) -> None:
    host = EngineHost(inspect_model(str(folder)), None, 4, 64, 1 << 20)
    (folder / "config.json").unlink()
    told = host.serves()
    assert told.fingerprint is None
    assert told.has_model(None)
    assert not told.has_model("a" * 32)


def test_a_tokenizer_is_kept_by_what_it_says(folder: Path) -> None:
    loads: list[str] = []

    def load(path: str) -> TextTokenizer:
        loads.append(path)
        return TextTokenizer.load(path)

    codecs = Tokenizers(load, inspect_model)
    first = codecs.of_folder(inspect_model(str(folder)))
    flip(folder / "model.safetensors")
    assert codecs.of_folder(inspect_model(str(folder))) is first, "other weights, the same text"
    rewrite(folder / "tokenizer_config.json", chat_template="{{ 1 }}")
    assert codecs.of_folder(inspect_model(str(folder))) is not first
    assert len(loads) == 2


def test_differences_are_named_where_they_are_known() -> None:
    one = Fingerprint.of(dict.fromkeys(PARTS, "a"))
    other = Fingerprint.of(dict.fromkeys(PARTS, "a") | {"weights": "b", "config": "b"})
    shown = f"(fingerprint {other.digest[:12]}, the job's is {one.digest[:12]})"
    assert compared(one.digest, one.parts, other) == f"other weights and config {shown}"
    assert compared(one.digest, {}, other) == f"other files {shown}"
