"""How many tokens a job's rows can take: what tenants' budgets and plans are checked with."""

from __future__ import annotations

from specbatch.schemas.budgets import LeastTokens
from specbatch.schemas.openai_formats import OPENAI_FORMATS
from specbatch.schemas.records import PromptRow
from specbatch.schemas.spec import JobSpec

_LEAST = 2  # of a row: a token of a prompt and one of an output


def most_tokens(spec: JobSpec, row: PromptRow) -> int:
    """The most that a row's samples can have, prompts and what is continued included."""
    return row.n * (len(row.prompt_ids) + longest_sample(spec, row))


def longest_sample(spec: JobSpec, row: PromptRow) -> int:
    """The most tokens that a sample of a row is given, what is continued included."""
    own: int = row.overrides.get("max_tokens", spec.sampling.max_tokens)
    return max(own, spec.output.malformed.max_tokens or 0)


def most_tries(spec: JobSpec, row: PromptRow) -> int:
    """How often a sample of a row can be written. The tokens of one try count; all take time."""
    is_greedy = row.overrides.get("temperature", spec.sampling.temperature) == 0
    return 1 if is_greedy else 1 + spec.output.malformed.retries


def least_tokens(spec: JobSpec, rows: int) -> LeastTokens:
    """Of a job with so many known rows, which are good."""
    return LeastTokens(_of_row(spec), _in_all(spec, rows))


def _of_row(spec: JobSpec) -> int:
    if _has_own_values(spec):
        return _LEAST
    longest = max(spec.sampling.max_tokens, spec.output.malformed.max_tokens or 0)
    return spec.sampling.n * (1 + longest)


def _in_all(spec: JobSpec, rows: int) -> int:
    if spec.reuse_outputs:
        return 0  # all of them may be copies
    if _has_own_values(spec):
        return rows * _LEAST
    return rows * spec.sampling.n * (1 + max(1, spec.sampling.min_tokens))


def _has_own_values(spec: JobSpec) -> bool:
    """Whether rows may have sampling values of their own."""
    source = spec.input
    may_be_openai = source.format == "auto" and not source.uri.endswith(".parquet")
    return source.sampling_column is not None or source.format in OPENAI_FORMATS or may_be_openai
