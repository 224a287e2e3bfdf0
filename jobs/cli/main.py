"""`specbatch`: all commands under one name. Heavy imports wait until a command needs them."""

from __future__ import annotations

from specbatch.jobs.cli.audit import audit
from specbatch.jobs.cli.bench import bench
from specbatch.jobs.cli.cancel import cancel
from specbatch.jobs.cli.chaos import chaos
from specbatch.jobs.cli.console import new_app, run
from specbatch.jobs.cli.cost import cost
from specbatch.jobs.cli.demo import demo
from specbatch.jobs.cli.doctor import doctor
from specbatch.jobs.cli.export import export
from specbatch.jobs.cli.jobs import jobs
from specbatch.jobs.cli.migrate import migrate
from specbatch.jobs.cli.notify import notify
from specbatch.jobs.cli.purge import purge
from specbatch.jobs.cli.replay import replay
from specbatch.jobs.cli.report import report
from specbatch.jobs.cli.retry import retry
from specbatch.jobs.cli.scheduler import scheduler
from specbatch.jobs.cli.schedules import schedules
from specbatch.jobs.cli.settings import settings
from specbatch.jobs.cli.show import show
from specbatch.jobs.cli.submit_job import submit_job
from specbatch.jobs.cli.top import top
from specbatch.jobs.cli.worker import worker

app = new_app("Batch generation with speculative decoding: exact, durable, auditable.")
for command in (
    submit_job,
    jobs,
    show,
    cost,
    report,
    cancel,
    retry,
    purge,
    audit,
    replay,
    export,
    worker,
    scheduler,
    schedules,
    top,
    demo,
    bench,
    chaos,
    notify,
    migrate,
    settings,
    doctor,
):
    app.command()(command)


def main() -> None:
    """The `specbatch` command."""
    run(app, "specbatch")
