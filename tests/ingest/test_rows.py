"""Every way a row can be good or bad."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from ingest.making import make_spec, save_tokenizer, write_parquet

from specbatch.pipeline.inputs import rows as module
from specbatch.pipeline.inputs.planner import plan
from specbatch.pipeline.inputs.rows import RowChecker
from specbatch.pipeline.inputs.sources import open_source
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.pipeline.storage.artefacts import read_prompts, write_prompts
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.errors import InputError, SpecError
from specbatch.schemas.records import ROW_CODES, PromptRow, RejectedRow
from specbatch.schemas.seeds import derive_seed, sample_seed
from specbatch.schemas.spec import JobSpec

MakeChecker = Callable[..., RowChecker]
Row = PromptRow | RejectedRow


def run(spec: JobSpec, checker: RowChecker) -> list[Row]:
    groups = plan(open_source(spec.input, Objects()), checker, 64)
    rows: list[Row] = []
    for group in groups:
        rows += [*group.rows, *group.rejected]
    return sorted(rows, key=lambda row: row.row_index)


@pytest.fixture
def check_column(tmp_path: Path, make_checker: MakeChecker) -> Callable[..., list[Row]]:
    """Rows of a Parquet file with these columns."""

    def check(columns: dict[str, Any], context: int = 64, **values: Any) -> list[Row]:
        spec = make_spec(write_parquet(tmp_path / "x.parquet", pa.table(columns)), **values)
        return run(spec, make_checker(spec, context))

    return check


@pytest.fixture
def check_lines(tmp_path: Path, make_checker: MakeChecker) -> Callable[..., list[Row]]:
    """Rows of a JSONL file with these lines (values are dumped, bytes are taken as they are)."""

    def check(lines: list[Any], **values: Any) -> list[Row]:
        path = tmp_path / "x.jsonl"
        path.write_bytes(
            b"".join((x if isinstance(x, bytes) else orjson.dumps(x)) + b"\n" for x in lines)
        )
        spec = make_spec(path, **values)
        return run(spec, make_checker(spec))

    return check


@pytest.fixture
def check_body(check_lines: Callable[..., list[Row]]) -> Callable[..., Row]:
    """The one row of an OpenAI file whose body has these fields."""

    def check(job: dict[str, Any] | None = None, **body: Any) -> Row:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body
        line = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
        (row,) = check_lines([line], sampling=job or {})
        return row

    return check


def bad(row: Row) -> tuple[str, str]:
    assert isinstance(row, RejectedRow), row
    return row.code, row.reason


def good(row: Row) -> PromptRow:
    assert isinstance(row, PromptRow), row
    return row


# --- ids, seeds, tags ---------------------------------------------------------------------------
def test_a_row_without_id_is_named_by_its_number(check_column: Callable[..., list[Row]]) -> None:
    rows = check_column({"prompt": ["a", "b"]})
    assert [row.row_id for row in rows] == ["0", "1"]
    assert good(rows[1]).seed == derive_seed(0, "1")


def test_id_and_tag_columns_are_found_by_name(check_column: Callable[..., list[Row]]) -> None:
    rows = check_column({"prompt": ["a", "b"], "id": [7, None], "tag": ["x", None]})
    assert [(good(row).row_id, good(row).tag) for row in rows] == [("7", "x"), ("1", None)]


def test_named_columns_are_used(check_column: Callable[..., list[Row]]) -> None:
    (row,) = check_column(
        {"q": ["a"], "key": ["k"], "s": [9], "kind": ["news"], "prompt": [None]},
        input={"prompt_column": "q", "id_column": "key", "seed_column": "s", "tag_column": "kind"},
    )
    assert (row.row_id, good(row).seed, good(row).tag) == ("k", 9, "news")


def test_seeds_come_from_the_job_and_the_row(check_column: Callable[..., list[Row]]) -> None:
    columns = {"prompt": ["a", "a"], "id": ["x", "y"]}
    seeds = [good(row).seed for row in check_column(columns, sampling={"seed": 5})]
    assert seeds == [derive_seed(5, "x"), derive_seed(5, "y")]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seed_functions_are_pinned() -> None:
    """Outputs of old jobs are reproduced only while these stay as they are."""
    assert derive_seed(0, "0") == 4710942582121664895
    assert sample_seed(5, 0) == 5
    assert sample_seed(5, 1) == 311212202917546400


def test_a_bad_seed_is_refused(check_column: Callable[..., list[Row]]) -> None:
    columns = {"prompt": ["a"] * 3, "s": pa.array([5, None, -1])}
    rows = check_column(columns, input={"seed_column": "s"})
    assert good(rows[0]).seed == 5
    assert good(rows[1]).seed == derive_seed(0, "1")
    assert bad(rows[2]) == ("bad_seed", "seed -1 is not an integer in [0, 2^63)")


def test_rows_without_an_id_are_not_merged_by_their_numbers(
    check_column: Callable[..., list[Row]],
) -> None:
    columns = {"prompt": ["a", "b", "c"], "id": ["x", None, ""]}
    for key, are_refused in (("id", True), (["id", "job"], False)):
        table = {"uri": "/t", "mode": "merge", "key": key}
        rows = check_column(columns, output={"uri": "/out", "table": table})
        assert good(rows[0]).row_id == "x"
        if are_refused:
            assert {bad(row)[0] for row in rows[1:]} == {"missing_id"}
        else:
            assert [good(row).row_id for row in rows[1:]] == ["1", "2"]


def test_the_first_of_two_rows_with_one_id_counts(check_column: Callable[..., list[Row]]) -> None:
    rows = check_column({"prompt": ["a", "b", None, "c"], "id": ["x", "x", "y", "y"]})
    assert good(rows[0]).row_id == "x"
    assert bad(rows[1]) == ("duplicate_id", "an earlier row has the id 'x'")
    assert bad(rows[2])[0] == "null_prompt"
    assert bad(rows[3])[0] == "duplicate_id"


def test_duplicates_are_found_across_files(tmp_path: Path, make_checker: MakeChecker) -> None:
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": ["p", "p"], "id": [name, "same"]})
    spec = make_spec(tmp_path)
    rows = run(spec, make_checker(spec))
    assert [isinstance(row, PromptRow) for row in rows] == [True, True, True, False]


@pytest.mark.parametrize("row_id", ["x" * 513, "a\0b"])
def test_an_id_databases_refuse_is_refused(
    check_column: Callable[..., list[Row]], row_id: str
) -> None:
    (row,) = check_column({"prompt": ["a"], "id": [row_id]})
    assert bad(row)[0] == "bad_id"
    assert row.row_id is not None
    assert "\0" not in row.row_id
    assert len(row.row_id) <= 512


# --- prompts ------------------------------------------------------------------------------------
def test_text_gets_what_the_tokenizer_adds(
    check_column: Callable[..., list[Row]], tokenizer: TextTokenizer
) -> None:
    (row,) = check_column({"prompt": ["hi"]})
    assert good(row).prompt_ids == tuple(tokenizer.encode_batch(["hi"])[0])
    assert len(good(row).prompt_ids) == 3  # <s> h i


@pytest.mark.parametrize(
    "kind",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(),
     pa.dictionary(pa.int32(), pa.string())],
    ids=str,
)  # fmt: skip
def test_every_kind_of_text_column_reads_alike(
    check_column: Callable[..., list[Row]], kind: pa.DataType
) -> None:
    rows = check_column({"prompt": pa.array(["hé", None, ""], pa.string()).cast(kind)})
    assert len(good(rows[0]).prompt_ids) == 4
    assert [bad(row)[0] for row in rows[1:]] == ["null_prompt", "empty_prompt"]


def test_invalid_utf8_in_a_string_column_is_one_bad_row(
    check_column: Callable[..., list[Row]],
) -> None:
    texts = [b"good", b"\xff\xfe bad", b"also good"]
    data = b"".join(texts)
    offsets = pa.array([0, 4, 4 + 6, len(data)], pa.int32()).buffers()[1]
    column = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(data)])
    rows = check_column({"prompt": column})
    assert bad(rows[1]) == ("invalid_utf8", "the prompt is not valid UTF-8")
    assert [good(rows[i]).row_index for i in (0, 2)] == [0, 2]


def test_token_ids_are_taken_as_they_are(check_column: Callable[..., list[Row]]) -> None:
    rows = check_column({"prompt": [[5, 6], [], None, [5, 258], [-1], [3, None]]})
    assert good(rows[0]).prompt_ids == (5, 6)
    codes = [bad(row) for row in rows[1:]]
    assert codes[0] == ("empty_prompt", "the prompt is empty")
    assert codes[1][0] == "null_prompt"
    assert codes[2] == ("bad_token_id", "token id 258 is outside the model's vocabulary of 258")
    assert codes[3][1] == "token id -1 is outside the model's vocabulary of 258"
    assert codes[4][1] == "token id None is not an integer"


def test_text_whose_tokens_the_model_lacks_is_refused(
    tmp_path: Path, make_checker: MakeChecker
) -> None:
    spec = make_spec(write_parquet(tmp_path / "x.parquet", {"prompt": ["ab", "é"]}))
    rows = run(spec, make_checker(spec, vocab=100))
    assert good(rows[0])
    assert bad(rows[1])[0] == "bad_token_id"


def test_long_prompts_are_refused_with_both_numbers(
    check_column: Callable[..., list[Row]],
) -> None:
    fits, not_fits = check_column({"prompt": ["x" * 8, "x" * 9]}, context=10)
    assert len(good(fits).prompt_ids) == 9
    assert bad(not_fits) == (
        "too_long",
        "the prompt has 10 tokens; with one generated token it exceeds the model's context of 10",
    )
    (row,) = check_column({"prompt": ["x" * 9]}, max_prompt_tokens=9)
    assert bad(row) == ("too_long", "the prompt has 10 tokens; max_prompt_tokens is 9")


# --- chats --------------------------------------------------------------------------------------
def test_a_chat_column_is_rendered_by_the_template(
    check_column: Callable[..., list[Row]], tokenizer: TextTokenizer
) -> None:
    chat = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    (row,) = check_column({"prompt": [chat]})
    assert tokenizer.decode(good(row).prompt_ids) == "<|system|>be\n<|user|>hi\n<|assistant|>"
    (text,) = check_column(
        {"prompt": [orjson.dumps(chat).decode()]}, input={"prompt_kind": "messages"}
    )
    assert good(text).prompt_ids == good(row).prompt_ids
    (expected,) = tokenizer.encode_batch([tokenizer.render(chat, today=0.0)], special=False)
    assert good(row).prompt_ids == tuple(expected)


@pytest.mark.parametrize(
    ("messages", "code", "words"),
    [
        ("{not json", "bad_messages", "not JSON"),
        ("[]", "bad_messages", "a list that is not empty"),
        ('"hi"', "bad_messages", "a list that is not empty"),
        ('["hi"]', "bad_messages", "message 0 is not an object"),
        ('[{"content": "x"}]', "bad_messages", "role and content"),
        ('[{"role": "robot", "content": "x"}]', "unknown_role", "the role 'robot'; roles are"),
        ('[{"role": "user", "content": 5}]', "bad_messages", "content of message 0 is not text"),
        ('[{"role": "user"}]', "bad_messages", "content of message 0 is not text"),
        (
            '[{"role": "user", "content": [{"type": "image_url"}]}]',
            "bad_messages",
            "content of message 0 is not text",
        ),
        ('[{"role": "tool", "content": "x"}]', "bad_messages", "has no tool turns"),
    ],
)
def test_a_bad_chat_is_refused(
    check_column: Callable[..., list[Row]], messages: str, code: str, words: str
) -> None:
    (row,) = check_column({"prompt": [messages]}, input={"prompt_kind": "messages"})
    assert bad(row)[0] == code
    assert words in bad(row)[1]


def test_text_parts_are_joined(
    check_lines: Callable[..., list[Row]], tokenizer: TextTokenizer
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (row,) = check_lines([{"prompt": [{"role": "user", "content": parts}]}])
    assert tokenizer.decode(good(row).prompt_ids) == "<|user|>ab\n<|assistant|>"


def test_a_tokenizer_without_template_refuses_chats(tmp_path: Path) -> None:
    bare = TextTokenizer.load(str(save_tokenizer(tmp_path / "m", None)))
    chat = [{"role": "user", "content": "hi"}]
    spec = make_spec(write_parquet(tmp_path / "x.parquet", {"prompt": [chat]}))
    (row,) = run(spec, RowChecker(spec, bare, 64, bare.vocab_size, today=0.0))
    assert bad(row)[0] == "no_chat_template"
    assert "has no chat template; use text prompts" in bad(row)[1]


# --- tools --------------------------------------------------------------------------------------
TOOLS = [{"type": "function", "function": {"name": "now"}}]


@pytest.mark.parametrize("as_text", [True, False])
def test_tools_of_a_column_hold_a_prompt_of_text(
    check_lines: Callable[..., list[Row]], as_text: bool
) -> None:
    """Also as a stopped job's remainder has them, which is as text."""
    own = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    (first,) = check_lines(
        [{"prompt": "x", "own": own}], input={"sampling_column": "own"}, sampling={"max_tokens": 9}
    )
    again = dict(good(first).overrides)
    assert set(again) == set(own)
    line = {"prompt": "x", "own": orjson.dumps(again).decode() if as_text else again}
    (second,) = check_lines([line], input={"sampling_column": "own"})
    assert good(second).overrides == again
    assert make_spec("i").sampling.params(again).form


