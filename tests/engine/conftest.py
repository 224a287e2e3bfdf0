"""The engine's tests run on two pairs: one takes the torch path, one the native pass."""

from __future__ import annotations

import pytest

from support.models import TinyPair, tiny_llama


@pytest.fixture(scope="session", params=["torch", "native"])
def tiny_pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """Random models with one 300-token vocabulary; the native pass wants heads of 32 or more."""
    folder = tmp_path_factory.mktemp(f"{request.param}-pair")
    hidden, heads, kv_heads = (32, 4, 2) if request.param == "torch" else (128, 4, 2)
    verifier, draft = (
        tiny_llama(
            folder / name,
            vocab_size=300,
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            seed=layers,
        )
        for name, layers in (("verifier", 2), ("draft", 1))
    )
    return TinyPair(verifier=verifier, draft=draft)
