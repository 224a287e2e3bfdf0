"""The page of models that are served."""

from __future__ import annotations

from specbatch.pipeline.engines.models.model_folder import NATIVE_MODEL_TYPES, SUPPORTED_MODEL_TYPES
from specbatch.tools.site.markdown import code, page, table

_INTRO = """
A model is a folder or hub id with safetensors, its config and a tokenizer. Its architecture is
the `model_type` of its config. Each of these is tested against `generate`. Others are refused by
name before a job starts, as are pickled weights and models that need code of their own repository.
"""


def architectures_page() -> str:
    """Every architecture, and how it runs."""
    rows = [
        (code(name), "native pass, else torch" if name in NATIVE_MODEL_TYPES else "torch")
        for name in SUPPORTED_MODEL_TYPES
    ]
    return page("Architectures", _INTRO, table(("`model_type`", "on a processor"), rows))
