"""`python -m specbatch.benchmarks.stand_in_worker`: a worker process whose engine is no model.

Everything else is what every worker has: Celery on the broker of the settings, the store, leases,
sweeper, stages and files. It imports no torch, so that many fit a machine.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from celery.signals import worker_ready

from specbatch.jobs.chaos import stand_in_model
from specbatch.jobs.chaos.stand_in import MAX_SEQUENCES, StandInHost
from specbatch.pipeline.bootstrap import KINDS, FakeModels
from specbatch.pipeline.engines.contract import ModelFolder
from specbatch.schemas.settings import Settings
from specbatch.workers.lifecycle import run_worker

READY = "ready"  # said on stdout once it listens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, required=True)
    parser.add_argument("--model", type=Path, required=True, help="a folder of `stand_in_model`")
    parser.add_argument("--step-sec", type=float, default=0.0)
    parser.add_argument("--max-sequences", type=int, default=MAX_SEQUENCES)
    parser.add_argument("--concurrency", type=int, default=16)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)

    def engines(verifier: ModelFolder, proposer: ModelFolder | None) -> StandInHost:
        return StandInHost(
            verifier,
            proposer,
            max_sequences=arguments.max_sequences,
            step_sec=arguments.step_sec,
        )

    worker_ready.connect(_say_ready)
    run_worker(
        Settings(),
        tuple(arguments.kinds),
        str(arguments.model) if "verify" in arguments.kinds else None,
        (str(arguments.model),) if "propose" in arguments.kinds else (),
        arguments.concurrency,
        fake_models=FakeModels(engines, stand_in_model.tokenizer),
    )


def _say_ready(**_: object) -> None:
    print(READY, file=sys.__stdout__, flush=True)  # Celery takes the other one for its log


if __name__ == "__main__":
    main()
