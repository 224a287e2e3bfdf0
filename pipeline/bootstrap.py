"""The composition root: the one file that knows which classes are used together.

Every part can be passed in, which is how tests use fakes.
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.databases import make_place
from specbatch.pipeline.ledger.sql.migrate import grant_roles, open_store
from specbatch.pipeline.observe.metrics.meter import Meter
from specbatch.pipeline.observe.tracing.tracing import UNTRACED, TraceOptions, Tracing
from specbatch.pipeline.privacy.tenants import Privacy
from specbatch.pipeline.runtime.client import Client, Enqueue
from specbatch.pipeline.runtime.leases import LeaseKeeper, owner_here
from specbatch.pipeline.runtime.lineage import LAST_SEC, make_lineage
from specbatch.pipeline.runtime.metering import counted, kv_blocks, metered
from specbatch.pipeline.runtime.notifier import Notifier
from specbatch.pipeline.runtime.outage import Outage
from specbatch.pipeline.runtime.placer import FRESH_SEC, Placer
from specbatch.pipeline.runtime.presence import Presence, ServedModels
from specbatch.pipeline.runtime.snapshots import spec_at_submission
from specbatch.pipeline.runtime.sweeper import QueueLength, Requeuer, Sweeper, unknown
from specbatch.pipeline.runtime.work_stealing import WorkStealer
from specbatch.pipeline.storage.objects import ASKED_RETRY_SEC, Objects
from specbatch.schemas import lineage
from specbatch.schemas.draft_switches import DraftSwitch, OffHere, SwitchScope
from specbatch.schemas.encryption import Cipher
from specbatch.schemas.errors import DeviceLostError, MissingExtraError, UsageError
from specbatch.schemas.extras import require_engine_extra
from specbatch.schemas.masking import hide_in_logs
from specbatch.schemas.messages import HintMessage
from specbatch.schemas.notifications import load_targets
from specbatch.schemas.placement import SPOT, Site
from specbatch.schemas.presence import WorkerProcess
from specbatch.schemas.records import DueWork, Stage
from specbatch.schemas.settings import EXACT, VLLM, Settings
from specbatch.schemas.timekeeping import LEASES_OF_SILENCE
from specbatch.schemas.vllm_proposer import VllmProposer

if TYPE_CHECKING:  # the light install has no torch, no pyarrow and no prometheus_client
    from specbatch.pipeline.engines.contract import Engines, ModelFolder
    from specbatch.pipeline.engines.exact.model.device import DeviceOptions
    from specbatch.pipeline.engines.exact.model.parallel import Leader
    from specbatch.pipeline.engines.vllm.host import HostOptions
    from specbatch.pipeline.inputs.tokenizer import TextTokenizer
    from specbatch.pipeline.observe.metrics.endpoint import Exposure
    from specbatch.pipeline.runtime.anchors import Anchoring
    from specbatch.pipeline.runtime.device_time import Timekeeper
    from specbatch.pipeline.runtime.knowledge_store import KnowledgeStore
    from specbatch.pipeline.runtime.switch_reader import SwitchReader
    from specbatch.pipeline.stages.context import StageContext
    from specbatch.pipeline.stages.refill import HintChannel, Refiller, Refills
    from specbatch.schemas.timekeeping import Device

log = logging.getLogger(__name__)

KINDS = ("ingest", "propose", "verify", "record")


@dataclass(frozen=True, slots=True)
class FakeModels:
    """Replaces real models, so that no engine extra is needed."""

    engines: Callable[[ModelFolder, ModelFolder | None], Engines]  # of a model, and its draft model
    tokenizer: Callable[[str], TextTokenizer]  # of a model folder's path


def make_store(settings: Settings, actor: str | None = None) -> Store:
    """The store of the settings, its schema brought up to date. `actor` is a worker's name."""
    make_place(settings)
    return open_store(
        settings.store_url,
        max_attempts=settings.max_attempts,
        weights=settings.tenant_weights,
        cipher=Cipher.of_setting(settings.encryption_key),
        actor=actor or settings.actor or None,
        lineage=lineage.is_told_here(),
        site=None if actor is None else site_of(settings),
    )


