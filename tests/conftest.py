"""Fixtures of every room. Servers and models are made on first use, once per run."""

from __future__ import annotations

import gc
import logging
import os
import platform
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings

from specbatch.schemas.masking import _log_filters
from support.databases import share_compiled_statements
from support.models import TinyPair, tiny_llama
from support.rabbit import PrivateRabbit
from support.servers import PrivatePostgres, PrivateRedis, PrivateS3, PrivateServer, ServerError
from support.tiers import BY_DEFAULT, COLLECTED, TIER_OF, TIERS, tier_of

TESTS = Path(__file__).parent
IN_MEMORY, ROOM_BYTES = Path("/dev/shm"), 8 << 30  # tests write less than 1 GB
Server = TypeVar("Server", bound=PrivateServer)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        default=",".join(BY_DEFAULT),
        help=f"run the tests of these tiers, with commas between: {', '.join(TIERS)}; or `all`",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(_Processes(config))
    # A shell has what it starts in the background ignore it, and all that this starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("ci")  # the same examples each time, however long one takes
    # Before anything imports huggingface_hub, which reads this once.
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Before anything imports triton, as parts of torch do: its kernels then run on a processor.
    if not _has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"
        # Its products are numpy's. OpenBLAS' kernels for AVX2 add a row's parts in another order
        # by the row's place in a tile, which no tensor core does; those for AVX do not.
        if platform.machine().lower() in ("x86_64", "amd64"):
            os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
    # Before anything imports torch. Where tests run in several processes each has its share of the
    # cores: threads of one that wait for each other are a hundred times slower on cores that
    # another one's keep busy.
    if processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
        threads = max(1, (os.cpu_count() or 1) // processes)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    for name in [name for name in os.environ if name.startswith("SPECBATCH_")]:
        if name != "SPECBATCH_NATIVE_ISA":  # all tests may be run as on a lesser processor
            del os.environ[name]
    if _has_room(IN_MEMORY):  # where SQLite's syncs take no time; --basetemp wins
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))


def _has_room(folder: Path) -> bool:
    """Whether all that tests write has room there, several times over."""
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= ROOM_BYTES


def _has_gpu() -> bool:
    """Whether there is a GPU and a torch for it, found out without importing torch."""
    device = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/kfd"))
    return device and not version("torch").endswith("+cpu")


_left_out = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test its tier, keep those that are asked for, and begin with the slow ones."""
    asked = config.getoption("--tier")
    wanted = TIERS if asked == "all" else tuple(asked.split(","))
    if unknown := set(wanted) - set(TIERS):
        raise pytest.UsageError(f"no such tier: {', '.join(unknown)}; --tier takes {TIERS}")
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        marks = [mark.name for mark in item.iter_markers()]
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        needs = {*getattr(item, "fixturenames", ()), *(p for p in parameters if type(p) is str)}
        item.stash[TIER_OF] = tier_of(folder, marks, needs)
    config.stash[COLLECTED] = list(items)
    others = [item for item in items if item.stash[TIER_OF] not in wanted]
    items[:] = [item for item in items if item.stash[TIER_OF] in wanted]
    items.sort(key=lambda item: TIERS.index(item.stash[TIER_OF]), reverse=True)
    if others:
        config.hook.pytest_deselected(items=others)
        config.stash[_left_out] = len(others)
        if (told := getattr(config, "workeroutput", None)) is not None:  # of several processes
            told["left_out"] = len(others)


_MANY_OBJECTS = 50_000
_TESTS_BETWEEN_COUNTS = 16
_finished = count()
_MUCH_MEMORY = 1 << 30
_resident = 0  # bytes, when all was collected


def pytest_collection_finish() -> None:
    gc.set_threshold(10_000, 20, 20)  # a sixteenth of the time of tests without models
    share_compiled_statements()
    _freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test of the tier `unit` starts no server, by whatever way."""
    PrivateServer.may_start = item.stash[TIER_OF] != "unit"


def pytest_runtest_logfinish() -> None:
    counts = next(_finished) % _TESTS_BETWEEN_COUNTS == 0  # counting objects takes milliseconds
    if (counts and len(gc.get_objects()) > _MANY_OBJECTS) or _has_grown():
        _freeze()


def _has_grown() -> bool:
    return _resident_bytes() > _resident + _MUCH_MEMORY


