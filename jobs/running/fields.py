"""The options of a job, as `submit-job` and `specbatch.run` name them, and the spec fields they
set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FIELD_OF = {
    "name": "name",
    "tenant": "tenant",
    "priority": "priority",
    "deadline_sec": "deadline_sec",
    "budget_usd": "budget_usd",
    "regions": "placement.regions",
    "spot": "placement.spot",
    "notify": "notify",
    "lineage_parent": "lineage_parent",
    "input": "input.uri",
    "format": "input.format",
    "delimiter": "input.delimiter",
    "snapshot": "input.snapshot",
    "since": "input.since",
    "prompt_column": "input.prompt_column",
    "prompt_kind": "input.prompt_kind",
    "id_column": "input.id_column",
    "seed_column": "input.seed_column",
    "sampling_column": "input.sampling_column",
    "template": "input.template",
    "template_kind": "input.template_kind",
    "system": "input.system",
    "output": "output.uri",
    "output_format": "output.format",
    "keep_columns": "output.keep_columns",
    "keep_best": "output.keep_best",
    "table": "output.table.uri",
    "verifier": "verifier",
    "proposer": "proposer",
    "max_tokens": "sampling.max_tokens",
    "min_tokens": "sampling.min_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "n": "sampling.n",
    "seed": "sampling.seed",
    "stop_token_ids": "sampling.stop_token_ids",
    "ignore_eos": "sampling.ignore_eos",
    "stop": "sampling.stop",
    "response_format": "sampling.response_format",
    "tools": "sampling.tools",
    "tool_choice": "sampling.tool_choice",
    "parallel_tool_calls": "sampling.parallel_tool_calls",
    "repetition_penalty": "sampling.repetition_penalty",
    "presence_penalty": "sampling.presence_penalty",
    "frequency_penalty": "sampling.frequency_penalty",
    "logprobs": "sampling.logprobs",
    "top_logprobs": "sampling.top_logprobs",
    "depth": "speculation.depth",
    "sources": "speculation.sources",
    "max_depth": "speculation.max_depth",
    "history_tokens": "speculation.history_tokens",
    "verification": "speculation.verification",
    "dtype": "engine.dtype",
    "exactness": "engine.exactness",
    "reuse_outputs": "reuse_outputs",
    "reuse_check": "reuse_check",
    "group_size": "group_size",
}


def by_field(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same values by the dotted name of the field that each sets."""
    return {FIELD_OF[name]: value for name, value in options.items()}
