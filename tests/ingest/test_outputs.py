"""Published output: complete, in input order, owned by one job, repeatable after a crash."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest
from ingest.making import completion
from openai.types import Completion

from specbatch.pipeline.outputs.outputs import OutputWriter, read_manifest, read_output
from specbatch.pipeline.outputs.parts import columns_of_job
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.arrow import OUTPUT, output_schema
from specbatch.schemas.errors import FencedError, ObjectError, OutputError
from specbatch.schemas.records import CompletionRecord, FinishReason, RejectedRow
from specbatch.schemas.staging import FIRST_PLACE, PartClaim, StagedPart
from specbatch.schemas.usage import UsageMeter

REJECTED = [RejectedRow(1, None, "bad_json", "no JSON"), RejectedRow(4, "x", "too_long", "long")]
COMPLETIONS = [completion(0), completion(0, 1), completion(2, proposed=0), completion(3)]
SOURCES = {"local", "s3"}


@pytest.fixture(params=sorted(SOURCES))
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Objects, str]:
    if request.param == "local":
        return Objects(), str(tmp_path / "out")
    return request.getfixturevalue("s3"), request.getfixturevalue("bucket") + "/jobs/out"


def test_rows_are_merged_in_input_order(place: tuple[Objects, str]) -> None:
    objects, uri = place
    manifest = OutputWriter(objects, uri, "job-a", rows_per_part=4).write(COMPLETIONS, REJECTED)
    table = read_output(uri, objects)
    assert table["row_index"].to_pylist() == [0, 0, 1, 2, 3, 4]
    assert table["sample_index"].to_pylist() == [0, 1, 0, 0, 0, 0]
    assert [part.rows for part in manifest.parts] == [4, 2]
    assert (manifest.rows, manifest.completions, manifest.rejected) == (6, 4, 2)
    assert read_manifest(uri, objects) == manifest


def test_columns_say_what_happened(place: tuple[Objects, str]) -> None:
    objects, uri = place
    OutputWriter(objects, uri, "job-a").write(COMPLETIONS, REJECTED)
    rows = read_output(uri, objects).to_pylist()
    assert rows[0] == {
        "id": "r0",
        "row_index": 0,
        "sample_index": 0,
        "text": "text 0/0",
        "token_ids": [5, 6, 0],
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "seed": 2**63 - 1,
        "acceptance_rate": 0.25,
        "cost_usd": 0.25,
        "verifier": "big",
        "proposer": "small",
        "error": None,
        "logprobs": None,
        "top_logprobs": None,
        "numeric_class": None,
        "tool_calls": None,
    }
    assert rows[3]["acceptance_rate"] is None
    bad = rows[2]
    assert bad.pop("error") == "bad_json: no JSON"
    assert bad.pop("finish_reason") == "error"
    assert (bad.pop("row_index"), bad.pop("sample_index")) == (1, 0)
    assert set(bad.values()) == {None}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_scores_are_there_where_a_job_has_them(kind: Any, tmp_path: Path) -> None:
    rows = [completion(0, score=0.5), completion(0, 1), completion(3, score=-2.0)]
    for scored in (True, False):
        uri = str(tmp_path / str(scored))
        writer = OutputWriter(Objects(), uri, "job-a", 2, kind, columns_of_job(scored))
        writer.write(rows, REJECTED)
        table = read_output(uri)
        assert table.column_names == output_schema(scored).names
        if scored:
            assert table["score"].to_pylist() == [0.5, None, None, -2.0, None]


TOPS = (((5, 9), (-0.5, -1.5)), ((8, 6), (-0.25, -2.5)), ((0, 3), (-0.0, -math.inf)))


def test_log_probabilities_are_there_for_those_who_asked(place: tuple[Objects, str]) -> None:
    objects, uri = place
    asked = [completion(0, top_logprobs=TOPS), completion(1, top_logprobs=(((), ()),) * 3)]
    OutputWriter(objects, uri, "job-a").write([*asked, completion(2)], [])
    both, own, neither = read_output(uri, objects).to_pylist()
    assert both["logprobs"] == own["logprobs"] == pytest.approx([-0.1, -2.5, 0.0])
    assert both["top_logprobs"] == [
        [{"token_id": 5, "logprob": -0.5}, {"token_id": 9, "logprob": -1.5}],
        [{"token_id": 8, "logprob": -0.25}, {"token_id": 6, "logprob": -2.5}],
        [{"token_id": 0, "logprob": 0.0}, {"token_id": 3, "logprob": -math.inf}],
    ]
    assert own["top_logprobs"] == [[], [], []]
    assert neither["logprobs"] is None
    assert neither["top_logprobs"] is None


def test_openai_files_tell_log_probabilities_as_openai_does(tmp_path: Path) -> None:
    texts = {0: "", 3: "c", 5: " é", 6: "\ufffd", 8: "a", 9: "\n"}
    asked = [completion(0, top_logprobs=TOPS), completion(0, 1, top_logprobs=(((), ()),) * 3)]
    OutputWriter(Objects(), str(tmp_path), "job-a").write(
        [*asked, completion(3)],
        [],
        openai="openai",
        decode=lambda ids: "".join(texts[i] for i in ids),
    )
    first, second = lines(Objects(), f"{tmp_path}/output.jsonl")
    both, own = first["response"]["body"]["choices"]
    assert second["response"]["body"]["choices"][0]["logprobs"] is None
    accent = {"token": " é", "bytes": [32, 195, 169]}
    assert both["logprobs"]["refusal"] is None
    assert both["logprobs"]["content"][0] == {
        **accent,
        "logprob": -0.1,
        "top_logprobs": [
            {**accent, "logprob": -0.5},
            {"token": "\n", "bytes": [10], "logprob": -1.5},
        ],
    }
    part_of_a_character, special = both["logprobs"]["content"][1:]
    assert (part_of_a_character["token"], part_of_a_character["bytes"]) == ("\ufffd", None)
    assert (special["token"], special["bytes"]) == ("", None)
    assert special["top_logprobs"][1] == {"token": "c", "bytes": [99], "logprob": -9999.0}
    assert [entry["top_logprobs"] for entry in own["logprobs"]["content"]] == [[], [], []]


def test_an_output_without_rows_can_be_read(place: tuple[Objects, str]) -> None:
    objects, uri = place
    OutputWriter(objects, uri, "job-a").write([], [])
    assert read_output(uri, objects).num_rows == 0


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    made = [
        OutputWriter(Objects(), str(tmp_path / name), "job-a").write(COMPLETIONS, REJECTED)
        for name in ("one", "two")
    ]
    assert made[0] == made[1]


def test_another_jobs_output_is_refused(place: tuple[Objects, str]) -> None:
    objects, uri = place
    OutputWriter(objects, uri, "job-a").claim()
    OutputWriter(objects, uri, "job-a").claim()
    with pytest.raises(OutputError, match=r"holds job job-a: .* how to resume"):
        OutputWriter(objects, uri, "job-b").claim()


def test_the_output_of_a_job_that_has_ended_is_refused_and_its_rest_can_be_done(
    place: tuple[Objects, str],
) -> None:
    objects, uri = place
    OutputWriter(objects, uri, "job-a").write(COMPLETIONS, REJECTED)
    for refuse in (OutputWriter.claim, OutputWriter.check):
        with pytest.raises(OutputError) as refused:
            refuse(OutputWriter(objects, uri, "job-b"))
        assert str(refused.value) == (
            f"output {uri} holds job job-a, which has ended: choose another location for a new "
            "job, or do what that one left undone with `specbatch retry job-a`"
        )


@pytest.mark.parametrize(
    "name",
    [
        *("manifest.json", "output.jsonl", "data/part-00000.parquet"),
        *("part-00000.parquet", "data/prompts.parquet", "data/more/rows.csv"),
    ],
)
def test_output_files_without_a_marker_are_refused(place: tuple[Objects, str], name: str) -> None:
    objects, uri = place
    objects.put_bytes(f"{uri}/{name}", b"old")
    with pytest.raises(OutputError, match=f"already holds {name}"):
        OutputWriter(objects, uri, "job-a").claim()


@pytest.mark.parametrize("within", ["data", "data/", "data/more", "data/data"])
def test_an_output_within_the_data_of_another_is_refused(
    place: tuple[Objects, str], within: str
) -> None:
    objects, uri = place
    OutputWriter(objects, uri, "job-a").claim()
    inner = OutputWriter(objects, f"{uri}/{within}", "job-b")
    for refuse in (inner.check, inner.claim):
        with pytest.raises(OutputError, match=f"lies in the data of output {uri}, .* job job-a:"):
            refuse()
    OutputWriter(objects, f"{uri}/data2", "job-b").claim()


@pytest.mark.parametrize("within", ["data", "data/more"])
def test_an_output_whose_data_would_be_in_that_of_another_is_refused(
    place: tuple[Objects, str], within: str
) -> None:
    objects, uri = place
    OutputWriter(objects, f"{uri}/{within}", "job-b").claim()
    outer = OutputWriter(objects, uri, "job-a")
    for refuse in (outer.check, outer.claim):
        with pytest.raises(OutputError, match="would be where another job has its output"):
            refuse()


def test_unrelated_files_do_not_stand_in_the_way(place: tuple[Objects, str]) -> None:
    objects, uri = place
    for name in ("notes.txt", "prompts.parquet", "data/.DS_Store", "data2/rows.parquet"):
        objects.put_bytes(f"{uri}/{name}", b"hello")
    OutputWriter(objects, uri, "job-a").claim()


def test_an_output_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(OutputError, match="is a file"):
        OutputWriter(Objects(), str(tmp_path / "out"), "job-a").claim()


def test_a_store_that_is_out_of_reach_is_no_wrong_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = Objects()

    def away(uri: str) -> None:
        raise ObjectError(f"cannot look at {uri}: the store answered 503")

    writer = OutputWriter(objects, str(tmp_path / "out"), "job-a")
    with monkeypatch.context() as patch:
        patch.setattr(objects, "head", away)
        with pytest.raises(ObjectError, match="503"):
            writer.claim()
        with pytest.raises(ObjectError, match="503"):
            writer.write(COMPLETIONS, REJECTED)
        with pytest.raises(OutputError, match=r"cannot be used: .*503"):
            writer.check()
    writer.write(COMPLETIONS, REJECTED)


def test_who_has_lost_a_job_touches_nothing_of_its_output(tmp_path: Path) -> None:
    objects, uri = Objects(), str(tmp_path / "out")
    OutputWriter(objects, uri, "job-a").write(COMPLETIONS, REJECTED)
    before = {info.uri: info.version for info in objects.list(uri)}

    def lost() -> None:
        raise FencedError("somebody else publishes")

    with pytest.raises(FencedError):
        OutputWriter(objects, uri, "job-a").write(COMPLETIONS, REJECTED, still_mine=lost)
    assert {info.uri: info.version for info in objects.list(uri)} == before


@pytest.mark.parametrize("published_before", [False, True])
def test_who_is_stopped_after_he_asked_leaves_anothers_manifest(
    tmp_path: Path, published_before: bool
) -> None:
    objects, uri = Objects(), str(tmp_path / "out")
    if published_before:
        OutputWriter(objects, uri, "job-a").write(COMPLETIONS[:1], [])
    asked = []

    def stopped() -> None:
        asked.append(1)
        if len(asked) == 1:  # the answer is yes, and then it takes long
            OutputWriter(objects, uri, "job-a").write(COMPLETIONS, REJECTED)
        else:
            raise FencedError("somebody else publishes")

    with pytest.raises(FencedError):
        OutputWriter(objects, uri, "job-a").write(COMPLETIONS, REJECTED, still_mine=stopped)
    assert read_output(uri, objects).num_rows == 6


def test_a_crash_before_the_manifest_leaves_the_run_repeatable(place: tuple[Objects, str]) -> None:
    objects, uri = place

    def crashing() -> Iterator[CompletionRecord]:
        yield from COMPLETIONS
        raise RuntimeError("power cut")

    writer = OutputWriter(objects, uri, "job-a", rows_per_part=1)
    with pytest.raises(RuntimeError, match="power cut"):
        writer.write(crashing(), REJECTED)
    with pytest.raises(OutputError, match="has not finished"):
        read_output(uri, objects)
    OutputWriter(objects, uri, "job-a", rows_per_part=5).write(COMPLETIONS, REJECTED)
    assert read_output(uri, objects).num_rows == 6
    assert parts(objects, uri) == ["data/part-00000.parquet", "data/part-00001.parquet"]


def parts(objects: Objects, uri: str) -> list[str]:
    names = [info.uri.removeprefix(f"{uri}/") for info in objects.list(f"{uri}/")]
    return sorted(name for name in names if "part-" in name)


def as_earlier_versions_wrote(objects: Objects, uri: str) -> None:
    """An output of one part, beside its manifest."""
    OutputWriter(objects, uri, "job-a").write(COMPLETIONS, REJECTED)
    manifest = orjson.loads(objects.get_bytes(f"{uri}/manifest.json"))
    (part,) = manifest["parts"]
    data = objects.get_bytes(f"{uri}/{part['name']}")
    objects.delete(f"{uri}/{part['name']}")
    part["name"] = part["name"].removeprefix("data/")
    objects.put_bytes(f"{uri}/{part['name']}", data)
    objects.put_bytes(f"{uri}/manifest.json", orjson.dumps(manifest))


def test_an_output_of_an_earlier_version_is_read_and_replaced(place: tuple[Objects, str]) -> None:
    objects, uri = place
    as_earlier_versions_wrote(objects, uri)
    assert parts(objects, uri) == ["part-00000.parquet"]
    assert read_output(uri, objects).num_rows == 6
    with pytest.raises(OutputError, match="holds job job-a"):
        OutputWriter(objects, uri, "job-b").claim()
    OutputWriter(objects, uri, "job-a").write(COMPLETIONS, REJECTED)
    assert parts(objects, uri) == ["data/part-00000.parquet"]
    assert read_output(uri, objects).num_rows == 6


def test_a_killed_writer_leaves_nothing_where_readers_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Polars opens every file of a folder, and stumbles over one that is no Parquet."""

    class Killed(BaseException):
        """Nothing is tidied up."""

    def die(path: Path, *_: object) -> None:
        if path.name.endswith(".tmp") and "part-" in path.name:
            raise Killed

    uri = tmp_path / "out"
    writer = OutputWriter(Objects(), str(uri), "job-a")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", die)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(Killed):
            writer.write(COMPLETIONS, REJECTED)
    (left,) = uri.rglob(".part-*.tmp")
    assert left.parent == uri
    assert list((uri / "data").iterdir()) == []


