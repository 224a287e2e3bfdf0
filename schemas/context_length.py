"""The tokens that a model can have in one sequence, and jobs that ask for more."""

from __future__ import annotations

CONTEXT_TOKENS = "context_tokens"  # key of a job's report, where its max_tokens is above it


def beyond_context(max_tokens: int, context_tokens: int | None) -> str | None:
    """What to say where completions cannot have `max_tokens`; None where they can, or might."""
    if context_tokens is None or max_tokens < context_tokens:
        return None
    return (
        f"max_tokens {max_tokens:,} is above what the model can do: prompt and completion have "
        f"{context_tokens:,} tokens at most, and a completion ends there with finish reason length"
    )