def _resident_bytes() -> int:
    """0 where the system does not say."""
    said = Path("/proc/self/statm")
    return int(said.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if said.exists() else 0


def _freeze() -> None:
    """What was collected, imported and compiled stays. Whole collections, of which each job has
    some, need not look at it again: with torch and thousands of tests that is half a second each.
    What has become garbage since, engines in cycles too, is looked for when memory has grown.
    """
    global _resident
    if has_grown := _has_grown():
        gc.unfreeze()
    gc.collect()
    gc.freeze()
    if has_grown:
        _resident = _resident_bytes()


class _Processes:
    """What is heard of the processes that tests are shared out to."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_testnodedown(self, node: Any) -> None:
        """Each of them has seen all tests."""
        told = getattr(node, "workeroutput", {})
        self._config.stash[_left_out] = told.get("left_out", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if count := config.stash.get(_left_out, 0):
        terminalreporter.write_line(f"{count} tests of other tiers not run; `--tier=all` runs all")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers in every test, whatever ran before."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _logs() -> Iterator[None]:
    """What a file's tests have set for the logs of this process does not reach the next file."""
    factory, filters = logging.getLogRecordFactory(), list(_log_filters)
    yield
    logging.setLogRecordFactory(factory)
    _log_filters[:] = filters


def _running(server: Server) -> Iterator[Server]:
    try:
        server.__enter__()
    except ServerError as error:
        pytest.fail(str(error), pytrace=False)
    try:
        yield server
    finally:
        server.__exit__()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[PrivateRedis]:
    """The run's Redis. Tests that stop or kill a server take `own_redis`."""
    yield from _running(PrivateRedis())


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PrivatePostgres]:
    """The run's PostgreSQL. Tests that stop or kill a server take `own_postgres`."""
    yield from _running(PrivatePostgres())


@pytest.fixture(scope="session")
def s3_server() -> Iterator[PrivateS3]:
    """The run's S3."""
    yield from _running(PrivateS3())


@pytest.fixture(scope="session")
def rabbit_server() -> Iterator[PrivateRabbit]:
    """The run's RabbitMQ. To stop or kill one, take `own_rabbit`."""
    yield from _running(PrivateRabbit())


@pytest.fixture
def own_redis() -> Iterator[PrivateRedis]:
    """A Redis of this test's own, to kill and restart."""
    yield from _running(PrivateRedis())


@pytest.fixture
def own_postgres() -> Iterator[PrivatePostgres]:
    """A PostgreSQL of this test's own, to kill and restart."""
    yield from _running(PrivatePostgres())


@pytest.fixture
def own_rabbit() -> Iterator[PrivateRabbit]:
    """A RabbitMQ of this test's own, to kill and restart."""
    yield from _running(PrivateRabbit())


_redis_databases = iter(range(1, sys.maxsize))


@pytest.fixture
def redis_url(redis_server: PrivateRedis) -> Iterator[str]:
    """URL of an empty numbered database, this test's alone."""
    database = next(_redis_databases) % redis_server.databases
    redis_server.flush(database)
    yield redis_server.url_of(database)
    redis_server.flush(database)


@pytest.fixture(scope="session")
def migrated_postgres(postgres_server: PrivatePostgres) -> str:
    """URL of a database that nobody works in: others are copies of it."""
    from specbatch.pipeline.ledger.sql.migrate import upgrade

    url = postgres_server.create_database()
    upgrade(url)
    return url


@pytest.fixture
def postgres_url(postgres_server: PrivatePostgres, migrated_postgres: str) -> Iterator[str]:
    """URL of a database with specbatch's tables and nothing in them, this test's alone."""
    url = postgres_server.create_database(like=migrated_postgres)
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def empty_postgres_url(postgres_server: PrivatePostgres) -> Iterator[str]:
    """URL of an empty database, this test's alone."""
    url = postgres_server.create_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def rabbit_url(rabbit_server: PrivateRabbit) -> str:
    """URL of an empty virtual host, this test's alone."""
    return rabbit_server.create_vhost()


@dataclass(frozen=True)
class S3:
    """A fresh bucket and where it is."""

    endpoint_url: str
    bucket: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}"

    def client(self) -> Any:
        """A boto3 client for it."""
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint_url)


@pytest.fixture
def s3(s3_server: PrivateS3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """A fresh bucket; the environment's `AWS_*` lead boto3 and pyarrow to it."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": s3_server.region,
        "AWS_REGION": s3_server.region,
        "AWS_ENDPOINT_URL": s3_server.url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    return S3(endpoint_url=s3_server.url, bucket=s3_server.create_bucket())


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A random two-layer verifier and one-layer draft with one 300-token vocabulary."""
    folder: Path = tmp_path_factory.mktemp("tiny-pair")
    return TinyPair(
        verifier=tiny_llama(folder / "verifier", vocab_size=300, layers=2, seed=1),
        draft=tiny_llama(folder / "draft", vocab_size=300, layers=1, seed=2),
    )
