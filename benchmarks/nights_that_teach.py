"""`make bench-nights`: whether a draft model that is trained every night earns more the next one.

Nights are jobs over the beginnings of docstring paragraphs of an installed package, which the
demo's draft model has not seen. After each one `specbatch learn` trains on all nights so far, tries
what is surely better, and begins a rollout; groups of the next night decide. At the end one
held-out set is replayed under the draft model of every night, in turns, so that what the machine
does meanwhile falls on all alike. Nothing but the draft model drafts.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

PROGRAMS = Path(sys.executable).parent
LEAST_CHARACTERS = 160  # of a paragraph, of which the beginning is a prompt
PROMPT_CHARACTERS = 100
DEPTH = 4


@dataclass(slots=True)
class Night:
    """One night, and what was learned from it."""

    proposer: str  # who is deployed at its end
    rows: int
    acceptance: float
    job_usd: float
    rollouts: list[str] = field(default_factory=list)  # the outcomes of all so far
    learn_sec: float = 0.0
    said: str = ""  # by `specbatch learn`


@dataclass(frozen=True, slots=True)
class Replay:
    """The held-out set under one draft model."""

    proposer: str
    sequences: int  # at once
    accepted: int
    usd: float
    tokens: int

    @property
    def accepted_per_usd(self) -> float:
        return self.accepted / self.usd


def paragraphs(package: str) -> Iterator[str]:
    """Of the docstrings of a package's modules, in the order of its files."""
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                for block in (ast.get_docstring(node) or "").split("\n\n"):
                    yield " ".join(block.split())


def prompts_of(package: str, seed: int) -> list[str]:
    """Beginnings of paragraphs, each once, shuffled."""
    long = (text for text in paragraphs(package) if len(text) >= LEAST_CHARACTERS)
    found = list(dict.fromkeys(text[:PROMPT_CHARACTERS].rsplit(" ", 1)[0] for text in long))
    random.Random(seed).shuffle(found)
    return found


def written(path: Path, prompts: Sequence[str]) -> Path:
    pq.write_table(pa.table({"prompt": prompts}), path)
    return path