def site_of(settings: Settings) -> Site:
    """Where a worker with these settings is."""
    return Site(settings.region, settings.tenure == SPOT)


def migrate(settings: Settings) -> list[str]:
    """Bring the store's schema and roles up to date; returns the roles that we may not create."""
    make_store(settings).close()
    return grant_roles(settings.store_url)


def make_client(
    settings: Settings,
    enqueue: Enqueue,
    store: Store | None = None,
    on_cancel: Callable[[], None] = lambda: None,
) -> Client:
    """A client. A worker in this process passes its `check_cancelled` as `on_cancel`."""
    privacy = Privacy.of_settings(settings)
    store = store or make_store(settings)
    objects = Objects(settings.s3_endpoint_url, s3_retry_sec=ASKED_RETRY_SEC)
    return Client(
        store,
        enqueue,
        settings.workspace,
        on_cancel,
        privacy,
        tracing=lambda: open_tracing(trace_options(settings)),
        pinned=partial(spec_at_submission, store, objects, privacy),
    )


def trace_options(settings: Settings) -> TraceOptions:
    """Where this process sends traces."""
    kind = settings.broker_url.partition("://")[0].partition("+")[0]
    broker = {"amqp": "rabbitmq", "amqps": "rabbitmq", "rediss": "redis"}.get(kind, kind)
    return TraceOptions(settings.traces, settings.trace_groups, settings.trace_requests, broker)


def open_tracing(options: TraceOptions) -> Tracing:
    """The traces that the options ask for; to be closed. Raises `MissingExtraError`."""
    if not options.to:
        return UNTRACED
    try:
        from specbatch.pipeline.observe.tracing.otel import OtelTracing
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"SPECBATCH_TRACES asks for traces, and {error.name} is not installed here: "
            "`pip install 'specbatch[observe]'`"
        ) from None
    return OtelTracing.shared(options)


@dataclass(slots=True)
class Worker:
    """Everything one worker process holds; `close` releases it."""

    context: StageContext  # of the stages
    store: Store
    lease_keeper: LeaseKeeper
    presence: Presence
    background: Sequence[Sweeper | Anchoring | Notifier | WorkStealer]  # beside the tasks
    engines: Sequence[Engines]
    leader: Leader | None
    knowledge: KnowledgeStore
    refills: Refills | None
    refiller: Refiller | None
    timekeeper: Timekeeper | None
    tracing: Tracing
    outage: Outage
    switches: SwitchReader

    def start(self) -> None:
        """Start the threads beside the tasks: presence, sweeper, anchoring, notifier, stealing."""
        if self.timekeeper is not None:
            self.timekeeper.beat()
        for thread in (self.presence, *self.background):
            thread.start()

    def run(self, stage: Stage, job_id: str, group_index: int | None) -> None:
        """Do the work that a message points to."""
        from specbatch.pipeline.stages.dispatch import run_stage

        run_stage(self.context, stage, job_id, group_index)

    def hint(self, message: HintMessage) -> None:
        """Pass a hint to the engine that has its request, if one still has it."""
        if self.refills is not None and (known := self.refills.answered(message)) is not None:
            for host in self.engines:
                host.hint(known, message.position, message.token_ids)

    def close(self) -> None:
        self.outage.close()
        self.context.hooks.close()
        for thread in self.background:
            thread.close()
        if self.refills is not None:
            followed = sum(stats.hints_followed for h in self.engines for stats in h.stats)
            counts = (self.refills.asked, self.refills.answers, followed)
            log.info("refills: %d asked for, %d answered, %d followed", *counts)
        for host in self.engines:
            host.stop()  # all, before one is waited for
        for host in self.engines:
            host.close()
        self.knowledge.close()
        self.lease_keeper.close()
        if self.timekeeper is not None:
            self.timekeeper.close()
        self.presence.close()
        self.store.close()
        self.tracing.close()
        if self.leader is not None:
            self.leader.close()  # last: it waits for processes that may be gone

    @property
    def out_of_step(self) -> DeviceLostError | None:
        """Why this process cannot part from the ranks that share its verifier, if it cannot."""
        return None if self.leader is None else self.leader.lost


