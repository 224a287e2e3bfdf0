"""`make bench-serve`: many clients at once at `specbatch serve`, on loopback.

    off      no `--rate`, and workers with the stand-in engine beside the service: errors, how long
             a poll takes, and whether the service's memory grows
    limits   `--rate`, and one key that asks as fast as it can beside modest ones: who is refused
    engine   the embedded runner with the demo pair: how long a job takes alone, and with clients

A client uploads a small file, makes a batch, polls it until it has ended, and cancels every third
one, over one connection that stays open. Clients, service and workers share this machine: a time is
that from a client's first byte sent to the last received, the clients' own queue included.
`others_cores` says how many cores everything else kept busy meanwhile. It should be near 0. Where
it is not, times say little: `--note` keeps the reason in the file.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from specbatch.benchmarks.fleet import fleet
from specbatch.benchmarks.processes import cpu_sec, resident_bytes
from specbatch.jobs.chaos import stand_in_model
from specbatch.jobs.serve.keys import EVERYTHING, make_key
from specbatch.jobs.serve.runner import SLICE_SEC
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.settings import Settings
from support.demo import DRAFT, VERIFIER
from support.servers import PrivateRedis, free_port

RESULTS = Path(__file__).parent / "results"
PARTS = ("off", "limits", "engine")
URL = "/v1/completions"
TENANTS = 20
ROWS = 3  # of a client's file
CANCELLED = 3  # every so many-th batch
RATE = "120/minute"
ENDED = ("completed", "failed", "expired", "cancelled")  # statuses
_LIBRARIES = (
    "specbatch",
    "fastapi",
    "starlette",
    "uvicorn",
    "h11",
    "sqlalchemy",
    "python-multipart",
)
Row = dict[str, Any]


# --- clients --------------------------------------------------------------------------------------
@dataclass(slots=True)
class Seen:
    """What all clients together saw, by kind of request."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    refused: Counter[str] = field(default_factory=Counter)  # 429, by client
    without_wait: int = 0  # of these, without Retry-After
    answered: Counter[str] = field(default_factory=Counter)  # by client
    errors: Counter[str] = field(default_factory=Counter)  # what else was not 200
    batches: int = 0

    def row(self) -> Row:
        kinds = {kind: _times(values) for kind, values in sorted(self.seconds.items())}
        return {
            "requests": sum(len(values) for values in self.seconds.values()),
            "batches": self.batches,
            "errors": dict(self.errors),
            "ms": kinds,
        }


def _times(seconds: Sequence[float]) -> Row:
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)

    return {"count": len(ordered), "p50": at(0.5), "p99": at(0.99), "most": at(1.0)}


class Connection:
    """HTTP/1.1 over one socket that stays open. As little work as can be: it shares the machine."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.key = port, key
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(
        self, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body. Raises `OSError` and `asyncio.IncompleteReadError`."""
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self.port)
        assert self._reader is not None, "opened together"
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.key}\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._writer.write(head.encode() + body)
        first, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        pairs = (line.partition(": ") for line in lines if line)
        headers = {name.lower(): value for name, _, value in pairs}
        said = await self._reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection") == "close":
            self.close()
        return int(first.split()[1]), headers, said

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@dataclass(slots=True)
class Client:
    """One client. `pause_sec`: between two polls; 0: it waits for nothing."""

    name: str
    connection: Connection
    pause_sec: float
    until: float
    seen: Seen
    made: int = 0

    async def run(self) -> None:
        await asyncio.sleep(self.pause_sec * random.Random(self.name).random())  # not all at once
        while time.monotonic() < self.until:
            try:
                await self._batch()
            except (OSError, asyncio.IncompleteReadError) as error:
                self.seen.errors[type(error).__name__] += 1
                self.connection.close()
        self.connection.close()

    async def _batch(self) -> None:
        file = await self._ask("upload", "POST", "/v1/files", _form(self.name), _FORM)
        if file is None:
            return
        asked = {"input_file_id": file["id"], "endpoint": URL, "completion_window": "24h"}
        body = json.dumps(asked).encode()
        batch = await self._ask("create", "POST", "/v1/batches", body)
        if batch is None:
            return
        self.made += 1
        self.seen.batches += 1
        path, polls = f"/v1/batches/{batch['id']}", 0
        while time.monotonic() < self.until:
            await asyncio.sleep(self.pause_sec)
            polls += 1
            if self.made % CANCELLED == 0 and polls == 2:
                await self._ask("cancel", "POST", f"{path}/cancel")
            shown = await self._ask("poll", "GET", path)
            if shown is not None and shown["status"] in ENDED:
                return

    async def _ask(
        self, what: str, method: str, path: str, body: bytes = b"", kind: str = "application/json"
    ) -> dict[str, Any] | None:
        begun = time.perf_counter()
        status, headers, said = await self.connection.ask(method, path, body, kind)
        took = time.perf_counter() - begun
        if status == 200:
            self.seen.seconds[what].append(took)
            self.seen.answered[self.name] += 1
            return dict(json.loads(said))
        if status == 429:
            self.seen.refused[self.name] += 1
            self.seen.without_wait += "retry-after" not in headers
            if self.pause_sec:
                await asyncio.sleep(int(headers.get("retry-after", 1)))
            return None
        self.seen.errors[f"{what} {status}"] += 1
        return None


