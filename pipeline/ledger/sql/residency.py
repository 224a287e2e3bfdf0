"""Where a job's rows may be, as conditions of statements.

A job says in which regions its rows may be, and whether on spot devices. That never changes after
its submission, so one comparison in the statement that claims is enough.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, func, or_, select, true

from specbatch.schemas.placement import PlacementSpec, Site
from specbatch.schemas.tables import Job

_NONE = "[]"  # no regions, as JSON


def placed(site: Site | None, table: Any = Job) -> list[ColumnElement[bool]]:
    """The conditions of jobs whose rows a worker at the site may have. None: any job."""
    if site is None:
        return []
    regions = _regions(table)
    found = [or_(regions == _NONE, _names(regions, site.region))]
    return [*found, _may_be_on_spot(table)] if site.is_spot else found


def job_is_placed(job_id: Any, site: Site | None) -> list[ColumnElement[bool]]:
    """The same for groups of the job with this id."""
    if site is None:
        return []
    return [select(Job.job_id).where(Job.job_id == job_id, *placed(site)).exists()]


def readable(placement: PlacementSpec) -> list[ColumnElement[bool]]:
    """The conditions of earlier jobs whose rows may be wherever a job with this placement goes."""
    regions = _regions(Job)
    found = [or_(regions == _NONE, _names(regions, name)) for name in placement.regions]
    found = found or [regions == _NONE]
    return [*found, _may_be_on_spot(Job)] if placement.spot else found


def _regions(table: Any) -> Any:
    """The JSON text of a list."""
    return func.coalesce(table.spec[("placement", "regions")].as_string(), _NONE)


def _names(regions: Any, name: str) -> ColumnElement[bool]:
    """Names are between quotes, and have none. (LIKE would not mind the case on SQLite.)"""
    without: ColumnElement[bool] = func.replace(regions, f'"{name}"', "") != regions
    return without


def _may_be_on_spot(table: Any) -> ColumnElement[bool]:
    return func.coalesce(table.spec[("placement", "spot")].as_boolean(), true())
