"""`make bench-ledger`: what a token's record takes in the store, and how many go there a second.

    size   PostgreSQL: tables, indexes and TOAST of all months (`pg_total_relation_size`); SQLite:
           how much the file grows. By tokens of a completion, with drafts and without.
    rate   tokens through `commit_group`, by one client and by two processes at once. PostgreSQL
           waits for its disk at each commit, as in earnest.

Completions are made up after real ones: lengths vary by half about their mean, token ids fall off
as words do in a vocabulary of 128,256, four characters of Python's own library stand for a token,
and seven of ten draft tokens are accepted.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg

from specbatch.benchmarks.private_servers import servers
from specbatch.pipeline.ledger.contract import Store
from specbatch.pipeline.ledger.sql.migrate import open_store
from specbatch.schemas.provenance import Provenance, Ticks, by_depth
from specbatch.schemas.records import (
    Artefact,
    CompletionRecord,
    FinishReason,
    NewGroup,
    NewJob,
    Origin,
    SourcePosition,
    Stage,
    StageTiming,
)

RESULTS = Path(__file__).parent / "results"
VERIFIER, PROPOSER = "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
VOCABULARY = 128_256
DEPTH, ACCEPTANCE = 4, 0.7
ROWS = 64  # of a group
LEASE_SEC = 600.0
NO_TIME = StageTiming(0.0)
CHARACTERS = 4  # of a token
Row = dict[str, Any]


# --- completions --------------------------------------------------------------------------------


def completion(number: int, mean_tokens: int, drafts: bool) -> CompletionRecord:
    """Of row `number`: always the same."""
    chance = random.Random(number)
    count = chance.randint(mean_tokens // 2, mean_tokens + mean_tokens // 2)
    origins, found = _passes(chance, count, DEPTH if drafts else 0)
    proposed, accepted = by_depth(origins, found.drafted)
    spent = sum(found.pass_ticks)
    ticks = Ticks(
        prefill=chance.randrange(20_000),
        verify=spent * 8 // 10,
        draft=spent // 10 if drafts else 0,
        rejected=spent // 20 if drafts else 0,
        overhead=spent // 20,
    )
    at = chance.randrange(len(_text()) - CHARACTERS * count)
    return CompletionRecord(
        row_index=number,
        sample_index=0,
        row_id=f"document-{number:07}",
        tag="en",
        seed=chance.getrandbits(63),
        prompt_tokens=200,
        token_ids=tuple(_token(chance) for _ in range(count)),
        text=_text()[at : at + CHARACTERS * count],
        finish_reason=FinishReason.LENGTH,
        origins=tuple(origins),
        logprobs=tuple(-chance.expovariate(1.5) for _ in range(count)),
        proposed=sum(found.drafted),
        accepted=origins.count(Origin.ACCEPTED),
        verifier_passes=len(found.steps),
        cost_usd=ticks.total * 2e6 / 3.6e16,
        verifier=VERIFIER,
        proposer=PROPOSER,
        proposed_at_depth=proposed,
        accepted_at_depth=accepted,
        compute_sec=ticks.total / 1e7,
        decode_sec=spent / 1e7,
        baseline_sec=spent / 2e7,
        provenance=found,
        ticks=ticks,
        price_microusd=2_000_000,
    )


def _passes(chance: random.Random, count: int, depth: int) -> tuple[list[int], Provenance]:
    origins: list[int] = []
    drafted, rejected = [], []
    while len(origins) < count:
        drafted_now = min(depth if chance.random() < 0.9 else depth // 2, count - len(origins) - 1)
        agreed = 0
        while agreed < drafted_now and chance.random() < ACCEPTANCE:
            agreed += 1
        last = Origin.BONUS if agreed == drafted_now else Origin.CORRECTED
        origins += [Origin.ACCEPTED] * agreed + [last if drafted_now > 0 else Origin.PLAIN]
        if drafted_now > 0:
            drafted.append(drafted_now)
            rejected += [_token(chance)] if last is Origin.CORRECTED else []
    passes = sum(origin != Origin.ACCEPTED for origin in origins)
    begun = chance.randrange(1_000_000)
    return [int(origin) for origin in origins], Provenance(
        steps=tuple(range(begun, begun + passes)),
        pass_ticks=tuple(int(chance.gauss(4000, 400)) for _ in range(passes)),
        sources=("draft-model",) if drafted else (),
        makers=(0,) * len(drafted),
        drafted=tuple(drafted),
        rejected=tuple(rejected),
    )


def _token(chance: random.Random) -> int:
    return int(math.exp(chance.random() * math.log(VOCABULARY)))


def _text(kept: list[str] = []) -> str:  # noqa: B006 - read once
    if not kept:
        library = Path(sysconfig.get_paths()["stdlib"])
        kept.append("".join(path.read_text() for path in sorted(library.glob("a*.py"))))
    return kept[0]


# --- one database -------------------------------------------------------------------------------


def begin(store: Store, job_id: str, groups: int) -> None:
    """A job with groups that wait for their verifier."""
    job = NewJob(job_id, job_id, "t", {}, "d", VERIFIER, PROPOSER, "file:///o", "file:///w")
    store.create_job(job)
    work = store.claim_job(job_id, Stage.INGEST, "bench", LEASE_SEC)
    assert work is not None, "nobody else is there"
    where, artefact = SourcePosition("file:///in", "v", 0, 0), Artefact("file:///p", "0" * 64, 1)
    planned = [NewGroup(i, where, ROWS, 1, artefact, Stage.VERIFY, ROWS, 1) for i in range(groups)]
    store.add_groups(work.lease, planned, [], groups * ROWS, where)
    store.finish_ingest(work.lease, groups * ROWS, {})


def commit(store: Store, job_id: str, index: int, records: Sequence[CompletionRecord]) -> float:
    """Seconds that `commit_group` took for one group."""
    work = store.claim_group(job_id, index, Stage.VERIFY, "bench", LEASE_SEC)
    assert work is not None, "nobody else claims it"
    store.advance(work.lease, Stage.RECORD, Artefact("file:///r", "0" * 64, 1), NO_TIME)
    work = store.claim_group(job_id, index, Stage.RECORD, "bench", LEASE_SEC)
    assert work is not None, "nobody else claims it"
    begun = time.perf_counter()
    store.commit_group(work.lease, records, NO_TIME, {"compute_sec": 1.0})
    return time.perf_counter() - begun


def client(url: str, job_id: str, first: int, groups: int, mean_tokens: int, drafts: bool) -> Row:
    """Commit groups from `first` on; says `ready`, waits for a line, and tells what it took."""
    store = open_store(url, migrate=False)
    made = [_group(first + i, mean_tokens, drafts) for i in range(groups)]
    commit(store, job_id, first, made[0])  # connects, and has every statement compiled
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.time()
    seconds = sum(
        commit(store, job_id, first + i, records) for i, records in enumerate(made[1:], 1)
    )
    tokens = sum(len(record.token_ids) for records in made[1:] for record in records)
    ended = time.time()
    store.close()
    return {"tokens": tokens, "commit_sec": seconds, "begun": begun, "ended": ended}


def _group(index: int, mean_tokens: int, drafts: bool) -> list[CompletionRecord]:
    return [completion(index * ROWS + row, mean_tokens, drafts) for row in range(ROWS)]


def measure(url: str, mean_tokens: int, drafts: bool, groups: int, clients: int) -> Row:
    """A fresh database's figures."""
    store = open_store(url)
    job_id = "0193b5a2c3d8f00aa1bb2"
    begin(store, job_id, groups * clients)
    before = size_of(url)
    results = list(_run_clients(url, job_id, groups, clients, mean_tokens, drafts))
    store.close()
    written = clients * groups
    tokens = sum(
        len(record.token_ids)
        for index in range(written)
        for record in _group(index, mean_tokens, drafts)
    )
    elapsed = max(t["ended"] for t in results) - min(t["begun"] for t in results)
    timed = sum(t["tokens"] for t in results)
    return {
        "mean_tokens": mean_tokens,
        "drafts": drafts,
        "clients": clients,
        "completions": written * ROWS,
        "bytes_per_token": round((size_of(url) - before) / tokens, 2),
        "commit_tokens_per_sec": round(timed / (sum(t["commit_sec"] for t in results) / clients)),
        "all_tokens_per_sec": round(timed / elapsed),
    }