def test_writing_again_takes_the_old_manifest_away_first(tmp_path: Path) -> None:
    uri, objects = str(tmp_path / "out"), Objects()
    writer = OutputWriter(objects, uri, "job-a")
    writer.write(COMPLETIONS, REJECTED)

    def looking() -> Iterator[CompletionRecord]:
        assert not objects.exists(f"{uri}/manifest.json")
        yield completion(0)

    writer.write(looking(), [])
    assert read_manifest(uri).rows == 1


def test_a_damaged_part_is_noticed_when_read(tmp_path: Path) -> None:
    uri = str(tmp_path / "out")
    OutputWriter(Objects(), uri, "job-a").write(COMPLETIONS, REJECTED)
    part = tmp_path / "out" / "data" / "part-00000.parquet"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(bytes(data))
    with pytest.raises(ObjectError, match="SHA-256"):
        read_output(uri)


def test_parts_are_ordinary_parquet(tmp_path: Path) -> None:
    OutputWriter(Objects(), str(tmp_path), "job-a").write(COMPLETIONS, [], info={"name": "n"})
    table = pq.read_table(tmp_path / "data")
    assert table.num_rows == 4
    assert orjson.loads((tmp_path / "manifest.json").read_bytes())["info"] == {"name": "n"}


def test_parts_as_json_lines_have_the_same_rows(place: tuple[Objects, str]) -> None:
    objects, uri = place
    odd = completion(5, top_logprobs=(((), ()),) * 3, logprobs=(-0.5, math.nan, 0.0))
    given = [*COMPLETIONS, completion(4, 1, text='a "b"\n\u2028é'), odd]
    manifest = OutputWriter(objects, uri, "job-a", 4, "jsonl").write(given, REJECTED)
    names = ["data/part-00000.jsonl", "data/part-00001.jsonl"]
    assert [part.name for part in manifest.parts] == parts(objects, uri) == names
    rows = [row for name in names for row in lines(objects, f"{uri}/{name}")]
    assert [list(row) for row in rows] == [OUTPUT.names] * 8
    assert rows[2] == {**dict.fromkeys(OUTPUT.names), "row_index": 1, "sample_index": 0,
                       "finish_reason": "error", "error": "bad_json: no JSON"}  # fmt: skip
    OutputWriter(objects, f"{uri}-2", "job-a").write(given, REJECTED)
    expected = read_output(f"{uri}-2", objects).to_pylist()
    (nan,) = (row for row in expected if row["row_index"] == 5)
    assert math.isnan(nan["logprobs"][1])
    nan["logprobs"][1] = None  # JSON has no NaN
    assert read_output(uri, objects).to_pylist() == expected


