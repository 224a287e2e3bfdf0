"""A job's `proposer`: a text, or an object that names vLLM's own speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbatch.pipeline.operations.spec_input import build_spec, spec_with
from specbatch.schemas.errors import SpecError, UsageError
from specbatch.schemas.numeric_class import key_of_spec
from specbatch.schemas.spec import JobSpec, load_spec
from specbatch.schemas.vllm_proposer import KINDS, VllmProposer, read_proposer

HEAD = {"kind": "eagle3", "model": "owner/head"}
FAST = {"engine": {"exactness": "fast"}}


def spec(proposer: object, **more: Any) -> JobSpec:
    needed = {"input": {"uri": "s3://b/in"}, "output": {"uri": "s3://b/out"}, "verifier": "o/v"}
    return load_spec({**needed, **FAST, "proposer": proposer, **more})


def test_a_text_is_a_draft_model_as_before() -> None:
    made = spec("owner/small")
    assert (made.draft_model, made.vllm_proposer) == ("owner/small", None)
    assert made.proposer_name == "owner/small"
    assert made.may_propose
    assert spec("none").proposer is spec("").proposer is spec(None).proposer is None


def test_an_object_is_vllms_own_speculation() -> None:
    made = spec(HEAD)
    assert (made.draft_model, made.proposer_name) == (None, "eagle3:owner/head")
    assert not made.may_propose
    assert spec({"kind": "suffix"}).proposer_name == "suffix"
    assert JobSpec.model_validate(made.model_dump(mode="json")) == made


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_passed_to_vllm_by_its_name(kind: str) -> None:
    model = {"model": "owner/m"} if kind in ("eagle3", "draft_model") else {}
    own = VllmProposer.model_validate({"kind": kind, **model})
    assert own.as_config == {"method": kind, **model}


@pytest.mark.parametrize(
    ("proposer", "said"),
    [
        ({"kind": "medusa"}, "field `proposer.kind`: must be 'eagle3', 'mtp', 'draft_model' or"),
        ({"model": "m"}, "field `proposer.kind` is required"),
        (
            {"kind": "suffix", "modell": "m"},
            "unknown field `proposer.modell` (did you mean `model`",
        ),
        ({"kind": "eagle3"}, "kind eagle3 needs a model: name the folder or hub id of its head"),
        ({"kind": "draft_model"}, "kind draft_model needs a model"),
        ({"kind": "suffix", "model": "m"}, "kind suffix drafts from what was written before"),
        ('{"kind": ', "field `proposer`: is not valid JSON"),
        (7, "field `proposer`: must be text (got 7)"),
    ],
)
def test_what_an_object_lacks_is_said_in_one_sentence(proposer: object, said: str) -> None:
    with pytest.raises(SpecError) as raised:
        spec(proposer)
    assert said in str(raised.value)
    assert str(raised.value).count("field `") == 1, "the other form is not spoken of"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"engine": {}}, "engine vllm cannot give exactness bitwise: set engine.exactness to fast"),
        (
            {"engine": {"exactness": "fast", "numeric_class": "exact/f32/1"}},
            "engine.numeric_class is of engine exact",
        ),
        (
            {"engine": {"exactness": "fast", "verifier_weights": "int8"}},
            "vLLM does not quantise weights",
        ),
        ({"speculation": {"verification": "block"}}, "leave verification block out"),
        ({"speculation": {"sources": ["ngram"]}}, "add draft-model to sources"),
    ],
)
def test_what_vllm_cannot_give_beside_it_is_refused_with_the_spec(
    more: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError) as raised:
        spec(HEAD, **more)
    assert "proposer kind eagle3 is vLLM's own speculation" in str(raised.value)
    assert said in str(raised.value)


def test_the_way_to_ask_for_an_engine_names_it() -> None:
    made = spec(HEAD)
    assert made.key_in(None) == "auto/fast/as-is/eagle3:owner/head"
    assert made.key_in("vllm/bf16/5d0c1a2b") == "bfloat16/fast/as-is/eagle3:owner/head"
    assert key_of_spec(made.model_dump(mode="json")) == made.key_in(None)
    assert key_of_spec(spec("owner/small").model_dump(mode="json")) == "auto/fast/as-is"


def test_jobs_of_other_proposers_have_other_digests() -> None:
    made = [spec(p) for p in (None, "owner/head", HEAD, {"kind": "mtp"}, {"kind": "suffix"})]
    assert len({one.digest() for one in made}) == len(made)
    assert spec('{"model": "owner/head", "kind": "eagle3"}').digest() == spec(HEAD).digest()


def test_paths_are_relative_to_where_they_are_written(tmp_path: Path) -> None:
    (tmp_path / "specs" / "head").mkdir(parents=True)
    file = tmp_path / "specs" / "job.yaml"
    needed = "input: {uri: s3://b/in}\noutput: {uri: s3://b/out}\nverifier: o/v\n"
    file.write_text(needed + "engine: {exactness: fast}\nproposer: {kind: eagle3, model: ./head}\n")
    made = build_spec(file, {}, tmp_path)
    assert made.proposer_name == f"eagle3:{tmp_path}/specs/head"
    given = build_spec(file, {"proposer": '{"kind": "draft_model", "model": "./d"}'}, tmp_path)
    assert given.proposer_name == f"draft_model:{tmp_path}/d"
    other = spec_with(file, {"proposer": {"kind": "suffix"}}, tmp_path)
    assert other.proposer_name == "suffix", "fields of the file's object would not fit"


def test_a_worker_reads_both_forms() -> None:
    assert read_proposer("models/draft") == "models/draft"
    assert read_proposer('{"kind": "mtp"}') == VllmProposer(kind="mtp")
    with pytest.raises(UsageError, match=r"--proposer: field `kind`: must be 'eagle3'"):
        read_proposer('{"kind": "medusa"}')
