"""`specbatch.run` and `arun` with real models: what comes back, and every way a job can end."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from api.conftest import LIBRARIES, columns_of, frame_of, settings_of

import specbatch
from specbatch.jobs.running import here
from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.outputs.outputs import read_output
from specbatch.schemas.records import JobRow, JobState
from support import demo, forks
from support.models import TinyPair
from support.workers import WAIT_SEC, wait_until

pytestmark = pytest.mark.pipeline  # runs models

PROMPTS = [f"def f{i}(x):" for i in range(12)]
Options = dict[str, Any]


@pytest.fixture
def job(tiny_pair: TinyPair) -> Options:
    """Options of a small job on the tiny pair."""
    return {
        "model": tiny_pair.verifier,
        "draft_model": tiny_pair.draft,
        "max_tokens": 6,
        "progress": False,
    }


def jobs_in(folder: Path) -> list[JobRow]:
    with closing(make_store(settings_of(folder))) as store:
        return store.list_jobs()


SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "ok": {"type": "boolean"}},
    "required": ["city", "ok"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("max_tokens", "failed"), [(80, 1), (6, 3)])
def test_outputs_have_the_form_that_was_asked_for_or_say_why_not(
    folder: Path, max_tokens: int, failed: int
) -> None:
    """Two rows have the job's form, one its own, one none, and one a form that is none."""
    own = [None, None, {"type": "choice", "choice": ["rain", "sun"]}, {"type": "text"}]
    rows = [
        {"id": str(i), "prompt": f"The weather {i}", "own": json.dumps({"response_format": form})}
        for i, form in enumerate([*own, {"type": "regex", "regex": "[0-"}])
    ]
    assert folder.is_dir()
    with pytest.warns(specbatch.RowsFailedWarning, match=f"{failed} of 5 rows failed"):
        done = specbatch.run(
            pl.DataFrame(rows),
            model=demo.VERIFIER,
            draft_model=demo.DRAFT,
            sampling_column="own",
            response_format={"type": "json_schema", "schema": SCHEMA},
            max_tokens=max_tokens,
            progress=False,
        )
    by_id = {row["id"]: row for row in done.to_dicts()}
    for row in (by_id["0"], by_id["1"]):
        if max_tokens == 80:
            assert set(json.loads(row["text"])) == {"city", "ok"}
            assert (row["finish_reason"], row["error"]) == ("stop", None)
        else:
            assert row["text"].startswith('{"city": "')
            assert row["finish_reason"] == "length"
            assert row["error"].endswith("it was cut before its end")
    assert by_id["2"]["text"] in ("rain", "sun")
    assert by_id["3"]["error"] is None
    assert by_id["4"]["error"].startswith("bad_response_format: ")


def files_of_frames(folder: Path) -> list[str]:
    """Inputs that are left in the workspace."""
    return [path.name for path in (folder / "specbatch-data" / "frames").rglob("prompts.parquet")]


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", specbatch.RowsFailedWarning)
        yield


def test_a_frame_comes_back_with_the_texts_that_the_command_writes(
    folder: Path, job: Options
) -> None:
    columns = {"prompt": PROMPTS, "label": list(range(12, 0, -1))}
    pq.write_table(pa.table(columns), folder / "prompts.parquet")
    with no_warning():
        path = specbatch.run("prompts.parquet", output="out", **job)
    assert path == str(folder / "out" / "data")
    written = read_output(str(folder / "out")).to_pydict()
    for library in LIBRARIES:
        with no_warning():
            done = specbatch.run(frame_of(library, columns), **job)
        assert type(done) is type(frame_of(library, columns))
        found = columns_of(done)
        assert {name: found[name] for name in columns} == columns, library
        for name in ("text", "token_ids", "finish_reason", "prompt_tokens", "seed", "sample_index"):
            assert found[name] == written[name], (library, name)
        assert files_of_frames(folder) == [], library


def test_the_demo_pair_completes_a_frame_of_pandas_as_it_completes_its_file(folder: Path) -> None:
    pq.write_table(pq.read_table(demo.PROMPTS).slice(0, 48), folder / "prompts.parquet")
    prompts = pd.read_parquet("prompts.parquet").head(24).set_index("id")
    shuffled = prompts.sample(frac=1.0, random_state=3)
    options: Options = {"model": demo.VERIFIER, "draft_model": demo.DRAFT, "max_tokens": 16}
    done = specbatch.run(shuffled, **options)
    assert done.index.equals(shuffled.index)
    assert done["prompt"].equals(shuffled["prompt"])
    whole = specbatch.run("prompts.parquet", output="out", budget_usd=None, **options)
    texts = pd.read_parquet(whole).set_index("id")["text"]
    assert done["text"].to_dict() == texts.loc[shuffled.index].to_dict()
    assert done["error"].isna().all()


