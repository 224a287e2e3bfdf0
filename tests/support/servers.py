"""Private servers for tests: each on its own free port, in its own temporary folder.

They never touch a server that already runs on the machine, and they end with the test run, even if
that is killed: `setpriv` asks the kernel to signal them when the thread that started them ends, and
that thread is ours and lives as long as the interpreter.

    with PrivateRedis() as redis:
        redis.url          # redis://127.0.0.1:41001/0
        redis.kill()       # as a crash: no goodbye, nothing saved on the way out
        redis.restart()    # same port, same data

`PrivateS3` keeps its objects in memory, so for it a restart loses them; the others keep their data.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, ClassVar, Self

POLL_SEC = 0.02
ATTEMPTS_PER_START = 3  # a free port may be taken between finding and using it

# One thread starts every server: see the module's docstring.
_launcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="private-servers")


class ServerError(RuntimeError):
    """A private server is not installed or did not start; the message says what to do."""


def free_port() -> int:
    """A TCP port nobody listens on right now, nor on the next one: `worker all` serves on both."""
    while True:
        with socket.socket() as probe, socket.socket() as above:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                above.bind(("127.0.0.1", port + 1))
                return port


def find_binary(name: str, folders: Sequence[str] = (), *, package: str) -> str:
    """Path of a program in PATH or one of `folders`; `ServerError` names the package to install."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", *folders])
    if found := shutil.which(name, path=path):
        return found
    raise ServerError(f"{name} is not installed; on Debian or Ubuntu: apt-get install {package}")


