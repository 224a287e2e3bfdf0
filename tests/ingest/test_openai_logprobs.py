"""What tokens read in `output.jsonl`: what they add to a text, by the tokenizers there are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from specbatch.pipeline.outputs.openai import Decode, token_texts


def decode_of(vocab: Sequence[str], decoder: decoders.Decoder, special: Sequence[str]) -> Decode:
    """As `TextTokenizer.decode` does it; a token's id is its place in `vocab`."""
    model = models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(list(special))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


SENTENCE_PIECE = {
    "</s>": "",
    "▁the": " the",
    "re": "re",
    "▁": " ",
    "▁▁": "  ",
    "<0x0A>": "\n",
    "<0xC3>": "\N{REPLACEMENT CHARACTER}",
    "é": "é",
}


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ],
    ids=["Llama's", "Metaspace"],
)
def test_a_token_keeps_the_space_before_it(decoder: decoders.Decoder) -> None:
    vocab = list(SENTENCE_PIECE)
    decode = decode_of(vocab, decoder, ["</s>"])
    texts = token_texts(decode)
    found = [texts(token) for token in range(len(vocab))]
    assert {name: one["token"] for name, one in zip(vocab, found, strict=True)} == SENTENCE_PIECE
    without = [name for name, one in zip(vocab, found, strict=True) if one["bytes"] is None]
    assert without == ["</s>", "<0xC3>"]
    assert bytes(found[1]["bytes"]) == b" the"
    ids = [2, 1, 3, 1, 2]
    assert "".join(texts(token)["token"] for token in ids) == decode(ids)


def test_tokens_of_bytes_read_what_they_read_alone() -> None:
    """Also parts of characters, which would read otherwise beside one another."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    parts = ["Ġa", "Ã©", "©aÃ", "©Ã", "Ãa", "âĤ", "Ĥâ", "</s>"]  # bytes as their printable symbols
    vocab = [*alphabet, *parts]
    decode = decode_of(vocab, decoders.ByteLevel(), ["</s>"])
    texts = token_texts(decode)
    for token in range(len(vocab)):
        assert texts(token)["token"] == decode([token])
    space_a, e_acute, *broken, end = (texts(len(alphabet) + i) for i in range(len(parts)))
    assert space_a == {"token": " a", "bytes": [32, 97]}
    assert e_acute == {"token": "é", "bytes": [0xC3, 0xA9]}
    assert [one["bytes"] for one in broken] == [None] * 5
    assert end == {"token": "", "bytes": None}