def test_samples_a_clash_of_names_and_an_index_of_equal_labels(folder: Path, job: Options) -> None:
    assert folder.is_dir()
    frame = pd.DataFrame({"text": PROMPTS[:3], "seed": [1, 2, 3]}, index=[7, 7, 9])
    done = specbatch.run(
        frame, prompt_column="text", seed_column="seed", n=2, temperature=0.8, **job
    )
    assert done.index.tolist() == [7, 7, 7, 7, 9, 9]
    assert done["text"].tolist() == [p for p in PROMPTS[:3] for _ in (0, 1)]
    assert done["sample_index"].tolist() == [0, 1] * 3
    assert done["completion_text"].notna().all()
    assert done["completion_text"].nunique() == 6
    assert done["seed"].tolist() == [1, 1, 2, 2, 3, 3]


def test_a_row_that_fails_is_there_with_its_reason(folder: Path, job: Options) -> None:
    assert folder.is_dir()
    frame = pl.DataFrame({"prompt": ["a", None, "", "b"]})
    with pytest.warns(specbatch.RowsFailedWarning, match="2 of 4 rows failed") as told:
        done = specbatch.run(frame, **job)
    assert [Path(one.filename).name for one in told] == ["test_run.py"]
    assert done["prompt"].to_list() == ["a", None, "", "b"]
    assert done["text"].is_null().to_list() == [False, True, True, False]
    codes = [error and error.partition(":")[0] for error in done["error"].to_list()]
    assert codes == [None, "null_prompt", "empty_prompt", None]


def test_a_job_without_one_good_row_is_an_error(folder: Path, job: Options) -> None:
    with pytest.raises(specbatch.JobFailedError, match="no row could be completed") as failed:
        specbatch.run(pd.DataFrame({"prompt": ["", ""]}), **job)
    assert failed.value.job_id == jobs_in(folder)[0].job_id


def test_with_an_output_a_frame_s_columns_go_there_too(folder: Path, job: Options) -> None:
    frame = pd.DataFrame({"prompt": PROMPTS, "label": range(12)})
    path = specbatch.run(frame, output="out", **job)
    written = pd.read_parquet(path)
    assert written["label"].tolist() == list(range(12))
    specbatch.run(frame, output="other", keep_columns=["prompt"], **job)
    assert "label" not in pd.read_parquet(folder / "other" / "data").columns
    with pytest.raises(specbatch.InputError, match="column `text` of the data cannot be kept"):
        specbatch.run(frame.assign(text="x"), output="third", **job)
    with pytest.raises(specbatch.OutputError, match="choose another location"):
        specbatch.run(frame.head(3), output="out", **job)


def test_the_same_call_makes_a_new_job_once_the_first_has_ended_with_its_threads(
    folder: Path, job: Options
) -> None:
    frame = pd.DataFrame({"prompt": PROMPTS})
    first = specbatch.run(frame, **job)
    before = {thread.name for thread in threading.enumerate()}
    second = specbatch.run(frame, **job)
    assert {thread.name for thread in threading.enumerate()} <= before
    assert first["text"].equals(second["text"])
    assert len(jobs_in(folder)) == 2
    keyed = {**job, "idempotency_key": "k"}
    for _ in (1, 2):
        assert specbatch.run(frame, **keyed)["text"].equals(first["text"])
    assert len(jobs_in(folder)) == 3
    with pytest.raises(specbatch.IdempotencyError):
        specbatch.run(frame.head(2), **keyed)


def test_a_timeout_stops_the_job_and_the_same_call_resumes_it(folder: Path, job: Options) -> None:
    frame = pd.DataFrame({"prompt": PROMPTS})
    with pytest.raises(specbatch.WaitTimeoutError, match="make the same call again"):
        specbatch.run(frame, timeout=0, **job)
    (file,) = (folder / "specbatch-data" / "frames").rglob("prompts.parquet")
    modes = [path.stat().st_mode & 0o077 for path in (file, file.parent)]
    assert modes == [0, 0], "they are for this user alone"
    (left,) = jobs_in(folder)
    assert specbatch.run(frame, **job)["text"].notna().all()
    (job_row,) = jobs_in(folder)
    assert (job_row.job_id, job_row.state) == (left.job_id, JobState.DONE)
    assert files_of_frames(folder) == []


