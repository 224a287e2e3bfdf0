"""The import directions of LAYERS and NESTED, read from the source of every module."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest

from support.tree import NOT_SHIPPED, ROOMS, Module, is_inside, modules

# From the bottom to the top: a folder imports from lines below its own, never from its neighbours.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("schemas", "kernels"),
    (
        *("pipeline.policy", "pipeline.storage", "pipeline.privacy", "pipeline.audit"),
        *("pipeline.observe", "migrations"),
    ),
    ("pipeline.inputs", "pipeline.outputs", "pipeline.ledger", "pipeline.engines"),
    ("pipeline.runtime", "pipeline.moderation"),
    ("pipeline.stages",),
    ("pipeline.bootstrap",),
    ("workers", "pipeline.operations", "pipeline.learning"),
    ("jobs",),
    ("package",),
    ("benchmarks", "tools"),
)

# The same inside of a folder; "." are its own files.
NESTED: dict[str, tuple[tuple[str, ...], ...]] = {
    "pipeline.policy": (("costs",), (".",)),
    "pipeline.observe": ((".",), ("metrics", "tracing", "report", "terminal")),
    "pipeline.ledger": ((".",), ("sql",)),
    # What both engines use lies beside both: neither imports the other.
    "pipeline.engines": (
        *((".",), ("models",), ("state",), ("proposers",), ("speculation",)),
        ("observing", "service"),
        ("exact", "vllm"),
    ),
    "pipeline.engines.exact": (("model",), ("sampling",), (".",)),
    "pipeline.engines.exact.model": (("batch_invariant",), (".",)),
    "jobs": (
        ("bench", "chaos", "demo", "schedules", "running"),
        ("serve",),
        *(("cli",), (".",), ("api", "dags"), ("examples",)),
    ),
    "jobs.bench": (("peers",), (".",)),
    "tools": ((".",), ("site", "demo_pair")),
}

Place = tuple[int, str]  # of a folder among its neighbours: from the bottom, and its name


def places(module: Module) -> list[Place]:
    """The folders a module is in, from the outermost to the innermost that the tables name."""
    found = [
        (at, room)
        for at, rooms in enumerate(LAYERS)
        for room in rooms
        if is_inside(module.name, room)
    ]
    while found and (folder := found[-1][1]) in NESTED:
        inner = {
            f"{folder}.{name}": at for at, names in enumerate(NESTED[folder]) for name in names
        }
        inside = [name for name in inner if is_inside(module.name, name)]
        name = max(inside, key=len, default=f"{folder}..")
        found.append((inner.get(name, -1), name.replace("..", "/*.py")))
    return found


@cache
def arrows() -> list[tuple[Module, int, Module]]:
    """Every import of one module of ours by another, and its line."""
    return list(_arrows())


def _arrows() -> Iterator[tuple[Module, int, Module]]:
    known = {module.name: module for module in modules()}
    for module in known.values():
        for imported in module.imports:
            target = imported.target.removeprefix("specbatch.")
            if is_inside(imported.target, "specbatch") and target in known:
                yield module, imported.line, known[target]


def test_every_module_is_in_a_folder_that_the_tables_know() -> None:
    lost = [
        module.name
        for module in modules()
        if module.path.name != "__init__.py"
        and not (places(module) and _is_named(module, places(module)[-1][1]))
    ]
    assert not lost, f"give their folder a place in LAYERS or NESTED: {lost}"


def _is_named(module: Module, folder: str) -> bool:
    """Whether no folder lies between the module and the one that the tables name."""
    inside = module.name.removeprefix(folder.removesuffix("/*.py")).removeprefix(".")
    return "." not in inside or is_inside(module.name, "kernels") or "migrations" in folder


def test_folders_import_only_from_below() -> None:
    wrong = []
    for module, line, target in arrows():
        if "__init__.py" in (module.path.name, target.path.name):
            continue
        for (here, name), (there, other) in zip(places(module), places(target), strict=False):
            if name == other:
                continue
            if here <= there:
                where = "beside" if here == there else "above"
                wrong.append(f"{module.at(line)} imports {target.name}: {other} is {where} {name}")
            break
    assert not wrong, "\n" + "\n".join(dict.fromkeys(wrong))


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, _, target in arrows():
        graph.setdefault(module.name, set()).add(target.name)
    assert_no_circle(graph)


def test_no_folders_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for module, _, target in arrows():
        here, there = folder_of(module), folder_of(target)
        if here != there and "__init__.py" not in (module.path.name, target.path.name):
            graph.setdefault(here, set()).add(there)
    assert_no_circle(graph)


def folder_of(module: Module) -> str:
    """The folder it lies in; a module that a table names counts as a folder of its own."""
    named = places(module)[-1][1]
    return named if named == module.name else module.name.rpartition(".")[0]


def assert_no_circle(graph: dict[str, set[str]]) -> None:
    """Late imports and those under TYPE_CHECKING count too: they only hide a circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" is imported by ".join(error.args[1]))


