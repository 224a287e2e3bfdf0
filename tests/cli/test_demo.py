"""`specbatch demo`: its folder, its two runs, and what it does when outputs differ."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer

from specbatch.jobs.cli.demo import (
    Same,
    check_same,
    demo_settings,
    demo_spec,
    gain,
    prepare,
    unchanged_outputs,
    with_some_changed,
)
from specbatch.jobs.running import here as running
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.outputs.outputs import Manifest
from specbatch.pipeline.runtime.client import Client
from specbatch.schemas.errors import OutputError, UsageError
from specbatch.schemas.exports import WrittenFile
from specbatch.schemas.job_figures import Savings
from specbatch.schemas.records import JobRow
from specbatch.schemas.spec import JobSpec
from support import demo as shipped


def test_the_demo_removes_only_what_it_made(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").touch()
    with pytest.raises(UsageError, match="left alone"):
        prepare(mine, keep=False)
    assert (mine / "thesis.txt").is_file()
    folder = tmp_path / "demo-run"
    prepare(folder, keep=False)
    (folder / "old").touch()
    prepare(folder, keep=True)
    assert (folder / "old").is_file()
    prepare(folder, keep=False)
    assert not (folder / "old").exists()


def test_a_folder_that_the_demo_cannot_make_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="name another --folder"):
        prepare(tmp_path / "file" / "demo", keep=False)


def test_a_device_that_costs_nothing_leaves_the_speed_up() -> None:
    """Its interval is not known without dollars."""
    priced, free = Savings(2.0, 1.0, 3.0, 10.0, 1.2, 5), Savings(0.0, 0.0, 0.0, 0.0, 1.3, 4)
    assert gain(priced)[:2] == ["1.20×", "1.10× to 1.30×"]
    assert gain(free)[:2] == ["1.30×", "-"]


def test_the_demo_keeps_to_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_BROKER_URL", "redis://elsewhere/0")
    settings, spec = demo_settings(tmp_path), demo_spec(tmp_path, 64, 1)
    assert settings.broker_url == "memory://"
    assert settings.store_url == f"sqlite:///{tmp_path / 'specbatch.db'}"
    assert Path(spec.output.uri).parent == Path(spec.input.uri).parent == tmp_path


def test_a_quarter_of_the_prompts_changes_a_little_and_always_the_same(tmp_path: Path) -> None:
    before = pq.read_table(shipped.PROMPTS)
    (tmp_path / "again").mkdir()
    specs = [demo_spec(tmp_path, 4, number) for number in (1, 2)]
    specs.append(demo_spec(tmp_path / "again", 4, 2))
    first, second, again = (pq.read_table(spec.input.uri) for spec in specs)
    assert first.equals(before)
    assert second.equals(again)
    assert second.drop_columns(["prompt"]).equals(before.drop_columns(["prompt"]))
    pairs = list(zip(before["prompt"].to_pylist(), second["prompt"].to_pylist(), strict=True))
    changed = [(old, new) for old, new in pairs if old != new]
    assert len(changed) == 64
    assert {len(new) - len(old) for old, new in changed} == {1}


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[JobSpec]:
    """Of both runs, whose outputs tests write themselves."""
    folder = tmp_path_factory.mktemp("demo")
    return [demo_spec(folder, 4, number) for number in (1, 2)]


def write_outputs(spec: JobSpec, **changes: Any) -> None:
    """One output for each prompt; `changes` to that of row 0."""
    rows = [
        {"id": row_id, "text": "x", "token_ids": [1], "logprobs": [-0.5], "finish_reason": "stop"}
        for row_id in pq.read_table(spec.input.uri)["id"].to_pylist()
    ]
    rows[0] |= changes
    folder = Path(spec.output.uri)
    part = folder / "data" / "part-00000.parquet"
    part.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), part)
    data = part.read_bytes()
    listed = WrittenFile("data/part-00000.parquet", len(rows), len(data), sha256(data).hexdigest())
    manifest = Manifest("job", len(rows), len(rows), 0, (listed,))
    (folder / "manifest.json").write_bytes(manifest.to_json())


def test_outputs_that_are_the_same_are_counted(specs: list[JobSpec]) -> None:
    for spec in specs:
        write_outputs(spec)
    assert unchanged_outputs(specs) == Same(192, ())


@pytest.mark.parametrize(
    "change", [{"text": "y"}, {"token_ids": [2]}, {"logprobs": [-0.25]}, {"id": "another"}]
)
def test_an_output_that_differs_is_found(specs: list[JobSpec], change: dict[str, Any]) -> None:
    prompts = pq.read_table(specs[0].input.uri)["prompt"].to_pylist()
    assert with_some_changed(prompts)[0] == prompts[0], "row 0 is one that does not change"
    write_outputs(specs[0])
    write_outputs(specs[1], **change)
    found = unchanged_outputs(specs)
    assert found.differing == (pq.read_table(specs[0].input.uri)["id"][0].as_py(),)


@pytest.mark.parametrize("same", [Same(192, ("a", "b")), Same(0, ())])
def test_the_demo_fails_where_outputs_differ_or_none_was_compared(
    same: Same, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as left:
        check_same(same)
    assert left.value.exit_code == 1
    assert ", ".join(same.differing) in capsys.readouterr().err


@pytest.mark.pipeline  # runs the demo
def test_an_interrupted_demo_resumes_and_shows_everything_it_promises(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, options = folder / "demo-run", ("--max-tokens", 8)
    follow, followed = running._follow, []

    def interrupted(here: Client, app: Any, worker: Any, job: JobRow, *rest: Any) -> None:
        followed.append(job.job_id)
        if len(followed) == 2:
            raise KeyboardInterrupt
        follow(here, app, worker, job, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(running, "_follow", interrupted)
        stopped = cli("demo", *options)
    assert stopped.code == 130
    assert "To resume it: `specbatch demo --keep`" in stopped.err
    before = times_of(place)

    other = cli("demo", "--max-tokens", 9, "--keep")
    assert other.code == 2
    assert "leave out --keep" in other.complaint

    done = cli("demo", *options, "--keep")
    assert done.code == 0, done.err
    assert "256/256 prompts" in done.err
    assert done.out.count("╭") == 5
    assert "drafted and accepted" in done.out
    assert re.search(r"drafts come from *│ *draft model, n-grams *│ *outputs of run 1 ", done.out)
    for row in ("measured speed-up over depth 0", "its 95 % interval", "saved by drafts"):
        assert row in done.out
    assert "the ledger balances" in done.out
    assert "192 of 192 unchanged prompts have the same output in both runs" in done.out
    shown = done.out.replace("\n", "")
    for number in (1, 2):
        assert f"output:   {place / f'output-{number}' / 'data'}" in shown
    assert str(place / "specbatch.db") in shown
    after = times_of(place)
    assert set(after) == set(followed)
    assert after[followed[0]] == before[followed[0]], "run 1 is not done again"


def times_of(place: Path) -> dict[str, Any]:
    """What each job of the demo has had of the device."""
    store = make_store(demo_settings(place))
    times = {job.job_id: store.job_times(job.job_id) for job in store.list_jobs(9)}
    store.close()
    return times