def test_a_row_is_free_of_the_tools_of_its_job(check_body: Callable[..., Row]) -> None:
    job = {"tools": TOOLS, "tool_choice": "auto"}
    assert bad(check_body(job))[0] == "no_tool_template"
    for own in ({"tools": []}, {"tool_choice": "none"}):
        good(check_body(job, **own))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (5, "a tool call of message 0 has no function.name"),
        ({"function": {"name": 5}}, "a tool call of message 0 has no function.name"),
        ({"function": {"name": "f", "arguments": "{"}}, "of message 0 are not JSON"),
    ],
    ids=str,
)
def test_a_bad_call_of_a_message_is_refused(
    check_body: Callable[..., Row], call: Any, words: str
) -> None:
    row = check_body(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert bad(row)[0] == "bad_messages"
    assert words in bad(row)[1]


def test_a_lone_surrogate_in_a_call_spoils_its_row_alone(tmp_path: Path) -> None:
    """JSON can say half a character, which no tokenizer takes."""
    showing = "{% for m in messages if m.tool_calls %}{{ m.tool_calls | tojson }}{% endfor %}"
    tokenizer = TextTokenizer.load(str(save_tokenizer(tmp_path / "m", showing)))
    path = tmp_path / "x.jsonl"
    with path.open("wb") as file:
        for arguments in (r'{"q": "\ud83d\ude00"}', r'{"q": "\ud83d"}', '{"q": "x"}'):
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
            file.write(orjson.dumps({"prompt": chat}) + b"\n")
    spec = make_spec(path)
    first, cut, last = run(spec, RowChecker(spec, tokenizer, 512, tokenizer.vocab_size, today=0.0))
    assert "\N{GRINNING FACE}" in tokenizer.decode(good(first).prompt_ids)
    assert bad(cut) == ("invalid_utf8", "the prompt has half a character (a lone surrogate)")
    good(last)


# --- JSONL --------------------------------------------------------------------------------------
def test_jsonl_values_say_what_they_are(check_lines: Callable[..., list[Row]]) -> None:
    rows = check_lines(
        [
            {"prompt": "ab", "id": "t", "tag": "g"},
            {"prompt": [5, 6]},
            {"prompt": [{"role": "user", "content": "x"}]},
            {"prompt": 7},
            {"other": 1},
        ]
    )
    assert [len(good(row).prompt_ids) for row in rows[:2]] == [3, 2]
    assert good(rows[0]).tag == "g"
    assert good(rows[2])
    assert bad(rows[3]) == ("wrong_type", "the prompt is a int, not text")
    assert bad(rows[4])[0] == "null_prompt"


def test_a_bad_line_is_a_bad_row_not_a_bad_file(check_lines: Callable[..., list[Row]]) -> None:
    rows = check_lines(
        [
            {"prompt": "a"},
            b"{broken",
            b"",
            b'{"prompt": "\xff"}',
            b"[1]",
            rb'{"prompt": "\ud800"}',
            {"prompt": "b"},
        ]
    )
    codes = [row.code if isinstance(row, RejectedRow) else "ok" for row in rows]
    assert codes == ["ok", "bad_json", "invalid_utf8", "bad_json", "bad_json", "ok"]
    assert [row.row_index for row in rows] == list(range(6))
    assert rows[1].row_id is None


# --- OpenAI bodies ------------------------------------------------------------------------------
def test_body_values_become_overrides(check_body: Callable[..., Row]) -> None:
    row = good(
        check_body(
            max_completion_tokens=9, temperature=1, top_p=0.5, top_k=3, min_p=0.1, min_tokens=2,
            seed=11, n=3, stop_token_ids=[4], ignore_eos=True,
        )
    )  # fmt: skip
    assert (row.row_id, row.seed, row.n) == ("c", 11, 3)
    assert row.overrides == {
        "max_tokens": 9,
        "temperature": 1.0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "min_tokens": 2,
        "stop_token_ids": (4,),
        "ignore_eos": True,
    }
    params = make_spec("x").sampling.params(dict(row.overrides))
    assert (params.max_tokens, params.stop_token_ids) == (9, (4,))


def test_penalties_biases_and_stops_of_a_body_are_honoured(
    check_body: Callable[..., Row],
) -> None:
    row = good(
        check_body(
            stop="END", logit_bias={"7": 100, "5": -1.5}, presence_penalty=-2,
            frequency_penalty=0.5,
            repetition_penalty=1.1, bad_token_ids=[9], bad_words=[[1, 2], [3]],
        )
    )  # fmt: skip
    assert row.overrides == {
        "stop": ("END",),
        "logit_bias": ((5, -1.5), (7, 100.0)),
        "presence_penalty": -2.0,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "bad_token_ids": (9,),
        "bad_words": ((1, 2), (3,)),
    }
    (back,) = read_prompts(write_prompts([row]))
    assert back.overrides == row.overrides
    hash(make_spec("x").sampling.params(dict(back.overrides)))
    several = good(check_body({"stop": ["a"]}, stop=["x", "\n"]))
    assert several.overrides == {"stop": ("x", "\n")}


def test_an_empty_value_of_a_body_wins_over_the_job(check_body: Callable[..., Row]) -> None:
    job = {"stop": ["a"], "logit_bias": {5: 1}, "presence_penalty": 1}
    row = good(check_body(job, stop=[], logit_bias={}, presence_penalty=0))
    params = make_spec("x", sampling=job).sampling.params(dict(row.overrides))
    assert (params.stop, params.logit_bias, params.presence_penalty) == ((), (), 0.0)


SAMPLING = {"temperature": 0.5, "n": 2, "stop": ["x"], "logit_bias": {"5": 2.0, "6": None}}
READ = {"temperature": 0.5, "stop": ("x",), "logit_bias": ((5, 2.0),)}


def test_a_sampling_column_of_parquet_holds_a_row_s_own_values(
    check_column: Callable[..., list[Row]],
) -> None:
    given = {"input": {"sampling_column": "s"}}
    rows = check_column({"prompt": ["a", "b"], "s": [SAMPLING, None]}, **given)
    assert (good(rows[0]).overrides, good(rows[0]).n) == (READ, 2)
    assert (good(rows[1]).overrides, good(rows[1]).n) == ({}, 1)
    texts = [orjson.dumps(SAMPLING).decode(), "", "{", "[1]", '{"colour": 1}', '{"min_p": 2}']
    rows = check_column({"prompt": ["a"] * 6, "s": texts}, **given)
    assert (good(rows[0]).overrides, good(rows[1]).overrides) == (READ, {})
    assert [bad(row)[0] for row in rows[2:]] == [
        "bad_parameter", "bad_parameter", "unsupported_parameter", "bad_parameter",
    ]  # fmt: skip


def test_a_sampling_column_of_jsonl_is_an_object_or_text(
    check_lines: Callable[..., list[Row]],
) -> None:
    rows = check_lines(
        [
            {"prompt": "a", "s": SAMPLING},
            {"prompt": "a", "s": orjson.dumps(SAMPLING).decode()},
            {"prompt": "a", "s": 5},
            {"prompt": "a", "s": {"messages": []}},
            {"prompt": "a", "s": {"seed": 7}},
            {"prompt": "a"},
        ],
        input={"sampling_column": "s"},
    )
    assert [good(row).overrides for row in rows[:2]] == [READ, READ]
    assert [bad(row)[0] for row in rows[2:4]] == ["bad_parameter", "unsupported_parameter"]
    assert good(rows[4]).seed == 7
    assert good(rows[5]).overrides == {}


def test_a_sampling_column_of_another_type_or_format_is_refused(
    check_column: Callable[..., list[Row]], check_lines: Callable[..., list[Row]]
) -> None:
    with pytest.raises(InputError, match="sampling values must be a struct or JSON text"):
        check_column({"prompt": ["a"], "s": [1]}, input={"sampling_column": "s"})
    with pytest.raises(InputError, match="no column `s`"):
        check_column({"prompt": ["a"]}, input={"sampling_column": "s"})
    with pytest.raises(InputError, match="not for openai files"):
        check_lines([{"custom_id": "a", "body": {}, "s": {}}], input={"sampling_column": "s"})
    with pytest.raises(SpecError, match="not for openai files"):
        make_spec("x", input={"sampling_column": "s", "format": "openai"})


@pytest.mark.parametrize(
    "sampling",
    [{"logit_bias": {258: 1}}, {"bad_token_ids": [300]}, {"bad_words": [[1, 258]]}],
    ids=str,
)
def test_a_job_that_names_a_token_outside_the_vocabulary_is_refused(
    check_lines: Callable[..., list[Row]], sampling: dict[str, Any]
) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(sampling))} has the token id"):
        check_lines([{"prompt": "a"}], sampling=sampling)


