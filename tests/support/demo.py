"""The shipped demo: its pair of models and its prompts."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[2] / "jobs" / "demo"
VERIFIER = ROOT / "models" / "verifier"
DRAFT = ROOT / "models" / "draft"
PROMPTS = ROOT / "prompts.parquet"


def prompt_ids(tokenizer: Path = VERIFIER) -> list[list[int]]:
    """The 256 prompts as token ids."""
    from specbatch.pipeline.inputs.tokenizer import TextTokenizer

    texts = pq.read_table(PROMPTS, columns=["prompt"]).column(0).to_pylist()
    return TextTokenizer.load(str(tokenizer)).encode_batch(texts)