def test_openai_files_hold_one_line_per_request(place: tuple[Objects, str]) -> None:
    objects, uri = place
    cancelled = completion(5, finish_reason=FinishReason.CANCELLED, text="")
    manifest = OutputWriter(objects, uri, "job-a").write(
        [*COMPLETIONS, cancelled], REJECTED, openai="openai", created=1_700_000_000
    )
    output = lines(objects, f"{uri}/output.jsonl")
    errors = lines(objects, f"{uri}/errors.jsonl")
    assert [(f.name, f.rows) for f in manifest.openai_files] == [
        ("output.jsonl", 3),
        ("errors.jsonl", 3),
    ]
    first = output[0]
    assert first["custom_id"] == "r0"
    assert first["error"] is None
    assert first["id"].startswith("batch_req_")
    body = first["response"]["body"]
    assert first["response"]["status_code"] == 200
    assert body["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in body["choices"]] == ["text 0/0", "text 0/1"]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert body["created"] == 1_700_000_000
    assert [(line["custom_id"], line["error"]["code"]) for line in errors] == [
        (None, "bad_json"),
        ("x", "too_long"),
        ("r5", "cancelled"),
    ]
    assert all(line["response"] is None for line in errors)
    assert len({line["id"] for line in output + errors}) == 6


def test_malformed_outputs_are_apart_and_an_error_where_they_were(
    place: tuple[Objects, str],
) -> None:
    objects, uri = place
    reason = "the output does not have its response format: it is not JSON"
    bad = completion(0, 1, error=reason)
    given = [COMPLETIONS[0], bad, *COMPLETIONS[2:]]
    writer = OutputWriter(objects, uri, "job-a")
    manifest = writer.write(given, REJECTED, openai="openai", quarantines=True)
    rows = read_output(uri, objects).to_pylist()
    assert [(row["row_index"], row["sample_index"]) for row in rows] == [
        *((0, 0), (0, 1), (1, 0), (2, 0), (3, 0), (4, 0)),
    ]
    assert (rows[1]["text"], rows[1]["token_ids"], rows[1]["finish_reason"]) == (
        None,
        None,
        "error",
    )
    assert rows[1]["error"] == f"malformed_output: {reason}"
    assert (rows[1]["seed"], rows[1]["cost_usd"]) == (bad.seed, bad.cost_usd)
    (line,) = lines(objects, f"{uri}/malformed.jsonl")
    assert line == {
        "id": "r0", "row_index": 0, "sample_index": 1, "reason": reason, "finish_reason": "stop",
        "text": "text 0/1", "token_ids": list(bad.token_ids), "completion_tokens": 3,
        "seed": bad.seed, "cost_usd": bad.cost_usd,
    }  # fmt: skip
    assert read_manifest(uri, objects) == manifest
    assert [(file.name, file.rows) for file in manifest.quarantine] == [("malformed.jsonl", 1)]
    codes = {x["custom_id"]: x["error"]["message"] for x in lines(objects, f"{uri}/errors.jsonl")}
    assert codes["r0"] == f"malformed_output: {reason}"
    again = writer.write(COMPLETIONS, REJECTED, quarantines=True)
    assert again.quarantine == ()
    assert not objects.exists(f"{uri}/malformed.jsonl")
    writer.write(given, REJECTED)
    assert read_output(uri, objects).to_pylist()[1]["text"] == "text 0/1"


def test_who_wrote_malformed_jsonl_there_is_asked_for_another_place(
    place: tuple[Objects, str],
) -> None:
    objects, uri = place
    objects.put_bytes(f"{uri}/malformed.jsonl", b"mine")
    with pytest.raises(OutputError, match=r"already holds malformed\.jsonl"):
        OutputWriter(objects, uri, "job-a").write(COMPLETIONS, REJECTED, quarantines=True)


def lines(objects: Objects, uri: str) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in objects.get_bytes(uri).splitlines()]


