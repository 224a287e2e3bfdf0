"""The composition root: the one file that knows which classes are used together.

Every part can be handed in, which is how tests put fakes in place.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from specbatch.pipeline.client import Client, Ring
from specbatch.pipeline.leases import LeaseKeeper
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.migrate import open_store
from specbatch.pipeline.sweeper import Sweeper
from specbatch.schemas.errors import MissingExtraError, UsageError
from specbatch.schemas.records import Bell
from specbatch.schemas.settings import Settings

if TYPE_CHECKING:  # the light install has no torch and no pyarrow
    from specbatch.pipeline.engine.host import EngineHost
    from specbatch.pipeline.engine.parallel import Leader
    from specbatch.pipeline.stages import Stages

log = logging.getLogger(__name__)

KINDS = ("ingest", "propose", "verify", "record")


def make_store(settings: Settings) -> Store:
    """The store of the settings, its schema brought up to date."""
    return open_store(settings.store_url, max_attempts=settings.max_attempts)


def make_client(settings: Settings, ring: Ring, store: Store | None = None) -> Client:
    return Client(store or make_store(settings), ring, settings.workspace)


@dataclass(slots=True)
class Worker:
    """Everything one worker process holds; `close` gives it all back."""

    stages: Stages
    store: Store
    keeper: LeaseKeeper
    sweeper: Sweeper
    engines: list[EngineHost] = field(default_factory=list)
    leader: Leader | None = None

    def close(self) -> None:
        self.sweeper.close()
        for host in self.engines:
            host.close()
        if self.leader is not None:
            self.leader.close()
        self.keeper.close()
        self.store.close()


def make_worker(
    settings: Settings,
    kinds: tuple[str, ...],
    ring: Ring,
    verifier: str | None = None,
    proposer: str | None = None,
    store: Store | None = None,
) -> Worker:
    """A worker of the given kinds. Engines load when their first group arrives.

    `verifier` is needed to verify, `proposer` to propose; a verify worker with a proposer also
    drafts locally. Raises `ModelError` for folders that cannot be served, `MissingExtraError`
    without the engine extra, `UsageError` without the device.
    """
    require_engine_extra()
    from specbatch.pipeline.engine.device import DeviceOptions
    from specbatch.pipeline.engine.host import EngineHost
    from specbatch.pipeline.engine.model_folder import check_pair, inspect_model
    from specbatch.pipeline.ingest.codec import TextCodec
    from specbatch.pipeline.ingest.objects import Objects
    from specbatch.pipeline.stages import Economy, Stages

    ring = patient(ring)
    device = DeviceOptions(settings.device, settings.cuda_graphs, settings.torch_compile)
    device.check()
    leader = None
    if settings.tensor_parallel > 1:
        leader, name = join_as_leader(settings)
        device = replace(device, name=name)
    models = lru_cache(maxsize=16)(inspect_model)
    folders = [models(ref) if ref else None for ref in (verifier, proposer)]
    if folders[0] is not None and folders[1] is not None:
        check_pair(folders[0], folders[1])
    gate = threading.Lock()  # engines of one process take turns on the device

    def host(model_index: int, drafts: bool) -> EngineHost | None:
        folder = folders[model_index]
        if folder is None:
            return None
        return EngineHost(
            folder,
            folders[1] if drafts else None,
            max_sequences=settings.max_concurrent_sequences,
            max_batch_tokens=settings.max_batch_tokens,
            kv_cache_bytes=settings.kv_cache_mib << 20,
            gate=gate,
            device=device,
            leader=leader,
        )

    verifying = host(0, drafts=True) if "verify" in kinds else None
    proposing = host(1, drafts=False) if "propose" in kinds else None
    store = store or make_store(settings)
    keeper = LeaseKeeper(store, settings.lease_sec)
    stages = Stages(
        store=store,
        objects=Objects(settings.s3_endpoint_url),
        keeper=keeper,
        ring=ring,
        owner=f"{socket.gethostname()}:{os.getpid()}",
        lease_sec=settings.lease_sec,
        economy=Economy(settings.price_per_device_hour_usd),
        codec=lru_cache(maxsize=16)(TextCodec.load),
        proposing=proposing,
        verifying=verifying,
        models=models,
    )
    return Worker(
        stages=stages,
        store=store,
        keeper=keeper,
        sweeper=Sweeper(store, ring, settings.sweep_interval_sec),
        engines=[h for h in (verifying, proposing) if h is not None],
        leader=leader,
    )


def join_as_leader(settings: Settings) -> tuple[Leader, str]:
    """(what leads the other ranks, the device of this one). Raises `UsageError` on other ranks."""
    from specbatch.pipeline.engine.parallel import Leader, join_ranks

    rank, device = join_ranks(settings.tensor_parallel, settings.device)
    if rank:
        raise UsageError(
            "with SPECBATCH_TENSOR_PARALLEL, `torchrun` starts `specbatch worker` and nothing else"
        )
    return Leader(settings.tensor_parallel), device


def follow_leader(settings: Settings) -> bool:
    """On all ranks but the first: do as that one says until it ends, and return True.

    Raises `UsageError` unless `torchrun` started as many processes as are set.
    """
    if settings.tensor_parallel == 1:
        return False
    require_engine_extra()
    from specbatch.pipeline.engine.parallel import follow, join_ranks, leave_ranks

    rank, device = join_ranks(settings.tensor_parallel, settings.device)
    if rank == 0:
        return False
    follow(device)
    leave_ranks()
    return True


def patient(ring: Ring) -> Ring:
    """The same bell for a worker: while the broker is away it is only logged.

    Work must not fail, or use up attempts, for want of a bell; the sweeper rings again.
    """

    def attempt(bell: Bell) -> None:
        try:
            ring(bell)
        except Exception as error:  # brokers raise many kinds for one meaning
            log.warning("the bell for %s could not be rung, the sweeper will: %s", bell, error)

    return attempt


def require_engine_extra() -> None:
    """Raise `MissingExtraError` unless the engine's packages are installed."""
    from importlib.util import find_spec

    missing = [n for n in ("torch", "transformers", "pyarrow") if find_spec(n) is None]
    if missing:
        raise MissingExtraError(
            f"{', '.join(missing)} is not installed here: `pip install 'specbatch[engine]'`"
        )