@pytest.mark.parametrize(
    "sampling",
    [
        {"stop": [""]}, {"stop": ["x"] * 17}, {"stop": "x" * 257}, {"logit_bias": {5: 101}},
        {"logit_bias": {-1: 1}}, {"logit_bias": [[5, 1], [5, 2]]}, {"bad_words": [[]]},
        {"bad_token_ids": [-1]}, {"repetition_penalty": 0}, {"presence_penalty": 3},
        {"frequency_penalty": float("nan")}, {"logprobs": 5}, {"top_logprobs": 21},
        {"top_logprobs": -1}, {"top_logprobs": 1.5}, {"top_k": 2**31}, {"stop_token_ids": [-1]},
    ],
    ids=str,
)  # fmt: skip
def test_a_job_s_values_out_of_range_are_spec_errors(sampling: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=f"sampling.{next(iter(sampling))}"):
        make_spec("x", sampling=sampling)


@pytest.mark.parametrize(
    ("job", "row", "expected"),
    [
        ({}, {}, (False, 0)),
        ({}, {"logprobs": True}, (True, 0)),
        ({}, {"logprobs": True, "top_logprobs": 5}, (True, 5)),
        ({}, {"top_logprobs": 5}, (True, 5)),
        ({"top_logprobs": 3}, {}, (True, 3)),
        ({"top_logprobs": 3}, {"top_logprobs": 20}, (True, 20)),
        ({"top_logprobs": 3}, {"top_logprobs": 0}, (True, 0)),
        ({"top_logprobs": 3}, {"logprobs": False}, (False, 0)),
        ({"logprobs": True}, {"logprobs": False}, (False, 0)),
    ],
    ids=str,
)  # fmt: skip
def test_top_logprobs_imply_logprobs_and_a_row_may_want_neither(
    check_body: Callable[..., Row],
    job: dict[str, Any],
    row: dict[str, Any],
    expected: tuple[bool, int],
) -> None:
    spec = make_spec("x", sampling=job)
    params = spec.sampling.params(dict(good(check_body(job, **row)).overrides))
    assert (params.logprobs, params.top_logprobs) == expected
    assert params.tells_logprobs is expected[0]
    stored = orjson.loads(orjson.dumps(spec.model_dump(mode="json")))
    assert JobSpec.model_validate(stored) == spec


