"""The engines of one worker process: one per (dtype, exactness) that its jobs ask for."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from functools import partial

from specbatch.pipeline.engine.block_proposer import BlockProposer
from specbatch.pipeline.engine.draft_model import MAX_PASS_TOKENS, DraftModelProposer
from specbatch.pipeline.engine.engine import Engine, EngineStats
from specbatch.pipeline.engine.loader import load_model
from specbatch.pipeline.engine.memory import MemoryBudget, budget_of, cache_bytes
from specbatch.pipeline.engine.model_folder import ModelFolder
from specbatch.pipeline.engine.proposer import Proposer
from specbatch.pipeline.engine.recheck import Rechecker
from specbatch.pipeline.engine.runner import ModelRunner
from specbatch.pipeline.engine.service import EngineService
from specbatch.schemas.spec import EngineSpec

log = logging.getLogger(__name__)


class EngineHost:
    """Makes engines when first needed and keeps them. Thread-safe."""

    def __init__(
        self,
        verifier: ModelFolder,
        proposer: ModelFolder | None,
        max_sequences: int,
        max_batch_tokens: int,
        kv_cache_bytes: int,
        gate: AbstractContextManager[object] | None = None,
        device: str = "cpu",
    ) -> None:
        self.verifier = verifier
        self.proposer = proposer
        self._max_sequences = max_sequences
        self._max_batch_tokens = max_batch_tokens
        self._kv_cache_bytes = kv_cache_bytes
        self._gate = gate
        self._device = device
        self.memory: MemoryBudget | None = None  # of the engine made last
        self._services: dict[tuple[str, str], EngineService] = {}
        self._lock = threading.Lock()

    def service(self, spec: EngineSpec) -> EngineService:
        """The engine for a job's dtype and exactness."""
        with self._lock:
            key = (spec.dtype, spec.exactness)
            if key not in self._services:
                self._services[key] = EngineService(
                    partial(self.make_engine, spec), self._gate, name=f"engine-{spec.dtype}"
                )
            return self._services[key]

    def check(self) -> None:
        """Raises `DeviceLostError` once an engine here has lost its device."""
        for service in self._all():
            service.check()

    def cancel(self, job_id: str) -> None:
        for service in self._all():
            service.cancel(job_id)

    @property
    def stats(self) -> list[EngineStats]:
        return [service.stats for service in self._all()]

    def close(self) -> None:
        for service in self._all():
            service.close()

    def _all(self) -> list[EngineService]:
        with self._lock:
            return list(self._services.values())

    def make_engine(self, spec: EngineSpec) -> Engine:
        """A new engine, its memory announced. The caller alone uses it."""
        proposers: list[Proposer] = [BlockProposer()]
        models = []
        if self.proposer is not None:
            drafting = self._runner(self.proposer, spec)
            proposers.append(DraftModelProposer(drafting))
            models.append(drafting.memory(MAX_PASS_TOKENS, self._max_sequences))
        verifying = self._runner(self.verifier, spec)
        engine = Engine(
            verifying,
            tuple(proposers),
            self._max_sequences,
            self._max_batch_tokens,
            None if verifying.steady else Rechecker(verifying),
        )
        models.append(verifying.memory(*engine.largest_pass))
        self.memory = budget_of(models, on_processor=self._device == "cpu")
        log.info("memory budget of the %s engine: %s", spec.dtype, self.memory)
        return engine

    def _runner(self, folder: ModelFolder, spec: EngineSpec) -> ModelRunner:
        model = load_model(folder, spec.dtype, spec.exactness, self._device)
        models = 1 if self.proposer is None else 2
        size = self._kv_cache_bytes
        if self._device == "cpu":
            size = cache_bytes(size, models)
        return ModelRunner(model, size, consume=True)