class PrivateServer(ABC):
    """One server process: `start`, `stop`, `kill`, `restart`, and `with` for start to clean-up."""

    name: ClassVar[str]
    start_cap_sec: ClassVar[float] = 60.0
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    kill_signal: ClassVar[signal.Signals] = signal.SIGKILL
    may_start: ClassVar[bool] = True

    def __init__(self) -> None:
        self.port = 0
        self.folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """How a client reaches it."""

    @abstractmethod
    def command(self) -> list[str]:
        """The program and its arguments."""

    @abstractmethod
    def answers(self) -> bool:
        """Whether a real connection works; False or `OSError` while it does not."""

    def prepare(self) -> None:  # noqa: B027 - most servers need nothing
        """Make what the first start needs; `self.folder` exists."""

    def run_as(self) -> str | None:
        """The user to run as; None: this one."""
        return None

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self.is_running and self._process else None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        if not PrivateServer.may_start:
            raise ServerError(f"a test of the tier `unit` starts {self.name}: mark it `pipeline`")
        self.folder = Path(tempfile.mkdtemp(prefix=f"specbatch-{self.name}-", dir=_temp_root()))
        self._log = (self.folder / "server.log").open("ab")
        try:
            if user := self.run_as():
                self.folder.chmod(0o755)
                shutil.chown(self.folder, user)
            self.prepare()
            self._start_on_a_free_port()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._clean_up()

    def start(self) -> None:
        """Start on the known port and wait until it answers."""
        if self.is_running:
            return
        self._process = _launcher.submit(self._spawn, self.command(), self.kill_signal).result()
        deadline = time.monotonic() + self.start_cap_sec
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerError(f"{self.name} ended while starting: {self.log_tail()}")
            with contextlib.suppress(OSError):
                if self.answers():
                    return
            time.sleep(POLL_SEC)
        self.kill()
        raise ServerError(
            f"{self.name} did not answer within {self.start_cap_sec:.0f} s: {self.log_tail()}"
        )

    def stop(self) -> None:
        """Ask it to end; after ten seconds, kill it."""
        if not self.is_running:
            return
        assert self._process is not None
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End it as a crash would, and wait until it is gone."""
        if not self.is_running:
            return
        assert self._process is not None
        self._process.send_signal(self.kill_signal)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(60)

    def restart(self) -> None:
        """Stop it if it runs, and start it again on the same port with the same data."""
        self.stop()
        self.start()

    def log_tail(self, characters: int = 800) -> str:
        """The end of what it wrote, for error messages."""
        text = (self.folder / "server.log").read_text(errors="replace")
        return text[-characters:].strip() or "(it wrote nothing)"

    def run_tool(self, command: list[str]) -> None:
        """Run a program of this server's to its end, as its user."""
        process = _launcher.submit(self._spawn, command, signal.SIGKILL).result()
        try:
            code = process.wait(self.start_cap_sec)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ServerError(f"{Path(command[0]).name} took too long: {self.log_tail()}") from None
        if code:
            raise ServerError(f"{Path(command[0]).name} exited with {code}: {self.log_tail()}")

    def _start_on_a_free_port(self) -> None:
        for attempt in itertools.count(1):
            self.port = free_port()
            try:
                self.start()
                return
            except ServerError:
                if attempt == ATTEMPTS_PER_START or self.is_running:
                    raise

    def _spawn(self, command: list[str], on_death: signal.Signals) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*_leash(on_death, self.run_as()), *command],
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C at the terminal is for pytest, which then stops us
        )

    def _clean_up(self) -> None:
        self.stop()
        if self._log is not None:
            self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class PrivateRedis(PrivateServer):
    """Redis with an append-only file: an acknowledged write survives `kill()`."""

    name = "redis"
    databases = 256

    @property
    def url(self) -> str:
        return self.url_of(0)

    def url_of(self, database: int) -> str:
        """The URL of one numbered database."""
        return f"redis://127.0.0.1:{self.port}/{database}"

    def command(self) -> list[str]:
        binary = find_binary("redis-server", package="redis-server")
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.folder),
            "databases": str(self.databases),
            "save": "",
            "appendonly": "yes",
            "appendfsync": "no",
            "daemonize": "no",
        }
        return [binary, *(word for key, value in options.items() for word in (f"--{key}", value))]

    def answers(self) -> bool:
        return self.talk("PING") == "+PONG"

    def flush(self, database: int) -> None:
        """Empty one numbered database."""
        answer = self.talk(f"SELECT {database}", "FLUSHDB")
        if answer != "+OK":
            raise ServerError(f"redis refused FLUSHDB: {answer}")

    def talk(self, *commands: str) -> str:
        """Send inline commands; the first line of the last answer."""
        line = ""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            stream = connection.makefile("rw", newline="\r\n")
            for command in commands:
                stream.write(command + "\r\n")
                stream.flush()
                line = stream.readline().strip()
        return line


class PrivatePostgres(PrivateServer):
    """PostgreSQL without fsync: a commit survives `kill()`, not a power cut.

    `kill()` is PostgreSQL's immediate shutdown: every backend dies, no checkpoint is written
    and the next start recovers from the log.
    """

    name = "postgres"
    stop_signal = signal.SIGINT  # fast shutdown: sessions are ended, not waited for
    kill_signal = signal.SIGQUIT
    user = "specbatch"

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str) -> str:
        """The URL of one database."""
        return f"postgresql://{self.user}@127.0.0.1:{self.port}/{database}"

    def run_as(self) -> str | None:
        return _unprivileged_user() if os.geteuid() == 0 else None

    def environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PG")}
        return kept | {"HOME": str(self.folder), "LC_ALL": "C"}

    def prepare(self) -> None:
        initdb = [_postgres_binary("initdb"), "--pgdata", str(self.folder / "data")]
        self.run_tool(
            [*initdb, "--username", self.user, "--auth=trust", "--encoding=UTF8", "--no-sync"]
        )

    def command(self) -> list[str]:
        options = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.folder),
            "fsync": "off",
            "full_page_writes": "off",
            "shared_buffers": "32MB",
            "max_wal_size": "128MB",  # of memory, mostly
            "min_wal_size": "32MB",
            "timezone": "UTC",
        }
        command = [_postgres_binary("postgres"), "-D", str(self.folder / "data")]
        settings = (word for key, value in options.items() for word in ("-c", f"{key}={value}"))
        return [*command, "-p", str(self.port), *settings]

    def answers(self) -> bool:
        import psycopg

        try:
            with psycopg.connect(self.url, connect_timeout=5) as connection:
                return connection.execute("SELECT 1").fetchone() == (1,)
        except psycopg.OperationalError:
            return False

    def create_database(self, like: str = "") -> str:
        """Make a fresh database, a copy of the one at `like` or an empty one; its URL."""
        name = f"test_{next(self._numbers)}"
        template = f' TEMPLATE "{like.rsplit("/", 1)[1]}"' if like else ""
        self._execute(f'CREATE DATABASE "{name}"{template}{self._strategy()}')
        return self.url_of(name)

    def _strategy(self) -> str:
        """Files are copied in a third of the time that PostgreSQL 15's log of them takes."""
        is_new = int((self.folder / "data" / "PG_VERSION").read_text()) >= 15
        return " STRATEGY FILE_COPY" if is_new else ""

    def drop_database(self, url: str) -> None:
        """Drop a database, ending whatever sessions it still has."""
        self._execute(f'DROP DATABASE IF EXISTS "{url.rsplit("/", 1)[1]}" WITH (FORCE)')

    def _execute(self, statement: str) -> None:
        import psycopg

        with psycopg.connect(self.url, autocommit=True, connect_timeout=60) as connection:
            connection.execute(statement.encode())


