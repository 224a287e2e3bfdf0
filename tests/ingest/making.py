"""Makes test inputs: specs, Parquet files, completions and a tiny real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specbatch.schemas.records import CompletionRecord, FinishReason
from specbatch.schemas.spec import JobSpec, load_spec

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('this template has no tool turns') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_tokenizer(folder: Path, chat_template: str | dict[str, str] | None) -> Path:
    """A byte-level tokenizer: one token per byte, `<s>` before text, `</s>` as the end."""
    specials = ["<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(specials + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(specials)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = chat_template
    fast.save_pretrained(folder)
    return folder


def make_spec(uri: str | Path, **values: Any) -> JobSpec:
    """A job over `uri`; keywords are spec fields, `input` may add to the input part."""
    values["input"] = {"uri": str(uri)} | values.get("input", {})
    return load_spec({"output": {"uri": "/out"}, "verifier": "m"} | values)


def write_parquet(path: Path, table: pa.Table | dict[str, Any], rows_per_group: int = 100) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = table if isinstance(table, pa.Table) else pa.table(table)
    pq.write_table(made, path, row_group_size=rows_per_group, write_page_checksum=True)
    return path


def completion(row: int, sample: int = 0, **values: Any) -> CompletionRecord:
    base: dict[str, Any] = {
        "row_index": row,
        "sample_index": sample,
        "row_id": f"r{row}",
        "tag": None,
        "seed": 2**63 - 1 - row,
        "prompt_tokens": 3,
        "token_ids": (5, 6, row),
        "text": f"text {row}/{sample}",
        "finish_reason": FinishReason.STOP,
        "origins": (0, 1, 3),
        "logprobs": (-0.1, -2.5, 0.0),
        "proposed": 4,
        "accepted": 1,
        "verifier_passes": 2,
        "cost_usd": 0.25,
        "verifier": "big",
        "proposer": "small",
    }
    return CompletionRecord(**base | values)
