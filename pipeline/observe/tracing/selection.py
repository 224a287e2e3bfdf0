"""Chooses what traces go through: OpenTelemetry, or nothing."""

from __future__ import annotations

from importlib.util import find_spec

from specbatch.pipeline.observe.tracing.tracing import UNTRACED, TraceOptions, Tracing
from specbatch.schemas.errors import MissingExtraError

NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def open_tracing(options: TraceOptions) -> Tracing:
    """What the options ask for; to be closed. Raises `MissingExtraError`."""
    if not options.to:
        return UNTRACED
    missing = [name for name in NEEDED if not _is_there(name)]
    if missing:
        raise MissingExtraError(
            f"SPECBATCH_TRACES asks for traces, and {', '.join(missing)} is not installed here: "
            "`pip install 'specbatch[observe]'`"
        )
    from specbatch.pipeline.observe.tracing.otel import OtelTracing

    return OtelTracing.shared(options)


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
