"""Prompts of a benchmark: the texts of a Parquet column as token ids of a model."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specbatch.jobs.bench.models import demo_model
from specbatch.jobs.bench.plan import Plan
from specbatch.pipeline.inputs.tokenizer import TextTokenizer
from specbatch.schemas.errors import InputError

DEMO_PROMPTS = Path(__file__).parents[1] / "demo" / "prompts.parquet"


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Token ids per prompt, and their source."""

    ids: list[list[int]]
    facts: dict[str, Any]


def read_prompts(plan: Plan, folder: Path) -> PromptSet:
    """As many prompts as the largest N, for the model in `folder`. Raises `InputError`.

    A model without a tokenizer of its own gets the ids of the demo's.
    """
    path, wanted = plan.prompts or DEMO_PROMPTS, max(plan.counts)
    texts = [text for text in _column(path, plan.prompt_column) if text and text.strip()]
    if len(texts) < wanted:
        raise InputError(
            f"{path} has {len(texts)} prompts and --n asks for {wanted}: name a larger file or a "
            "smaller --n"
        )
    own = (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file()
    tokenizer = TextTokenizer.load(str(folder if own else demo_model().folder))
    ids = [prompt[: plan.prompt_tokens] for prompt in tokenizer.encode_batch(texts[:wanted])]
    lengths = [len(prompt) for prompt in ids]
    facts = {
        "source": plan.prompts.name if plan.prompts else "demo",
        "column": plan.prompt_column,
        "tokenizer": "the model's" if own else "the demo's",
        "prompts": len(ids),
        "tokens": {
            "least": min(lengths),
            "mean": round(statistics.mean(lengths), 1),
            "most": max(lengths),
        },
    }
    return PromptSet(ids, facts)


def _column(path: Path, name: str) -> list[str | None]:
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError:
        raise InputError(f"prompts {path} do not exist: name a Parquet file") from None
    except (pa.ArrowInvalid, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path} cannot be read as Parquet ({reason}): name another") from None
    with file:
        if name not in file.schema_arrow.names:
            raise InputError(
                f"{path} has no column `{name}`; its columns are "
                f"{', '.join(file.schema_arrow.names)}: choose with --prompt-column"
            )
        kind = file.schema_arrow.field(name).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise InputError(
                f"column `{name}` of {path} is {kind}, not text: choose with --prompt-column"
            )
        texts: list[str | None] = file.read(columns=[name]).column(0).to_pylist()
        return texts
