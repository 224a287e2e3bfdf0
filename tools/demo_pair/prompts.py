"""The demo's prompts: heads of documented functions from the held-out modules.

Needs only the tokenizer, so the prompts are fixed before any model is trained.
"""

from __future__ import annotations

import argparse
from itertools import zip_longest
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerBase

from specbatch.tools.demo_pair.corpus import functions, held_out_files, read
from specbatch.tools.demo_pair.tokens import load_tokenizer

COUNT = 256
MIN_TOKENS = 20
MAX_TOKENS = 120


def held_out_prompts(tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """`COUNT` rows, taken in turn from every module so that no large module crowds the rest."""
    by_module: list[list[dict[str, str]]] = []
    seen: set[str] = set()
    for module, path in held_out_files().items():
        rows: list[dict[str, str]] = []
        for function in functions(read(path)):
            identifier = f"{module}.{function.name}"
            if not function.documented or identifier in seen:
                continue
            if MIN_TOKENS <= len(tokenizer(function.head)["input_ids"]) <= MAX_TOKENS:
                seen.add(identifier)
                rows.append({"id": identifier, "prompt": function.head, "tag": module})
        by_module.append(rows)
    in_turn = [row for turn in zip_longest(*by_module) for row in turn if row is not None]
    if len(in_turn) < COUNT:
        raise SystemExit(f"only {len(in_turn)} prompts in the held-out modules; hold out more")
    return sorted(in_turn[:COUNT], key=lambda row: row["id"])


def write_prompts(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write the rows as `id`, `prompt`, `tag`, all strings."""
    schema = pa.schema([(name, pa.string()) for name in ("id", "prompt", "tag")])
    pq.write_table(pa.Table.from_pylist(held_out_prompts(tokenizer), schema=schema), path)


def read_prompts(path: Path) -> list[dict[str, str]]:
    """The rows of a prompts file."""
    rows: list[dict[str, str]] = pq.read_table(path).to_pylist()
    return rows


def main() -> None:
    """Write the prompts file for a tokenizer."""
    here = Path(__file__).parents[2] / "jobs" / "demo"
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tokenizer", type=Path, default=here / "models" / "verifier")
    parser.add_argument("--out", type=Path, default=here / "prompts.parquet")
    options = parser.parse_args()
    write_prompts(load_tokenizer(options.tokenizer), options.out)
    print(f"{COUNT} prompts -> {options.out}")


if __name__ == "__main__":
    main()
