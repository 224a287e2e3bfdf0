"""The tiny models are models: they load, they vary, and their tokenizers come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.models import EOS, TinyPair, byte_tokenizer, tiny_llama


def test_tiny_pair_loads_and_does_not_repeat_one_token(tiny_pair: TinyPair) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    for folder in (tiny_pair.verifier, tiny_pair.draft):
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        ids = model.generate(
            torch.tensor([[72, 105]]), max_new_tokens=48, do_sample=False, eos_token_id=None
        )
        assert len(set(ids[0, 2:].tolist())) >= 4


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    one = tiny_llama(tmp_path / "one", seed=5)
    two = tiny_llama(tmp_path / "two", seed=5)
    other = tiny_llama(tmp_path / "other", seed=6)
    weights = [(folder / "model.safetensors").read_bytes() for folder in (one, two, other)]
    assert weights[0] == weights[1] != weights[2]
    assert not (one / "tokenizer.json").exists()  # 111 ids cannot hold the bytes


def test_the_tokenizer_returns_every_text(tiny_pair: TinyPair) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_pair.verifier)
    text = "There are tete-à-têtes\n\tat 12 € — 水\x00"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert len(ids) < len(text.encode())  # some pairs merged
    assert max(ids) < 300
    assert tokenizer.eos_token_id == EOS
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "user: hi\nassistant: "


def test_plain_bytes_are_their_own_ids() -> None:
    assert byte_tokenizer()(bytes(range(128)).decode())["input_ids"] == list(range(128))
