"""What the stages of a test's worker share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from specbatch.jobs.chaos import stand_in_model
from specbatch.pipeline.engines.models.model_folder import inspect_model
from specbatch.pipeline.inputs.contract import READER_BYTES
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.runtime.client import Enqueue
from specbatch.pipeline.runtime.leases import LeaseKeeper
from specbatch.pipeline.runtime.sweeper import Requeuer
from specbatch.pipeline.runtime.tokenizers import Tokenizers
from specbatch.pipeline.stages.context import KnownJobs, StageContext
from specbatch.pipeline.stages.draft_models import DraftModels
from specbatch.pipeline.stages.drafting import Drafting
from specbatch.pipeline.storage.objects import Objects
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE


def stage_context(
    store: Store, lease_keeper: LeaseKeeper, enqueue: Enqueue, lease_sec: float, **more: Any
) -> StageContext:
    """With the stand-in's tokenizer; `more` are further fields."""
    objects = more.setdefault("objects", Objects())
    values: dict[str, Any] = {
        "owner": "me",
        "price_microusd": 1_000_000,
        "jobs": KnownJobs(store),
        "tokenizers": Tokenizers(lru_cache(stand_in_model.tokenizer), lru_cache(inspect_model)),
        "drafting": Drafting(store, objects),
        "draft_models": DraftModels(store),
        "requeuer": Requeuer(store, enqueue, LEASES_OF_SILENCE * lease_sec),
        "models": lru_cache(inspect_model),
        "max_open_groups": 512,
        "max_attempts": 3,
        "reader_bytes": READER_BYTES,
    }
    shared = {
        "store": store,
        "lease_keeper": lease_keeper,
        "enqueue": enqueue,
        "lease_sec": lease_sec,
    }
    return StageContext(**{**shared, **values, **more})
