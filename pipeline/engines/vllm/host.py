"""The vLLM engine of one worker process. vLLM's state is the process's, so there is one."""

from __future__ import annotations

import json
import logging
import os
import platform
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from specbatch.pipeline.engines.contract import EngineStats, ModelFolder, Wanted
from specbatch.pipeline.engines.models.dtypes import choose_dtype
from specbatch.pipeline.engines.models.fingerprint import snapshot_of, unchanged
from specbatch.pipeline.engines.models.model_folder import LoadedModels, end_tokens, read_config
from specbatch.pipeline.engines.observing import Observer
from specbatch.pipeline.engines.recheck_sample import ONE_IN
from specbatch.pipeline.engines.service import EngineService, made
from specbatch.pipeline.engines.vllm.core import Core, CoreOptions, check_options, vllm_version
from specbatch.pipeline.engines.vllm.engine import VllmEngine
from specbatch.pipeline.engines.vllm.own_speculation import check_needs, names_of
from specbatch.pipeline.engines.vllm.parameters import check_given
from specbatch.pipeline.engines.vllm.probe import probe
from specbatch.pipeline.policy import tuning
from specbatch.pipeline.policy.knowledge import Knowledge, KnowledgeKeeper
from specbatch.schemas.draft_switches import ALL_ON, DraftSwitches
from specbatch.schemas.errors import (
    DeviceLostError,
    ModelChangedError,
    ModelError,
    RequestCancelledError,
    UsageError,
)
from specbatch.schemas.fingerprint import short_digest
from specbatch.schemas.numeric_class import DTYPES, Serves, digested, engine_key, key_with
from specbatch.schemas.registry import NO_MODELS
from specbatch.schemas.spec import EngineSpec
from specbatch.schemas.speculation_spec import NO_DRAFT_MODEL, SpeculationSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How a process runs vLLM."""

    device: str = "cpu"  # or "cuda"
    max_sequences: int = 64
    max_batch_tokens: int = 2048
    kv_cache_bytes: int | None = None  # None: vLLM decides
    max_depth: int = tuning.MAX_DEPTH
    own_speculation: Mapping[str, Any] = field(default_factory=dict)  # vLLM's; empty: none
    more: Mapping[str, Any] = field(default_factory=dict)  # fields of vLLM's `EngineArgs`
    only_job: str | None = None  # no other job is served


@dataclass(slots=True)
class _Running:
    """The one engine of the process, once a job asked for it."""

    dtype: str
    service: EngineService
    engine: VllmEngine | None = None  # the service's, to be closed with it


class VllmHost:
    """Makes its engine when first needed and keeps it. Thread-safe."""

    draft_model: ModelFolder | None = None  # drafts come from propose workers, history, n-grams

    def __init__(
        self,
        verifier: ModelFolder,
        options: HostOptions,
        gate: AbstractContextManager[object] | None = None,
        knowledge_store: KnowledgeKeeper | None = None,
        on_wanted: Callable[[Wanted], None] | None = None,
        observer: Observer | None = None,
    ) -> None:
        """Raises `MissingExtraError` without a vLLM that is supported or a package that its own
        speculation needs, `ModelError` for a model that cannot be drafted for so, and `UsageError`
        for options that vLLM does not have. Imports vLLM, and loads no model."""
        self._version, self._transformers = vllm_version(), version("transformers")
        check_needs(options.own_speculation, verifier)
        check_options(options.device, options.more)
        self._options = options
        self._models = LoadedModels(verifier)
        self._gate = gate
        self._store = knowledge_store
        self._on_wanted = on_wanted
        self._observer = observer
        self._running: _Running | None = None
        self._switches = ALL_ON
        self._rechecks = True
        self._stopped = self._given_up = False
        self._lock = threading.Lock()
        self._naming = threading.Lock()

    # --- what it can do ------------------------------------------------------------------------
    @property
    def model(self) -> ModelFolder:
        return self._models.model

    def serves(self) -> Serves:
        """`exactness: fast` with the model's own weights. Bits depend on the batch in vLLM."""
        classes: dict[str, str] = {}
        facts: dict[str, Mapping[str, str]] = {}
        running = self._running
        for asked in ("auto", *DTYPES.values()):
            dtype = self._dtype(asked)
            if running is not None and running.dtype != dtype:
                continue  # vLLM has one engine in a process
            name, of_class = self._class_of(dtype)
            facts[name] = of_class
            key = engine_key(asked, "fast", "as-is")
            for own in ("", *names_of(self._options.own_speculation)):
                classes[key_with(key, own)] = name
        served = Serves.of(self.model.ref, classes, facts)
        served = replace(served, only_job=self._options.only_job, probe=self._probe_in_words())
        with self._naming:
            try:
                self._models.check_again()
            except ModelError as error:
                log.warning("taking no jobs that pin a fingerprint: %s", error)
                return served
            return replace(served, fingerprint=self._models.of(self.model))

    def _probe_in_words(self) -> str | None:
        running = self._running
        if running is None or running.engine is None or running.engine.verdict is None:
            return None
        return f"vLLM {self._version}: {running.engine.verdict.in_words}"

    def _class_of(self, dtype: str) -> tuple[str, Mapping[str, str]]:
        facts = self._facts(dtype)
        return digested("vllm", dtype, facts), facts

    def _dtype(self, asked: str) -> str:
        where = torch.device(self._options.device.partition(":")[0])
        return str(choose_dtype(asked, where)).removeprefix("torch.")

    def _facts(self, dtype: str) -> dict[str, str]:
        """What may change a token, as far as it is known before vLLM is loaded."""
        on_gpu = self._options.device != "cpu"
        own = self._options.own_speculation
        return {
            "engine": "vllm",
            "dtype": dtype,
            "vllm": self._version,
            "torch": torch.__version__,
            "transformers": self._transformers,
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "processor": "" if on_gpu else platform.machine(),
            "instruction set": "" if on_gpu else torch.backends.cpu.get_cpu_capability(),
            "threads": "" if on_gpu else str(torch.get_num_threads()),
            "batch invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0"),
            "depth": str(self._options.max_depth),
            "options": json.dumps(dict(self._options.more), sort_keys=True),
            **({"speculation": json.dumps(dict(own), sort_keys=True)} if own else {}),
        }

    def tag_models(
        self,
        wanted: SpeculationSpec,
        deployed: Mapping[str | None, str] = NO_MODELS,  # noqa: ARG002 - none is loaded here
    ) -> dict[str | None, str]:
        """Tags without a draft model. Those of a model that is not here may ask whoever is."""
        return {tag: model for tag, model in wanted.routes if model == NO_DRAFT_MODEL}

    # --- work ----------------------------------------------------------------------------------
    def service(self, spec: EngineSpec) -> EngineService:
        """The engine for a job's dtype.

        Raises `UsageError` for what vLLM cannot give, and `RequestCancelledError` once the worker
        is ending.
        """
        check_given(spec)
        dtype = self._dtype(spec.dtype)
        with self._lock:
            if self._stopped:
                raise RequestCancelledError("the engines were closed")
            if self._running is None:
                self._running = _Running(
                    dtype,
                    EngineService(
                        partial(self._make_engine, dtype),
                        self._gate,
                        name=f"vllm-{dtype}",
                        keep=self._keeping(dtype),
                        on_wanted=self._on_wanted,
                    ),
                )
                self._running.service.switch(self._switches)
            if self._running.dtype != dtype:
                raise UsageError(
                    f"this worker's vLLM computes in {self._running.dtype}: start another worker "
                    f"for jobs in {dtype}"
                )
            return self._running.service

    def _make_engine(self, dtype: str) -> VllmEngine:
        """A new engine for the calling thread. It loads the model once requests need it."""
        assert self._running is not None
        broken, self._running.engine = self._running.engine, None
        if broken is not None:
            broken.close()
            if broken.failed_rechecking:
                log.warning("a step failed that held a recheck: this worker does no more of them")
                self._rechecks = False
        with self._naming:
            self._models.forget()  # no engine is left, so it may be another model
            self._models.check_again()
        folder, options = self.model, self._options
        knowledge = (self._store and self._store.load(self._about(dtype))) or Knowledge()
        self._running.engine = VllmEngine(
            partial(self._make_core, folder, dtype),
            lambda core: probe(
                *(core, folder.vocab_size, dtype, options.max_depth),
                drafts_itself=bool(options.own_speculation),
            ),
            folder.vocab_size,
            end_tokens(folder.path, read_config(folder.ref, folder.path).get("eos_token_id")),
            options.max_sequences,
            knowledge,
            self._observer,
            recheck_one_in=ONE_IN if self._rechecks else 0,
            max_depth=options.max_depth,
            own_speculation=options.own_speculation.get("method"),
            own_fingerprint=_fingerprint_of_own(options.own_speculation, folder),
        )
        return self._running.engine

    def _make_core(self, folder: ModelFolder, dtype: str, drafted: bool) -> Core:
        """Load the model."""
        options = self._options
        core_options = CoreOptions(
            str(folder.path),
            dtype,
            options.max_sequences,
            options.max_batch_tokens,
            options.max_depth if drafted else 0,
            options.kv_cache_bytes,
            own_speculation=options.own_speculation,
            more=options.more,
        )
        loaded: list[Core] = []

        def load() -> Core:
            while loaded:  # from files that changed meanwhile
                loaded.pop().close()
            loaded.append(Core(core_options))
            return loaded[-1]

        with self._naming:
            self._models.check_changed()  # requests that wait belong to the model of the last core
        try:
            snapshot, core = made(partial(unchanged, folder.ref, folder.path, load))
            if snapshot.fingerprint != folder.fingerprint:  # the engine has its end tokens
                raise ModelChangedError(f"model `{folder.ref}` changed before it was loaded")
            with self._naming:
                self._models.note(folder, snapshot)
        except Exception:
            for one in loaded:
                one.close()
            raise
        return core

    def _keeping(self, dtype: str) -> Callable[[Knowledge], None] | None:
        return None if self._store is None else partial(self._store.keep, self._about(dtype))

    def _about(self, dtype: str) -> str:
        """What an engine's knowledge is about."""
        name, _ = self._class_of(dtype)
        return f"{name}; {self._models.of(self.model).digest[:16]}"

    def switch(self, switches: DraftSwitches) -> None:
        with self._lock:
            self._switches = switches
        for service in self._all():
            service.switch(switches)

    def hint(self, request_id: str, position: int, token_ids: tuple[int, ...]) -> None:
        for service in self._all():
            service.hint(request_id, position, token_ids)

    def cancel(self, job_id: str) -> None:
        for service in self._all():
            service.cancel(job_id)

    # --- health --------------------------------------------------------------------------------
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

    def check(self) -> None:
        """Raises `DeviceLostError` once an engine here has lost its device."""
        for service in self._all():
            service.check()

    # --- ends ----------------------------------------------------------------------------------
    def give_up(self, error: DeviceLostError) -> None:
        with self._lock:
            self._stopped = self._given_up = True
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
        self.stop()
        for service in self._all():
            service.close()
        running = self._running
        if running is not None and running.engine is not None and not self._given_up:
            running.engine.close()  # which would wait for a device that hangs

    def _all(self) -> list[EngineService]:
        running = self._running
        return [] if running is None else [running.service]


def _fingerprint_of_own(speculation: Mapping[str, Any], verifier: ModelFolder) -> str:
    """Of what vLLM's own speculation drafts with: its folder's, or else by name and verifier."""
    ref = speculation.get("model")
    if isinstance(ref, str) and Path(ref).is_dir():
        return snapshot_of(ref, Path(ref)).fingerprint.digest
    named = json.dumps([dict(speculation), verifier.fingerprint.digest], sort_keys=True)
    return short_digest(named.encode())
