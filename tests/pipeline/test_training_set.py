"""A corrections file is all a draft model needs: read with pyarrow, learned from with torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from ledger.builders import JOB
from torch.nn import functional

from specbatch.pipeline.operations.export import Exporter
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.exports import ExportKind, ExportOrder
from support.databases import sqlite_store
from support.exported import exported_job
from support.models import TinyPair

STEPS = 12


def load(path: Path) -> dict[str, torch.Tensor]:
    """Padded tensors of a file. Nothing else is known here: no job, no store, no tokenizer."""
    rows = pq.read_table(path).to_pylist()
    longest = max(len(row["prompt_ids"]) + len(row["token_ids"]) for row in rows)
    shape = (len(rows), longest)
    tokens = torch.zeros(shape, dtype=torch.long)
    weights, said = torch.zeros(shape), torch.full(shape, -1)
    for place, row in enumerate(rows):
        start = len(row["prompt_ids"])
        ids = [*row["prompt_ids"], *row["token_ids"]]
        tokens[place, : len(ids)] = torch.tensor(ids)
        weights[place, start : len(ids)] = torch.tensor(row["weights"])
        positions = torch.tensor(row["rejected_positions"], dtype=torch.long)
        said[place, start + positions] = torch.tensor(row["rejected_tokens"])
    return {"tokens": tokens, "weights": weights, "said": said}


def weighted_loss(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of the verifier's tokens; prompts and padding weigh nothing."""
    logits = model(input_ids=batch["tokens"][:, :-1], use_cache=False).logits
    wanted, weights = batch["tokens"][:, 1:], batch["weights"][:, 1:]
    each = functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
    return (each * weights).sum() / weights.sum()


def test_a_draft_model_learns_from_the_file_alone(tmp_path: Path, tiny_pair: TinyPair) -> None:
    from transformers import LlamaForCausalLM

    made = exported_job(sqlite_store(), tmp_path / "work")
    path = tmp_path / "corrections.parquet"
    order = ExportOrder(ExportKind.CORRECTIONS, str(path))
    Exporter(made.store, Objects(), Objects()).export(JOB, order)
    path = path.rename(tmp_path / "elsewhere.parquet")  # as if it were all that is left

    draft: Any = LlamaForCausalLM.from_pretrained(tiny_pair.draft, dtype=torch.float32)
    batch = load(path)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    losses = []
    for _ in range(STEPS):
        loss = weighted_loss(draft, batch)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[1] < losses[0]  # one step is enough to get better …
    assert losses[-1] < 0.8 * losses[0]  # … and more steps get further


def test_what_the_draft_said_stands_beside_what_it_should_have(tmp_path: Path) -> None:
    made = exported_job(sqlite_store(), tmp_path / "work")
    path = tmp_path / "corrections.parquet"
    Exporter(made.store, Objects(), Objects()).export(
        JOB, ExportOrder(ExportKind.CORRECTIONS, str(path))
    )
    batch = load(path)
    wrong = batch["said"] >= 0
    refused = [token for c in made.completions for token in c.provenance.rejected]
    assert batch["said"][wrong].tolist() == refused
    assert (batch["weights"][wrong] >= 1).all()