def _run_clients(
    url: str, job_id: str, groups: int, clients: int, mean_tokens: int, drafts: bool
) -> Iterator[Row]:
    command = [sys.executable, "-m", __spec__.name, "--client", url, job_id, "--groups"]
    rest = [str(groups), "--tokens", str(mean_tokens), *(["--drafts"] if drafts else [])]
    running = [
        subprocess.Popen(
            [*command, *rest, "--first", str(i * groups)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(clients)
    ]
    for process in running:
        assert process.stdout is not None, "a pipe was asked for"
        if process.stdout.readline() != "ready\n":
            raise SystemExit("a client ended early; what it said is above")
    for process in running:
        assert process.stdin is not None, "as above"
        process.stdin.write("\n")
        process.stdin.flush()
    for process in running:
        out, _ = process.communicate()
        yield json.loads(out)


def size_of(url: str) -> int:
    """Bytes of the completions, with all that belongs to them."""
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        return sum(f.stat().st_size for f in path.parent.glob("*.db"))
    query = "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('completions')"
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        found = connection.execute(query).fetchone()
    assert found is not None, "a sum has a row"
    return int(found[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--groups", type=int, default=60, help="of 64 completions, each client's")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--client", nargs=2, metavar=("URL", "JOB"), help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--drafts", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        url, job_id = arguments.client
        (mean,) = arguments.tokens
        result = client(url, job_id, arguments.first, arguments.groups, mean, arguments.drafts)
        print(json.dumps(result))
        return
    found: dict[str, Any] = {}
    with servers() as around, tempfile.TemporaryDirectory() as folder:
        found["machine"] = around.facts
        number = 0
        for database in ("postgres", "sqlite"):
            found[database] = []
            for mean in arguments.tokens:
                for drafts in (False, True):
                    for clients in arguments.clients:
                        number += 1
                        url = f"sqlite:///{folder}/{number}/store.db"
                        if database == "postgres":
                            url = around.postgres.create_database()
                        row = measure(url, mean, drafts, arguments.groups, clients)
                        found[database].append(row)
                        print(database, json.dumps(row), flush=True)
    path = arguments.results / "ledger.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
