"""The machine of the measurements."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Its processor, threads and versions, and the date; not its name."""
    import transformers

    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