def test_answers_to_completions_are_text(tmp_path: Path) -> None:
    OutputWriter(Objects(), str(tmp_path / "out"), "job-a").write(
        COMPLETIONS, [], openai="openai-completions", created=1_700_000_000
    )
    lines = (tmp_path / "out" / "output.jsonl").read_bytes().splitlines()
    answers = [Completion.model_validate(orjson.loads(one)["response"]["body"]) for one in lines]
    assert [[choice.text for choice in answer.choices] for answer in answers] == [
        ["text 0/0", "text 0/1"], ["text 2/0"], ["text 3/0"],
    ]  # fmt: skip
    assert {answer.object for answer in answers} == {"text_completion"}


# --- parts that are written before the job is published -----------------------------------------
def never() -> None:
    """Nobody else has the work."""


def staged(writer: OutputWriter, parts: int) -> list[StagedPart]:
    """The first parts, staged one after another."""
    made, place = [], FIRST_PLACE
    for _ in range(parts):
        claim = PartClaim("job-a", place, f"{place.number:032x}")
        done, bad = (
            [row for row in rows if row.row_index >= place.row_index]
            for rows in (COMPLETIONS, REJECTED)
        )
        part = writer.stage(claim, done, bad, never)
        assert part is not None
        made.append(part)
        place = part.then
    return made


