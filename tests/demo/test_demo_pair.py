"""The shipped demo pair is what its folder says: small, loadable, honest about what it saw."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from specbatch.jobs import demo
from specbatch.tools.demo_pair.corpus import HELD_OUT, functions, held_out_files, training_files
from specbatch.tools.demo_pair.learning import load_model
from specbatch.tools.demo_pair.measure import count_accepted, greedy_matches
from specbatch.tools.demo_pair.prompts import MAX_TOKENS, MIN_TOKENS, read_prompts
from specbatch.tools.demo_pair.tokens import END_OF_TEXT, VOCAB_SIZE, load_tokenizer

DEMO = Path(demo.__file__).parent
MODELS = DEMO / "models"
PAIR = ("verifier", "draft")
MAX_BYTES = 12_000_000


@pytest.mark.parametrize("name", PAIR)
def test_model_and_tokenizer_load_with_the_auto_classes(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / name)
    tokenizer = AutoTokenizer.from_pretrained(MODELS / name)
    assert str(model.dtype) == "torch.bfloat16"
    assert model.config.vocab_size == len(tokenizer) == VOCAB_SIZE
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == END_OF_TEXT
    text = "def f(x):\n\treturn 'é' if x else None  # done\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("name", PAIR)
def test_weights_are_safetensors_only(name: str) -> None:
    files = {path.name for path in (MODELS / name).iterdir()}
    assert files == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_pair_stays_within_the_repository_s_size_limit() -> None:
    assert sum(path.stat().st_size for path in MODELS.rglob("*") if path.is_file()) <= MAX_BYTES


def test_draft_is_five_to_ten_times_smaller() -> None:
    verifier, draft = (load_model(MODELS / name, "cpu").num_parameters() for name in PAIR)
    assert 5 <= verifier / draft <= 10


def test_both_models_share_one_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (MODELS / "verifier" / name).read_bytes() == (MODELS / "draft" / name).read_bytes()


def test_chat_template_renders_messages_as_comments() -> None:
    messages = [
        {"role": "system", "content": "Be brief.\nBe kind."},
        {"role": "user", "content": "Add two numbers."},
        {"role": "assistant", "content": "def add(a, b):"},
    ]
    rendered = load_tokenizer(MODELS / "verifier").apply_chat_template(messages, tokenize=False)
    assert rendered == (
        "# system: Be brief.\n# Be kind.\n# user: Add two numbers.\ndef add(a, b):\n"
    )


def test_there_are_256_prompts_with_unique_ids() -> None:
    table = pq.read_table(DEMO / "prompts.parquet")
    assert table.column_names == ["id", "prompt", "tag"]
    identifiers = table["id"].to_pylist()
    assert len(identifiers) == len(set(identifiers)) == 256
    assert identifiers == sorted(identifiers)


def test_every_prompt_comes_from_a_held_out_module_and_has_20_to_120_tokens() -> None:
    tokenizer = load_tokenizer(MODELS / "verifier")
    for row in read_prompts(DEMO / "prompts.parquet"):
        assert row["tag"] in HELD_OUT
        assert row["id"].startswith(row["tag"] + ".")
        assert MIN_TOKENS <= len(tokenizer(row["prompt"])["input_ids"]) <= MAX_TOKENS


def test_training_reads_no_held_out_module() -> None:
    assert training_files()
    assert not set(HELD_OUT) & set(training_files())
    assert not set(held_out_files().values()) & set(training_files().values())


def test_functions_are_found_at_their_first_decorator() -> None:
    text = "x = 1\n\f\nclass A:\n    @property\n    def b(self):\n"
    text += '        """Say b.\n\n        More."""\n'
    (function,) = functions(text)
    assert (function.name, function.documented) == ("A.b", True)
    assert text[function.start :].startswith(function.head)
    assert function.head == '    @property\n    def b(self):\n        """Say b.'


def test_counting_keeps_the_matching_prefix_and_one_token_more() -> None:
    matches = [[True, True, False, True, True, True]]
    counts = count_accepted(matches, depth=4)
    # Blocks: T T F T -> 2 kept, then position 3: T T T -> 3 kept.
    assert (counts.accepted, counts.proposed, counts.steps) == (5, 7, 2)
    assert counts.emitted == 6


def test_measured_figures_reach_the_bars() -> None:
    measured = json.loads((MODELS / "measured.json").read_text(encoding="utf-8"))
    assert measured["prompts"] == 256
    assert measured["acceptance"]["depth_1"] >= 0.70
    assert measured["acceptance"]["depth_4"] >= 0.50


def test_acceptance_on_a_sample_of_prompts_reaches_one_half_at_depth_4() -> None:
    verifier, draft = (load_model(MODELS / name, "cpu") for name in PAIR)
    prompts = [row["prompt"] for row in read_prompts(DEMO / "prompts.parquet")[::8]]
    tokenizer = load_tokenizer(MODELS / "verifier")
    matches = greedy_matches(verifier, draft, tokenizer, prompts)
    assert count_accepted(matches, depth=4).rate >= 0.5
