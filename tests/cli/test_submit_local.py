"""`submit-job --local`: a whole job in this process, and every way it can end."""

from __future__ import annotations

import re
import signal
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from specbatch.pipeline.bootstrap import make_store
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.schemas.settings import Settings
from support import forks
from support.models import TinyPair
from support.workers import WAIT_SEC, wait_until

KEYS = [
    *("job", "name", "state", "rows", "rows_failed", "tokens", "acceptance_rate", "cost_usd"),
    *("output", "data"),
]


def test_a_good_job_ends_with_0_and_one_json_object(cli: Any, job: Any, folder: Path) -> None:
    done = cli("submit-job", *job, "--local", "--json")
    assert done.code == 0
    assert list(done.json) == KEYS
    assert len(done.out.strip().splitlines()) == 1
    assert done.json["state"] == "done"
    assert (done.json["rows"], done.json["rows_failed"]) == (12, 0)
    assert done.json["output"] == str(folder / "out")
    assert done.json["data"] == str(folder / "out" / "data")
    assert done.json["tokens"] == 12 * 6
    table = pq.read_table(folder / "out" / "data/part-00000.parquet")
    assert table.column("id").to_pylist() == [f"row-{i}" for i in range(12)]
    assert "12/12 prompts" in done.err


def test_stop_strings_and_a_row_s_own_values_reach_the_output(
    cli: Any, job: Any, folder: Path, tiny_pair: TinyPair
) -> None:
    """Where text ends, which tokens are kept, and that it is the same with and without drafts."""
    flags = [*job, "--local", "--max-tokens", 24, "--repetition-penalty", 1.2, "--seed", 3]
    flags += ["--temperature", 0.9, "--frequency-penalty", 0.3, "--presence-penalty", 0.1]
    given = pq.read_table(folder / "prompts.parquet")
    own = [None] * 6 + ['{"stop": []}'] * 6
    pq.write_table(given.append_column("own", pa.array(own)), folder / "own.parquet")
    flags += ["--input", "own.parquet", "--sampling-column", "own"]
    assert cli("submit-job", *flags, "--output", "plain").code == 0
    stops = list("etaoinsh.\n")
    stopping = [flag for stop in stops for flag in ("--stop", stop)]
    for depth in ("off", 4):
        asked = [*flags, *stopping, "--depth", depth, "--output", f"out-{depth}"]
        assert cli("submit-job", *asked).code == 0
    plain, off, drafted = (
        pq.read_table(folder / name / "data/part-00000.parquet").to_pylist()
        for name in ("plain", "out-off", "out-4")
    )
    tokenizer, cut = TextTokenizer.load(str(tiny_pair.verifier)), 0
    for before, one, other in zip(plain, off, drafted, strict=True):
        for name in ("text", "token_ids", "finish_reason"):
            assert one[name] == other[name]
        assert one["token_ids"] == before["token_ids"][: len(one["token_ids"])]
        if one["row_index"] >= 6 or not any(stop in before["text"] for stop in stops):
            assert (one["text"], one["token_ids"]) == (before["text"], before["token_ids"])
            continue
        cut += 1
        assert one["finish_reason"] == "stop"
        assert one["text"] == re.split(r"[etaoinsh.\n]", before["text"])[0]
        assert tokenizer.decode(one["token_ids"]).startswith(one["text"])
        assert any(stop in tokenizer.decode(one["token_ids"]) for stop in stops)
        assert not any(stop in tokenizer.decode(one["token_ids"][:-1]) for stop in stops)
    assert cut


def test_people_get_a_summary_and_the_output(cli: Any, job: Any, folder: Path) -> None:
    done = cli("submit-job", *job, "--local", "--wait")
    assert done.code == 0
    assert "measured speed-up over depth 0" in done.out
    assert f"output: {folder / 'out'}data:   {folder / 'out' / 'data'}" in "".join(
        done.out.splitlines()
    )


def test_failed_rows_end_with_3_and_are_shown_by_reason(cli: Any, job: Any, bad_rows: Path) -> None:
    done = cli("submit-job", *job, "--local", "--json", "--input", bad_rows)
    assert done.code == 3
    assert (done.json["state"], done.json["rows"], done.json["rows_failed"]) == ("partial", 8, 3)
    shown = cli("show", done.json["job"])
    assert "quarantined, null_prompt: 1" in shown.out
    assert "row 4 (id 3): an earlier row has the id '3'" in shown.out


def test_a_job_without_one_good_row_ends_with_4(cli: Any, job: Any, folder: Path) -> None:
    pq.write_table(pa.table({"prompt": ["", ""]}), folder / "none.parquet")
    done = cli("submit-job", *job, "--local", "--input", "none.parquet")
    assert done.code == 4
    assert "no row could be completed" in done.complaint


def test_a_cancelled_job_ends_with_5_and_retry_does_the_rest(cli: Any, job: Any) -> None:
    job_id = _submitted(cli, job)
    assert "will be cancelled" in cli("cancel", job_id).out
    ended = cli("retry", job_id, "--local", "--json")
    assert ended.code == 5
    assert ended.json["state"] == "cancelled"
    again = cli("retry", job_id, "--local", "--json")
    assert again.code == 0
    assert again.json["rows"] == 12


def test_a_wait_that_is_too_short_ends_with_6_and_the_job_can_go_on(cli: Any, job: Any) -> None:
    keyed = [*job, "--local", "--idempotency-key", "k"]
    waited = cli("submit-job", *keyed, "--timeout", 0)
    assert waited.code == 6
    assert "run the same command again" in waited.complaint
    assert cli("submit-job", *keyed).code == 0


