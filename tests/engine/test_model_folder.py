"""Which models are refused, and in which words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from specbatch.pipeline.engines.models.model_folder import (
    check_architecture,
    check_folder,
    check_pair,
    end_tokens,
    inspect_model,
    read_config,
)
from specbatch.schemas.errors import ModelError
from support.models import TinyPair, tiny_llama


@pytest.fixture
def folder(tiny_pair: TinyPair, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(tiny_pair.verifier, tmp_path / "model")


def edit(
    folder: Path, change: Callable[[dict[str, Any]], object], name: str = "config.json"
) -> None:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def refusal(ref: Path | str) -> str:
    with pytest.raises(ModelError) as caught:
        inspect_model(str(ref))
    return str(caught.value)


@pytest.mark.parametrize("closed", ["config.json", "."])
def test_a_folder_that_may_not_be_read_is_refused_in_words(
    folder: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """Root may read everything, so the system is spoken for."""

    def refuse(path: Path, *_: object, **__: object) -> NoReturn:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir" if closed == "." else "read_text", refuse)
    what = "model folder" if closed == "." else f"{closed} of model"
    with pytest.raises(ModelError) as caught:
        check_folder(str(folder))
    assert str(caught.value) == f"{what} `{folder}` cannot be read: permission denied"
    assert refusal(folder) == str(caught.value)


def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    """Else a worker could be made to read, and to serve, any file that it can."""
    for name in ("model.safetensors", "generation_config.json"):
        moved = (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(moved)
        assert refusal(folder) == (
            f"model `{folder}` has the file {name}, which is a link out of its folder: copy what "
            "it points to into the folder"
        )
        (folder / name).unlink()
        moved.rename(folder / name)


def test_links_inside_the_folder_and_of_the_hub_s_cache_are_followed(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "model.safetensors").rename(folder / "weights")
    (folder / "model.safetensors").symlink_to("weights")
    inspect_model(str(folder))
    repository = tmp_path / "models--owner--name"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots").mkdir()
    snapshot = folder.rename(repository / "snapshots" / "0123abcd")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "weights").rename(repository / "blobs" / "sha")
    (snapshot / "model.safetensors").symlink_to("../../blobs/sha")
    inspect_model(str(snapshot))
    (snapshot / "model.safetensors").unlink()
    (repository / "elsewhere").write_bytes(b"")
    (snapshot / "model.safetensors").symlink_to("../../elsewhere")
    assert "which is a link out of its folder" in refusal(snapshot)


@pytest.mark.parametrize(
    "named", ["pytorch_model.bin", "../model.safetensors", "/etc/passwd", "more.safetensors"]
)
def test_an_index_that_names_other_files(folder: Path, named: str) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": named}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(folder) == (
        f"model.safetensors.index.json of model `{folder}` names {named}, which is not a "
        "safetensors file of its folder: save the model again"
    )
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "cannot be read (TypeError): save it again" in refusal(folder)


def test_an_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "somebody/else"}')
    assert refusal(folder) == (
        f"model `{folder}` is an adapter (adapter_config.json): merge it into its base model and "
        "save that"
    )


def test_weights_are_read_as_safetensors_even_where_pickles_lie_beside_them(folder: Path) -> None:
    """A pickle that would leave a trace if anybody unpickled it."""
    from specbatch.pipeline.engines.exact.model.loader import load_model

    trace = folder / "trace"
    evil = f"cposix\nsystem\n(S'touch {trace}'\ntR.".encode()
    for name in ("pytorch_model.bin", "model.pt", "training_args.bin"):
        (folder / name).write_bytes(evil)
    (folder / "modeling.py").write_text(f"open({str(trace)!r}, 'w')")
    load_model(inspect_model(str(folder)))
    assert not trace.exists()


def test_a_tokenizer_with_code_of_its_own_is_loaded_without_it(folder: Path) -> None:
    from specbatch.pipeline.inputs.tokenizer import TextTokenizer

    trace = folder / "trace"
    (folder / "tokens.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass")
    edit(
        folder,
        lambda c: c.update(auto_map={"AutoTokenizer": ["tokens.Evil", None]}),
        "tokenizer_config.json",
    )
    TextTokenizer.load(str(folder))
    assert not trace.exists()


def test_a_good_folder_is_described(tiny_pair: TinyPair) -> None:
    found = inspect_model(str(tiny_pair.verifier))
    assert (found.ref, found.path) == (str(tiny_pair.verifier), tiny_pair.verifier)
    assert (found.model_type, found.vocab_size, found.context_tokens) == ("llama", 300, 2048)
    check_pair(found, inspect_model(str(tiny_pair.draft)))


@pytest.mark.parametrize("ref", ["/no/such/folder", "./missing", "~/missing", "missing", "a/b/c"])
def test_a_missing_folder(ref: str) -> None:
    assert refusal(ref) == (
        f"model folder `{ref}` does not exist: give a folder or a hub id owner/name[@revision]"
    )


def test_a_hub_id_that_is_not_to_be_had() -> None:
    name = "nobody-at-all/nothing-at-all"
    assert refusal(name).startswith(
        f"model `{name}` is neither a local folder nor available from the hub ("
    )


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        f"model folder `{tmp_path}` has no config.json: is it a model folder?"
    )


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe"], ids=["cut", "not text"])
def test_a_config_that_is_no_json(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert refusal(folder).startswith(f"config.json of model `{folder}` cannot be read: ")


@pytest.mark.parametrize("content", ["[]", "{}", "null"])
def test_a_config_of_something_else(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert refusal(folder) == (
        f"config.json of model `{folder}` names no vocab_size: is it a text model?"
    )


def test_code_from_the_model_s_repository(folder: Path) -> None:
    edit(folder, lambda c: c.update(auto_map={"AutoModelForCausalLM": "modeling.Evil"}))
    assert refusal(folder) == (
        f"model `{folder}` needs code from its own repository (trust_remote_code), which is "
        "refused: use a model that transformers supports itself"
    )


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ([], "no weights"),
        (["pytorch_model.bin"], "only pickle weights (pytorch_model.bin)"),
        (["b.pt", "a.pth", "c.pkl", "d.txt"], "only pickle weights (a.pth, b.pt, c.pkl)"),
    ],
)
def test_weights_that_are_not_safetensors(folder: Path, files: list[str], reason: str) -> None:
    (folder / "model.safetensors").unlink()
    for name in files:
        (folder / name).write_bytes(b"\x80\x04.")
    assert refusal(folder) == f"model `{folder}` has {reason}: save it as safetensors"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": "rwkv"}, "rwkv"),
        ({"model_type": "qwen3_next"}, "qwen3_next"),
        ({"model_type": "gemma3"}, "gemma3"),
    ],
)
def test_engine_exact_refuses_architectures_that_were_not_tested(
    folder: Path, change: dict[str, Any], named: str
) -> None:
    edit(folder, lambda c: c.update(change))
    with pytest.raises(ModelError) as raised:
        check_architecture(inspect_model(str(folder)), may_be_vllm=True)
    assert str(raised.value) == (
        f"model `{folder}` has architecture `{named}`, which is not supported by engine exact: "
        "use one of gemma2, gemma3_text, gpt2, gpt_neox, llama, mistral, mixtral, olmo2, phi3, "
        "qwen2, qwen3, qwen3_moe; or engine vllm, with `exactness: fast`"
    )


@pytest.mark.parametrize("named", ["t5", "llama"])
def test_models_with_an_encoder_are_refused(folder: Path, named: str) -> None:
    edit(folder, lambda c: c.update(model_type=named, is_encoder_decoder=True))
    assert f"has an encoder (architecture `{named}`), which is not supported" in refusal(folder)


def test_an_architecture_that_is_not_named(folder: Path) -> None:
    edit(folder, lambda c: c.pop("model_type"))
    with pytest.raises(ModelError, match=r"has architecture `\?`, which is not supported"):
        check_architecture(inspect_model(str(folder)))


def test_the_text_part_of_a_larger_model_counts(folder: Path) -> None:
    whole = inspect_model(str(folder))

    def nest(config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config.update(model_type="gemma3", text_config=text)

    edit(folder, nest)
    found = inspect_model(str(folder))
    assert found.model_type == "gemma3"
    assert (found.vocab_size, found.context_tokens) == (whole.vocab_size, whole.context_tokens)


def test_a_model_that_attends_in_both_directions(folder: Path) -> None:
    edit(folder, lambda c: c.update(use_bidirectional_attention=True))
    assert refusal(folder) == (
        f"model `{folder}` attends in both directions (use_bidirectional_attention), so it cannot "
        "write token by token: use a causal model"
    )


def positions(names: dict[str, Any], rope: dict[str, Any] | None = None) -> Callable[[Any], None]:
    """Gives a config these entries about positions and no other."""

    def change(config: dict[str, Any]) -> None:
        for name in ("max_position_embeddings", "rope_parameters", "rope_scaling"):
            config.pop(name, None)
        config.update(names, **({} if rope is None else {"rope_parameters": rope}))

    return change


@pytest.mark.parametrize(
    ("change", "tokens"),
    [
        (positions({"n_positions": 1024}), 1024),
        (positions({"max_position_embeddings": 640}), 640),
        (positions({"max_position_embeddings": 640}, {"rope_type": "dynamic", "factor": 4}), 640),
        (
            positions(
                {"max_position_embeddings": 640},
                {"rope_type": "longrope", "original_max_position_embeddings": 160},
            ),
            160,
        ),
        (
            positions(
                {
                    "max_position_embeddings": 640,
                    "original_max_position_embeddings": 160,
                    "rope_scaling": {"type": "su"},
                }
            ),
            160,
        ),
    ],
    ids=["learned", "rotary", "dynamic", "longrope", "older longrope"],
)
def test_the_context_ends_where_positions_would_depend_on_the_length(
    folder: Path, change: Callable[[Any], None], tokens: int
) -> None:
    edit(folder, change)
    assert inspect_model(str(folder)).context_tokens == tokens


def test_two_vocabularies(tiny_pair: TinyPair, tmp_path: Path) -> None:
    other = inspect_model(str(tiny_llama(tmp_path / "other", vocab_size=280)))
    mine = inspect_model(str(tiny_pair.verifier))
    with pytest.raises(ModelError) as caught:
        check_pair(mine, other)
    assert str(caught.value) == (
        f"verifier `{mine.ref}` has 300 tokens and proposer `{other.ref}` has 280: "
        "they must share one vocabulary"
    )


def test_the_same_number_of_other_tokens(tiny_pair: TinyPair, folder: Path) -> None:
    def swap(tokenizer: dict[str, Any]) -> None:
        vocab = tokenizer["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    edit(folder, swap, "tokenizer.json")
    mine, other = inspect_model(str(tiny_pair.verifier)), inspect_model(str(folder))
    with pytest.raises(ModelError) as caught:
        check_pair(mine, other)
    assert str(caught.value) == (
        f"verifier `{mine.ref}` and proposer `{other.ref}` give different meanings to the same "
        "token ids: use a proposer trained with the verifier's tokenizer"
    )


def test_without_tokenizers_the_number_of_tokens_decides(tmp_path: Path) -> None:
    one, two = (inspect_model(str(tiny_llama(tmp_path / str(i), seed=i))) for i in range(2))
    check_pair(one, two)


def test_the_fingerprint_is_of_config_and_weights_alone(folder: Path, tmp_path: Path) -> None:
    before = inspect_model(str(folder)).fingerprint
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    (moved / "README.md").write_text("words")
    assert inspect_model(str(moved)).fingerprint == before
    edit(moved, lambda c: c.update(rope_theta=5e5))
    config = inspect_model(str(moved)).fingerprint
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    assert len({before, config, inspect_model(str(folder)).fingerprint}) == 3


def test_end_tokens_are_those_of_the_generation_config_or_else_of_the_models(
    tmp_path: Path,
) -> None:
    def found() -> frozenset[int]:
        config = read_config("model", tmp_path)  # where a text part's values count, too
        return end_tokens(tmp_path, config.get("eos_token_id"))

    config, generation = tmp_path / "config.json", tmp_path / "generation_config.json"
    config.write_text('{"vocab_size": 9}')
    assert found() == frozenset()
    config.write_text('{"vocab_size": 9, "eos_token_id": 7}')
    assert found() == {7}
    config.write_text('{"text_config": {"vocab_size": 9, "eos_token_id": 8}}')
    assert found() == {8}
    generation.write_text('{"temperature": 0.5}')
    assert found() == {8}
    generation.write_text('{"eos_token_id": [7, 9]}')
    assert found() == {7, 9}
