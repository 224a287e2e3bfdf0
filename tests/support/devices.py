"""Where Triton kernels run in tests: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_DEVICE = "cpu" if INTERPRETED else "cuda"


def on_triton_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with its tensors moved to the device and its results moved back."""

    @functools.wraps(run)
    def moved(*args: Any, **kwargs: Any) -> Any:
        named = {name: _moved(value, TRITON_DEVICE) for name, value in kwargs.items()}
        return _moved(run(*(_moved(value, TRITON_DEVICE) for value in args), **named), "cpu")

    return moved


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(torch.device(device))
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: _moved(part, device) for name, part in found.items()})
    return value
