"""`make bench-bad-candidates`: who stops a bad draft model, and what it cost until then.

One candidate has random weights: the trial should stop it. The other one is the demo's draft model,
blind to all tokens that a job of small letters did not have: it drafts well for the prompts of the
trial, and badly for a night of capital letters, where the canary should stop it. What they cost is
read from the ledger: drafting and rejected device time of the groups that they drafted for.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specbatch.benchmarks.nights_that_teach import Site, prompts_of, written

MODEL = "tried"
STEPS = "1,5,25,100"
CANNOT_PAY = 3  # exit code of `specbatch models try`
REFUSED = 2  # of `rollout start`

COST = """
select coalesce(sum(case when g.is_candidate then c.draft_ticks + c.rejected_ticks end), 0) * 1.0
     / sum(c.prefill_ticks + c.verify_ticks + c.draft_ticks + c.rejected_ticks + c.padding_ticks
         + c.overhead_ticks)
from completions c
left join rollout_groups g
    on g.job_id = c.job_id and g.group_index = c.group_index and g.rollout_id = :rollout
where c.job_id = :job
"""
DRAWN = """
select count(*), sum(is_candidate) from rollout_groups where rollout_id = :rollout
"""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A bad candidate: who stopped it, and what it cost."""

    candidate: str
    trial: str  # its verdict
    passed_trial: bool
    outcome: str | None  # of its rollout; refused: there was none
    groups: int  # until the verdict, and those then on their way
    drafted: int  # of these, groups that it drafted for
    lost_share: float  # its drafting and rejected time over the job's device time
    same_outputs: bool


def candidate_of(draft: Path, out: Path, known: Collection[int] | None) -> Path:
    """The draft model with random weights, or blind to all tokens but these."""
    import torch
    from transformers import AutoModelForCausalLM

    shutil.copytree(draft, out)
    model = AutoModelForCausalLM.from_pretrained(draft)
    torch.manual_seed(0)
    with torch.no_grad():
        if known is None:
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02)
        else:
            blind = torch.ones(model.config.vocab_size, dtype=torch.bool)
            blind[list(known)] = False
            model.get_input_embeddings().weight[blind] = 0.0
    model.save_pretrained(out)
    return out


class Ledger:
    """The store of a site, read beside the product."""

    def __init__(self, site: Site) -> None:
        (self._path,) = site.folder.rglob("specbatch.db")

    def all(self, query: str, **values: object) -> list[Any]:
        with closing(sqlite3.connect(self._path)) as database:
            return database.execute(query, values).fetchall()

    def outputs(self, job: str) -> list[Any]:
        query = "select row_index, token_ids from completions where job_id = :job order by 1"
        return self.all(query, job=job)

    def tokens(self, job: str) -> set[int]:
        """All that a job's completions have."""
        return {int(token) for _, ids in self.outputs(job) for token in json.loads(ids)}


def stopped(site: Site, draft: Path, bad: Path, night: Path, sample: str) -> Stopped:
    """The night without and with the candidate, which is rolled out unless the trial forbids it."""
    name = bad.name
    scope = ("--tenant", "default", "--job", name)
    plain = site.job(f"{name}-plain", night, str(draft))
    site.run("specbatch", "models", "add", MODEL, draft)  # once; it stays version 1
    site.run("specbatch", "models", "promote", f"{MODEL}:1", *scope, "--reason", "the first one")
    site.run("specbatch", "models", "add", MODEL, bad)
    trying = ("--verifier", site.verifier, "--job", sample, "--json")
    code, printed = site.run("specbatch", "models", "try", MODEL, *trying, allowed=(0, CANNOT_PAY))
    begin = ("rollout", "start", MODEL, *scope, "--steps", STEPS, "--reason", "a bad one")
    code, _ = site.run("specbatch", *begin, allowed=(0,) if code == 0 else (REFUSED,))
    verdict = json.loads(printed)["reason"]
    if code == REFUSED:
        return Stopped(name, verdict, False, "refused", 0, 0, 0.0, True)
    done = site.job(name, night, str(draft))
    _, listed = site.run("specbatch", "rollout", "list", "--history", "--json")
    rollout = json.loads(listed)[-1]
    ledger = Ledger(site)
    ((groups, drafted),) = ledger.all(DRAWN, rollout=rollout["number"])
    ((share,),) = ledger.all(COST, rollout=rollout["number"], job=done["job"])
    same = ledger.outputs(plain["job"]) == ledger.outputs(done["job"])
    return Stopped(*(name, verdict, True, rollout["outcome"], groups, drafted or 0, share, same))


def main() -> None:
    from specbatch.benchmarks.engine import RESULTS
    from specbatch.jobs.bench.machine import machine

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", default="sqlalchemy")
    parser.add_argument("--prompts", type=int, default=2048, help="of a night")
    parser.add_argument("--sample", type=int, default=512, help="of the job that the trial uses")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    draft = Path(__file__).resolve().parents[1] / "jobs" / "demo" / "models" / "draft"
    prompts = prompts_of(arguments.package, arguments.seed)
    with TemporaryDirectory() as name:
        folder = Path(name)
        site = Site(folder, draft.with_name("verifier"), arguments.tokens, arguments.group_size)
        small = [text.lower() for text in prompts[: arguments.sample]]
        capital = [text.upper() for text in prompts[: arguments.prompts]]
        night = written(folder / "night.parquet", capital)
        sample = site.job("sample", written(folder / "sample.parquet", small), str(draft))
        known = Ledger(site).tokens(sample["job"])
        bad = [
            candidate_of(draft, folder / "random", None),
            candidate_of(draft, folder / "blind", known),
        ]
        found = []
        for one in bad:
            found.append(stopped(site, draft, one, night, "sample"))
            print(json.dumps(asdict(found[-1])), flush=True)
    report = {
        "machine": machine(),
        "arguments": {k: str(v) for k, v in vars(arguments).items() if k != "results"},
        "steps": STEPS,
        "stopped": [asdict(one) for one in found],
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "bad-candidates.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