def make_worker(
    settings: Settings,
    kinds: tuple[str, ...],
    enqueue: Enqueue,
    verifier: str | None = None,
    proposer: str | None = None,
    store: Store | None = None,
    hint_channel: HintChannel | None = None,
    extra_draft_models: Sequence[str] = (),
    fake_models: FakeModels | None = None,
    queue_length: QueueLength = unknown,
    meter: Meter | None = None,
    trouble: Callable[[], str | None] = lambda: None,
    only_job: str | None = None,
) -> Worker:
    """A worker of the given kinds. Engines load when their first group arrives.

    `verifier` is needed to verify, `proposer` to propose. A verify worker with a proposer also
    drafts locally; one without asks for refills of blocks over `hint_channel`. `extra_draft_models`
    stand beside the proposer, for verifying only. `fake_models` replace real ones. `queue_length`
    returns how many messages wait for a unit's queue, if that is known. `meter` counts everything.
    `trouble` returns why no messages can be taken, or None if they can. `only_job`: take work of no
    other job.
    Raises `ModelError` for folders that cannot be served, `MissingExtraError` without the engine
    extra, `UsageError` without the device and for draft models that cannot be distinguished.
    """
    if fake_models is None:
        require_engine_extra()
    from specbatch.pipeline.engines import step_guard
    from specbatch.pipeline.engines.models.model_folder import (
        check_architecture,
        check_pair,
        models_here,
    )
    from specbatch.pipeline.inputs.tokenizer import TextTokenizer
    from specbatch.pipeline.policy.costs.pricing import unit_prices
    from specbatch.pipeline.runtime.anchors import Anchoring, Anchors
    from specbatch.pipeline.runtime.device_time import Timekeeper, Timing
    from specbatch.pipeline.runtime.knowledge_store import KnowledgeStore
    from specbatch.pipeline.runtime.switch_reader import SwitchReader
    from specbatch.pipeline.runtime.tokenizers import Tokenizers
    from specbatch.pipeline.runtime.watchdog import Watchdog
    from specbatch.pipeline.stages.context import KnownJobs, StageContext
    from specbatch.pipeline.stages.draft_models import DraftModels
    from specbatch.pipeline.stages.drafting import Drafting
    from specbatch.pipeline.stages.refill import Refiller, Refills

    sweeper_enqueue = patient(enqueue if meter is None else counted(enqueue, meter.enqueued))
    enqueue = patient(enqueue)
    device, leader = (None, None) if fake_models else _device(settings)
    models = models_here()
    folders = [models(ref) if ref else None for ref in (verifier, proposer)]
    beside = tuple(models(ref) for ref in extra_draft_models)
    if folders[0] is not None and settings.engine == EXACT and fake_models is None:
        check_architecture(folders[0], may_be_vllm=True)
    for drafting in filter(None, (folders[1], *beside)):
        check_architecture(drafting)
        if folders[0] is not None:
            check_pair(folders[0], drafting)
    tracing = open_tracing(trace_options(settings))
    owner = owner_here()  # the form that sql_triggers.py knows
    store = store or make_store(settings, owner)
    if meter is not None:
        store = metered(store, meter)
    privacy = Privacy.of_settings(settings)
    if privacy.is_anybody_private:
        hide_in_logs(privacy.redactor.redacted)
    knowledge = KnowledgeStore(store)
    gate = threading.Lock()  # engines of one process take turns on the device
    alone = "verify" in kinds and proposer is None
    refills = Refills(hint_channel) if hint_channel is not None and alone else None

    def host(model_index: int, drafts: bool) -> Engines | None:
        folder, beside_it = folders[model_index], folders[1] if drafts else None
        if folder is None:
            return None
        if fake_models is not None:
            return fake_models.engines(folder, beside_it)
        on_wanted = refills.want if refills and model_index == 0 else None
        observer = None if meter is None else meter.observer(verifies=drafts)
        if settings.engine == VLLM and model_index == 0:
            from specbatch.pipeline.engines.vllm.host import VllmHost

            options = _vllm_options(settings, only_job)
            return VllmHost(folder, options, gate, knowledge, on_wanted, observer)
        from specbatch.pipeline.engines.exact.host import EngineHost

        assert device is not None
        return EngineHost(
            folder,
            beside_it,
            max_sequences=settings.max_concurrent_sequences,
            max_batch_tokens=settings.max_batch_tokens,
            kv_cache_bytes=settings.kv_cache_bytes,
            gate=gate,
            device=device,
            leader=leader,
            knowledge_store=knowledge,
            on_wanted=on_wanted,
            extra_draft_models=beside if drafts else (),
            observer=observer,
            drift_every=settings.drift_every_steps,
            only_job=only_job,
        )

    verifying = host(0, drafts=True) if "verify" in kinds else None
    proposing = host(1, drafts=False) if "propose" in kinds else None
    objects = Objects.of_settings(settings)
    engines = [h for h in (verifying, proposing) if h is not None]
    if meter is not None and verifying is not None:
        meter.ask_blocks(partial(kv_blocks, verifying))
    device_here = priced_device(settings)
    serves = None if verifying is None else ServedModels(verifying.serves, settings.lease_sec / 6)
    timekeeper = Timekeeper(store, owner, device_here, engines, serves) if engines else None
    prices = unit_prices(settings.price_book)
    lease_keeper = LeaseKeeper(store, settings.lease_sec, unit_prices=prices)
    beside_verifier = [] if folders[1] is None else [folders[1], *beside]
    switches = SwitchReader(
        store, engines, pairs_that_do_not_pay(store, verifying, beside_verifier)
    )
    switches.read()
    lease_keeper.at_heartbeats(lease_keeper.report_usage)
    lease_keeper.at_heartbeats(switches.read)
    lease_keeper.at_checks(switches.read)
    if timekeeper is not None:
        step_guard.guard(settings.step_deadline_sec, settings.lease_sec)
        deadlines = settings.step_deadline_sec, settings.load_deadline_sec
        lease_keeper.at_heartbeats(Watchdog(engines, *deadlines).check)
        lease_keeper.at_heartbeats(timekeeper.beat)
    outage = Outage(ends=only_job is not None)
    anchors = Anchors.of_settings(settings, objects)
    anchoring = None if anchors is None else Anchoring(store, anchors)
    silence_sec = LEASES_OF_SILENCE * settings.lease_sec
    drafts_beside = verifying is not None and verifying.draft_model is not None
    told = make_lineage(settings.docs_url)
    placer = None
    if verifying is not None and only_job is None:
        patience, fresh_sec = settings.pool_patience_sec, min(FRESH_SEC, settings.lease_sec / 6)
        weights = settings.tenant_weights
        placer = Placer(store, device_here, silence_sec, patience, weights, fresh_sec)
    context = StageContext(
        store=store,
        objects=objects,
        lease_keeper=lease_keeper,
        enqueue=enqueue,
        owner=owner,
        lease_sec=settings.lease_sec,
        price_microusd=device_here.price_microusd,
        jobs=KnownJobs(store),
        tokenizers=Tokenizers(fake_models.tokenizer if fake_models else TextTokenizer.load, models),
        drafting=Drafting(store, objects, drafts_beside, lambda: switches.now),
        draft_models=DraftModels(store),
        requeuer=Requeuer(store, enqueue, silence_sec, site=site_of(settings)),
        placer=placer,
        proposing=proposing,
        verifying=verifying,
        models=models,
        tenant_depths=settings.tenant_depths,
        refills=refills,
        max_open_groups=settings.max_open_groups,
        max_attempts=settings.max_attempts,
        timing=timekeeper or Timing(),
        privacy=privacy,
        tracing=tracing,
        reader_bytes=settings.ingest_memory_mib << 20,
        anchoring=anchoring,
        only_job=only_job,
        outage=outage,
        tells_lineage=told is not None,
    )
    refiller = None
    if proposing is not None:
        refiller = Refiller(store, objects, proposing, timekeeper, lambda: switches.now)
    process = WorkerProcess(
        uuid.uuid4().hex,
        owner,
        kinds,
        verifier if "verify" in kinds else None,
        proposer if "propose" in kinds else None,
        site_of(settings),
    )
    background: list[Sweeper | Anchoring | Notifier | WorkStealer] = [
        Sweeper(
            store,
            sweeper_enqueue,
            settings.sweep_interval_sec,
            settings.propose_patience_sec,
            settings.message_patience_sec,
            queue_length,
            silence_sec=silence_sec,
            only_job=only_job,
        )
    ]
    if anchoring is not None and only_job is None:
        background.append(anchoring)
    if settings.notify_file:
        background.append(Notifier(store, load_targets(settings.notify_file), only_job))
    if told is not None:
        # Beside the other: a target that does not answer delays none of the other kind.
        background.append(Notifier(store, {lineage.TARGET: told}, only_job, last_sec=LAST_SEC))
    if verifier is not None and verifying is not None and only_job is None:
        every_sec = settings.lease_sec / 3  # as leases are prolonged
        jobs = (lambda: None) if placer is None else placer.jobs
        background.append(
            WorkStealer(store, lease_keeper, verifier, owner, every_sec, serves, jobs)
        )
    return Worker(
        context=context,
        store=store,
        lease_keeper=lease_keeper,
        presence=Presence(store, process, trouble, settings.lease_sec / 3),
        background=background,
        engines=engines,
        leader=leader,
        knowledge=knowledge,
        refills=refills,
        refiller=refiller,
        timekeeper=timekeeper,
        tracing=tracing,
        outage=outage,
        switches=switches,
    )