SCRIPT = """
import sys
import pandas, specbatch
frame = pandas.DataFrame({"prompt": [f"def f{i}(x):" for i in range(24)]})
done = specbatch.run(
    frame, model=sys.argv[1], max_tokens=48, ignore_eos=True, group_size=4, progress=True,
    output=sys.argv[2] if len(sys.argv) > 2 else None,
)
if isinstance(done, str):
    done = pandas.read_parquet(done)
print(done["text"].notna().sum(), "texts of", len(done))
"""


@pytest.mark.parametrize(
    "output", [[], pytest.param(["to-here"], marks=pytest.mark.long)], ids=["frame", "folder"]
)
def test_ctrl_c_leaves_a_job_that_the_same_script_resumes(
    folder: Path, tiny_pair: TinyPair, output: list[str]
) -> None:
    command = ["-c", SCRIPT, str(tiny_pair.verifier), *output]
    env = {"OMP_NUM_THREADS": "1"}  # of both: it belongs to the numeric class
    with (
        (folder / "log").open("w+b") as log,
        closing(make_store(settings_of(folder))) as store,
    ):
        one_by_one = env | {"SPECBATCH_MAX_CONCURRENT_SEQUENCES": "1"}  # most is left to do
        running = forks.fork(*command, environment=one_by_one, cwd=folder, stdout=log, stderr=log)
        wait_until("a group is planned", lambda: planned(store) or running.poll() is not None)
        running.send_signal(signal.SIGINT)
        code = running.wait(WAIT_SEC)
    said = (folder / "log").read_text()
    assert code != 0, said
    assert "stopping after the current step" in said
    told = said.strip().splitlines()[-1]
    (left,) = jobs_in(folder)
    assert told.startswith("specbatch.schemas.errors.JobInterrupted: ")
    assert f"job {left.job_id} stopped" in told
    assert told.endswith("To resume it: make the same call again")
    again = forks.run(*command, environment=env, cwd=folder, timeout=WAIT_SEC)
    assert again.stdout.strip().endswith("24 texts of 24"), again.stderr
    assert f"job {left.job_id} was begun by the same call: it resumes here" in again.stderr
    assert "24/24 prompts" in again.stderr
    assert [row.job_id for row in jobs_in(folder)] == [left.job_id]


def planned(store: Store) -> bool:
    return any(store.progress(row.job_id).groups_total for row in store.list_jobs())


def test_rows_that_a_budget_left_undone_say_so(folder: Path, job: Options) -> None:
    assert folder.is_dir()
    frame = pa.table({"prompt": PROMPTS * 4})
    options = {**job, "max_tokens": 64, "ignore_eos": True, "group_size": 2}
    with pytest.warns(specbatch.RowsFailedWarning, match=r"was stopped \(.*specbatch retry"):
        done = specbatch.run(frame, budget_usd=1e-9, **options)
    assert done.column("prompt").to_pylist() == PROMPTS * 4
    rows = zip(*(done.column(name).to_pylist() for name in ("finish_reason", "error")), strict=True)
    undone = [error for reason, error in rows if reason == "cancelled"]
    assert undone
    assert all("budget" in error for error in undone)


