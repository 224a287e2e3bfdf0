"""The device that a worker's engines run on, and its options."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specbatch.kernels.native import processor_name
from specbatch.pipeline.engines.models.dtypes import native_level
from specbatch.schemas.errors import UsageError

if TYPE_CHECKING:  # recording needs Triton, which only a GPU does
    from specbatch.pipeline.engines.exact.model.graphs import Capture
    from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """An installation's settings. On a CPU only the name matters."""

    name: str = "cpu"  # as torch names it: cpu, cuda, cuda:1
    graphs: bool = True  # record short passes

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    def check(self) -> None:
        """Raise `UsageError` if the device or the requested instruction set is not available."""
        if not self.is_gpu:
            native_level()
            return
        index = torch.device(self.name).index or 0
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise UsageError(
                f"device `{self.name}` is not here, or this build of torch cannot use it: "
                "set SPECBATCH_DEVICE=cpu"
            )

    @property
    def description(self) -> str:
        """The kind of device and what decides its speed: equal descriptions take equal times."""
        if self.is_gpu:
            return torch.cuda.get_device_name(torch.device(self.name))
        return f"{processor_name()}, {native_level()}, {torch.get_num_threads()} threads"

    def enter(self) -> None:
        """Make it this thread's device: Triton launches there, wherever its tensors are."""
        device = torch.device(self.name)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)


def capture_for(model: LoadedModel, options: DeviceOptions) -> Capture | None:
    """What records the passes of a model, or None. The reason is logged."""
    if not (options.is_gpu and options.graphs):
        return None
    from specbatch.pipeline.engines.exact.model.graphs import CudaCapture, why_not

    reason = why_not(model)
    if reason is not None:
        log.info("no CUDA graphs for model %s: %s", model.folder.ref, reason)
        return None
    return CudaCapture()
