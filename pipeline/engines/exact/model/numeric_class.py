"""The numeric class of an engine: everything that can change a bit, under one readable name.

It follows from the model's config and from the process's settings, so a worker knows its classes
before it has loaded any weights.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch

from specbatch.kernels import native
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.exact.model.device import DeviceOptions
from specbatch.pipeline.engines.exact.model.native_model import why_not_native
from specbatch.pipeline.engines.models.dtypes import choose_dtype, native_level
from specbatch.schemas.errors import ModelError
from specbatch.schemas.numeric_class import Serves, all_keys, digested

log = logging.getLogger(__name__)


def class_of(
    folder: ModelFolder, key: str, device: DeviceOptions, tensor_parallel: int = 1
) -> tuple[str, Mapping[str, str]]:
    """The class in which a process with these settings runs a model, asked for by an engine key.

    Returns its name and what it stands for: of the native decoder the arithmetic alone, of the
    torch path everything that its bits depend on, which the name has a digest of.
    """
    dtype, exactness, weights = key.split("/")
    where = torch.device(device.name)
    chosen = choose_dtype(dtype, where)
    named = str(chosen).removeprefix("torch.")
    plain = device.name == "cpu" and weights == "as-is" and tensor_parallel == 1
    if plain and why_not_native(folder, chosen) is None:
        arithmetic, edition = native.arithmetic(named), native.ARITHMETIC_VERSION
        facts = {"engine": "exact", "arithmetic": arithmetic, "version": edition}
        return f"exact/{arithmetic}/{edition}", facts
    facts = {"engine": "torch", "dtype": named, **_of_device(device)}
    facts |= {"exactness": exactness, "weights": weights, "tensor parallel": str(tensor_parallel)}
    if weights != "as-is":
        facts["torchao"] = _version("torchao")
    return digested("torch", named, facts), facts


def serves(folder: ModelFolder, device: DeviceOptions, tensor_parallel: int = 1) -> Serves:
    """Every way in which a process with these settings may be asked to run a model."""
    classes: dict[str, str] = {}
    facts: dict[str, Mapping[str, str]] = {}
    for key in all_keys():
        classes[key], of_class = class_of(folder, key, device, tensor_parallel)
        facts[classes[key]] = of_class
    log.info("numeric classes of model %s: %s", folder.ref, ", ".join(sorted(facts)))
    return Serves.of(folder.ref, classes, facts)


def check_class(serves: Serves, key: str, is_native: bool) -> None:
    """Raise `ModelError` unless a loaded model runs as its worker has announced."""
    name = serves.class_of(key)
    if name is None or name.startswith("exact/") == is_native:
        return
    path = "the native pass" if is_native else "the torch path"
    raise ModelError(
        f"model `{serves.model}` was announced in numeric class {name}, but was loaded for {path}: "
        "restart the worker"
    )


@cache  # reading a package's metadata takes milliseconds, and every engine key asks
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _of_device(device: DeviceOptions) -> dict[str, str]:
    """What the torch path's bits depend on beside the model and how it was asked for."""
    facts = {
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "kernels": "triton" if device.is_gpu else "torch",  # as `choose_kernels` has it
        "version": native.ARITHMETIC_VERSION,
        "sampling": "native" if native_level() != "torch" else "torch",
    }
    if device.is_gpu:
        return {
            **facts,
            "device": torch.cuda.get_device_name(torch.device(device.name)),
            "cuda": str(torch.version.cuda),
            "triton": _version("triton"),
            "compiled": "false",  # as ever: without it all classes would get other names
        }
    return {
        **facts,
        "device": "cpu",
        "processor": native.processor_name(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "onednn": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
        "threads": str(torch.get_num_threads()),
    }
