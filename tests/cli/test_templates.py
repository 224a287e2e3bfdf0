"""Prompts made of columns, on the command line: flags, files, a dry run, what is shown of a job."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from specbatch.jobs.cli import console
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.outputs.outputs import read_output
from support.html_page import Page
from support.models import TinyPair

TEMPLATE = "def f{number}(x):  # {{was}} {id}"


def without_chats(model: Path, folder: Path) -> Path:
    """A copy of the model whose tokenizer has no chat template."""
    made = shutil.copytree(model, folder / "bare")
    (made / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((made / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (made / "tokenizer_config.json").write_text(json.dumps(config))
    return made


def tokens_of(tiny_pair: TinyPair, texts: list[str]) -> list[int]:
    tokenizer = TextTokenizer.load(str(tiny_pair.verifier))
    return [len(ids) for ids in tokenizer.encode_batch(texts)]


def test_a_template_makes_the_prompts_of_a_job(
    cli: Any, job: Any, folder: Path, tiny_pair: TinyPair
) -> None:
    """By whatever way it is given: the output is that of the same prompts in a column."""
    prompts = [f"def f{i}(x):  # {{was}} row-{i}" for i in range(12)]
    tokens = tokens_of(tiny_pair, prompts)
    (folder / "t.txt").write_text(TEMPLATE + "\n")
    (folder / "t.yaml").write_text(yaml.safe_dump({"input": {"template": TEMPLATE}}))
    table = pq.read_table("prompts.parquet")
    pq.write_table(table.set_column(1, "prompt", [prompts]), folder / "made.parquet")
    ways = (("--template", TEMPLATE), ("--template-file", "t.txt"), ("t.yaml",))
    for way in ways:
        first = cli("submit-job", *way, *job, "--dry-run", "--json").json["first_prompts"]
        assert [one["text"] for one in first] == prompts[:3]
        assert [one["tokens"] for one in first] == tokens[:3]
    ended = cli("submit-job", *job, *ways[0], "--output", "made", "--local", "--json").json
    cli("submit-job", *job, "--input", "made.parquet", "--output", "column", "--local")
    column, made = (read_output(name) for name in ("column", "made"))
    same = ["id", "seed", "prompt_tokens", "token_ids", "logprobs", "text"]
    assert made.select(same) == column.select(same)
    assert made["prompt_tokens"].to_pylist() == tokens
    (folder / "prompts.parquet").unlink()  # a replay needs no columns
    replayed = cli("replay", f"{ended['job']}/3")
    assert replayed.code == 0, replayed.err


def test_a_dry_run_shows_three_prompts_with_their_tokens(
    cli: Any, job: Any, tiny_pair: TinyPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (*job, "--dry-run", "--template", "{prompt}\n#", "--system", "Row {id}.")
    monkeypatch.setattr(console.out, "_width", 60)
    shown = cli("submit-job", *flags).out.splitlines()
    lines = [line for line in shown if line.startswith("row ")]
    assert len(lines) == 3
    text = TextTokenizer.load(str(tiny_pair.verifier)).render(
        [{"role": "system", "content": "Row row-0."}, {"role": "user", "content": "def f0(x):\n#"}],
        today=0.0,
    )
    (tokens,) = tokens_of(tiny_pair, [text])
    begin = text[:20].replace("\n", "\\n")
    assert lines[0].startswith(f"row 0 (id row-0), {tokens} tokens: {begin}")
    assert {len(line) for line in lines} == {60}
    assert {line[-1] for line in lines} == {"…"}
    (first, *_) = cli("submit-job", *flags, "--json").json["first_prompts"]
    assert first == {"row_index": 0, "row_id": "row-0", "tokens": tokens, "text": text}


def test_a_plan_without_a_template_shows_no_prompts(cli: Any, job: Any) -> None:
    assert cli("submit-job", *job, "--dry-run", "--json").json["first_prompts"] == []


@pytest.mark.parametrize(("mode", "email"), [("redacted", "[EMAIL]"), ("hash-only", None)])
def test_a_dry_run_shows_no_more_than_the_tenant_keeps(
    cli: Any, job: Any, monkeypatch: pytest.MonkeyPatch, mode: str, email: str | None
) -> None:
    monkeypatch.setenv("SPECBATCH_PRIVACY", mode)
    planned = cli("submit-job", *job, "--dry-run", "--json", "--template", "a@b.org {number}")
    assert planned.json["first_prompts"][0]["text"] == (email and f"{email} 0")
    assert ("row-0" in planned.out) is (email is not None)


def test_null_in_a_named_column_quarantines_the_row(cli: Any, job: Any, bad_rows: Path) -> None:
    flags = ("--input", bad_rows, "--template", "# {prompt}", "--local", "--json")
    ended = cli("submit-job", *job, *flags)
    assert ended.code == 3
    shown = cli("show", ended.json["job"]).out
    assert "quarantined, null_column: 1" in shown
    assert "row 1 (id 1): column `prompt` is null, and the template needs it" in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--template", "{promt}"], "has no column `promt` (did you mean `prompt`?), which the"),
        (["--template", "{{ promt }}"], "template names no column"),
        (["--template", "{{ promt }}", "--template-kind", "jinja"], "(did you mean `prompt`?)"),
        (["--template", "{{ x", "--template-kind", "jinja"], "cannot be compiled (line 1: unexp"),
        (["--template", "{id"], "field `input`: template, line 1 has a single {"),
        (["--template", "{id}", "--prompt-column", "p"], "template and prompt_column exclude"),
        (["--template", "{id}", "--format", "openai"], "each body already is a whole request"),
        (["--template", "{id}", "--template-file", "t"], "--template and --template-file exclude"),
        (["--template-file", "nowhere"], "template file nowhere cannot be read: no such file"),
        (["--template-kind", "go"], "--template-kind (field `input.template_kind`): must be"),
    ],
)
def test_a_slip_in_a_template_is_answered_before_anything_runs(
    cli: Any, job: Any, flags: list[str], words: str
) -> None:
    for mode in ("--local", "--dry-run", "--wait"):
        refused = cli("submit-job", *job, *flags, mode)
        assert refused.code == 2
        assert words in refused.complaint
    assert cli("jobs", "--json").json == []


def test_a_template_file_that_is_no_text_is_refused(cli: Any, job: Any, folder: Path) -> None:
    (folder / "t").write_bytes(b"\xff{id}")
    refused = cli("submit-job", *job, "--template-file", "t", "--local")
    assert "template file t is not a text file in UTF-8" in refused.complaint


def test_a_system_prompt_needs_a_model_for_chats(
    cli: Any, job: Any, folder: Path, tiny_pair: TinyPair
) -> None:
    flags = ("--verifier", without_chats(tiny_pair.verifier, folder), "--proposer", "none")
    for mode in ("--local", "--dry-run"):
        refused = cli("submit-job", *job, *flags, "--system", "Be brief.", mode)
        assert refused.code == 2
        assert "field `input.system` makes chats, and the tokenizer of" in refused.complaint


def test_a_job_shows_its_template_in_brief(cli: Any, job: Any, folder: Path) -> None:
    flags = ("--template", "# {number}\n{prompt}", "--system", "Be brief." + "!" * 200)
    ended = cli("submit-job", *job, *flags, "--local", "--json")
    shown = cli("show", ended.json["job"]).out
    assert "template: # {number} {prompt}\n" in shown
    assert "system: Be brief.!!!" in shown
    assert "!" * 151 not in shown
    assert cli("show", ended.json["job"], "--json").json["template"] == "# {number} {prompt}"
    report = folder / "r.html"
    cli("report", ended.json["job"], "--output", report)
    assert "# {number} {prompt}" in Page(report.read_text()).text
    cli("report", ended.json["job"], "--output", report, "--no-texts")
    assert "# {number} {prompt}" not in Page(report.read_text()).text


def test_what_is_left_of_a_stopped_job_needs_no_template(cli: Any, job: Any) -> None:
    flags = ("--template", TEMPLATE, "--deadline-sec", 0.001, "--local", "--json")
    stopped = cli("submit-job", *job, *flags).json
    rest = f"out/remainder-{stopped['job']}.yaml"
    assert "template" not in Path(rest).read_text()
    done = cli("submit-job", rest, "--local", "--json").json
    whole = cli("submit-job", *job, "--template", TEMPLATE, "--output", "w", "--local", "--json")
    assert done["state"] == whole.json["state"] == "done"
    decided = ["id", "token_ids", "text"]
    assert read_output(done["output"]).select(decided) == read_output("w").select(decided)


def test_another_template_is_another_job_for_a_key(cli: Any, job: Any) -> None:
    flags = (*job, "--local", "--idempotency-key", "k")
    assert cli("submit-job", *flags, "--template", "{id}").code == 0
    refused = cli("submit-job", *flags, "--template", "{id} ")
    assert refused.code == 2
    assert "differs in: input.template)" in refused.complaint
