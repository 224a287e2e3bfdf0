"""Settings of an installation, read once at the edge from the environment or a file.

Every field is `SPECBATCH_<NAME>`; `SPECBATCH_SETTINGS` may name a TOML file with the same names in
lower case (the environment wins). Secrets only ever travel in URLs read here; they are masked in
`repr` and never reach the store, messages or logs (`masking.py`).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, AliasChoices, Field, field_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from specbatch.schemas.file_modes import Access
from specbatch.schemas.masking import MASK, mask_url, remember, remember_secrets
from specbatch.schemas.placement import DEFAULT_POOL, REGION
from specbatch.schemas.privacy import PrivacyMode
from specbatch.schemas.schemes import why_not_writable
from specbatch.schemas.sqlite_urls import url_of_file
from specbatch.schemas.usage import PRICE_NAMES

PRICED = rf"^([^/]+/[^/]+/(on-demand|reserved|spot)|{'|'.join(PRICE_NAMES)})$"
MOST_USD = 1_000_000.0


def _in_microusd(usd: float) -> float:
    """Costs are summed in whole units, so a price is a whole number of millionths."""
    if round(usd, 6) != usd:
        raise ValueError("a price has at most six decimals")
    return usd


Usd = Annotated[float, Field(ge=0, le=MOST_USD), AfterValidator(_in_microusd)]  # of an hour

_IN_URL = r"(?:[A-Za-z0-9._~:/@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"  # before a query or fragment
_SECRETS_OF_LIBRARIES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PGPASSWORD", "HF_TOKEN")


OLD_NAMES = frozenset({"bell_patience_sec"})  # of settings, which still count
EngineName = Literal["exact", "vllm"]
ENGINES = get_args(EngineName)
EXACT: EngineName = "exact"
VLLM: EngineName = "vllm"


class Settings(BaseSettings):
    """One frozen object; each class gets only the values it needs, never the whole."""

    model_config = SettingsConfigDict(
        env_prefix="SPECBATCH_",
        frozen=True,
        extra="ignore",
        allow_inf_nan=False,  # JSON has neither, and child processes are given these as JSON
    )

    database_url: str = Field(
        default="", description="SQLAlchemy URL; empty means SQLite inside the workspace"
    )
    broker_url: str = Field(default="memory://", description="Celery broker: redis, amqp or memory")
    workspace: str = Field(
        default="",
        description="folder or s3:// prefix for group artefacts; empty: ./specbatch-data",
    )
    store_mode: Access = Field(
        default=Access.PRIVATE,
        description="who may read the SQLite file and the workspace's files that are made from now "
        "on: `private` (this user), `group` (the folder's group too) or `umask`",
    )
    output_mode: Access = Field(
        default=Access.UMASK, description="the same for outputs and exports in folders"
    )
    s3_endpoint_url: str | None = Field(default=None, description="S3 endpoint other than AWS")
    lease_sec: float = Field(
        default=60.0, gt=0, description="a lease without a heartbeat expires after so many seconds"
    )
    step_deadline_sec: float = Field(
        default=900.0,
        gt=0,
        # The longest step is a pass of `max_batch_tokens` prompt tokens. With 8e9 weights these are
        # 2 * 8e9 * 2,048 = 3.3e13 operations: 210 s at the 158 GFLOP/s that two cores with AVX2
        # were measured at, 820 s at a quarter of that. Loading a model is no step.
        description="if a step takes longer, the engine is given up and its worker ends",
    )
    load_deadline_sec: float = Field(
        default=3600.0,
        gt=0,
        # 140 GB of weights take 1,400 s from a storage that gives 100 MB a second. vLLM compiles
        # for some minutes behind that, and tries its speculation.
        description="the same for loading a model, with what an engine tries of it",
    )
    sweep_interval_sec: float = Field(
        default=5.0, gt=0, description="how often messages for due work are sent again"
    )
    broker_reconnects: int = Field(
        default=100,
        ge=0,
        # Attempts come at most ten seconds apart, so that is about a quarter of an hour. Until then
        # groups in hand continue: they need no broker.
        description="a worker ends after so many failures in a row to take messages; 0: never",
    )
    message_patience_sec: float = Field(
        default=30.0,
        gt=0,
        validation_alias=AliasChoices(
            *("message_patience_sec", "SPECBATCH_MESSAGE_PATIENCE_SEC"),
            *("bell_patience_sec", "SPECBATCH_BELL_PATIENCE_SEC"),
        ),
        # Longer than an ordinary queue takes; otherwise messages for what waits there add up.
        description="work that still waits this long after its message is enqueued again",
    )
    propose_patience_sec: float = Field(
        default=60.0,
        gt=0,
        # As long as a lease: longer than a busy proposer takes for a group, and no longer than it
        # takes to find out that one is dead.
        description="a group that no proposer claims for so long continues without drafts",
    )
    max_attempts: int = Field(
        default=3, ge=1, description="claims of a group before it is split or fails"
    )
    price_per_device_hour_usd: Usd = Field(
        default=0.20, description="price of a device that is not in the price book"
    )
    price_book: dict[Annotated[str, Field(pattern=PRICED)], Usd] = Field(
        default_factory=dict,
        description="kind/region/tenure of devices: dollars per hour, and the prices of what else "
        f"a job uses ({', '.join(PRICE_NAMES)}), as JSON",
    )
    device_kind: str = Field(
        default="", description="what this worker's device is in the price book; empty: `device`"
    )
    region: str = Field(default="local", description="the device's region in the price book")
    tenure: Literal["on-demand", "reserved", "spot"] = Field(
        default="reserved", description="how the device is leased: on-demand, reserved or spot"
    )
    pool: str = Field(
        default=DEFAULT_POOL,
        pattern=r"^[\w.-]+$",
        description="name of the pool of alike workers that this one belongs to",
    )
    pool_patience_sec: float = Field(
        default=1800.0,
        gt=0,
        # Longer than the largest groups take: a job moves on with each of them.
        description="a job that a cheaper pool does not continue for so long goes to this one too",
    )
    loss_notice_file: str = Field(
        default="",
        description="once this file exists, this worker's device is about to be taken away: it "
        "gives its groups back at once and ends",
    )
    max_concurrent_sequences: int = Field(default=64, ge=1, description="sequences per fused batch")
    max_batch_tokens: int = Field(default=2048, ge=16, description="tokens per forward pass")
    kv_cache_mib: int | None = Field(
        default=None,
        ge=16,
        description="memory for KV blocks, per model; less if less is available. Unset: 1024 on a "
        "processor, and on a GPU four fifths of what is free, for all models together",
    )
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda(:\d+)?)$",
        description="where engines run: cpu, cuda, or one GPU of several as cuda:1",
    )
    engine: EngineName = Field(
        default="exact",
        description="what verifies: `exact`, or `vllm`, which must be installed beside specbatch",
    )
    vllm_max_depth: int = Field(
        default=8,
        ge=0,
        le=32,
        description="draft tokens that vLLM makes room for per sequence and step; 0: never drafts",
    )
    vllm_options: dict[str, Any] = Field(
        default_factory=dict,
        description="further options of vLLM's engine, as JSON: max_model_len, "
        "tensor_parallel_size, gpu_memory_utilization, enforce_eager and others",
    )
    cuda_graphs: bool = Field(default=True, description="record short passes on a GPU")
    tenant_depths: dict[str, Annotated[int, Field(ge=0, le=32)]] = Field(
        default_factory=dict, description="tenant: draft tokens per step at most, as JSON; 0: none"
    )
    tenant_weights: dict[str, Annotated[float, Field(gt=0, le=1e6)]] = Field(
        default_factory=dict,
        description="tenant: its share beside the others', as JSON; 1 where none is given",
    )
    max_open_groups: int = Field(
        default=512,
        ge=1,
        description="reading of a job's input pauses while this many of its groups wait",
    )
    ingest_memory_mib: int = Field(
        default=768,
        ge=64,
        description="memory that decoding an input may take; rows beyond it are quarantined",
    )
    actor: str = Field(
        default="", description="this user's name in the audit log; empty: user@host"
    )
    anchor_uri: str = Field(
        default="",
        description="folder or s3:// prefix for anchors of audit logs, outside the store; empty: "
        "none are written",
    )
    anchor_key: str = Field(
        default="",
        repr=False,
        description="Ed25519 key that signs anchors, 32 bytes in URL-safe base64",
    )
    anchor_public_keys: str = Field(
        default="",
        description="further public keys to trust, separated by commas",
    )
    timestamp_url: str = Field(
        default="", description="RFC 3161 authority that stamps anchors too; empty: none does"
    )
    timestamp_roots: str = Field(
        default="", description="PEM file with its root certificates, to check its time stamps"
    )
    notify_file: str = Field(
        default="",
        description="YAML file of the targets that jobs may notify: webhooks, Slack, e-mail; this "
        "worker sends to them",
    )
    docs_url: str = Field(
        default="https://docs.example.com/specbatch",
        pattern=rf"^https?://(\[[0-9A-Fa-f:]+\]|{_IN_URL}){_IN_URL}*$",
        description="where your copy of this documentation is, a URL without query or fragment: "
        "lineage names the schema of its own facet there",
    )
    tensor_parallel: int = Field(
        default=1, ge=1, le=64, description="processes of `torchrun` that share the verifier"
    )

    metrics_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="where a worker serves metrics, the second process of `worker all` on the next "
        "one; 0: nowhere",
    )
    metrics_address: str = Field(
        default="127.0.0.1",
        description="the address it serves them on; 0.0.0.0: all, for anyone who reaches it",
    )
    metrics_label_values: int = Field(
        default=50,
        ge=1,
        description="job names, tags, proposers each that metrics tell apart; others are `other`",
    )
    drift_every_steps: int = Field(
        default=251,
        ge=0,
        description="steps between two measurements of the drift of draft models; 0: none",
    )
    planned_rollout: bool = Field(
        default=False, description="announce a rollout in the metrics, so that alerts wait"
    )
    schedules_dir: str = Field(
        default="jobs/schedules", description="folder of the schedule files, for `scheduler`"
    )

    encryption_key: str = Field(
        default="", repr=False, description="keys of texts at rest, newest first; empty: none"
    )
    privacy: PrivacyMode = Field(
        default=PrivacyMode.FULL, description="what is kept of texts: full, redacted or hash-only"
    )
    tenant_privacy: dict[str, PrivacyMode] = Field(
        default_factory=dict, description="tenant: its own `privacy`, as JSON"
    )
    redaction_patterns: dict[str, str] = Field(
        default_factory=dict,
        description="NAME: regular expression to redact as well, as JSON",
    )
    presidio: bool = Field(default=False, description="redact what Presidio finds too")
    presidio_language: str = Field(
        default="en", description="language of the texts that Presidio checks"
    )
    retention_days: dict[str, Annotated[float, Field(ge=0)]] = Field(
        default_factory=dict,
        description="tenant: days after which `specbatch purge` empties its jobs, as JSON",
    )

    traces: str = Field(
        default="",
        pattern=r"^(otlp|file:.+)?$",
        description="where traces go: otlp, or file:PATH; empty: nowhere",
    )
    trace_groups: float = Field(
        default=0.05, ge=0, le=1, description="share of a job's groups that are traced; failed: all"
    )
    trace_requests: float = Field(
        default=0.1, ge=0, le=1, description="share of a traced group's requests that are, too"
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="how commands and workers log: text or json"
    )
    job_log_days: float = Field(
        default=7.0,
        ge=0,
        description="days that workers keep what they log about a job, for `specbatch logs`; 0: "
        "they keep nothing",
    )

    @field_validator("region", mode="after")
    @classmethod
    def _is_a_region(cls, value: str) -> str:
        if re.fullmatch(REGION, value) is None or value.endswith("\n"):
            raise ValueError(
                "no job could name this region: give it 1 to 64 characters without spaces, commas, "
                "slashes, quotes and backslashes"
            )
        return value

    @field_validator("device_kind", mode="after")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if "/" in value:
            raise ValueError("a slash separates names in the price book, so none can have one")
        return value

    @field_validator("actor", mode="after")
    @classmethod
    def _is_no_workers(cls, name: str) -> str:
        """The store's roles tell workers from people by their names."""
        if re.search(r":[0-9]+$", name):
            raise ValueError(
                "only workers are called HOST:NUMBER: give a name that does not end in a colon and "
                "digits"
            )
        return name

    @field_validator("workspace", mode="after")
    @classmethod
    def _workspace_is_absolute(cls, value: str) -> str:
        value = value or "specbatch-data"
        if "@" in value.partition("://")[2].partition("/")[0]:
            # Every job's row names it, and so would its credentials be in the store.
            raise ValueError("credentials belong in the environment, not in the workspace's URL")
        if words := why_not_writable(value):
            raise ValueError(words)
        return value if "://" in value else str(Path(value).expanduser().resolve())

    def model_post_init(self, _context: Any, /) -> None:
        """Mask the passwords that were read in all texts of this process from now on."""
        remember(value for value in self.model_dump().values() if isinstance(value, str))
        remember_secrets(os.environ.get(name, "") for name in _SECRETS_OF_LIBRARIES)
        remember_secrets(part.strip() for part in self.encryption_key.split(","))
        remember_secrets([self.anchor_key])

    @property
    def kv_cache_bytes(self) -> int | None:
        """Of each model; None: the engine's choice."""
        return None if self.kv_cache_mib is None else self.kv_cache_mib << 20

    @property
    def store_url(self) -> str:
        """The database URL; SQLite in the workspace unless one is set."""
        if self.database_url:
            return self.database_url
        root = Path.cwd() / "specbatch-data" if "://" in self.workspace else Path(self.workspace)
        return url_of_file(root / "specbatch.db")

    @property
    def masked(self) -> dict[str, object]:
        """All values with passwords in URLs hidden, for printing."""
        shown = {k: mask_url(v) if isinstance(v, str) else v for k, v in self.model_dump().items()}
        secret = {"encryption_key": self.encryption_key, "anchor_key": self.anchor_key}
        return shown | {name: MASK for name, value in secret.items() if value}

    def __repr__(self) -> str:
        return f"Settings({self.masked})"

    __str__ = __repr__

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the hook's signature
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the same
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        sources: list[PydanticBaseSettingsSource] = [init_settings, env_settings]
        if path := os.environ.get("SPECBATCH_SETTINGS"):
            sources.append(TomlConfigSettingsSource(settings_cls, toml_file=Path(path)))
        return tuple(sources)
