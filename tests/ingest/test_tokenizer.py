"""The tokenizer wrapper."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
from ingest.making import CHAT_TEMPLATE, save_tokenizer

from specbatch.pipeline.inputs import tokenizer as tokenizer_module
from specbatch.pipeline.inputs.contract import RowError
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.schemas.errors import ModelError


def test_text_comes_back(tokenizer: TextTokenizer) -> None:
    texts = ["plain", " spaces  kept ", "ünïcödé 🎈", "line\nbreak"]
    assert tokenizer.decode_batch(tokenizer.encode_batch(texts)) == texts


def test_special_tokens_come_only_when_asked_for(tokenizer: TextTokenizer) -> None:
    with_bos, without = tokenizer.encode_batch(["a"]), tokenizer.encode_batch(["a"], special=False)
    assert with_bos[0][1:] == without[0]
    assert tokenizer.decode(with_bos[0]) == "a"


def test_large_batches_are_tokenised_in_portions(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["x" * i for i in range(40)]
    whole = tokenizer.encode_batch(texts)
    monkeypatch.setattr(tokenizer_module, "_CHARS_PER_CALL", 50)
    assert tokenizer.encode_batch(texts) == whole
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.encode_batch([""], special=False) == [[]]


def test_end_tokens_come_from_tokenizer_and_generation_config(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, CHAT_TEMPLATE)
    assert TextTokenizer.load(str(folder)).eos_ids == (1,)
    (folder / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": [1, 7]}))
    assert TextTokenizer.load(str(folder)).eos_ids == (1, 7)
    (folder / "generation_config.json").write_bytes(b"[]")
    with pytest.raises(ModelError, match=r"generation_config\.json is not a JSON object"):
        TextTokenizer.load(str(folder))


@pytest.mark.parametrize(
    ("model_type", "named"),
    [
        ("llama", "LlamaTokenizer"),
        ("llama", "PreTrainedTokenizerFast"),
        ("mistral", "LlamaTokenizerFast"),
        ("qwen2", "Qwen2Tokenizer"),
        ("qwen3", "Qwen2TokenizerFast"),
        ("gemma2", "GemmaTokenizer"),
        ("gpt2", "GPT2Tokenizer"),
        ("unheard-of", "TokenizersBackend"),
        ("llama", "UnheardOfTokenizer"),
        ("deepseek_v3", "LlamaTokenizerFast"),
    ],
)
def test_a_named_class_is_loaded_as_transformers_would_without_the_models_code(
    tmp_path: Path, model_type: str, named: str
) -> None:
    from transformers import AutoTokenizer

    folder = save_tokenizer(tmp_path, CHAT_TEMPLATE)
    config = folder / "tokenizer_config.json"
    config.write_bytes(orjson.dumps(orjson.loads(config.read_bytes()) | {"tokenizer_class": named}))
    (folder / "config.json").write_bytes(orjson.dumps({"model_type": model_type}))
    light = tokenizer_module._light_config(folder)
    assert light.model_type == model_type
    loaded, theirs = (AutoTokenizer.from_pretrained(folder, config=c) for c in (light, None))
    assert type(loaded) is type(theirs)
    assert loaded.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert loaded.special_tokens_map == theirs.special_tokens_map
    assert loaded.chat_template == theirs.chat_template


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", b"not JSON"),
        ("config.json", b"[]"),
        ("config.json", b'{"model_type": 7}'),
        ("tokenizer_config.json", b"{}"),
        ("tokenizer_config.json", b'{"tokenizer_class": "X", "auto_map": {}}'),
    ],
)
def test_what_does_not_name_its_class_is_left_to_transformers(
    tmp_path: Path, file: str, content: bytes | None
) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "llama"}')
    (tmp_path / "tokenizer_config.json").write_bytes(b'{"tokenizer_class": "LlamaTokenizer"}')
    assert tokenizer_module._light_config(tmp_path) is not None
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    assert tokenizer_module._light_config(tmp_path) is None


def test_loading_a_tokenizer_imports_no_model(tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path, CHAT_TEMPLATE)
    (folder / "config.json").write_bytes(b'{"model_type": "llama"}')
    code = (
        "import sys\nfrom specbatch.pipeline.inputs.tokenizer import TextTokenizer\n"
        "TextTokenizer.load(sys.argv[1])\n"
        "print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder], capture_output=True, text=True, check=True
    )
    imported = done.stdout.split()
    assert "transformers" in imported
    assert not {"transformers.models.llama.configuration_llama", "torch._dynamo"} & set(imported)


def test_a_chat_without_template_says_so(tmp_path: Path) -> None:
    bare = TextTokenizer.load(str(save_tokenizer(tmp_path, None)))
    with pytest.raises(RowError, match="has no chat template") as caught:
        bare.render([{"role": "user", "content": "x"}], today=0.0)
    assert caught.value.code == "no_chat_template"


def test_models_that_cannot_be_loaded_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model folder /no/such/model does not exist"):
        TextTokenizer.load("/no/such/model")
    with pytest.raises(ModelError, match=rf"model {tmp_path} has no tokenizer"):
        TextTokenizer.load(str(tmp_path))


@pytest.mark.pipeline  # slow imports
def test_a_tokenizer_that_panics_fails_as_others_do(tmp_path: Path) -> None:
    """A panic in Rust is no `Exception`: the engine's thread would end, and its worker wait."""
    path = save_tokenizer(tmp_path / "model", None) / "tokenizer.json"
    said = orjson.loads(path.read_bytes())
    strip = {"type": "Strip", "content": " ", "start": 0, "stop": 1}  # panics at an empty string
    said["decoder"] = {"type": "Sequence", "decoders": [said["decoder"], strip]}
    path.write_bytes(orjson.dumps(said))
    tokenizer = TextTokenizer.load(str(path.parent))
    for failing in (tokenizer.decode, tokenizer.shown):
        with pytest.raises(ModelError, match=rf"the tokenizer of model {path.parent} fails: "):
            failing([])


