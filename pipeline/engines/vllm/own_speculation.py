"""vLLM's own speculation: how it is asked for, and what each kind needs.

An operator names it among `SPECBATCH_VLLM_OPTIONS`, as vLLM does; a worker's `--proposer` and a
job's `proposer` name it by an object, which becomes the same option.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.pipeline.engines.models.model_folder import (
    check_folder,
    check_pair,
    inspect_folder,
    read_config,
)
from specbatch.schemas.errors import MissingExtraError, ModelError, UsageError
from specbatch.schemas.uris import model_ref
from specbatch.schemas.vllm_proposer import KINDS, VllmProposer, vllm_proposer_name

SPECULATION = "speculative_config"
REFUSED_SPECULATION = (
    # vLLM cannot verify other drafts than those that such a method made itself.
    *(("method", name) for name in ("custom_class", "dflash", "dspark", "extract_hidden_states")),
    # It would test drafts by what its own proposer drew them from, or not at all. Ours may replace
    # them, so that would be the wrong distribution.
    ("draft_sample_method", "probabilistic"),
    ("rejection_sample_method", "synthetic"),
)
# How configs say how many layers for multi-token prediction a model has; and how types of models
# begin that vLLM takes without such a word.
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
MTP_TYPES = ("mimo_v2", "longcat_flash", "step3p", "minimax_m3")
# vLLM takes a draft model with such a word in its name or path for one of that kind.
OTHER_KINDS = ("eagle-", "eagle3", "dflash", "dspark")


def own_speculation(options: Mapping[str, Any], max_depth: int) -> tuple[dict[str, Any], int]:
    """vLLM's own speculation among its engine options, without its depth; and that depth.

    Empty, and `max_depth`, where the user configured none. Raises `UsageError`.
    """
    if options.get("pipeline_parallel_size", 1) != 1 and (max_depth or SPECULATION in options):
        raise UsageError(
            "SPECBATCH_VLLM_OPTIONS: pipeline_parallel_size needs a core without drafts: set "
            f"SPECBATCH_VLLM_MAX_DEPTH=0, and leave {SPECULATION} out"
        )
    if SPECULATION not in options:
        return {}, max_depth
    given = options[SPECULATION]
    if not isinstance(given, Mapping) or not isinstance(given.get("method"), str):
        raise UsageError(
            f"SPECBATCH_VLLM_OPTIONS: {SPECULATION} names no method: write "
            '{"method": "eagle3", "model": …, "num_speculative_tokens": 3}'
        )
    for name, value in REFUSED_SPECULATION:
        if given.get(name) == value:
            raise UsageError(f"SPECBATCH_VLLM_OPTIONS: {SPECULATION} cannot have {name} {value}")
    depth = given.get("num_speculative_tokens", max_depth)
    if not isinstance(depth, int) or depth < 1:
        raise UsageError(
            f"SPECBATCH_VLLM_OPTIONS: num_speculative_tokens is {depth!r}: write a number from 1"
        )
    return {name: value for name, value in given.items() if name != "num_speculative_tokens"}, depth


def with_proposer(
    options: Mapping[str, Any], proposer: VllmProposer, max_depth: int
) -> dict[str, Any]:
    """vLLM's engine options with this speculation.

    Raises `UsageError` where the options name another one, or leave no room for drafts.
    """
    given = options.get(SPECULATION)
    if given is not None:
        if proposer.name not in names_of(given):
            raise UsageError(
                f"the proposer is {proposer.name}, and SPECBATCH_VLLM_OPTIONS has another "
                f"{SPECULATION}: leave one of them out"
            )
        return dict(options)
    if max_depth < 1:
        raise UsageError(
            f"proposer {proposer.name} needs room for drafts: set SPECBATCH_VLLM_MAX_DEPTH to 1 or "
            "more"
        )
    return {**options, SPECULATION: proposer.as_config}


def names_of(speculation: object) -> tuple[str, ...]:
    """As what jobs may ask for this speculation; empty: no job's object can name it."""
    if not isinstance(speculation, Mapping) or speculation.get("method") not in KINDS:
        return ()
    kind, model = speculation["method"], speculation.get("model")
    return (vllm_proposer_name(kind, None if model is None else model_ref(str(model), Path.cwd())),)


def check_needs(speculation: Mapping[str, Any], verifier: ModelFolder) -> None:
    """Raise `ModelError` or `MissingExtraError` for what a kind needs and is not here.

    Models of the hub are vLLM's to find.
    """
    kind, model = speculation.get("method"), speculation.get("model")
    if kind == "suffix" and find_spec("arctic_inference") is None:
        raise MissingExtraError(
            "proposer kind suffix needs the package arctic-inference: `pip install "
            "arctic-inference`, or name another kind"
        )
    if kind == "mtp" and model is None and not _has_mtp(verifier):
        raise ModelError(
            f"proposer kind mtp needs a verifier with layers for multi-token prediction, and the "
            f"config of `{verifier.ref}` names none: use another kind"
        )
    if kind in ("eagle3", "draft_model"):
        if not isinstance(model, str):
            raise ModelError(f"proposer kind {kind} needs a model: name its folder or hub id")
        check_folder(model)
        word = next((word for word in OTHER_KINDS if word in model.lower()), None)
        if kind == "draft_model" and word is not None:
            raise ModelError(
                f"vLLM takes `{model}` for {word.strip('-')}, by the word in its name, and not for "
                "a draft model: give its folder another name"
            )
        if kind == "draft_model" and Path(model).is_dir():
            check_pair(verifier, inspect_folder(model, Path(model)))


def _has_mtp(verifier: ModelFolder) -> bool:
    config = read_config(verifier.ref, verifier.path)
    inner = [config.get(name) for name in ("text_config", "mtp_config")]
    parts = [config, *(part for part in inner if isinstance(part, Mapping))]
    if any(part.get(name) for part in parts for name in MTP_LAYERS):
        return True
    return str(config.get("model_type")).startswith(MTP_TYPES)
