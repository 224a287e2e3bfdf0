"""Stop strings: noticed with the token that completes them, wherever tokens begin and end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from specbatch.pipeline.stages.text_stop import TextStop, text_before_stop
from support.models import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer(300)
REPLACED = "\N{REPLACEMENT CHARACTER}"


def decode(ids: Sequence[int]) -> str:
    return str(TOKENIZER.backend_tokenizer.decode(list(ids), skip_special_tokens=True))


def pieces(text: str) -> list[int]:
    return list(text.encode())


def stopped(ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> int | None:
    """How many tokens it takes."""
    watch = TextStop(decode, stop, min_tokens)
    return next((n for n, token in enumerate(ids, 1) if watch(token)), None)


def naive(ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0) -> int | None:
    """All of the text at every token, unfinished characters left out."""
    floor = 0
    for n in range(1, len(ids) + 1):
        text = decode(ids[:n]).rstrip(REPLACED)
        if n < min_tokens:
            floor = len(text)
        elif any(text.find(s, max(0, floor - len(s) + 1)) >= 0 for s in stop):
            return n
    return None


@pytest.mark.parametrize(
    ("text", "stop", "tokens", "shown"),
    [
        ("one END two", ["END"], 7, "one "),
        ("END", ["END"], 3, ""),
        ("a\n\nb", ["\n\n"], 3, "a"),
        ("tea for two", ["two", "for"], 7, "tea "),
        ("grün", ["ü"], 4, "gr"),
        ("日本語", ["本"], 6, "日"),
        ("xaab", ["aab"], 4, "x"),
        ("nothing", ["NO"], None, "nothing"),
    ],
)
def test_the_token_that_completes_the_string_is_the_last(
    text: str, stop: list[str], tokens: int | None, shown: str
) -> None:
    ids = pieces(text)
    assert stopped(ids, stop) == tokens
    kept = ids[:tokens]
    assert text_before_stop(decode, kept, decode(kept), stop) == shown


def test_a_token_may_hold_the_end_of_the_string_and_more() -> None:
    both = next(t for t in range(259, 300) if decode([t]) == "et")
    ids = [*pieces("the b"), both, *pieces("x")]
    assert stopped(ids, ["be"]) == 6
    assert text_before_stop(decode, ids[:6], decode(ids[:6]), ["be"]) == "the "


def test_tokens_without_text_change_nothing() -> None:
    ids = [*pieces("EN"), EOS, EOS, *pieces("D.")]
    assert stopped(ids, ["END"]) == 5


def test_strings_before_min_tokens_do_not_count() -> None:
    ids = pieces("a.b.c.")
    assert [stopped(ids, ["."], n) for n in (0, 2, 3, 4, 5, 6)] == [2, 2, 4, 4, 6, 6]
    assert text_before_stop(decode, ids[:4], "a.b.", ["."], 3) == "a.b"


def of_bytes() -> tuple[Tokenizer, dict[str, int]]:
    """As of Llama 2: an unfinished character takes the bytes right before it along."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)} | {"ok": 257}
    bpe = models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer, vocabulary


@pytest.mark.parametrize("least", range(7))
def test_the_text_is_cut_only_where_the_completion_stopped(least: int) -> None:
    tokenizer, vocabulary = of_bytes()
    bytes_of = [vocabulary[f"<0x{byte:02X}>"] for byte in "\n€".encode()]
    ids = [vocabulary["ok"], *bytes_of, vocabulary["ok"]]
    watch = TextStop(tokenizer.decode, ["\n"], least)
    end = next((n for n, token in enumerate(ids, 1) if watch(token)), None)
    text = tokenizer.decode(ids[:end])
    shown = text_before_stop(tokenizer.decode, ids[:end], text, ["\n"], least)
    assert (shown == text) == (end is None)


TOKENS = st.sampled_from([*pieces("aé日b"), 255, EOS, *range(259, 264)])
STOPS = st.lists(st.text("aé日bet", min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(ids=st.lists(TOKENS, max_size=60), stop=STOPS, least=st.sampled_from([0, 1, 5, 20]))
def test_any_tokens_stop_where_the_whole_text_says(
    ids: list[int], stop: list[str], least: int
) -> None:
    end = naive(ids, stop, least)
    assert stopped(ids, stop, least) == end
    shown = text_before_stop(decode, ids[:end], decode(ids[:end]), stop, least)
    assert (shown == decode(ids[:end])) == (end is None)