def test_threads_that_load_the_first_tokenizer_at_once_all_have_it(tmp_path: Path) -> None:
    """In a process that has imported nothing, as a worker's is when its first groups come."""
    folder = save_tokenizer(tmp_path, CHAT_TEMPLATE)
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(folder)], capture_output=True, text=True, timeout=240
    )
    assert done.stdout.strip() == "8", done.stderr[-2000:]


LOADING = """
import sys
from concurrent.futures import ThreadPoolExecutor
from specbatch.pipeline.inputs.tokenizer import TextTokenizer

with ThreadPoolExecutor(8) as pool:
    print(len(list(pool.map(TextTokenizer.load, sys.argv[1:] * 8))))
"""


# --- tools ----------------------------------------------------------------------------------------
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": {"at": 1}}}
CALLS = "the tool calls of messages"
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "When?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
]
TOOL_TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
    "{% if m.content is none %}<{{ m.tool_calls[0].function.arguments.at }}>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def with_template(folder: Path, template: Any) -> TextTokenizer:
    return TextTokenizer.load(str(save_tokenizer(folder, template)))


def test_a_template_shows_tools_and_calls(tmp_path: Path) -> None:
    made = with_template(tmp_path, TOOL_TEMPLATE)
    assert made.render(ASKED, [TOOL], today=0.0) == "[now]When?<1>12:00"
    assert made.render(ASKED, today=0.0) == "When?<1>12:00"


def test_a_template_of_its_own_for_tools_is_taken(tmp_path: Path) -> None:
    both = {"default": "no tools", "tool_use": "{{ tools[0].function.name }}"}
    made = with_template(tmp_path, both)
    assert made.render(ASKED[:1], [TOOL], today=0.0) == "now"
    assert made.render(ASKED[:1], today=0.0) == "no tools"


@pytest.mark.parametrize(
    ("messages", "tools", "what"),
    [
        (ASKED[:1], [TOOL], "tools"),
        (ASKED, None, CALLS),
        *(
            ([one | {"content": one["content"] or text} for one in ASKED], None, CALLS)
            for text in ("", "ok")
        ),
    ],
    ids=["tools", "calls", "empty", "text"],
)
def test_what_a_template_does_not_show_is_refused(
    tmp_path: Path, messages: list[dict[str, Any]], tools: Any, what: str
) -> None:
    blind = with_template(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(RowError, match=f"does not show it {what}: use a model") as caught:
        blind.render(messages, tools, today=0.0)
    assert caught.value.code == "no_tool_template"
