"""Teach the draft to say what the verifier would say.

After a prompt the verifier runs on its own output, so its own writing is what a proposal has to
match and what the draft mostly learns from. Part of each rollout is sampled, so that the greedy
rest starts from text that the verifier does not know by heart. What the verifier thought at each
position is kept from the rollout itself (its few likeliest tokens), which makes the draft's
training free of verifier passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from specbatch.tools.demo_pair.batches import Windows
from specbatch.tools.demo_pair.learning import Plan, fit, logits_of

LENGTH = 192  # tokens of one distillation window
LIKELIEST = 16  # tokens kept of the verifier's distribution
ARGMAX_WEIGHT = 0.5
TEXT_SHARE = 0.125
SAMPLED_STEPS = (0, 8, 24, 48, LENGTH)  # how long a rollout samples before it turns greedy
SHORTEST_PROMPT, LONGEST_PROMPT = 8, 96  # tokens


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The verifier's continuations of training text, with its distribution at each position."""

    tokens: Tensor  # [rows, LENGTH + 1] int16
    likeliest: Tensor  # [rows, LENGTH, LIKELIEST] int16: next-token ids, likeliest first
    weights: Tensor  # [rows, LENGTH, LIKELIEST] fp16: their probabilities, adding up to 1

    def save(self, path: Path) -> None:
        """Keep them for a further try at the draft."""
        torch.save((self.tokens, self.likeliest, self.weights), path)

    @classmethod
    def load(cls, path: Path) -> Rollouts:
        """What `save` wrote."""
        return cls(*torch.load(path))


def text_loss(model: LlamaForCausalLM) -> Callable[[Tensor], Tensor]:
    """Cross-entropy on the text itself."""

    def loss_of(tokens: Tensor) -> Tensor:
        logits = logits_of(model, tokens[:, :-1]).float()
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss_of


def distillation_loss(draft: LlamaForCausalLM) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """KL(verifier || draft) up to a constant, plus cross-entropy on the verifier's argmax.

    The first serves sampled requests, the second greedy ones, where only the first rank counts.
    """

    def loss_of(tokens: Tensor, likeliest: Tensor, weights: Tensor) -> Tensor:
        log_given = functional.log_softmax(logits_of(draft, tokens[:, :-1]).float(), dim=-1)
        log_likeliest = log_given.gather(-1, likeliest)
        divergence = -(weights * log_likeliest).sum(-1).mean()
        return divergence - ARGMAX_WEIGHT * log_likeliest[..., 0].mean()

    return loss_of


@torch.inference_mode()
def write_rollouts(
    verifier: LlamaForCausalLM, windows: Windows, batches: int, rows: int, seed: int
) -> Rollouts:
    """Let the verifier continue `batches * rows` beginnings of training windows."""
    generator = torch.Generator().manual_seed(seed)
    switch_steps = torch.tensor(SAMPLED_STEPS)[torch.arange(rows) % len(SAMPLED_STEPS)]
    written: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in range(batches):
        length = int(torch.randint(SHORTEST_PROMPT, LONGEST_PROMPT, (), generator=generator))
        prompts = windows.draw(rows, length - 1, generator)
        switch = switch_steps[torch.randperm(rows, generator=generator)]
        written.append(_continue(verifier, prompts, switch, generator))
        print(f"rollouts: {batch + 1} of {batches} batches of {rows}", flush=True)
    tokens, likeliest, weights = (torch.cat(parts) for parts in zip(*written, strict=True))
    return Rollouts(tokens.clone(), likeliest.clone(), weights.clone())


class _BufferedLayer(DynamicLayer):  # type: ignore[misc]  # transformers publishes no type
    """Keys and values in a buffer of `LENGTH`: to append does not copy all that came before."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        start = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            rows, heads, _, size = key_states.shape
            self.buffers = key_states.new_empty(2, rows, heads, LENGTH, size)
        end = start + key_states.shape[-2]
        self.buffers[0, :, :, start:end] = key_states
        self.buffers[1, :, :, start:end] = value_states
        self.keys, self.values = self.buffers[:, :, :, :end]
        return self.keys, self.values


def _continue(
    verifier: LlamaForCausalLM,
    prompts: Tensor,  # [rows, prompt length]
    switch: Tensor,  # [rows]: the step at which a row turns greedy
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor]:
    device = verifier.device
    fed = tokens = prompts.to(device)
    layers: int = verifier.config.num_hidden_layers
    cache = Cache(layers=[_BufferedLayer() for _ in range(layers)])
    likeliest: list[Tensor] = []
    weights: list[Tensor] = []
    step = 0
    while tokens.shape[1] <= LENGTH:
        logits = verifier(input_ids=fed, past_key_values=cache, use_cache=True).logits.float()
        top = logits.topk(LIKELIEST, dim=-1)
        likeliest.append(top.indices.to("cpu", torch.int16))
        weights.append(top.values.softmax(-1).to("cpu", torch.float16))
        chosen = logits[:, -1]
        sampling = switch > step
        if sampling.any():  # Gumbel noise makes an argmax a sample
            noise = torch.empty(chosen.shape).exponential_(generator=generator).log_()
            chosen = chosen - (noise * sampling[:, None]).to(device)
        fed = chosen.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, fed], dim=1)
        step += 1
    return tokens.to("cpu", torch.int16), torch.cat(likeliest, 1), torch.cat(weights, 1)


def distill(
    draft: LlamaForCausalLM,
    windows: Windows,
    rollouts: Rollouts,
    rows: int,
    plan: Plan,
    seed: int,
) -> None:
    """Train the draft on rollouts mixed with a little text, which keeps it honest elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    from_text = int(rows * TEXT_SHARE)
    certain = torch.zeros(from_text, LENGTH, LIKELIEST)
    certain[..., 0] = 1.0

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        picks = torch.randint(len(rollouts.tokens), (rows - from_text,), generator=generator)
        text = windows.draw(from_text, LENGTH, generator)
        text_targets = text[:, 1:, None].expand(-1, -1, LIKELIEST)
        return (
            torch.cat([rollouts.tokens[picks].long(), text]),
            torch.cat([rollouts.likeliest[picks].long(), text_targets]),
            torch.cat([rollouts.weights[picks].float(), certain]),
        )

    fit("draft", draft, distillation_loss(draft), draw, plan)