def rest_of(parts: list[StagedPart]) -> tuple[list[CompletionRecord], list[RejectedRow]]:
    first = parts[-1].then.row_index if parts else 0
    return (
        [row for row in COMPLETIONS if row.row_index >= first],
        [row for row in REJECTED if row.row_index >= first],
    )


def contents(objects: Objects, uri: str) -> dict[str, bytes]:
    """The files of an output, but for its manifest."""
    found = {f.uri.removeprefix(uri): objects.get_bytes(f.uri) for f in objects.list(f"{uri}/")}
    return {name: data for name, data in found.items() if name != "/manifest.json"}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_staged_parts_are_published_as_they_would_be_written(
    place: tuple[Objects, str], kind: Any
) -> None:
    objects, uri = place
    plain = OutputWriter(objects, f"{uri}-plain", "job-a", rows_per_part=1, kind=kind)
    expected = plain.write(COMPLETIONS, REJECTED)
    writer = OutputWriter(objects, uri, "job-a", rows_per_part=1, kind=kind)
    parts = staged(writer, 4)
    with pytest.raises(OutputError, match="has not finished"):
        read_manifest(uri, objects)
    assert writer.usable(parts) == parts
    assert writer.write(*rest_of(parts), staged=parts) == expected
    assert contents(objects, uri) == contents(objects, f"{uri}-plain")