def test_refusing_logprobs_and_asking_for_the_most_likely_is_refused(
    check_body: Callable[..., Row],
) -> None:
    reason = "top_logprobs 2 needs logprobs to be true"
    assert bad(check_body(logprobs=False, top_logprobs=2)) == ("bad_parameter", reason)
    with pytest.raises(SpecError, match=reason):
        make_spec("x", sampling={"logprobs": False, "top_logprobs": 2})


def test_a_spec_survives_the_way_through_the_store() -> None:
    spec = make_spec(
        "x", sampling={"stop": "a", "logit_bias": {9: 1, 5: -2}, "bad_words": [[1, 2]]}
    )
    assert spec.sampling.stop == ("a",)
    stored = orjson.loads(orjson.dumps(spec.model_dump(mode="json")))
    assert JobSpec.model_validate(stored) == spec
    assert spec.sampling.params().logit_bias == ((5, -2.0), (9, 1.0))


def test_absent_and_null_body_values_are_the_jobs(check_body: Callable[..., Row]) -> None:
    row = good(check_body({"n": 2, "seed": 3}, temperature=None, n=None, seed=None, stop=None))
    assert row.overrides == {}
    assert (row.n, row.seed) == (2, derive_seed(3, "c"))


@pytest.mark.parametrize(
    "field",
    [
        {"user": "u"}, {"metadata": {"a": "b"}}, {"stream": False}, {"tools": []},
        {"response_format": {"type": "text"}}, {"frequency_penalty": 0}, {"presence_penalty": 0.0},
        {"logprobs": False}, {"logit_bias": {}}, {"stop": []}, {"tool_choice": "none"},
        {"stop": ""}, {"modalities": ["text"]}, {"max_tokens": 5, "max_completion_tokens": 5},
    ],
    ids=str,
)  # fmt: skip
def test_harmless_body_fields_are_accepted(
    check_body: Callable[..., Row], field: dict[str, Any]
) -> None:
    good(check_body(**field))