def test_settings_of_a_call_win_over_the_environment_s_and_no_broker_is_asked(
    tmp_path: Path, job: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECBATCH_WORKSPACE", str(tmp_path / "no"))
    monkeypatch.setenv("SPECBATCH_BROKER_URL", "redis://127.0.0.1:9/0")
    settings = {"workspace": str(tmp_path / "yes")}
    done = specbatch.run(pd.DataFrame({"prompt": ["a"]}), settings=settings, **job)
    assert done["text"].notna().all()
    assert [path.name for path in tmp_path.iterdir()] == ["yes"]


def test_a_spec_file_says_what_options_do_not(folder: Path, job: Options) -> None:
    (folder / "job.yaml").write_text(
        f"input: {{uri: none.parquet, prompt_column: text}}\noutput: {{uri: none}}\n"
        f"verifier: {job['model']}\nsampling: {{max_tokens: 3, bad_token_ids: [97]}}\n"
    )
    frame = pa.table({"text": PROMPTS[:3]})
    done = specbatch.run(frame, spec="job.yaml", max_tokens=5, progress=False)
    assert done.column("completion_tokens").to_pylist() == [5, 5, 5]
    assert not any(97 in ids for ids in done.column("token_ids").to_pylist())
    assert not (folder / "none").exists()


# --- with an event loop -----------------------------------------------------------------------


def test_arun_lets_the_loop_go_on(folder: Path, job: Options) -> None:
    assert folder.is_dir()
    frame = pd.DataFrame({"prompt": PROMPTS})

    async def both() -> tuple[pd.DataFrame, int]:
        work = asyncio.ensure_future(specbatch.arun(frame, **job))
        turns = 0
        while not work.done():
            await asyncio.wait([work], timeout=0.01)
            turns += 1
        return await work, turns

    done, turns = asyncio.run(both())
    assert done["text"].equals(specbatch.run(frame, **job)["text"])
    assert turns > 1


def test_arun_raises_what_run_raises(folder: Path, job: Options) -> None:
    assert folder.is_dir()
    with pytest.raises(specbatch.InputError, match="no column `prompt`"):
        asyncio.run(specbatch.arun(pd.DataFrame({"p": ["a"]}), **job))
    with pytest.raises(specbatch.JobFailedError):
        asyncio.run(specbatch.arun(pd.DataFrame({"prompt": [""]}), **job))


def test_a_cancelled_task_stops_the_job_and_the_same_call_resumes_it(
    folder: Path, job: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    frame = pd.DataFrame({"prompt": PROMPTS})
    followed, follow = asyncio.Event(), here._follow

    async def cancelled() -> None:
        loop = asyncio.get_running_loop()

        def watched(*arguments: Any) -> None:
            loop.call_soon_threadsafe(followed.set)
            follow(*arguments)

        monkeypatch.setattr(here, "_follow", watched)
        options = {**job, "max_tokens": 64, "ignore_eos": True}
        work = asyncio.ensure_future(specbatch.arun(frame, **options))
        await followed.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(cancelled())
    (left,) = jobs_in(folder)
    assert not left.state.is_final
    with closing(make_store(settings_of(folder))) as store:
        assert not list(store.holders(left.job_id)), "its groups are given back"
    monkeypatch.setattr(here, "_follow", follow)
    options = {**job, "max_tokens": 64, "ignore_eos": True}
    assert asyncio.run(specbatch.arun(frame, **options))["text"].notna().all()
    assert [row.job_id for row in jobs_in(folder)] == [left.job_id]


@pytest.mark.usefixtures("folder")
def test_a_template_makes_the_prompts_of_a_frame(job: Options) -> None:
    frame = pd.DataFrame({"name": ["area", None], "arguments": ["width, height", "x"]})
    with pytest.warns(specbatch.RowsFailedWarning):
        done = specbatch.run(frame, template="def {name}({arguments}):", **job)
    whole = pd.DataFrame({"prompt": ["def area(width, height):"]})
    assert done["text"][0] == specbatch.run(whole, **job)["text"][0]
    assert "null_column" in done["error"][1]
    assert list(done["arguments"]) == list(frame["arguments"])


def test_two_jobs_at_once_are_done_one_after_the_other(folder: Path, job: Options) -> None:
    frames = [pd.DataFrame({"prompt": PROMPTS[:4]}), pd.DataFrame({"prompt": PROMPTS[4:]})]

    async def both() -> list[pd.DataFrame]:
        return await asyncio.gather(*(specbatch.arun(frame, **job) for frame in frames))

    found = pd.concat(asyncio.run(both()))["text"]
    whole = specbatch.run(pd.DataFrame({"prompt": PROMPTS}), **job)["text"]
    assert list(found) == list(whole)
    assert len(jobs_in(folder)) == 3


def test_purge_deletes_the_file_that_was_made_of_a_frame(folder: Path, job: Options) -> None:
    with pytest.warns(specbatch.RowsFailedWarning):
        specbatch.run(pd.DataFrame({"prompt": ["a", None]}), **job)
    assert files_of_frames(folder) == ["prompts.parquet"]  # `retry` may need it
    (row,) = jobs_in(folder)
    command = ("specbatch", "purge", "--job", row.job_id)
    done = forks.run(*command, environment={}, cwd=folder, timeout=WAIT_SEC)
    assert done.returncode == 0, done.stderr
    assert files_of_frames(folder) == []