def make_exposure(
    settings: Settings, trouble: Callable[[], str | None] = lambda: None
) -> Exposure | None:
    """What counts and serves a worker's metrics; None if no port is set.

    `trouble` returns why no messages can be taken, or None if they can. Every scrape calls it.

    Raises `UsageError` when the port cannot be had, `MissingExtraError` without the extra.
    """
    if not settings.metrics_port:
        return None
    if find_spec("prometheus_client") is None:
        raise MissingExtraError(
            "SPECBATCH_METRICS_PORT needs prometheus-client, which is not installed here: "
            "`pip install 'specbatch[observe]'`, or unset it"
        )
    from specbatch.pipeline.observe.metrics.endpoint import Exposure

    return Exposure(settings, trouble)


def _vllm_devices(settings: Settings) -> int:
    options = settings.vllm_options
    names = ("tensor_parallel_size", "pipeline_parallel_size")
    return math.prod(int(options.get(name, 1)) for name in names)


def priced_device(settings: Settings) -> Device:
    """The device of this worker, or all devices that share its verifier."""
    from specbatch.pipeline.policy.costs.pricing import priced

    return priced(
        settings.device_kind or settings.device.partition(":")[0],
        settings.region,
        settings.tenure,
        settings.price_book,
        settings.price_per_device_hour_usd,
        devices=_vllm_devices(settings) if settings.engine == VLLM else settings.tensor_parallel,
        pool=settings.pool,
        is_otherwise_known="price_per_device_hour_usd" in settings.model_fields_set,
    )