@pytest.mark.parametrize(
    "field",
    [
        {"guided_regex": "a*"},
        {"stream": True}, {"functions": [{}]}, {"reasoning_effort": "low"}, {"best_of": 2},
        {"modalities": ["audio"]}, {"audio": {"voice": "x"}},
    ],
    ids=str,
)  # fmt: skip
def test_body_fields_we_cannot_honour_are_refused(
    check_body: Callable[..., Row], field: dict[str, Any]
) -> None:
    code, reason = bad(check_body(**field))
    assert code == "unsupported_parameter"
    assert f"`{next(iter(field))}`" in reason


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": -0.1}, {"temperature": 11}, {"temperature": "hot"}, {"temperature": True},
        {"top_p": 0}, {"top_p": 1.1}, {"top_k": -1}, {"top_k": 1.5}, {"min_p": 1}, {"n": 0},
        {"n": 129}, {"max_tokens": 0}, {"max_tokens": 2**20}, {"min_tokens": -1},
        {"min_tokens": 200}, {"max_tokens": 5, "max_completion_tokens": 6},
        {"stop_token_ids": [258]}, {"stop_token_ids": 3}, {"ignore_eos": 1},
        {"stop": 5}, {"stop": [""]}, {"stop": ["a", None]}, {"stop": "x" * 257},
        {"stop": ["x"] * 17}, {"stop": {"a": 1}}, {"presence_penalty": 2.1},
        {"frequency_penalty": -3}, {"frequency_penalty": "1"}, {"repetition_penalty": 0},
        {"repetition_penalty": 11}, {"logit_bias": {"258": 1}}, {"logit_bias": {"-1": 1}},
        {"logit_bias": {"x": 1}}, {"logit_bias": {"5": 101}}, {"logit_bias": {"5": True}},
        {"logit_bias": [5]}, {"bad_token_ids": [258]}, {"bad_token_ids": [1] * 1025},
        {"bad_words": [[]]}, {"bad_words": [5]}, {"bad_words": [[1, 258]]},
        {"bad_words": [[1] * 17]}, {"bad_words": [[1]] * 257}, {"logprobs": 5},
        {"logprobs": "yes"}, {"top_logprobs": 21}, {"top_logprobs": -1}, {"top_logprobs": True},
        {"top_logprobs": 2, "logprobs": False}, {"response_format": {"type": "xml"}},
        {"response_format": "json"}, {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "choice", "choice": []}}, {"response_format": 5},
        {"response_format": {"type": "json_object"}, "min_tokens": 2},
    ],
    ids=str,
)  # fmt: skip
def test_body_values_out_of_range_are_refused(
    check_body: Callable[..., Row], field: dict[str, Any]
) -> None:
    assert bad(check_body(**field))[0] == "bad_parameter"


