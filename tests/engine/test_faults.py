"""What an exception out of a pass means."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch

from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.engines.state.recovery import (
    RECOVER_AFTER_PASSES,
    Fault,
    TokenBudget,
    engine_error,
    fault_of,
    may_pass,
    with_type,
)
from specbatch.schemas.errors import DeviceLostError, EngineError, ModelError
from support.models import TinyPair

ADVICE = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the "
    "stacktrace below might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)


def accelerator(text: str, code: int | None = None) -> Any:
    """As torch makes them: the number is an attribute."""
    error = torch.AcceleratorError(f"CUDA error: {text}{ADVICE}")
    if code is not None:
        error.error_code = code
    return error


def too_much_for_the_processor() -> RuntimeError:
    """Torch's own, which has no class of its own."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 60)
    return raised.value


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (MemoryError("no memory for a pass of 5 tokens"), Fault.MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), Fault.MEMORY),
        (torch.cuda.OutOfMemoryError("HIP out of memory."), Fault.MEMORY),
        (accelerator("out of memory", 2), Fault.MEMORY),
        (RuntimeError("CUDA error: out of memory"), Fault.MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), Fault.MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), Fault.MEMORY),
        (accelerator("device-side assert triggered", 710), Fault.KERNEL),
        (accelerator("device-side assert triggered"), Fault.KERNEL),
        (accelerator("an illegal memory access was encountered", 700), Fault.KERNEL),
        (accelerator("unspecified launch failure", 719), Fault.KERNEL),
        (torch.AcceleratorError("HIP error: unspecified launch failure"), Fault.KERNEL),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), Fault.KERNEL),
        (accelerator("driver shutting down", 4), Fault.DEVICE),
        (accelerator("uncorrectable ECC error encountered", 214), Fault.DEVICE),
        (accelerator("CUDA-capable device(s) is/are busy or unavailable", 46), Fault.DEVICE),
        (accelerator("unknown error", 999), Fault.DEVICE),
        (accelerator("words of a later version", 214), Fault.DEVICE),
        (RuntimeError("GPU 0 has fallen off the bus"), Fault.DEVICE),
        (DeviceLostError("gone"), Fault.DEVICE),
        (DeviceLostError("gone", blameless=False), Fault.KERNEL),
        (accelerator("invalid argument", 1), Fault.OTHER),
        (RuntimeError("an unknown error in your text"), Fault.OTHER),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), Fault.OTHER),
        (OSError(errno.ENOENT, "No such file"), Fault.OTHER),
        (ValueError("out of memory of what was said"), Fault.OTHER),
        (KeyError("x"), Fault.OTHER),
    ],
    ids=lambda value: str(value).partition("\n")[0][:50],
)
def test_an_exception_is_put_where_it_belongs(error: Exception, fault: Fault) -> None:
    assert fault_of(error) is fault


def test_the_processor_s_allocator_is_understood() -> None:
    assert fault_of(too_much_for_the_processor()) is Fault.MEMORY


@pytest.mark.parametrize(("code", "blameless"), [(710, False), (214, True)])
def test_tickets_learn_of_a_lost_device_in_one_line(code: int, blameless: bool) -> None:
    error = engine_error(accelerator("something", code), "engine step")
    assert isinstance(error, DeviceLostError)
    assert error.blameless is blameless
    assert str(error) == "engine step failed: CUDA error: something"
    assert error.exit_code == 7


def test_other_failures_are_the_engine_s() -> None:
    error = engine_error(KeyError(), "engine step")
    assert type(error) is EngineError
    assert str(error) == "engine step failed: KeyError"
    assert with_type(KeyError()) == "KeyError"
    assert with_type(RuntimeError("a\nb")) == "RuntimeError: a"


def test_a_token_budget_shrinks_to_one_and_grows_back() -> None:
    budget = TokenBudget(100)
    assert not budget.strained
    assert budget.halve(100)
    assert budget.now == 50
    for used in (50, 25, 12, 6, 3):
        assert budget.halve(used)
    assert budget.now == 1
    assert budget.strained
    assert not budget.halve(1)
    seen = [budget.now]
    while budget.strained:
        for _ in range(RECOVER_AFTER_PASSES):
            assert budget.now == seen[-1]
            budget.passed()
        seen.append(budget.now)
    assert seen == [1, 2, 4, 8, 16, 32, 64, 100]


def test_a_token_budget_is_never_more_than_was_set() -> None:
    """Drafts come on top of it."""
    budget = TokenBudget(512)
    assert budget.halve(1088)
    assert (budget.now, budget.strained) == (256, True)


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (too_much_for_the_processor(), True),
        (MemoryError("Cannot allocate memory (os error 12)"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError("Stale file handle (os error 116)"), True),
        (accelerator("uncorrectable ECC error encountered", 214), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), False),
        (OSError("Permission denied (os error 13)"), False),
        (OSError("Error no file named model.safetensors found in directory"), False),
        (ValueError("Unrecognized model"), False),
        (KeyError("architecture"), False),
        (RuntimeError("size mismatch for lm_head.weight"), False),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_what_its_surroundings_did_is_not_taken_for_a_model_that_cannot_be_served(
    tiny_pair: TinyPair,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    passes: bool,
    native: bool,
) -> None:
    """A model error fails groups whole at once; others are tried again after a while."""

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("specbatch.pipeline.engines.exact.model.native_weights.safe_open", fail)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fail)
    assert may_pass(error) is passes
    folder = inspect_model(str(tiny_pair.verifier))
    with pytest.raises(EngineError if passes else ModelError) as raised:
        load_model(folder, "float32", native=native)
    words = " failed: " if passes else " cannot be loaded ("
    assert f"model `{folder.ref}`{words}" in str(raised.value)
    assert "\n" not in str(raised.value)