_FORM = "multipart/form-data; boundary=b"


def _form(name: str) -> bytes:
    lines = b"".join(
        json.dumps(_request(f"{name}-{row}", f"say {row}", 4)).encode() + b"\n"
        for row in range(ROWS)
    )
    head = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
    file = (head % b'file"; filename="x.jsonl') + lines
    return (head % b"purpose") + b"batch\r\n" + file + b"\r\n--b--\r\n"


def _request(name: str, prompt: str, tokens: int) -> dict[str, Any]:
    body = {"model": "small", "prompt": prompt, "max_tokens": tokens}
    return {"custom_id": name, "method": "POST", "url": URL, "body": body}


# --- the service ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Service:
    """`specbatch serve` in a process of its own."""

    pid: int
    port: int
    keys: list[str]  # of as many tenants


@contextmanager
def service(
    work: Path, model: Row, options: Sequence[str], broker_url: str = ""
) -> Iterator[Service]:
    (work / "models.yaml").write_text(yaml.safe_dump({"models": {"small": model}}))
    folder, port = work / "specbatch-serve", free_port()
    own = {"SPECBATCH_SWEEP_INTERVAL_SEC": "1"}
    if broker_url:
        own |= {"SPECBATCH_BROKER_URL": broker_url, "SPECBATCH_WORKSPACE": str(folder)}
    store = make_store(Settings(workspace=str(folder)))
    keys = [make_key(store, f"k{n}", f"t{n}", EVERYTHING, None)[1] for n in range(TENANTS)]
    store.close()
    program = Path(sys.executable).with_name("specbatch")
    command = [str(program), "serve", "--models", "models.yaml", "--port", str(port)]
    more = ["--max-open-batches", "100000", *options]
    with (work / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *more], cwd=work, env=os.environ | own, stdout=log, stderr=log
        )
    try:
        _wait_for(port, process, work / "serve.log")
        yield Service(process.pid, port, keys)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    while process.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.2)
    raise SystemExit(f"the service did not start: {log.read_text()[-2000:]}")


# --- measuring ------------------------------------------------------------------------------------
async def _load(here: Service, clients: Sequence[Client], seconds: float) -> tuple[int, int]:
    """Resident bytes of the service after a fifth of the time and at its end."""
    tasks = [asyncio.create_task(client.run()) for client in clients]
    await asyncio.sleep(seconds / 5)
    early = resident_bytes(here.pid)
    await asyncio.sleep(4 * seconds / 5 - 0.5)
    late = resident_bytes(here.pid)
    await asyncio.gather(*tasks)
    return early, late


def load(
    here: Service, pauses: Sequence[float], seconds: float, ours: Sequence[int] = ()
) -> tuple[Seen, Row]:
    """Clients with these pauses, each with the key of a tenant, for so long. `ours`: processes
    beside the service that take part."""
    seen, until = Seen(), time.monotonic() + seconds
    clients = [
        Client(f"c{n}", Connection(here.port, here.keys[n % TENANTS]), pause, until, seen)
        for n, pause in enumerate(pauses)
    ]
    pids = [here.pid, os.getpid(), *ours]
    before, busy, begun = [cpu_sec(pid) for pid in pids], _busy_sec(), time.monotonic()
    early, late = asyncio.run(_load(here, clients, seconds))
    elapsed = time.monotonic() - begun
    used = [cpu_sec(pid) - was for pid, was in zip(pids, before, strict=True)]
    row = {
        "clients": len(pauses),
        "seconds": round(elapsed, 1),
        "requests_per_sec": round(sum(map(len, seen.seconds.values())) / elapsed, 1),
        **seen.row(),
        "rss_mib_at_a_fifth": round(early / 2**20, 1),
        "rss_mib_at_the_end": round(late / 2**20, 1),
        "service_cores": round(used[0] / elapsed, 3),
        "clients_cores": round(used[1] / elapsed, 3),
        "others_cores": round(max(0.0, _busy_sec() - busy - sum(used)) / elapsed, 3),
    }
    return seen, row


