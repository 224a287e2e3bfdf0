"""The import directions of DESIGN's folder table, read from the source of every module."""

from __future__ import annotations

from support.tree import Import, Module, is_inside, modules

# room: the rooms of ours it may import besides itself. The longest matching room counts.
DIRECTIONS = {
    "schemas": (),
    "kernels": (),
    "pipeline": ("schemas",),  # its own files: the use cases, over all the pipeline's rooms
    "pipeline.engine": ("kernels", "schemas", "pipeline.policy"),  # the step loop asks for depths
    "pipeline.policy": ("schemas",),
    "pipeline.ingest": ("schemas",),
    "pipeline.ledger": ("schemas",),
    "pipeline.observe": ("schemas",),
    "pipeline.privacy": ("schemas",),
    "workers": (
        "pipeline.bootstrap",
        "pipeline.client",
        "pipeline.ledger.contract",
        "pipeline.stages",
        "schemas",
    ),
    "jobs": (
        "kernels.native",  # `settings` says at which instruction set they run
        "pipeline.auditing",
        "pipeline.bootstrap",
        "pipeline.client",
        "pipeline.coverage",  # the rows of the table that `audit` prints
        "pipeline.ingest.folders",
        "pipeline.ledger.contract",
        "pipeline.observe",
        "pipeline.policy",
        "pipeline.preflight",
        "pipeline.purging",
        "pipeline.replaying",
        "pipeline.reporting",
        "pipeline.stages",
        "pipeline.tools",
        "workers",
        "schemas",
    ),
    "jobs.bench": ("kernels", "pipeline", "workers", "schemas", "jobs"),  # measures the parts
    "jobs.chaos": ("pipeline", "workers", "schemas", "jobs"),  # an engine of its own, and faults
    "jobs.site": ("pipeline", "schemas", "jobs"),  # documents all of them
    "jobs.demo": ("kernels", "pipeline", "workers", "schemas", "jobs"),  # trains and measures
    "migrations": ("schemas",),
}

# third-party package: the only rooms that may import it
KEPT_TO = {
    "sqlalchemy": (
        *("pipeline.ledger", "schemas.tables", "schemas.audit_tables", "schemas.time_tables"),
        "schemas.schedule_tables",
        *("schemas.text_columns", "schemas.token_arrays", "schemas.mapper", "migrations"),
    ),
    "celery": ("workers", "jobs"),
    "prometheus_client": ("pipeline.observe",),
    "kombu": ("workers", "jobs"),
    "airflow": ("jobs.dags", "jobs.examples"),
    "dagster": ("jobs.dags", "jobs.examples"),
    "opentelemetry": (
        *("pipeline.observe.otel", "pipeline.observe.otel_span"),
        "pipeline.observe.span_exporters",
    ),
}

# room: third-party packages it must do without
WITHOUT = {
    "pipeline.engine": ("celery", "sqlalchemy", "pyarrow", "tokenizers"),
    "pipeline.policy": ("torch", "sqlalchemy"),
}


def room_of(module: Module) -> str:
    return max((room for room in DIRECTIONS if is_inside(module.name, room)), key=len)


def may_import(module: Module, imported: Import) -> bool:
    target = imported.target.removeprefix("specbatch").removeprefix(".")
    room = room_of(module)
    return any(is_inside(target, allowed) for allowed in (room, *DIRECTIONS[room]))


def test_rooms_import_only_what_the_table_allows() -> None:
    wrong = [
        f"{module.at(imported.line)} imports {imported.target}, which {room_of(module)} may not"
        for module in modules()
        for imported in module.imports
        if is_inside(imported.target, "specbatch") and not may_import(module, imported)
    ]
    assert not wrong, "\n" + "\n".join(dict.fromkeys(wrong))


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
    bare = ("schemas", "kernels", "pipeline", "workers", "jobs", "migrations")
    wrong = [
        f"{module.at(imported.line)} imports {imported.target}"
        for module in modules()
        for imported in module.imports
        if not imported.level and any(is_inside(imported.target, name) for name in bare)
    ]
    assert not wrong, "\n" + "\n".join(dict.fromkeys(wrong))
