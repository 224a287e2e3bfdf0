"""The engines of one worker process: one per `EngineSpec` that its jobs ask for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from specbatch.pipeline.engines.contract import EngineStats, ModelFolder, Wanted
from specbatch.pipeline.engines.exact.draft_model import (
    MAX_PASS_TOKENS,
    DraftModelProposer,
)
from specbatch.pipeline.engines.exact.engine import Engine
from specbatch.pipeline.engines.exact.model.device import DeviceOptions, capture_for
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel
from specbatch.pipeline.engines.exact.model.loader import load_model
from specbatch.pipeline.engines.exact.model.memory import (
    DEFAULT_CACHE,
    PROMISES,
    MemoryBudget,
    budget_of,
    cache_bytes,
    free_for_another,
    gpu_caches,
)
from specbatch.pipeline.engines.exact.model.numeric_class import check_class, serves
from specbatch.pipeline.engines.exact.model.quantised import check_weights
from specbatch.pipeline.engines.exact.model.runner import Decoder, ModelRunner
from specbatch.pipeline.engines.exact.model.torch_decoder import TorchDecoder
from specbatch.pipeline.engines.exact.recheck import Rechecker
from specbatch.pipeline.engines.models.draft_names import DRAFT_MODEL, draft_names, pins_of
from specbatch.pipeline.engines.models.fingerprint import fingerprint_of, unchanged
from specbatch.pipeline.engines.models.model_folder import LoadedModels, check_pair, inspect_folder
from specbatch.pipeline.engines.observing import Observer
from specbatch.pipeline.engines.proposers.block import BlockProposer
from specbatch.pipeline.engines.proposers.grammar import GrammarProposer
from specbatch.pipeline.engines.proposers.history import HistoryProposer
from specbatch.pipeline.engines.proposers.ngram import NgramProposer
from specbatch.pipeline.engines.proposers.proposer import Proposer
from specbatch.pipeline.engines.service import EngineService
from specbatch.pipeline.engines.speculation.drift import EVERY_STEPS
from specbatch.pipeline.policy.knowledge import Knowledge, KnowledgeKeeper
from specbatch.schemas.draft_switches import ALL_ON, DraftSwitches
from specbatch.schemas.errors import (
    DeviceLostError,
    ModelChangedError,
    ModelError,
    RequestCancelledError,
)
from specbatch.schemas.fingerprint import shown
from specbatch.schemas.numeric_class import Serves
from specbatch.schemas.registry import NO_MODELS
from specbatch.schemas.spec import EngineSpec, Weights
from specbatch.schemas.speculation_spec import SpeculationSpec

if TYPE_CHECKING:
    from specbatch.pipeline.engines.exact.model.parallel import Leader

log = logging.getLogger(__name__)


class EngineHost:
    """Makes engines when first needed and keeps them. Thread-safe."""

    def __init__(
        self,
        verifier: ModelFolder,
        proposer: ModelFolder | None,
        max_sequences: int,
        max_batch_tokens: int,
        kv_cache_bytes: int | None,
        gate: AbstractContextManager[object] | None = None,
        device: DeviceOptions = DeviceOptions(),
        leader: Leader | None = None,
        knowledge_store: KnowledgeKeeper | None = None,
        on_wanted: Callable[[Wanted], None] | None = None,
        extra_draft_models: Sequence[ModelFolder] = (),
        observer: Observer | None = None,
        drift_every: int = EVERY_STEPS,
        only_job: str | None = None,
        share_prefixes: bool = True,
    ) -> None:
        """`extra_draft_models` stand beside `proposer`, the main one. `observer` hears what engines
        do, and every `drift_every` steps (0: never) how far a draft model is from the verifier.
        `kv_cache_bytes` of each model; None: what suits the device.
        `only_job`: no other job is served. `share_prefixes`: a prompt's KV is kept for the next
        that begins like it.

        Raises `UsageError` if two draft models have the same name.
        """
        self._on_wanted = on_wanted
        self.draft_model = proposer
        draft_models = (*([] if proposer is None else [proposer]), *extra_draft_models)
        self._models = LoadedModels(verifier, draft_models)
        self._pairs = {(verifier.fingerprint, f.fingerprint) for f in draft_models}
        self._draft_names = draft_names([folder.ref for folder in draft_models])
        self._max_sequences = max_sequences
        self._max_batch_tokens = max_batch_tokens
        if kv_cache_bytes is None and not device.is_gpu:
            kv_cache_bytes = DEFAULT_CACHE
        self._kv_cache_bytes = kv_cache_bytes  # None: most of what a GPU has free
        self._gate = gate
        self._device = device
        self.memory: MemoryBudget | None = None  # of the engine made last …
        self.context_tokens = 0  # … and the longest sequence, prompt and output, that it can run
        self._leader = leader  # of the ranks that share the verifier; a proposer is rank 0's own
        self._observer = observer
        self._drift_every = drift_every
        self._only_job = only_job
        self._share_prefixes = share_prefixes
        self._store = knowledge_store  # what earlier engines learned of their machines
        self._services: dict[EngineSpec, EngineService] = {}
        self._switches = ALL_ON
        self._stopped = False
        self._lock = threading.Lock()
        self._serves: Serves | None = None
        self._noted: set[str] = set()  # deployed draft models that are not here
        self._missing = ""  # last logged reason why files cannot be loaded
        self._naming = threading.Lock()  # held while a caller finds them out

    @property
    def model(self) -> ModelFolder:
        """As it was loaded; if it is not loaded yet, as its files were when last read."""
        return self._models.model

    def serves(self) -> Serves:
        """The verifier's numeric classes here, and the fingerprints of what was loaded, or else of
        what is on disk. Loads nothing."""
        with self._naming:
            try:
                if self._models.check_again():
                    self._serves = None
            except ModelError as error:  # perhaps they are being replaced at this moment
                if str(error) != self._missing:
                    log.warning("taking no jobs that pin a fingerprint: %s", error)
                self._missing = str(error)
                return replace(self._named(), fingerprint=None)
            known, self._missing = self._named(), ""
            found = (self._models.of(self.model), self._models.drafts)
            if (known.fingerprint, known.drafts) != found:
                known = self._serves = replace(known, fingerprint=found[0], drafts=found[1])
            return known

    def _named(self) -> Serves:
        if self._serves is None:
            found = serves(self.model, self._device, self._tensor_parallel)
            self._serves = replace(found, only_job=self._only_job)
        return self._serves

    def service(self, spec: EngineSpec) -> EngineService:
        """The engine for a job's dtype, exactness and weights.

        Raises `MissingExtraError`, and `RequestCancelledError` once the worker is ending.
        """
        check_weights(spec.verifier_weights)
        if self.draft_model is not None:
            check_weights(spec.proposer_weights)
        with self._lock:
            if self._stopped:
                raise RequestCancelledError("the engines were closed")
            if spec not in self._services:
                self._services[spec] = EngineService(
                    partial(self.make_engine, spec),
                    self._gate,
                    name=f"engine-{spec.dtype}",
                    keep=self._keeping(spec),
                    on_wanted=self._on_wanted,
                )
                self._services[spec].switch(self._switches_of(spec))
            return self._services[spec]

    def tag_models(
        self, wanted: SpeculationSpec, deployed: Mapping[str | None, str] = NO_MODELS
    ) -> dict[str | None, str]:
        """Names of draft models by tag. Raises `UsageError` for a model that is not here."""
        if not wanted.enabled:
            return {}
        folders = self._models.draft_models
        here = {
            self._models.of(folder).digest: name
            for folder, name in zip(folders, self._draft_names, strict=True)
        }
        self._note_missing(set(deployed.values()) - here.keys())
        found = {tag: here[wanted] for tag, wanted in deployed.items() if wanted in here}
        return {**found, **pins_of(wanted.routes, [folder.ref for folder in folders])}

    def _note_missing(self, fingerprints: set[str]) -> None:
        """Log it once when deployed models are not here."""
        with self._naming:
            new, self._noted = fingerprints - self._noted, self._noted | fingerprints
        for fingerprint in sorted(new):
            log.warning(
                "the deployed draft model %s is not here: its rows are drafted for by what is; "
                "start the worker with --proposer models:NAME to load it",
                shown(fingerprint),
            )

    def check(self) -> None:
        """Raises `DeviceLostError` once an engine here has lost its device."""
        for service in self._all():
            service.check()

    def cancel(self, job_id: str) -> None:
        for service in self._all():
            service.cancel(job_id)

    def switch(self, switches: DraftSwitches) -> None:
        with self._lock:
            self._switches = switches
            services = list(self._services.items())
        for spec, service in services:
            service.switch(self._switches_of(spec))

    def _switches_of(self, spec: EngineSpec) -> DraftSwitches:
        return self._switches.in_class(self._named().class_of(spec.key))

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None:
        """Passes a hint to all engines; those without the request ignore it."""
        for service in self._all():
            service.hint(request_id, position, token_ids)

    @property
    def stats(self) -> list[EngineStats]:
        return [service.stats for service in self._all()]

    @property
    def stepping_since(self) -> int | None:
        begun = [s for service in self._all() if (s := service.stepping_since) is not None]
        return min(begun, default=None)

    @property
    def loading_since(self) -> int | None:
        begun = [s for service in self._all() if (s := service.loading_since) is not None]
        return min(begun, default=None)

    def give_up(self, error: DeviceLostError) -> None:
        """A step here will not end: fail the tickets of all engines without waiting."""
        if self._leader is not None:
            self._leader.give_up(error)  # the other ranks may be in that step
        with self._lock:
            self._stopped = True
        for service in self._all():
            service.give_up(error)

    def stop(self) -> None:
        """Begin to close, without waiting."""
        with self._lock:
            self._stopped = True
        for service in self._all():
            service.stop()

    def close(self) -> None:
        """Stop after the current steps; open tickets fail with `RequestCancelledError`."""
        self.stop()  # all of them, before one is waited for
        for service in self._all():
            service.close()

    def _all(self) -> list[EngineService]:
        with self._lock:
            return list(self._services.values())

    def make_engine(self, spec: EngineSpec) -> Engine:
        """A new engine for the calling thread. Logs its memory budget."""
        self._device.enter()
        free_for_another(on_gpu=self._device.is_gpu)  # one that failed lies in a cycle
        knowledge = (self._store and self._store.load(self._about(spec))) or Knowledge()
        with self._naming:
            services = self._all()
            if services and not any(service.has_engine for service in services):
                self._models.forget()  # what had been loaded is lost
        self._models.check_changed()  # before minutes are spent on loading
        verifier = self._load_verifier(spec)
        check_class(self.serves(), spec.key, is_native=verifier.native is not None)
        vocab_size = self.model.vocab_size
        proposers: list[Proposer] = [
            *(GrammarProposer(), BlockProposer(), HistoryProposer(vocab_size), NgramProposer())
        ]
        models = []
        loaded = self._load_drafts(verifier.folder, spec)
        share, *shares = self._cache_shares([verifier, *(model for _, model in loaded)])
        while loaded:
            name, draft_model = loaded.pop(0)
            drafting = self._runner(draft_model, shares.pop(0))
            pass_time = knowledge.draft_time_of(name)
            fingerprint = fingerprint_of(
                draft_model.folder.fingerprint.digest, spec.proposer_weights
            )
            proposers.append(DraftModelProposer(drafting, pass_time, name, fingerprint))
            models.append(drafting.memory(MAX_PASS_TOKENS, self._max_sequences))
        verifying = self._runner(verifier, share, self._spread(spec))
        if verifying.shortage is not None:  # that of a draft model costs drafts only
            log.warning(
                "the KV cache of model %s has room for %d tokens, its context is %d: "
                "longer prompts are refused, and longer outputs end there; %s",
                self.model.ref,
                verifying.context_tokens,
                self.model.context_tokens,
                verifying.shortage,
            )
        engine = Engine(
            verifying,
            tuple(proposers),
            self._max_sequences,
            self._max_batch_tokens,
            None if verifying.batch_invariant else Rechecker(verifying),
            knowledge,
            self._observer,
            self._drift_every,
        )
        models.append(verifying.memory(*engine.largest_pass))
        self.context_tokens = verifying.context_tokens
        # Its tensors are held until the last reference goes, native form or not.
        del verifier
        self.memory = budget_of(models, on_processor=not self._device.is_gpu)
        log.info("memory budget of the %s engine: %s", spec.dtype, self.memory)
        return engine

    @property
    def _tensor_parallel(self) -> int:
        """Processes that share the verifier."""
        return 1 if self._leader is None else self._leader.size

    def _load_drafts(
        self, verifier: ModelFolder, spec: EngineSpec
    ) -> list[tuple[str, LoadedModel]]:
        """The draft models by name, without those whose files were replaced: drafts are hints."""
        found = []
        for folder, name in zip(self._models.draft_models, self._draft_names, strict=True):
            try:
                # Hints need no exactness, which costs time and can refuse a model.
                model = self._load(folder, spec.dtype, "fast", spec.proposer_weights)
            except ModelChangedError as error:
                log.warning("a draft model is left out: %s", error)
                continue
            if self._still_fits(verifier, model.folder):
                found.append((name, model))
        return found

    def _still_fits(self, verifier: ModelFolder, draft_model: ModelFolder) -> bool:
        """Whether both still share their tokens, if one changed since that was checked."""
        if (verifier.fingerprint, draft_model.fingerprint) in self._pairs:
            return True
        try:
            check_pair(verifier, draft_model)
        except ModelError as error:
            log.warning("draft model %s is left out: %s", draft_model.ref, error)
            return False
        return True

    def _load_verifier(self, spec: EngineSpec) -> LoadedModel:
        if self._leader is None:
            return self._load(self.model, spec.dtype, spec.exactness, spec.verifier_weights)
        load = partial(
            self._leader.load,
            self._name(spec),
            self.model.ref,
            self._device.name,
            dtype=spec.dtype,
            exactness=spec.exactness,
            weights=spec.verifier_weights,
        )
        return self._as_loaded(self.model, load)

    def _as_loaded(self, folder: ModelFolder, load: Callable[[], LoadedModel]) -> LoadedModel:
        """Load a model, which is known from then on by the files that it was read from."""
        snapshot, loaded = unchanged(folder.ref, folder.path, load)
        with self._naming:
            self._models.note(folder, snapshot)
            if folder.ref == self.model.ref:
                self._models.model = loaded.folder
        return loaded

    def _spread(self, spec: EngineSpec) -> Callable[[TorchDecoder, int], Decoder] | None:
        if self._leader is None:
            return None
        return partial(self._leader.decoder, self._name(spec))

    def _keeping(self, spec: EngineSpec) -> Callable[[Knowledge], None] | None:
        return None if self._store is None else partial(self._store.keep, self._about(spec))

    def _about(self, spec: EngineSpec) -> str:
        """What an engine's knowledge is about: the kind of device and the models on it."""
        weights = f"{self._models.of(self.model).digest[:16]} {spec.verifier_weights}"
        for folder, name in zip(self._models.draft_models, self._draft_names, strict=True):
            weights += f" + {self._models.of(folder).digest[:16]} {spec.proposer_weights}"
            weights += name.removeprefix(DRAFT_MODEL)  # what is known of it is known by this
        return f"{self._device.description}; {weights}; {spec.dtype} {spec.exactness}"

    def _name(self, spec: EngineSpec) -> str:
        """The name of the same verifier on other ranks."""
        return f"{self.model.ref} {spec}"

    def _load(
        self, folder: ModelFolder, dtype: str, exactness: str, weights: Weights
    ) -> LoadedModel:
        return self._as_loaded(
            folder,
            lambda: load_model(
                inspect_folder(folder.ref, folder.path),
                dtype,
                exactness,
                self._device.name,
                weights=weights,
            ),
        )

    def _runner(
        self,
        model: LoadedModel,
        share: int,
        spread: Callable[[TorchDecoder, int], Decoder] | None = None,
    ) -> ModelRunner:
        capture = None if spread else capture_for(model, self._device)
        runner = ModelRunner(
            model,
            share,
            self._share_prefixes,
            consume=True,
            capture=capture,
            spread=spread,
            is_capped=self._kv_cache_bytes is None or share < self._kv_cache_bytes,
        )
        if not self._device.is_gpu:  # a GPU's memory is taken at once
            PROMISES.make(runner.blocks, share // (runner.blocks.untouched + 1))
        return runner

    def _cache_shares(self, models: Sequence[LoadedModel]) -> list[int]:
        """Bytes of each model's cache, computed after loading all models: caches get what models
        leave and other engines of this process were not promised.

        Raises `NoEngineError`.
        """
        if self._device.is_gpu:
            free, _ = torch.cuda.mem_get_info(models[0].device)
            return gpu_caches(self._kv_cache_bytes, [m.token_bytes for m in models], free)
        assert self._kv_cache_bytes is not None
        return [cache_bytes(self._kv_cache_bytes, len(models))] * len(models)
