"""A worker of several kinds with the stand-in's engine, otherwise as `specbatch worker` runs it.

python tests/support/some_kinds.py KIND,KIND,... VERIFIER PROPOSER
"""

from __future__ import annotations

import logging

from specbatch.jobs.chaos.orders import Order
from specbatch.jobs.chaos.worker import models_of
from specbatch.jobs.cli.connect import load_settings
from specbatch.jobs.cli.console import new_app, run
from specbatch.workers.lifecycle import run_worker

app = new_app("A worker of several kinds.")


@app.command()
def work(kinds: str, verifier: str, proposer: str) -> None:
    settings = load_settings()
    for name in ("celery", "specbatch"):
        logging.getLogger(name).setLevel(logging.INFO)
    names = tuple(kinds.split(","))
    drafting = None if proposer == "none" else proposer
    order = Order(0, {}, "stand-in", verifier, drafting, log="", kinds=names)
    drafts = (drafting,) if drafting else ()
    run_worker(settings, names, verifier, drafts, concurrency=4, fake_models=models_of(order))


if __name__ == "__main__":
    run(app, "some-kinds")
