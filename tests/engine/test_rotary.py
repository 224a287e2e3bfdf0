"""Rotary tables are those of transformers, to the last bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specbatch.pipeline.engines.exact.model import rotary

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        YARN,
        YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
        YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
        YARN | {"attention_factor": 1.25},
    ],
    ids=lambda rope: "-".join(str(v) for v in rope.values()),
)
@pytest.mark.parametrize(("theta", "head_dim"), [(10_000.0, 32), (500_000.0, 128)])
def test_the_tables_are_those_of_transformers(
    rope: dict[str, Any], theta: float, head_dim: int
) -> None:
    rope = rope | {"rope_theta": theta}
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters=rope,
    )
    positions = torch.arange(2048)[None]
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    found = rotary.tables(config.rope_parameters, head_dim, 2048, 2048)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == (2048, head_dim)
        # An angle of 2,047 has a last bit worth 1.2e-4.
        torch.testing.assert_close(ours, theirs[0], rtol=0, atol=3e-4)
        torch.testing.assert_close(ours[:16], theirs[0, :16], rtol=1e-5, atol=1e-6)
