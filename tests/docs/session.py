"""One session for all pages: a working folder, the demo pair, private servers, and a small shell.

Our own commands run in this process, so that each costs what it does and not an interpreter; what
is more than a plain command (pipes, documents, substitutions) is bash's. Workers are real
processes, ended with their page.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from docs.elsewhere import SUBSTITUTES
from docs.pages import program_of

from specbatch.jobs.cli import console, main, submit_job
from support.servers import PrivatePostgres, PrivateRedis, PrivateS3, free_port
from support.tree import ROOT
from support.workers import BIN, WorkerProcess

OURS = {"specbatch": main.main, "submit-job": submit_job.main}
SERVICES = ("worker", "scheduler", "serve", "top")  # go on until they are told to end
FORKING = ("chaos",)  # makes processes from itself: not from a test's
BUCKETS = ("prompts", "completions", "specbatch-work")
WIDTH = 110
TOO_LONG_SEC = 120


@dataclass
class Ran:
    """What a command left behind."""

    command: str
    code: int
    printed: str


@dataclass
class Session:
    """The state of a shell."""

    folder: Path  # as a checkout: with jobs/ in it
    values: dict[str, str]  # of substitutes
    base: dict[str, str]  # environment at the begin of each page
    cwd: Path = field(init=False)
    environment: dict[str, str] = field(init=False)
    services: list[WorkerProcess] = field(default_factory=list)
    _ends: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.begin(self.folder)

    def begin(self, cwd: Path) -> None:
        """A page begins: where the reader is, and nothing exported yet."""
        self.cwd, self.environment = cwd, dict(self.base)

    def end(self) -> None:
        """A page is over: what it started must not have failed, and is ended."""
        dead = [one.text()[-2000:] for one in self.services if one.process.poll()]
        self.services.clear()
        self._ends.close()
        assert not dead, f"ended by itself: {dead}"

    def run(self, command: str) -> Ran:
        """Run one command of a page."""
        for said, meant in SUBSTITUTES:
            command = command.replace(said, meant.format(**self.values) if "{" in meant else meant)
        command = re.sub(r"(?<![\w${-])JOB(?![\w=])", self.environment.get("JOB", "JOB"), command)
        if program_of(command) in OURS and not _needs_bash(command):
            words = shlex.split(self._expanded(command.replace("\\\n", " ")), comments=True)
            values = {}
            while "=" in words[0]:
                name, _, value = words.pop(0).partition("=")
                values[name] = value
            if words[1:2] and words[1] in SERVICES:
                return self._served(command, words, values)
            if words[1:2] and words[1] not in FORKING:
                return self._here(command, words, values)
        return self._in_bash(command)

    def python(self, text: str) -> Ran:
        """Run a block of Python as a script of its own would."""
        with self._inside({}) as printed:
            exec(compile(text, "<page>", "exec"), {"__name__": "__main__"})
        return Ran(text, 0, printed.getvalue())

    def _here(self, command: str, words: list[str], values: dict[str, str]) -> Ran:
        code: object = 0
        with self._inside(values) as printed:
            before, sys.argv = sys.argv, words
            try:
                OURS[words[0]]()
            except SystemExit as left:
                code = left.code
            finally:
                sys.argv = before
        return Ran(command, code if isinstance(code, int) else 1, printed.getvalue())

    def _served(self, command: str, words: list[str], values: dict[str, str]) -> Ran:
        environment = {**self.environment, **values, "OMP_NUM_THREADS": "1"}
        name = "-".join([str(len(self.services)), *words[1:3]])
        started = command_process(*words[1:], environment=environment, cwd=self.cwd, name=name)
        self.services.append(self._ends.enter_context(started))
        return Ran(command, 0, "")

    def _in_bash(self, command: str) -> Ran:
        state = self.folder / ".state"
        script = f"set -e -o pipefail\n{command}\nenv -0 > {state}\npwd > {state}.cwd\n"
        done = subprocess.run(
            ["bash", "-a", "-c", script],
            cwd=self.cwd,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TOO_LONG_SEC,
            check=False,
        )
        if done.returncode == 0:
            pairs = (pair.partition("=") for pair in state.read_text().split("\0") if pair)
            self.environment = {name: value for name, _, value in pairs}
            self.cwd = Path(Path(f"{state}.cwd").read_text().strip())
        return Ran(command, done.returncode, done.stdout)

    def _expanded(self, command: str) -> str:
        return re.sub(r"\$\{?(\w+)\}?", lambda found: self.environment.get(found[1], ""), command)

    @contextlib.contextmanager
    def _inside(self, values: dict[str, str]) -> Iterator[io.StringIO]:
        """This process with the session's folder, environment and output."""
        printed = io.StringIO()
        kept, cwd = dict(os.environ), Path.cwd()
        widths = console.out.width, console.err.width
        console.out.width = console.err.width = WIDTH
        os.environ.clear()
        os.environ.update({**self.environment, **values})
        os.chdir(self.cwd)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                yield printed
        finally:
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(kept)
            console.out.width, console.err.width = widths


@contextlib.contextmanager
def command_process(
    *arguments: str, environment: Mapping[str, str], cwd: Path, name: str
) -> Iterator[WorkerProcess]:
    """`specbatch ARGUMENTS` in a process of its own, killed at the end."""
    log = cwd / f"{name}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [str(BIN / "specbatch"), *arguments],
            env=dict(environment),
            cwd=cwd,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            yield WorkerProcess(process, log)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def with_servers(
    folder: Path, redis: PrivateRedis, postgres: PrivatePostgres, s3: PrivateS3
) -> Iterator[Session]:
    """A session on private servers, with the buckets that the pages name and last night's input."""
    (folder / "jobs").symlink_to(ROOT / "jobs")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPECBATCH_", "AWS_"))}
    base = kept | {
        "PATH": f"{BIN}:{kept['PATH']}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": s3.region,
        "AWS_REGION": s3.region,
        "AWS_ENDPOINT_URL": s3.url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    database = postgres.create_database()
    port = str(free_port())
    values = {"redis": redis.url_of(redis.databases - 1), "postgres": database, "port": port}
    session = Session(folder, values, base)
    import boto3

    client = boto3.client(
        "s3",
        endpoint_url=s3.url,
        region_name=s3.region,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    for bucket in BUCKETS:
        client.create_bucket(Bucket=bucket)
    prompts = (ROOT / "jobs" / "demo" / "prompts.parquet").read_bytes()
    client.put_object(Bucket="prompts", Key="2026-11-21/prompts.parquet", Body=prompts)
    try:
        yield session
    finally:
        session.services.clear()
        session._ends.close()
        postgres.drop_database(database)


def _needs_bash(command: str) -> bool:
    """Whether there is more to it than words, quotations and variables."""
    bare = re.sub(r"'[^']*'|\"[^\"]*\"|#.*", "", command.replace("\\\n", " "))
    return bool(re.search(r"[|<>;&`]|\$\(", bare)) or "$(" in command