def _busy_sec() -> float:
    """Processor time of the whole machine, with the time that its host stole."""
    fields = [int(one) for one in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    idle = fields[3] + fields[4]
    return (sum(fields[:8]) - idle) / os.sysconf("SC_CLK_TCK")


def off(count: int, pause_sec: float, seconds: float) -> Row:
    with tempfile.TemporaryDirectory() as name, PrivateRedis() as redis:
        work = Path(name)
        model = stand_in_model.write_model(work / "model")
        values = {"verifier": str(model), "spec": {"speculation": {"depth": "off"}}}
        url = redis.url_of(0)
        with service(work, values, ["--rate", "off"], url) as here:
            settings = Settings(broker_url=url, workspace=str(work / "specbatch-serve"))
            kinds = {"all": ("--kinds", "ingest", "record", "verify", "--concurrency", "4")}
            with fleet(settings, model, kinds, work) as workers:
                ours = [*workers.pids.values(), *([redis.pid] if redis.pid else [])]
                _, row = load(here, [pause_sec] * count, seconds, ours)
    return {"pause_sec": pause_sec, **row}


def limits(count: int, pause_sec: float, seconds: float) -> Row:
    """The first tenant's key is greedy: its clients, one of `TENANTS`, wait for nothing."""
    with tempfile.TemporaryDirectory() as name, PrivateRedis() as redis:
        work = Path(name)
        model = stand_in_model.write_model(work / "model")
        url = redis.url_of(0)
        with service(work, {"verifier": str(model)}, ["--rate", RATE], url) as here:
            greedy = {n for n in range(count) if n % TENANTS == 0}
            pauses = [0.0 if n in greedy else pause_sec for n in range(count)]
            seen, row = load(here, pauses, seconds)
    names = {f"c{n}" for n in greedy}
    modest = [seen.answered[f"c{n}"] for n in range(count) if n not in greedy]
    return {
        "rate": RATE,
        "greedy_answered": sum(seen.answered[one] for one in names),
        "greedy_refused": sum(seen.refused[one] for one in names),
        "modest_refused": sum(n for one, n in seen.refused.items() if one not in names),
        "modest_answered_least": min(modest),
        "modest_answered_most": max(modest),
        "refused_without_retry_after": seen.without_wait,
        **row,
    }


def engine(count: int, pause_sec: float, rows: int) -> Row:
    """The same job twice: alone, and while clients upload, poll and cancel."""
    spec = {"sampling": {"max_tokens": 48}, "engine": {"dtype": "float32"}}
    model = {"verifier": str(VERIFIER), "proposer": str(DRAFT), "spec": spec}
    found: Row = {"rows": rows, "pause_sec": pause_sec}
    with (
        tempfile.TemporaryDirectory() as name,
        service(Path(name), model, ["--rate", "off"]) as here,
    ):
        job_sec(here, 8)  # loads the models
        found["alone_sec"] = job_sec(here, rows)
        end = in_a_thread(here, rows)
        if found["alone_sec"] > SLICE_SEC / 2:
            raise SystemExit("the job may stop for another tenant's turn: give fewer --rows")
        # Their batches wait for the end of the job, so that they only upload, poll and cancel.
        _, row = load(here, [pause_sec] * count, found["alone_sec"])
        found["with_clients_sec"] = end()
    found["slowdown"] = round(found["with_clients_sec"] / found["alone_sec"], 3)
    return found | row


def job_sec(here: Service, rows: int) -> float:
    return asyncio.run(_one_job(here, rows))


def in_a_thread(here: Service, rows: int) -> Callable[[], float]:
    """Begin the job. What is returned waits for its seconds."""
    began = ThreadPoolExecutor(1).submit(job_sec, here, rows)
    time.sleep(1.0)  # so that it is begun before there are others
    return began.result


async def _one_job(here: Service, rows: int) -> float:
    """Seconds from the batch's creation to its end, by four polls a second."""
    connection = Connection(here.port, here.keys[0])
    lines = b"".join(
        json.dumps(_request(f"r{row}", f"def f{row}(x, y):", 48)).encode() + b"\n"
        for row in range(rows)
    )
    head = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n'
    body = (head % b"purpose") + b"batch\r\n" + (head % b'file"; filename="x') + lines
    _, _, said = await connection.ask("POST", "/v1/files", body + b"\r\n--b--\r\n", _FORM)
    asked = {
        "input_file_id": json.loads(said)["id"],
        "endpoint": URL,
        "completion_window": "24h",
    }
    begun = time.monotonic()
    _, _, said = await connection.ask("POST", "/v1/batches", json.dumps(asked).encode())
    path = f"/v1/batches/{json.loads(said)['id']}"
    while True:
        await asyncio.sleep(0.25)
        shown = json.loads((await connection.ask("GET", path))[2])
        if shown["status"] in ENDED:
            break
    connection.close()
    if shown["status"] != "completed" or shown["request_counts"]["completed"] != rows:
        raise SystemExit(f"the job did not end well: {shown}")
    return round(time.monotonic() - begun, 2)


def facts() -> Row:
    """The machine and every version that matters, and no names."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpus = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(cpus, platform.processor()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--pause-sec", type=float, default=4.0, help="between two polls")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="of `off`; a third of `limits`"
    )
    parser.add_argument("--rows", type=int, default=256, help="of the engine's job")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--note", default="", help="kept in the JSON file")
    arguments = parser.parse_args()
    path = arguments.results / "serve.json"
    is_whole = set(arguments.parts) == set(PARTS)
    found: Row = json.loads(path.read_text()) if path.is_file() and not is_whole else {}
    found |= {"note": arguments.note} if arguments.note else {}
    found["machine"] = facts()
    count, pause_sec = arguments.clients, arguments.pause_sec
    for part in arguments.parts:
        if part == "off":
            found[part] = off(count, pause_sec, arguments.seconds)
        elif part == "limits":
            found[part] = limits(count, pause_sec, arguments.seconds / 3)
        else:
            found[part] = engine(count, pause_sec, arguments.rows)
        print(json.dumps({part: found[part]}), flush=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
