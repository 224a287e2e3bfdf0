"""Measure the demo pair: acceptance on the held-out prompts, losses on the held-out text.

While a proposal still matches, the draft's context *is* the verifier's text; so whether the j-th
proposed token matches can be read off one teacher-forced pass of the draft over the verifier's
greedy continuation. The counts are those of real drafting, at the price of one forward pass.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from specbatch.tools.demo_pair.batches import held_out_windows
from specbatch.tools.demo_pair.learning import load_model, logits_of
from specbatch.tools.demo_pair.prompts import read_prompts
from specbatch.tools.demo_pair.tokens import load_tokenizer

NEW_TOKENS = 64
DEPTHS = (1, 4)
_BATCH = 64
_LOSS_WINDOWS = 128  # spread over the held-out text; all of it would take minutes


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of one depth over all prompts."""

    accepted: int
    proposed: int
    emitted: int  # tokens, the verifier's own among them
    steps: int  # verifier passes

    @property
    def rate(self) -> float:
        """Accepted per proposed token."""
        return self.accepted / self.proposed

    @property
    def tokens_per_step(self) -> float:
        """What one verifier pass yields; 1 without drafting."""
        return self.emitted / self.steps


def count_accepted(matches: list[list[bool]], depth: int) -> Acceptance:
    """Draft `depth` tokens, keep the matching prefix and one token of the verifier; again."""
    accepted = proposed = steps = 0
    for row in matches:
        position = 0
        while position < len(row):
            block = row[position : position + depth]
            kept = block.index(False) if False in block else len(block)
            proposed, accepted, steps = proposed + len(block), accepted + kept, steps + 1
            position += kept + 1
    return Acceptance(accepted, proposed, sum(map(len, matches)), steps)


@torch.inference_mode()
def greedy_matches(
    verifier: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    new_tokens: int = NEW_TOKENS,
) -> list[list[bool]]:
    """Per prompt and greedy verifier token: does the draft, given all before it, say the same?

    A continuation ends with its end-of-text token, so rows may be shorter than `new_tokens`.
    """
    end = tokenizer.eos_token_id
    matches: list[list[bool]] = []
    for start in range(0, len(prompts), _BATCH):
        batch = tokenizer(prompts[start : start + _BATCH], padding=True, return_tensors="pt")
        batch = batch.to(verifier.device)
        tokens: Tensor = verifier.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        written = tokens.shape[1] - batch["input_ids"].shape[1]
        mask = functional.pad(batch["attention_mask"], (0, written - 1), value=1)
        logits = draft(
            input_ids=tokens[:, :-1],
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
            use_cache=False,
        ).logits
        wanted = tokens[:, -written:]
        same = logits[:, -written:].argmax(-1) == wanted
        for row_same, row_wanted in zip(same.tolist(), wanted.tolist(), strict=True):
            length = row_wanted.index(end) + 1 if end in row_wanted else written
            matches.append(row_same[:length])
    return matches


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, windows: Tensor) -> float:
    """Mean cross-entropy in nats per token over [num_windows, length + 1] tokens."""
    total = 0.0
    for batch in windows.split(16):
        tokens = batch.to(model.device)
        logits = logits_of(model, tokens[:, :-1]).float()
        total += functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        ).item()
    return total / windows[:, 1:].numel()


def measure(models: Path, prompts_path: Path, device: str) -> dict[str, object]:
    """Everything `measured.json` says; nothing in it names the machine."""
    tokenizer = load_tokenizer(models / "verifier")
    pair = {name: load_model(models / name, device) for name in ("verifier", "draft")}
    prompts = [row["prompt"] for row in read_prompts(prompts_path)]
    matches = greedy_matches(pair["verifier"], pair["draft"], tokenizer, prompts)
    counts = {depth: count_accepted(matches, depth) for depth in DEPTHS}
    windows = held_out_windows(tokenizer)
    windows = windows[:: max(1, len(windows) // _LOSS_WINDOWS)]
    return {
        "prompts": len(prompts),
        "new_tokens": NEW_TOKENS,
        "acceptance": {f"depth_{depth}": round(c.rate, 4) for depth, c in counts.items()},
        "tokens_per_step": {
            f"depth_{depth}": round(c.tokens_per_step, 3) for depth, c in counts.items()
        },
        "held_out_loss": {
            name: round(held_out_loss(model, windows), 4) for name, model in pair.items()
        },
        "parameters": {name: model.num_parameters() for name, model in pair.items()},
        "bytes": {
            name: sum(file.stat().st_size for file in (models / name).iterdir()) for name in pair
        },
        "torch": torch.__version__.split("+")[0],
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    """Print the figures and write them to `measured.json` beside the models."""
    here = Path(__file__).parents[2] / "jobs" / "demo"
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", type=Path, default=here / "models")
    parser.add_argument("--prompts", type=Path, default=here / "prompts.parquet")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    text = json.dumps(measure(options.models, options.prompts, options.device), indent=2)
    print(text)
    (options.models / "measured.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
