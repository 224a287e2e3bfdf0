"""`specbatch scheduler`: Celery beat over the schedule files, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import closing
from pathlib import Path

from specbatch.jobs.cli.checks import check_scheduled
from specbatch.jobs.cli.connect import check_broker_url, client, load_settings
from specbatch.jobs.cli.console import remark
from specbatch.jobs.cli.options import SchedulesFolder
from specbatch.jobs.cli.schedule_process import Processes
from specbatch.jobs.schedules.definition import Folder
from specbatch.jobs.schedules.ticker import Ticker
from specbatch.pipeline.bootstrap import make_store
from specbatch.schemas.masking import mask_url


def scheduler(folder: SchedulesFolder = None) -> None:
    """Run what schedule files say when its time comes. Several may run at once.

    Files may be changed, added and removed meanwhile.
    """
    settings = load_settings()
    app = check_broker_url(settings)
    files = Folder(folder or Path(settings.schedules_dir))
    schedules = files.schedules()
    for name in ("celery", "specbatch"):
        logging.getLogger(name).setLevel(logging.INFO)
    counted = f"{len(schedules):,} schedule{'s' if len(schedules) != 1 else ''}"
    remark(
        f"scheduler of {counted} in {files.path} on {mask_url(settings.broker_url)}; Ctrl-C ends it"
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    from specbatch.jobs.schedules.beat import run_beat

    with (
        closing(make_store(settings)) as store,
        client(settings) as c,
        closing(Processes(settings)) as processes,
    ):
        ticker = Ticker(store, c, time.time, check_scheduled, processes.start)
        run_beat(app, files, ticker)
    remark("scheduler ended")