def with_proposer(settings: Settings, proposer: VllmProposer | None) -> Settings:
    """The settings of a process that drafts with vLLM's own speculation. Raises `UsageError`."""
    if proposer is None:
        return settings
    if settings.engine != VLLM:
        raise UsageError(
            f"proposer kind {proposer.kind} is vLLM's own speculation, which engine "
            f"{settings.engine} does not have: verify with engine vllm, or name a draft model"
        )
    from specbatch.pipeline.engines.vllm.own_speculation import with_proposer

    options = with_proposer(settings.vllm_options, proposer, settings.vllm_max_depth)
    return settings.model_copy(update={"vllm_options": options})


def _vllm_options(settings: Settings, only_job: str | None) -> HostOptions:
    """How this process runs vLLM. Raises `UsageError`."""
    from specbatch.pipeline.engines.vllm.host import HostOptions
    from specbatch.pipeline.engines.vllm.own_speculation import SPECULATION, own_speculation

    if settings.tensor_parallel > 1:
        raise UsageError(
            "SPECBATCH_TENSOR_PARALLEL is for engine exact: with engine vllm set "
            "SPECBATCH_VLLM_OPTIONS='{\"tensor_parallel_size\": 2}'"
        )
    speculation, depth = own_speculation(settings.vllm_options, settings.vllm_max_depth)
    return HostOptions(
        settings.device,
        settings.max_concurrent_sequences,
        settings.max_batch_tokens,
        settings.kv_cache_bytes,
        depth,
        speculation,
        {name: value for name, value in settings.vllm_options.items() if name != SPECULATION},
        only_job,
    )