class PrivateS3(PrivateServer):
    """moto's S3 behind real HTTP, in a process of its own. Objects live in its memory."""

    name = "s3"
    region = "us-east-1"

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def environment(self) -> dict[str, str]:
        return dict(os.environ) | {"PYTHONWARNINGS": "ignore"}

    def answers(self) -> bool:
        try:
            with _direct.open(f"{self.url}/moto-api/", timeout=5) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:
            return True

    def create_bucket(self) -> str:
        """Make a fresh bucket; its name."""
        name = f"test-bucket-{next(self._numbers)}"
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
        with _direct.open(request, timeout=60):
            return name


# Proxies of the environment are for the outside world.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _leash(on_death: signal.Signals, user: str | None) -> list[str]:
    """The command prefix that ends a server with us and, where asked, drops root."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        if user is not None:
            raise ServerError(
                "setpriv is not installed; on Debian or Ubuntu: apt-get install util-linux"
            )
        return []
    drop = [f"--reuid={user}", f"--regid={_group_of(user)}", "--clear-groups"] if user else []
    return [setpriv, *drop, f"--pdeathsig={on_death.name.removeprefix('SIG')}", "--"]


def _unprivileged_user() -> str:
    import pwd

    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    raise ServerError("PostgreSQL refuses to run as root and there is no user postgres or nobody")


def _group_of(user: str) -> int:
    import pwd

    return pwd.getpwnam(user).pw_gid


def _postgres_binary(name: str) -> str:
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_version, reverse=True)
    folders = [str(folder) for folder in versions]
    if pg_config := shutil.which("pg_config"):
        asked = subprocess.run([pg_config, "--bindir"], capture_output=True, text=True, check=False)
        folders.append(asked.stdout.strip())
    return find_binary(name, folders, package="postgresql")


def _version(folder: Path) -> float:
    try:
        return float(folder.parent.name)
    except ValueError:
        return 0.0


def _temp_root() -> str | None:
    """A folder every user may pass through; None: the default one is.

    In memory where conftest finds room there: a PostgreSQL makes 300 files for a database, and
    ext4 without a journal looks at every inode that was freed within five seconds for each.
    """
    if in_memory := os.environ.get("PYTEST_DEBUG_TEMPROOT"):
        return in_memory if _all_may_pass(Path(in_memory)) else "/tmp"
    return None if _all_may_pass(Path(tempfile.gettempdir())) else "/tmp"


def _all_may_pass(folder: Path) -> bool:
    whole = folder.resolve()
    return all(one.stat().st_mode & stat.S_IXOTH for one in (whole, *whole.parents))