@pytest.mark.parametrize("depth", [300, 1000])
@pytest.mark.parametrize("name", ["id", "tag", "prompt", "seed", "own"])
def test_values_of_any_depth_end_at_most_their_row(
    check_lines: Callable[..., list[Row]], name: str, depth: int
) -> None:
    deep = b"[" * depth + b"]" * depth
    line = b'{"prompt": "a", "%s": %s}' % (name.encode(), deep)
    lines = [line, {"id": "b", "prompt": "a", "own": {}}]
    _, last = check_lines(lines, input={"sampling_column": "own"})
    assert good(last).row_id == "b"


def test_a_token_id_of_any_length_ends_its_row_only(check_lines: Callable[..., list[Row]]) -> None:
    lines = [{"prompt": "a", "own": {"logit_bias": {key: 1}}} for key in ("9" * 5000, "007")]
    rows = check_lines(lines, input={"sampling_column": "own"})
    assert bad(rows[0])[0] == "bad_parameter"
    assert len(bad(rows[0])[1]) < 200
    assert good(rows[1]).overrides == {"logit_bias": ((7, 1.0),)}


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, "5", True])
def test_bad_body_seeds_are_refused(check_body: Callable[..., Row], seed: object) -> None:
    assert bad(check_body(seed=seed))[0] == "bad_seed"