def test_the_same_key_finds_the_finished_job(cli: Any, job: Any) -> None:
    keyed = [*job, "--local", "--json", "--idempotency-key", "k"]
    first, second = cli("submit-job", *keyed), cli("submit-job", *keyed)
    assert second.code == 0
    assert second.json == first.json
    assert "known by this key" in second.err


def test_the_same_key_with_another_spec_names_the_field(cli: Any, job: Any) -> None:
    keyed = [*job, "--local", "--idempotency-key", "k"]
    cli("submit-job", *keyed)
    refused = cli("submit-job", *keyed, "--temperature", 0.5)
    assert refused.code == 2
    assert "differs in: sampling.temperature" in refused.complaint


def test_an_output_of_another_job_is_refused_before_a_job_is_made(cli: Any, job: Any) -> None:
    cli("submit-job", *job, "--local")
    refused = cli("submit-job", *job, "--local", "--idempotency-key", "other")
    assert refused.code == 2
    assert "choose another location" in refused.complaint
    assert len(cli("jobs", "--json").json) == 1


def test_ctrl_c_stops_cleanly_and_the_same_command_goes_on(
    cli: Any, job: Any, folder: Path
) -> None:
    keyed = [*map(str, job), "--max-tokens", "200", "--ignore-eos", "--group-size", "4"]
    keyed += ["--local", "--idempotency-key", "k", "--json"]
    with forks.open_memory() as out, (folder / "log").open("wb") as log:
        one_by_one = {"SPECBATCH_MAX_CONCURRENT_SEQUENCES": "1"}  # most is left to do
        running = forks.fork(
            *("submit-job", *keyed), environment=one_by_one, cwd=folder, stdout=out, stderr=log
        )
        try:
            _wait_for_groups(folder)
            running.send_signal(signal.SIGINT)
            running.wait(WAIT_SEC)
        finally:
            running.kill()
            running.wait()
    err = (folder / "log").read_text()
    assert running.returncode == 130, err
    assert "run the same command again" in err
    assert "Traceback" not in err
    assert cli("jobs", "--state", "interrupted", "--json").json
    again = forks.run("submit-job", *keyed, environment={}, cwd=folder, timeout=WAIT_SEC)
    assert orjson.loads(again.stdout)["state"] == "done", again.stderr


def test_a_job_of_another_class_is_not_waited_for(cli: Any, job: Any, folder: Path) -> None:
    other = "torch/f32/00000000"
    (folder / "class.yaml").write_text(yaml.safe_dump({"engine": {"numeric_class": other}}))
    refused = cli("submit-job", "class.yaml", *job, "--local")
    assert refused.code == 2
    assert f"is verified in numeric class {other}, and this process has " in refused.complaint
    command = refused.complaint.rpartition("`specbatch ")[2].partition("`")[0]
    assert cli(*command.split(), "--json").json["state"] == "done"


def test_a_dead_worker_thread_is_an_error_and_not_a_wait(
    cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery.worker.WorkController.start", lambda _self: None)
    died = cli("submit-job", *job, "--local")
    assert died.code == 4
    assert "the worker in this process died" in died.complaint


def _submitted(cli: Any, job: Any) -> str:
    """A job that is stored and not yet begun."""
    waited = cli("submit-job", *job, "--local", "--timeout", 0)
    assert waited.code == 6
    return str(cli("jobs", "--json").json[0]["job"])


def _wait_for_groups(folder: Path) -> None:
    settings = Settings(workspace=str(folder / "specbatch-data"))
    with closing(make_store(settings)) as store:
        wait_until(
            "a group is planned",
            lambda: any(store.progress(job.job_id).groups_total for job in store.list_jobs()),
        )


BEFORE = {
    "specbatch.pipeline.operations.preflight.check_job": "interrupted: nothing was submitted",
    "specbatch.pipeline.runtime.client.Client.submit": "`specbatch jobs` says whether it is there",
    "specbatch.pipeline.runtime.client.Client.take_over": "its finished groups are kept. To resume",
    "specbatch.workers.lifecycle.embedded": "its finished groups are kept. To resume it",
    "specbatch.jobs.cli.local.finish": "is stored: `specbatch show",
}


@pytest.mark.parametrize("place", BEFORE)
def test_ctrl_c_at_any_time_says_what_is_left(
    cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, interrupt)
    stopped = cli("submit-job", *job, "--local")
    assert stopped.code == 130
    assert BEFORE[place] in stopped.err
    assert "nothing was submitted" not in stopped.err or cli("jobs", "--json").json == []


def test_more_tokens_than_the_model_can_write_are_announced_once(
    cli: Any, job: Any, folder: Path
) -> None:
    pq.write_table(pa.table({"prompt": ["x" * 2035]}), folder / "prompts.parquet")
    words = "max_tokens 3,000 is above what the model can do: prompt and completion have 2,048"
    done = cli("submit-job", *job, "--local", "--json", "--max-tokens", 3000)
    assert 0 < done.json["tokens"] < 20
    assert done.err.count(words) == 1
    assert cli("show", done.json["job"]).out.count(words) == 1
    planned = cli("submit-job", *job, "--dry-run", "--max-tokens", 3000, "--output", "other")
    assert planned.err.count(words) == 1
