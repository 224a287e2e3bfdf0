"""One training loop for both models: Muon on the matrices, AdamW on the rest, cosine decay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

WARMUP = 0.03  # share of the run
GRADIENT_CLIP = 1.0
REPORT_EVERY = 25  # steps


@dataclass(frozen=True, slots=True)
class Plan:
    """How long one model is trained, and how fast.

    With `minutes`, the run also ends by the clock and decays towards that end; its result then
    depends on the machine's speed. Without, equal seeds on one machine repeat the run.
    """

    steps: int
    peak_rate: float
    minutes: float = math.inf
    device: str = "cpu"
    compiled: bool = True


def new_model(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model in fp32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a bf16 copy and leave the trained fp32 weights as they are."""
    copy = LlamaForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.config.dtype = torch.bfloat16
    copy.generation_config.pad_token_id = model.config.pad_token_id
    copy.save_pretrained(folder)


def load_model(folder: Path, device: str) -> LlamaForCausalLM:
    """The saved bf16 model, ready to be asked."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.to(device).eval().requires_grad_(False)


def logits_of(model: LlamaForCausalLM, tokens: Tensor) -> Tensor:
    """Next-token logits at every position, [rows, length, vocab]."""
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits


def fit(
    name: str,
    model: LlamaForCausalLM,
    loss_of: Callable[..., Tensor],  # a batch's tensors -> mean loss
    draw: Callable[[], tuple[Tensor, ...]],  # a batch; its first tensor: [rows, length + 1] tokens
    plan: Plan,
) -> None:
    """Minimise `loss_of` over the drawn batches, printing as it goes."""
    model.to(plan.device).train()
    objective = torch.compile(loss_of) if plan.compiled else loss_of
    optimizers = _optimizers(model, plan.peak_rate)
    began, reported, progress, step, mean = time.monotonic(), time.monotonic(), 0.0, 0, 0.0
    while progress < 1.0:
        rate = plan.peak_rate * _schedule(progress)
        batch = [tensor.to(plan.device) for tensor in draw()]
        with torch.autocast(torch.device(plan.device).type, dtype=torch.bfloat16):
            loss = objective(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_CLIP)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        mean += loss.item() / REPORT_EVERY
        now = time.monotonic()
        progress = max(step / plan.steps, (now - began) / 60 / plan.minutes)
        if step % REPORT_EVERY == 0:
            speed = REPORT_EVERY * batch[0][:, 1:].numel() / (now - reported)
            print(
                f"{name}: step {step} ({progress:.0%}), loss {mean:.3f}, {speed:,.0f} tokens/s",
                flush=True,
            )
            reported, mean = now, 0.0
    model.eval()


def _schedule(progress: float) -> float:
    """Linear warm-up, then a cosine down to a twentieth."""
    if progress < WARMUP:
        return (progress + 1e-3) / (WARMUP + 1e-3)
    decay = (progress - WARMUP) / (1 - WARMUP)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * decay))


def _optimizers(model: LlamaForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon orthogonalises updates of matrices; embeddings and norms are not such matrices."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]
