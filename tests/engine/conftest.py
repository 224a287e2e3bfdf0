"""The engine's tests run on two pairs: one takes the native pass, one the torch path."""

from __future__ import annotations

import pytest

from support.models import TinyPair, tiny_llama

BOTH_PATHS = {  # files about what a pass computes; others run on the torch path in the tier `long`
    "test_contract",
    "test_draft_model",
    "test_engine",
    "test_engine_ends",
    "test_engine_fuzz",
    "test_parallel",
    "test_parameters",
    "test_prefix_sharing",
    "test_quantised",
    "test_recheck",
    "test_replayer",
    "test_top_logprobs",
    "test_verification",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    own = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "tiny_pair" in metafunc.fixturenames and "tiny_pair" not in own:
        both = metafunc.module.__name__.rpartition(".")[2] in BOTH_PATHS
        torch = pytest.param("torch", marks=() if both else pytest.mark.long)
        metafunc.parametrize("tiny_pair", [torch, "native"], indirect=True, scope="session")


@pytest.fixture(scope="session")
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
