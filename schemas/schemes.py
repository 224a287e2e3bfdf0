"""Schemes of stores that are only read: inputs may be there, nothing that is written."""

from __future__ import annotations

READ_ONLY = ("gs", "az", "abfs", "hf", "http", "https")


def why_not_writable(uri: str) -> str | None:
    """Why nothing is written to a uri; None where it may be."""
    scheme = uri.partition("://")[0].lower() if "://" in uri else ""
    if scheme == "iceberg":
        return "iceberg:// names a table: put it into output.table, and name a folder here"
    return (
        f"{scheme}:// is for inputs alone: use a folder or s3://" if scheme in READ_ONLY else None
    )