class Site:
    """One workspace, and the commands as a user types them."""

    def __init__(self, folder: Path, verifier: Path, tokens: int, group_size: int = 4) -> None:
        self.folder = folder
        self.verifier = verifier
        self._group_size = group_size
        self._tokens = tokens
        self._jobs = 0

    def run(self, *words: object, sequences: int = 8, allowed: Sequence[int] = (0,)) -> Any:
        """(exit code, what was printed)"""
        program, *arguments = map(str, words)
        environment = {
            **os.environ,
            "SPECBATCH_MAX_CONCURRENT_SEQUENCES": str(sequences),
            "OMP_WAIT_POLICY": "passive",
        }
        done = subprocess.run(
            [str(PROGRAMS / program), *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in allowed:
            raise SystemExit(f"{program} {arguments}: {done.stderr}")
        return done.returncode, done.stdout

    def job(self, name: str, prompts: Path, proposer: str, sequences: int = 8) -> dict[str, Any]:
        self._jobs += 1
        output = f"output-{self._jobs}"
        models = ("--verifier", self.verifier, "--proposer", proposer)
        drafts = ("--sources", "draft-model", "--depth", DEPTH, "--top-logprobs", 8)
        order = ("--input", prompts, "--output", output, "--name", name, "--json")
        more = ("--max-tokens", self._tokens, "--group-size", self._group_size)
        _, printed = self.run(
            "submit-job", "--local", *order, *models, *drafts, *more, sequences=sequences
        )
        done = json.loads(printed)
        _, cost = self.run("specbatch", "cost", done["job"], "--json")
        return {**done, "figures": json.loads(cost)["figures"], "paid": json.loads(cost)["paid"]}

    def replay(self, prompts: Path, proposer: str, sequences: int) -> Replay:
        done = self.job("held-out", prompts, proposer, sequences)
        accepted, usd = done["figures"]["accepted"], done["paid"]["usd"]
        return Replay(proposer, sequences, accepted, usd, done["tokens"])

    def deployed(self) -> str:
        """The files of the model that drafts now."""
        _, printed = self.run("specbatch", "models", "list", "--json")
        (ref,) = [model["ref"] for model in json.loads(printed) if model["deployments"]]
        return str(ref)


def teach(site: Site, draft: str, nights: Sequence[Path], steps: str) -> list[Night]:
    """The nights. Their jobs name the first draft model; the registry says which one drafts."""
    scope = ("--tenant", "default", "--job", "taught")
    site.run("specbatch", "models", "add", "taught", draft)
    site.run("specbatch", "models", "promote", "taught", *scope, "--reason", "the first one")
    told = []
    for number, prompts in enumerate(nights, 1):
        done = site.job("taught", prompts, draft)
        site.run("specbatch", "rollout", "settle")
        night = Night(site.deployed(), done["rows"], done["acceptance_rate"], done["paid"]["usd"])
        _, printed = site.run("specbatch", "rollout", "list", "--history", "--json")
        night.rollouts = [one["outcome"] or "goes on" for one in json.loads(printed)]
        began = time.monotonic()
        learning = ("--verifier", site.verifier, "--job", "taught", "--steps", steps)
        _, said = site.run("specbatch", "learn", "taught", *learning, "--night", number)
        night.learn_sec, night.said = time.monotonic() - began, said.strip()
        told.append(night)
        print(json.dumps(asdict(night)), flush=True)
    return told


def main() -> None:
    from specbatch.benchmarks.engine import RESULTS
    from specbatch.jobs.bench.machine import machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default="sqlalchemy")
    parser.add_argument("--nights", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1024, help="of a night, at most")
    parser.add_argument("--held-out", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", default="0,25,100", help="of the rollouts")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    pair = Path(__file__).resolve().parents[1] / "jobs" / "demo" / "models"
    all_prompts = prompts_of(arguments.package, arguments.seed)
    held_out, rest = all_prompts[: arguments.held_out], all_prompts[arguments.held_out :]
    size = min(arguments.prompts, len(rest) // arguments.nights)
    with TemporaryDirectory() as name:
        folder = Path(name)
        site = Site(folder, pair / "verifier", arguments.tokens, arguments.group_size)
        nights = [
            written(folder / f"night-{n}.parquet", rest[n * size : (n + 1) * size])
            for n in range(arguments.nights)
        ]
        told = teach(site, str(pair / "draft"), nights, arguments.steps)
        drafts = list(dict.fromkeys([str(pair / "draft"), *(night.proposer for night in told)]))
        held = written(folder / "held-out.parquet", held_out)
        replays = [
            site.replay(held, draft, sequences)
            for _ in range(arguments.rounds)
            for sequences in (1, 8)
            for draft in drafts
        ]
    report = {
        "machine": machine(),
        "arguments": {k: str(v) for k, v in vars(arguments).items() if k != "results"},
        "prompts_a_night": size,
        "nights": [asdict(night) for night in told],
        "replays": [
            {**asdict(one), "proposer": Path(one.proposer).name, "per_usd": one.accepted_per_usd}
            for one in replays
        ],
        "gains": gains(replays),
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "nights-that-teach.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["gains"], indent=1))
    print(f"written to {path}")


def gains(replays: Sequence[Replay]) -> list[dict[str, Any]]:
    """Of each draft model over the first, by sequences at once: medians over the rounds."""
    found = []
    for sequences in sorted({one.sequences for one in replays}):
        by_draft: dict[str, list[float]] = {}
        for one in replays:
            if one.sequences == sequences:
                by_draft.setdefault(Path(one.proposer).name, []).append(one.accepted_per_usd)
        medians = {draft: statistics.median(of) for draft, of in by_draft.items()}
        first = next(iter(medians.values()))
        found.append({"sequences": sequences, **{d: m / first for d, m in medians.items()}})
    return found


if __name__ == "__main__":
    main()
