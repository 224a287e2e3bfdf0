"""The keyword arguments are the options of `submit-job`, and reach the same fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import typer

import specbatch
from specbatch.jobs.api.options import (
    RunOptions,
    SpecOptions,
    SubmitOptions,
    asked,
    spec_of,
)
from specbatch.jobs.api.places import settings_of
from specbatch.jobs.cli.submit_job import app
from specbatch.jobs.running.fields import FIELD_OF
from specbatch.schemas.errors import SpecError, UsageError
from specbatch.schemas.spec import JobSpec

PLACES = {"input", "output"}  # `data` and `output` of the functions
# Repeated, the first is one list of stop_token_ids; the second is a template in a file.
SHELL_ONLY = {"stop_token_id", "template_file"}
# What the command does, not what the job does.
ABOUT_THE_COMMAND = {
    *("spec_file", "local", "engine", "wait", "timeout", "dry_run", "tokens_per_sec", "json"),
    *("idempotency_key", "schedule", "logical_time"),
}
TOOLS = (
    '[{"type":"function","function":{"name":"f","parameters":'
    '{"type":"object","properties":{},"additionalProperties":false}}}]'
)
VALUES: dict[str, Any] = {
    "format": "jsonl", "prompt_column": "p", "prompt_kind": "text", "id_column": "i",
    "seed_column": "s", "sampling_column": "c", "output_format": "jsonl",
    "keep_columns": ["a", "b"], "verifier": "owner/big", "proposer": "owner/small",
    "max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1,
    "n": 2, "seed": 7, "stop_token_ids": [5, 6], "ignore_eos": True, "stop": ["x", "y"],
    "response_format": '{"type":"json_object"}', "tools": TOOLS, "tool_choice": "none",
    "parallel_tool_calls": False,
    "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25,
    "logprobs": True, "top_logprobs": 2, "depth": 4, "sources": ["ngram", "draft-model"],
    "max_depth": 8, "history_tokens": 10, "verification": "rejection", "dtype": "float32",
    "keep_best": 1, "snapshot": 4, "since": 3, "table": "s3://bucket/answers",
    "reuse_outputs": True, "reuse_check": 0.5,
    "exactness": "fast", "group_size": 3, "name": "nightly", "tenant": "us", "priority": "high",
    "deadline_sec": 5.0, "budget_usd": 1.0, "regions": ["eu", "us"],
    "spot": False, "notify": ["ops"],
    "lineage_parent": "default/nightly.load/01939f2e-7c1e-7d0b-8a55-3c1b2f6f9f10",
    "delimiter": ";", "template": "Say {a}.", "template_kind": "jinja", "system": "Be {kind}.",
}  # fmt: skip

NEEDS: dict[str, dict[str, Any]] = {  # of an option: what it cannot be without
    "template_kind": {"template": "{{ a }}"},
    "snapshot": {"format": "delta"},
    "since": {"format": "delta"},
}


def command_options() -> set[str]:
    return {str(param.name) for param in typer.main.get_command(app).params}


def field(spec: JobSpec, dotted: str) -> Any:
    value: Any = spec
    for part in dotted.split("."):
        value = getattr(value, part)
    return list(value) if isinstance(value, tuple) else value


def test_the_options_are_those_of_the_command() -> None:
    assert command_options() - ABOUT_THE_COMMAND - SHELL_ONLY == set(FIELD_OF)
    assert set(SpecOptions.__annotations__) == set(FIELD_OF) - PLACES


@pytest.mark.parametrize("name", sorted(SpecOptions.__annotations__))
def test_an_option_reaches_its_field(name: str) -> None:
    needs = NEEDS.get(name, {})
    given = {"verifier": "owner/big", "proposer": "owner/small", **needs, name: VALUES[name]}
    spec = spec_of(asked(None, None, given, RunOptions), "in.parquet", "out")
    assert field(spec, FIELD_OF[name]) == VALUES[name]


def test_the_values_that_an_option_takes_are_those_of_its_field() -> None:
    hints = get_type_hints(SpecOptions)
    checked = 0
    for name, hint in hints.items():
        literals = [part for part in get_args(hint) if get_origin(part) is Literal]
        words = [word for part in literals for word in get_args(part)]
        if words:
            model: Any = JobSpec
            *parts, last = FIELD_OF[name].split(".")
            for part in parts:
                model = model.model_fields[part].annotation
            annotation = model.model_fields[last].annotation
            assert set(words) <= set(_words_of(annotation)), name
            if name != "depth":
                assert set(words) == set(_words_of(annotation)), name
            checked += 1
    assert checked > 5


def _words_of(annotation: Any) -> list[str]:
    if isinstance(annotation, type):
        return [str(member) for member in annotation]  # type: ignore[attr-defined]  # an enumeration
    found = []
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) is Literal:
            found += get_args(part)
    return found


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("draft_modell", "draft_model"),
        ("time_out", "timeout"),
        ("ouput", "output"),
    ],
)
def test_an_unknown_option_names_its_near_miss(name: str, near: str) -> None:
    with pytest.raises(SpecError, match=rf"unknown option `{name}` \(did you mean `{near}`\?\)"):
        asked(None, None, {name: 1}, RunOptions)


def test_an_option_of_another_function_is_unknown() -> None:
    with pytest.raises(SpecError, match="unknown option `timeout`"):
        asked("m", None, {"timeout": 1.0}, SubmitOptions)
    with pytest.raises(SpecError, match="the first argument is the data"):
        asked("m", None, {"input": "x"}, RunOptions)


def test_a_proposer_may_be_an_object() -> None:
    head = {"kind": "eagle3", "model": "owner/head"}
    made = asked(Path("owner/big"), None, {"proposer": head, "exactness": "fast"}, RunOptions)
    assert spec_of(made, "in.parquet", "out").proposer_name == "eagle3:owner/head"


def test_model_and_draft_model_are_the_verifier_and_the_proposer() -> None:
    made = asked(Path("models/big"), "owner/small", {"max_tokens": None}, RunOptions)
    assert made.fields == {"verifier": "models/big", "proposer": "owner/small"}
    with pytest.raises(SpecError, match="model and verifier mean the same"):
        asked("a", None, {"verifier": "b"}, RunOptions)


def test_a_wrong_value_is_named_by_its_field() -> None:
    made = asked("owner/big", None, {"max_tokens": 0}, RunOptions)
    with pytest.raises(SpecError, match=r"field `sampling.max_tokens`: must be at least 1 \(got 0"):
        spec_of(made, "in.parquet", "out")


def test_a_missing_model_is_asked_for() -> None:
    with pytest.raises(SpecError, match="give model="):
        spec_of(asked(None, None, {}, RunOptions), "in.parquet", "out")


def test_options_override_a_spec_of_values_and_of_a_file(tmp_path: Path) -> None:
    values = {
        "input": {"uri": "old.parquet", "prompt_column": "text"},
        "output": {"uri": "old"},
        "verifier": "owner/big",
        "sampling": {"max_tokens": 5, "temperature": 0.5},
        "speculation": {"depth": False, "tag_depths": {"code": 2}},
    }
    file = tmp_path / "job.yaml"
    file.write_text(
        "input: {uri: old.parquet, prompt_column: text}\noutput: {uri: old}\nverifier: owner/big\n"
        "sampling: {max_tokens: 5, temperature: 0.5}\n"
        "speculation: {depth: off, tag_depths: {code: 2}}\n"
    )
    for base, folder in ((values, Path.cwd()), (file, tmp_path), (str(file), tmp_path)):
        made = asked(None, None, {"spec": base, "max_tokens": 7}, RunOptions)
        spec = spec_of(made, None, "new")
        assert spec.input.uri == str(folder / "old.parquet")
        assert spec.output.uri == str(Path.cwd() / "new")
        assert (spec.input.prompt_column, spec.speculation.depth) == ("text", "off")
        assert (spec.sampling.max_tokens, spec.sampling.temperature) == (7, 0.5)


def test_settings_are_checked_by_name() -> None:
    assert settings_of({"lease_sec": 5.0, "broker_url": None}).lease_sec == 5.0
    with pytest.raises(UsageError, match=r"`lease_secs` \(did you mean `lease_sec`"):
        settings_of({"lease_secs": 5.0})
    with pytest.raises(UsageError, match="store_url here"):
        specbatch.Client(database_url="sqlite:///x")
