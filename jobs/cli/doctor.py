"""`specbatch doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from specbatch.jobs.cli.connect import check_broker, load_settings
from specbatch.jobs.cli.console import out, say_json
from specbatch.kernels import native
from specbatch.pipeline.engines.exact.model.memory import available_bytes
from specbatch.pipeline.ledger.sql.databases import has_store
from specbatch.pipeline.ledger.sql.migrate import current, head
from specbatch.schemas.errors import SpecbatchError, UsageError
from specbatch.schemas.masking import mask_url
from specbatch.schemas.notifications import load_targets
from specbatch.schemas.settings import Settings

_LEAST_GIB = 2.0  # of free memory: an engine of a small model, with its imports
_GPU_SEC = 10.0
# Extra: one of its packages, and what it is for.
_EXTRAS = {
    "engine": ("torch", "to run models here: workers and local jobs"),
    "s3": ("boto3", "to read and write s3://"),
    "gcs": ("gcsfs", "to read gs://"),
    "azure": ("adlfs", "to read az:// and abfs://"),
    "hf": ("huggingface_hub", "to read hf://"),
    "http": ("urllib3", "to read http:// and https://"),
    "postgres": ("psycopg", "for a store on PostgreSQL"),
    "observe": ("prometheus-client", "for metrics and traces"),
    "report": ("jinja2", "for `specbatch report`"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. `remedy` says what to do; None: nothing is wrong."""

    what: str
    found: str
    remedy: str | None = None
    is_problem: bool = False  # else a remark


def doctor(
    json: Annotated[bool, typer.Option("--json", help="one JSON array on one line")] = False,
) -> None:
    """Look at this machine and the settings, and say what to do where something is wrong.

    Exit code 1: something is wrong.
    """
    found = list(findings(load_settings()))
    if json:
        say_json([asdict(one) for one in found])
    else:
        table = Table("", "found", "what to do")
        for one in found:
            mark = "✗ " if one.is_problem else "· " if one.remedy else "✓ "
            table.add_row(mark + one.what, one.found, one.remedy or "")
        out.print(table)
    if any(one.is_problem for one in found):
        raise typer.Exit(1)


def findings(settings: Settings) -> Iterator[Finding]:
    """All of them. A check that fails is a finding, never the end."""
    yield _versions()
    yield from _extras(settings)
    yield _processor()
    yield _memory()
    yield _gpu()
    yield _checked("store", lambda: _store(settings))
    yield _checked("broker", lambda: _broker(settings))
    yield _workspace(settings)
    if settings.notify_file:
        yield _checked("notifications", lambda: _targets(settings.notify_file))
    yield _terminal()


def _checked(what: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except SpecbatchError as error:
        return Finding(what, "cannot be used", str(error), is_problem=True)


def _versions() -> Finding:
    return Finding(
        "specbatch",
        f"{version('specbatch')}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.machine()}",
    )


def _extras(settings: Settings) -> Iterator[Finding]:
    needed = {"s3"} if settings.workspace.startswith("s3://") else set[str]()
    needed |= {"postgres"} if settings.store_url.startswith("postgresql") else set()
    for extra, (package, purpose) in _EXTRAS.items():
        try:
            yield Finding(f"extra {extra}", f"{package} {version(package)}")
        except PackageNotFoundError:
            how = f"`pip install 'specbatch[{extra}]'`, {purpose}"
            yield Finding(f"extra {extra}", "not installed", how, is_problem=extra in needed)


def _processor() -> Finding:
    name, cores = native.processor_name(), len(os.sched_getaffinity(0))
    try:
        kernels = native.library()
    except native.NativeUnavailableError as error:
        return Finding(
            "processor",
            f"{name}, {cores} cores, no C kernels: {error}",
            "install a wheel for this platform, or build one with a C compiler: without the "
            "kernels torch computes, several times slower",
            is_problem=True,
        )
    except native.InstructionSetError as error:
        return Finding("processor", f"{name}, {cores} cores", str(error), is_problem=True)
    return Finding(
        "processor", f"{name}, {cores} cores, kernels at {kernels.level}: {kernels.reason}"
    )


def _memory() -> Finding:
    available = available_bytes()
    if available is None:
        return Finding("memory", "the system does not say")
    free = available / (1 << 30)
    if free < _LEAST_GIB:
        remedy = f"free some: an engine needs {_LEAST_GIB:g} GiB and its model's size"
        return Finding("memory", f"{free:.1f} GiB free", remedy, is_problem=True)
    return Finding("memory", f"{free:.1f} GiB free")


def _gpu() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("GPU", "none, engines run on the processor")
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=_GPU_SEC, check=True)
    except (OSError, subprocess.SubprocessError):
        return Finding("GPU", "nvidia-smi does not answer", "see that the driver is loaded", True)
    cards = "; ".join(told.stdout.strip().splitlines())
    if "+cpu" in _version_of("torch"):
        remedy = "this torch computes on processors alone: install a build for CUDA"
        return Finding("GPU", cards, remedy, is_problem=True)
    return Finding("GPU", cards)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _store(settings: Settings) -> Finding:
    shown = mask_url(settings.store_url)
    if not has_store(settings):
        return Finding("store", f"{shown}: made by the first job")
    there = current(settings.store_url)
    if there == head():
        return Finding("store", f"{shown}, revision {there}")
    return Finding(
        "store",
        f"{shown}, revision {there or 'none'}, and this specbatch has {head()}",
        "`specbatch migrate`; the next job does it too",
    )


def _broker(settings: Settings) -> Finding:
    if settings.broker_url.startswith("memory://"):
        remedy = "fine for `--local`; workers need SPECBATCH_BROKER_URL"
        return Finding("broker", "memory://, of one process", remedy)
    check_broker(settings)
    return Finding("broker", f"{mask_url(settings.broker_url)} answers")


def _workspace(settings: Settings) -> Finding:
    place = settings.workspace or "specbatch-data"
    if "://" in place:
        return Finding("workspace", place)
    there = next(p for p in (Path(place).absolute(), *Path(place).absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        remedy = f"let this user write {there}, or set SPECBATCH_WORKSPACE"
        return Finding("workspace", place, remedy, is_problem=True)
    free = shutil.disk_usage(there).free / (1 << 30)
    if free < 1.0:
        return Finding("workspace", f"{place}, {free:.1f} GiB free", "free some disk space", True)
    return Finding("workspace", f"{place}, {free:.0f} GiB free")


def _targets(path: str) -> Finding:
    targets = load_targets(path)
    if not targets:
        raise UsageError(f"{path} names no target")
    kinds = ", ".join(f"{name} ({target.kind})" for name, target in targets.items())
    return Finding("notifications", kinds)


def _terminal() -> Finding:
    encoding = (sys.stdout.encoding or "ascii").lower()
    if not encoding.startswith("utf"):
        remedy = "set LANG to a UTF-8 locale, for example C.UTF-8: tables and bars need it"
        return Finding("terminal", encoding, remedy)
    kind = f"{out.width} columns" if sys.stdout.isatty() else "no terminal: output is plain"
    return Finding("terminal", f"{encoding}, {kind}")