def test_bad_openai_lines_are_refused_one_by_one(check_lines: Callable[..., list[Row]]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    rows = check_lines(
        [
            {"custom_id": "a", "body": body},
            {"custom_id": "a", "body": body},
            {"body": body},
            {"custom_id": "b", "body": "x"},
            {"custom_id": "c", "body": body, "url": "/v1/embeddings"},
            {"custom_id": "d", "body": {}},
            b"nope",
        ]
    )
    codes = [row.code if isinstance(row, RejectedRow) else "ok" for row in rows]
    assert codes == [
        "ok", "duplicate_id", "bad_parameter", "bad_json", "unsupported_parameter", "null_prompt",
        "bad_json",
    ]  # fmt: skip
    assert [row.row_id for row in rows] == ["a", "a", None, "b", "c", "d", None]


def test_completions_of_openai_have_one_prompt(check_lines: Callable[..., list[Row]]) -> None:
    def request(**body: Any) -> dict[str, Any]:
        return {"custom_id": str(body), "url": "/v1/completions", "body": body}

    rows = check_lines(
        [
            request(prompt="hi", max_tokens=3, temperature=0.5, seed=4, n=2, echo=False, best_of=1),
            request(prompt=[5, 6, 7]),
            request(prompt=["hi", "ho"]),
            request(prompt=[{"role": "user", "content": "hi"}]),
            request(prompt="hi", messages=[]),
            request(prompt="hi", tools=[]),
            request(prompt="hi", logprobs=2),
            request(prompt="hi", suffix="x"),
            request(prompt="hi", wrong=1),
            request(),
            {**request(prompt="a"), "url": "/v1/chat/completions"},
        ]
    )
    first, ids = rows[:2]
    assert isinstance(first, PromptRow)
    assert isinstance(ids, PromptRow)
    assert (first.n, first.seed, first.overrides) == (2, 4, {"max_tokens": 3, "temperature": 0.5})
    assert ids.prompt_ids == (5, 6, 7)
    codes = [row.code if isinstance(row, RejectedRow) else "ok" for row in rows[2:]]
    assert codes == ["wrong_type", "wrong_type", *["unsupported_parameter"] * 5, "null_prompt",
                     "unsupported_parameter"]  # fmt: skip


def test_every_code_is_explained() -> None:
    explained = re.findall(r"^    (\w+_\w+|unreadable) {2,}\S", module.__doc__ or "", re.MULTILINE)
    assert explained == list(ROW_CODES)
