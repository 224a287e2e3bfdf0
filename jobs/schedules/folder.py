"""The schedules of a folder, read again when its files change."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from specbatch.jobs.schedules.definition import Schedule, load_schedule, schedule_files
from specbatch.schemas.errors import UsageError

log = logging.getLogger(__name__)

Stamp = tuple[int, int]


@dataclass(slots=True)
class Folder:
    """A file that becomes wrong keeps what it last said rightly, and is complained of once."""

    path: Path
    _stamps: dict[Path, Stamp] = field(default_factory=dict)
    _schedules: dict[Path, Schedule] = field(default_factory=dict)

    def schedules(self) -> list[Schedule]:
        """What the files say now; of several of one name the first. Raises `UsageError`."""
        files = schedule_files(self.path)
        for gone in self._stamps.keys() - set(files):
            del self._stamps[gone]
            self._schedules.pop(gone, None)
        for file in files:
            self._look(file)
        return list({s.name: s for s in reversed(list(self._schedules.values()))}.values())[::-1]

    def _look(self, file: Path) -> None:
        try:
            found = file.stat()
        except OSError:  # it went away meanwhile
            return
        stamp = (found.st_mtime_ns, found.st_size)
        if self._stamps.get(file) == stamp:
            return
        self._stamps[file] = stamp
        try:
            made = load_schedule(file)
        except UsageError as error:
            goes_on = " (its last valid version stays in force)" if file in self._schedules else ""
            log.error("%s%s", error, goes_on)
            return
        for other, schedule in self._schedules.items():
            if schedule.name == made.name and other != file:
                log.error("schedule file %s: %s has its name too", file, other)
        self._schedules[file] = made
