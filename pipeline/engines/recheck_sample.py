"""Which finished completions an engine rechecks, where its bits may depend on the batch."""

from __future__ import annotations

import hashlib

from specbatch.pipeline.engines.contract import Request

ONE_IN = 64


def is_chosen(request: Request, one_in: int = ONE_IN) -> bool:
    """A pure function of the request's id: a retry rechecks the same completions."""
    if request.decided_ids:  # not all of its output is this engine's
        return False
    digest = hashlib.sha256(request.request_id.encode()).digest()
    return int.from_bytes(digest[:8], "big") % one_in == 0