def test_a_publication_that_was_killed_finds_the_parts_that_it_moved(
    place: tuple[Objects, str],
) -> None:
    objects, uri = place
    writer = OutputWriter(objects, uri, "job-a", rows_per_part=2)
    parts = staged(writer, 2)
    assert writer.usable(parts) == parts

    def killed(_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write(*rest_of(parts), staged=parts, commit=killed)
    again = OutputWriter(objects, uri, "job-a", rows_per_part=2)
    assert again.usable(parts) == parts
    manifest = again.write(*rest_of(parts), staged=parts)
    assert (manifest.rows, manifest.completions, manifest.rejected) == (6, 4, 2)
    assert read_output(uri, objects)["row_index"].to_pylist() == [0, 0, 1, 2, 3, 4]


def test_parts_are_used_up_to_the_first_that_is_not_as_it_was_staged(
    place: tuple[Objects, str],
) -> None:
    objects, uri = place
    writer = OutputWriter(objects, uri, "job-a", rows_per_part=1)
    parts = staged(writer, 4)
    harmed = sorted(f.uri for f in objects.list(f"{uri}/_specbatch_staging/"))[2]
    data = bytearray(objects.get_bytes(harmed))
    data[10] ^= 1
    objects.put_bytes(harmed, bytes(data))
    assert writer.usable(parts) == parts[:2]
    other = replace(parts[1], schema_version=parts[1].schema_version - 1)
    assert writer.usable([parts[0], other]) == parts[:1], "an earlier version's columns"
    objects.delete(harmed)
    assert writer.usable(parts) == parts[:2]
    assert OutputWriter(objects, uri, "job-a", rows_per_part=2).usable(parts) == []


def test_a_store_copies_staged_parts_itself(s3: Objects, bucket: str) -> None:
    uri = f"{bucket}/jobs/out"
    writer = OutputWriter(s3, uri, "job-a", rows_per_part=2)
    parts = staged(writer, 3)
    assert writer.usable(parts) == parts
    meter = UsageMeter()
    with meter.measuring():
        writer.write(*rest_of(parts), staged=parts)
    assert meter.read().stored_bytes == len(s3.get_bytes(f"{uri}/manifest.json"))


def test_a_part_whose_claim_is_lost_is_not_written(place: tuple[Objects, str]) -> None:
    objects, uri = place

    def lost() -> None:
        raise FencedError("another worker has it")

    writer = OutputWriter(objects, uri, "job-a", rows_per_part=1)
    with pytest.raises(FencedError):
        writer.stage(PartClaim("job-a", FIRST_PLACE, "0" * 32), COMPLETIONS, REJECTED, lost)
    assert objects.list(f"{uri}/_specbatch_staging/") == []