def pairs_that_do_not_pay(
    store: Store, verifying: Engines | None, draft_models: Sequence[ModelFolder]
) -> list[OffHere]:
    """Draft models whose drafts were found not to pay beside this verifier are off here."""
    if verifying is None or not draft_models:
        return []
    serves = verifying.serves()
    if serves.fingerprint is None:
        return []
    here = (serves.fingerprint.digest, serves.names)
    failed = [one for one in store.pair_trials() if one.concerns(*here) and not one.pays]
    if not failed:
        return []
    from specbatch.pipeline.engines.models.draft_names import draft_names

    names = draft_names([folder.ref for folder in draft_models])
    off = []
    for name, folder in zip(names, draft_models, strict=True):
        for trial in (one for one in failed if one.proposer == folder.fingerprint.digest):
            log.warning(
                "drafts of %s are off here%s: %s; to try again: `specbatch models try`, then start "
                "anew",
                folder.ref,
                trial.numeric_class and f" in class {trial.numeric_class}",
                trial.reason,
            )
            scope = SwitchScope(proposer=name)
            switch = DraftSwitch(scope, trial.tried_at, trial.tried_by, trial.reason)
            off.append(OffHere(name, trial.numeric_class, switch))
    return off


def _device(settings: Settings) -> tuple[DeviceOptions, Leader | None]:
    """Where engines run, and the leader of the other ranks, if there are any."""
    from specbatch.pipeline.engines.exact.model.device import DeviceOptions

    device = DeviceOptions(settings.device, settings.cuda_graphs)
    device.check()
    if settings.tensor_parallel == 1:
        return device, None
    leader, name = join_as_leader(settings)
    return replace(device, name=name), leader


def join_as_leader(settings: Settings) -> tuple[Leader, str]:
    """(leader of the other ranks, this rank's device). Raises `UsageError` on other ranks."""
    from specbatch.pipeline.engines.exact.model.parallel import Leader, join_ranks

    rank, device = join_ranks(settings.tensor_parallel, settings.device)
    if rank:
        raise UsageError(
            "with SPECBATCH_TENSOR_PARALLEL, `torchrun` starts `specbatch worker` and nothing else"
        )
    return Leader(settings.tensor_parallel), device


def follow_leader(settings: Settings) -> bool:
    """On all ranks but the first: follow the first until it ends, and return True.

    Raises `UsageError` unless `torchrun` started as many processes as are set.
    """
    if settings.tensor_parallel == 1:
        return False
    require_engine_extra()
    from specbatch.pipeline.engines.exact.model.parallel import follow, join_ranks

    rank, device = join_ranks(settings.tensor_parallel, settings.device)
    if rank == 0:
        return False
    follow(device)
    return True


def patient(enqueue: Enqueue) -> Enqueue:
    """The same for a worker: while the broker is away, failures are only logged.

    Work must not fail, or use up attempts, because a message is lost: the sweeper enqueues again.
    """

    def attempt(work: DueWork) -> None:
        try:
            enqueue(work)
        except Exception as error:  # brokers raise many kinds for one meaning
            log.warning("could not enqueue %s, the sweeper will: %s", work, error)

    return attempt
