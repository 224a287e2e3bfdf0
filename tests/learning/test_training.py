"""A training learns, tells what it did, and gives the same bits however often it is killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import pytest
import torch
from learning.trained import STEPS, data, training
from safetensors.torch import load_file

from specbatch.pipeline.engines.models.model_folder import check_pair, inspect_model
from specbatch.pipeline.learning import checkpoints
from specbatch.pipeline.learning.training import Watcher, verdict_of
from specbatch.schemas.errors import InUseError, ModelError, OutputError, UsageError
from specbatch.schemas.training import RECORD
from support import forks
from support.models import TinyPair, tiny_llama
from support.tree import ROOT

pytestmark = pytest.mark.pipeline  # runs models

WEIGHTS = "model.safetensors"


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_learns_what_the_verifier_writes(tmp_path: Path, tiny_pair: TinyPair) -> None:
    record = training(str(tiny_pair.draft), tmp_path / "out", parameters={"steps": 60}).run()
    share = record["held_out"]["acceptance"]
    assert record["better"]
    assert share["parent"]["value"] < 0.3 < 0.8 < share["candidate"]["value"]
    lengths = [one["length"] for one in record["evaluations"]]
    best = [one for one in record["evaluations"] if one["step"] == record["best_step"]]
    assert best[0]["length"] == max(lengths)


def test_the_folder_is_a_proposer_as_its_parent_was(tmp_path: Path, tiny_pair: TinyPair) -> None:
    out = tmp_path / "out"
    record = training(str(tiny_pair.draft), out).run()
    assert files_of(out) == files_of(tiny_pair.draft) | {RECORD}
    for name in files_of(tiny_pair.draft) - {WEIGHTS}:
        assert (out / name).read_bytes() == (tiny_pair.draft / name).read_bytes()
    parent, model = inspect_model(str(tiny_pair.draft)), inspect_model(str(out))
    check_pair(inspect_model(str(tiny_pair.verifier)), model)
    assert record["model"] == model.fingerprint.as_json()
    assert record["parent"]["digest"] == parent.fingerprint.digest != model.fingerprint.digest
    mine, theirs = load_file(out / WEIGHTS), load_file(tiny_pair.draft / WEIGHTS)
    assert {n: (w.shape, w.dtype) for n, w in mine.items()} == {
        n: (w.shape, w.dtype) for n, w in theirs.items()
    }
    assert orjson.loads((out / RECORD).read_bytes()) == record


def test_a_half_precision_parent_is_judged_and_written_as_it_is_served(tmp_path: Path) -> None:
    parent = tiny_llama(tmp_path / "parent", vocab_size=300, layers=1, dtype=torch.bfloat16)
    record = training(str(parent), tmp_path / "out").run()
    assert {w.dtype for w in load_file(tmp_path / "out" / WEIGHTS).values()} == {torch.bfloat16}
    again = training(str(tmp_path / "out"), tmp_path / "next", parameters={"steps": 1}).run()
    length = record["held_out"]["accepted_length"]["candidate"]["value"]
    assert again["held_out"]["accepted_length"]["parent"]["value"] == length


# --- killed -------------------------------------------------------------------------------------


def run_dying(parent: Path, out: Path, site: str) -> int:
    code = "from learning.trained import main; main()"
    command = ("-c", code, str(parent), str(out), site)
    done = forks.run(*command, environment={}, cwd=ROOT / "tests", timeout=240)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


# Between checkpoints; before one is on the disk; before it has its name; when the model is there
# in part; when all but its record is.
SITES = ("step:4", "fsync:4", "replace:2", "replace:7", "fsync:6")


def test_killed_and_resumed_it_gives_the_same_bits(tmp_path: Path, tiny_pair: TinyPair) -> None:
    assert run_dying(tiny_pair.draft, tmp_path / "whole", "none") == 0
    out = tmp_path / "killed"
    killed = [run_dying(tiny_pair.draft, out, site) for site in SITES]
    assert killed.count(-signal.SIGKILL) >= 4, killed
    assert run_dying(tiny_pair.draft, out, "none") == 0
    assert files_of(out) == files_of(tmp_path / "whole")
    for name in files_of(out):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_stopped_at_each_step_it_gives_the_same_bits(tmp_path: Path, tiny_pair: TinyPair) -> None:
    whole = training(str(tiny_pair.draft), tmp_path / "whole").run()
    one = training(
        str(tiny_pair.draft), tmp_path / "stopped", watcher=Watcher(is_stopped=lambda: True)
    )
    for step in range(1, STEPS + 1):
        with pytest.raises(KeyboardInterrupt):
            one.run()
        assert checkpoints.load(one.out).progress.step == step
    assert one.run() == whole
    weights = [(tmp_path / name / WEIGHTS).read_bytes() for name in ("whole", "stopped")]
    assert weights[0] == weights[1]


def test_killed_behind_its_model_it_resumes_with_chat_templates_in_a_folder(
    tmp_path: Path, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = shutil.copytree(tiny_pair.draft, tmp_path / "parent")
    (parent / "additional_chat_templates").mkdir()
    template = Path("additional_chat_templates", "tool_use.jinja")
    (parent / template).write_text("{{ messages }}")
    one = training(str(parent), tmp_path / "out")
    real = checkpoints.replace_file

    def interrupted(path: Path, write: Any) -> None:
        if path.name == RECORD:
            raise KeyboardInterrupt
        real(path, write)

    with monkeypatch.context() as killed:
        killed.setattr(checkpoints, "replace_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.run()
    assert (one.out / template).is_file()
    record = one.run()
    assert files_of(one.out) == files_of(parent) | {RECORD}
    assert (one.out / template).read_text() == "{{ messages }}"
    assert record["model"] == inspect_model(str(one.out)).fingerprint.as_json()


# --- one folder, one training -------------------------------------------------------------------


def test_a_training_that_has_ended_is_not_done_again(tmp_path: Path, tiny_pair: TinyPair) -> None:
    first = training(str(tiny_pair.draft), tmp_path / "out")
    record = first.run()
    said: list[str] = []
    assert replace(first, watcher=Watcher(said.append)).run() == record
    assert said == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"parameters": {"learning_rate": 1e-3}}, "learning_rate"),
        ({"parameters": {"seed": 1, "steps": 5}}, "seed, steps"),
        ({"data": data(train=90)}, "data"),
    ],
)
@pytest.mark.parametrize("ended", [True, False])
def test_another_training_in_the_folder_is_refused(
    tmp_path: Path, tiny_pair: TinyPair, change: dict[str, Any], named: str, ended: bool
) -> None:
    one = training(str(tiny_pair.draft), tmp_path, watcher=Watcher(is_stopped=lambda: not ended))
    if ended:
        one.run()
    else:
        with pytest.raises(KeyboardInterrupt):
            one.run()
    with pytest.raises(OutputError, match=f"holds a training that differs in {named}: ask for"):
        training(str(tiny_pair.draft), tmp_path, **change).run()


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, tiny_pair: TinyPair) -> None:
    (tmp_path / "thesis.tex").write_text("by hand")
    with pytest.raises(OutputError, match="holds something that is no training"):
        training(str(tiny_pair.draft), tmp_path).run()
    assert files_of(tmp_path) == {"thesis.tex"}


def test_a_damaged_checkpoint_is_told(tmp_path: Path, tiny_pair: TinyPair) -> None:
    (tmp_path / checkpoints.FILE).write_bytes(b"PK\x03\x04 what was a file")
    with pytest.raises(OutputError, match=r"cannot be read .*: delete it to begin again"):
        training(str(tiny_pair.draft), tmp_path).run()


def test_too_few_prompts_are_refused(tmp_path: Path, tiny_pair: TinyPair) -> None:
    with pytest.raises(UsageError, match="90 prompts to learn from and 2 held out are too few"):
        training(str(tiny_pair.draft), tmp_path, data=data(90, 1)).run()


def test_outputs_of_one_token_are_refused_before_anything_is_trained(
    tmp_path: Path, tiny_pair: TinyPair
) -> None:
    whole = data()
    short = {
        part: tuple(
            replace(one, ids=one.ids[: one.prompt_tokens + 1]) for one in getattr(whole, part)
        )
        for part in ("train", "choosing", "judging")
    }
    one = training(str(tiny_pair.draft), tmp_path / "out", data=replace(whole, **short))
    with pytest.raises(UsageError, match="outputs have one token each, which no draft can save"):
        one.run()
    assert not (tmp_path / "out").exists()


def test_quantised_weights_are_refused(tmp_path: Path, tiny_pair: TinyPair) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    for path in tiny_pair.draft.iterdir():
        (parent / path.name).write_bytes(path.read_bytes())
    config = orjson.loads((parent / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (parent / "config.json").write_bytes(orjson.dumps(config))
    with pytest.raises(ModelError, match="has quantised weights, which cannot be trained"):
        training(str(parent), tmp_path / "out").run()


def test_a_full_disk_leaves_no_part_of_a_checkpoint_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_fields: object, file: BinaryIO) -> None:
        file.write(b"PK")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    one = checkpoints.Checkpoint({}, checkpoints.Progress(), {}, {}, {})
    with pytest.raises(OutputError, match=r"no checkpoint can be written to .*: the disk may be"):
        checkpoints.save(tmp_path, one)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("better", "high", "verdict"),
    [(True, 0.3, "better"), (False, 0.001, "not surely better"), (False, -0.002, "worse")],
)
def test_an_interval_below_zero_is_worse(better: bool, high: float, verdict: str) -> None:
    held_out = {"accepted_length": {"difference": {"high": high}}}
    assert verdict_of({"better": better, "held_out": held_out}) == verdict


@pytest.mark.parametrize("record", [b"{}", b"[]", b'{"about": {}}'])
def test_a_record_that_is_none_is_told(tmp_path: Path, record: bytes) -> None:
    (tmp_path / RECORD).write_bytes(record)
    with pytest.raises(OutputError, match="is no record of a training: name another folder"):
        checkpoints.about_of(tmp_path)


def test_a_folder_is_of_one_training_until_that_dies(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from specbatch.pipeline.learning.checkpoints import locked\n"
        "with locked(Path(sys.argv[1]), 'x'): print('has it', flush=True); time.sleep(60)"
    )
    lock = tmp_path / "new" / checkpoints.LOCK
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "has it\n"
        with (
            pytest.raises(InUseError, match=r"another training writes to .*new: wait for it, or"),
            checkpoints.locked(lock, "another folder"),
        ):
            pass
        other.kill()
    with checkpoints.locked(lock, "another folder"):
        assert checkpoints.about_of(lock.parent) is None, "a lock is no training"