# third-party package: the only folders that may import it
KEPT_TO = {
    "sqlalchemy": (
        *("pipeline.ledger.sql", "schemas.tables", "schemas.audit_tables"),
        *("schemas.serving_tables", "schemas.budget_tables", "schemas.staging_tables"),
        *("schemas.text_columns", "schemas.token_arrays", "schemas.mapper", "migrations"),
        "benchmarks",
    ),
    "celery": ("workers", "jobs", "benchmarks"),
    "prometheus_client": ("pipeline.observe.metrics",),
    "vllm": (
        "pipeline.engines.vllm.core",
        "jobs.bench.peers",
        "benchmarks.vllm",
        "benchmarks.vllm_nights",
    ),
    "jinja2": (
        *("pipeline.inputs.prompt_child", "pipeline.observe.report", "jobs.serve.rendering"),
        "tools.site",
    ),
    "fastapi": ("jobs.serve",),
    "starlette": ("jobs.serve",),
    "uvicorn": ("jobs.cli.serve", "jobs.serve.connections"),
    "h11": ("jobs.serve.connections",),
    "kombu": ("workers", "jobs", "benchmarks"),
    "airflow": ("jobs.dags", "jobs.examples"),
    "dagster": ("jobs.dags", "jobs.examples"),
    "prefect": ("jobs.dags", "jobs.examples"),
    "openlineage": ("pipeline.runtime.lineage", "pipeline.runtime.lineage_events"),
    "opentelemetry": (
        *("pipeline.observe.tracing.otel", "pipeline.observe.tracing.span_exporters"),
    ),
}

# folder: third-party packages it must do without
WITHOUT = {
    "pipeline.engines": ("celery", "sqlalchemy", "pyarrow", "tokenizers"),
    "pipeline.policy": ("torch", "sqlalchemy"),
}


def test_databases_and_brokers_stay_in_their_rooms() -> None:
    wrong = [
        f"{module.at(imported.line)} imports {imported.target}; only {', '.join(rooms)} may"
        for module in modules()
        for imported in module.imports
        for package, rooms in KEPT_TO.items()
        if is_inside(imported.target, package)
        and not any(is_inside(module.name, room) for room in rooms)
    ]
    assert not wrong, "\n" + "\n".join(dict.fromkeys(wrong))


def test_engine_and_policy_do_without_what_they_need_not_know() -> None:
    wrong = [
        f"{module.at(imported.line)} imports {imported.target}; {room} does without it"
        for module in modules()
        for imported in module.imports
        for room, packages in WITHOUT.items()
        if is_inside(module.name, room)
        and any(is_inside(imported.target, package) for package in packages)
    ]
    assert not wrong, "\n" + "\n".join(dict.fromkeys(wrong))


def test_no_import_is_relative() -> None:
    wrong = [
        module.at(imported.line)
        for module in modules()
        for imported in module.imports
        if imported.level
    ]
    assert not wrong, f"import specbatch.* by its full name: {sorted(set(wrong))}"


def test_our_folders_are_never_imported_by_their_bare_names() -> None:
    bare = (*ROOMS, *NOT_SHIPPED)
    wrong = [
        f"{module.at(imported.line)} imports {imported.target}"
        for module in modules()
        for imported in module.imports
        if not imported.level and any(is_inside(imported.target, name) for name in bare)
    ]
    assert not wrong, "\n" + "\n".join(dict.fromkeys(wrong))
