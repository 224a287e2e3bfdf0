"""A spec file, flags, and who wins; the shipped examples."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml

from specbatch.pipeline.operations.spec_input import build_spec
from specbatch.schemas.errors import SpecError
from specbatch.schemas.spec import JobSpec
from support.tree import ROOT

EXAMPLES = sorted((ROOT / "jobs" / "examples").glob("*.yaml"))
SPEC = """
input: {uri: in.parquet, prompt_column: text}
output: {uri: out}
verifier: ./v
sampling: {max_tokens: 10, temperature: 0.5}
"""


def spec_file(folder: Path, text: str = SPEC) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "spec.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_the_file_field_by_field(tmp_path: Path) -> None:
    flags = {"sampling.max_tokens": 20, "sampling.top_p": None, "input.prompt_column": "p"}
    spec = build_spec(spec_file(tmp_path), flags, tmp_path)
    assert (spec.sampling.max_tokens, spec.sampling.temperature) == (20, 0.5)
    assert spec.input.prompt_column == "p"


def test_paths_are_relative_to_the_file_in_it_and_to_the_folder_in_flags(tmp_path: Path) -> None:
    spec = build_spec(spec_file(tmp_path / "specs"), {"output.uri": "elsewhere"}, tmp_path)
    assert spec.input.uri == str(tmp_path / "specs" / "in.parquet")
    assert spec.verifier == str(tmp_path / "specs" / "v")
    assert spec.output.uri == str(tmp_path / "elsewhere")


def test_flags_alone_make_a_spec(tmp_path: Path) -> None:
    flags = {"input.uri": "s3://b/in", "output.uri": "out", "verifier": "o/v", "proposer": "none"}
    spec = build_spec(None, flags, tmp_path)
    assert (spec.input.uri, spec.verifier, spec.proposer) == ("s3://b/in", "o/v", None)


def test_off_means_off_although_yaml_reads_it_as_false(tmp_path: Path) -> None:
    spec = build_spec(spec_file(tmp_path, SPEC + "speculation: {depth: off}\n"), {}, tmp_path)
    assert spec.speculation.depth == "off"


def test_what_is_missing_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="verifier not given; add --verifier"):
        build_spec(None, {"input.uri": "a", "output.uri": "b"}, tmp_path)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_are_valid(path: Path) -> None:
    assert build_spec(path, {}).name == path.stem


def test_the_demo_spec_is_valid_and_names_files_that_are_there() -> None:
    spec = build_spec(ROOT / "jobs" / "demo" / "spec.yaml", {})
    assert Path(spec.input.uri).is_file()
    assert Path(spec.verifier).is_dir()
    assert Path(spec.proposer or "").is_dir()


def test_the_nightly_example_names_every_field_with_its_default() -> None:
    shown = yaml.safe_load((ROOT / "jobs" / "examples" / "nightly.yaml").read_text())
    spec = JobSpec.model_validate(shown)
    whole = spec.model_dump(mode="json")
    assert shown.keys() == whole.keys(), "the example lacks a field"
    for name, part in whole.items():
        if isinstance(part, dict):
            assert shown[name].keys() == part.keys(), f"the example lacks a field of {name}"
    least = JobSpec.model_validate(
        {"input": {"uri": "x"}, "output": {"uri": "y"}, "verifier": "z"}
    ).model_dump(mode="json")
    differs = {
        name
        for name in whole
        if whole[name] != least[name] and name not in ("name", "verifier", "proposer")
    }
    assert differs == {"input", "output"}
    assert {k for k in whole["input"] if whole["input"][k] != least["input"][k]} == {"uri"}


def test_a_digest_is_of_what_differs_from_the_defaults() -> None:
    least = {"input": {"uri": "x"}, "output": {"uri": "y"}, "verifier": "z"}
    spelled = JobSpec.model_validate(least).model_dump(mode="json")
    digest = JobSpec.model_validate(least).digest()
    assert JobSpec.model_validate(spelled).digest() == digest
    said = json.dumps(least, sort_keys=True, separators=(",", ":"))
    assert digest == hashlib.sha256(said.encode()).hexdigest(), "no field that nobody set is in it"
    for changed in ({"group_size": 8}, {"sampling": {"seed": 1}}, {"engine": {"dtype": "float32"}}):
        assert JobSpec.model_validate(least | changed).digest() != digest
