"""The page of the store's tables, from their metadata and the comments beside their columns."""

from __future__ import annotations

import ast
import importlib
import inspect
import io
import pkgutil
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

from specbatch import schemas
from specbatch.schemas.sql_roles import RIGHTS
from specbatch.schemas.tables import Base
from specbatch.tools.site.markdown import code, page, plain, section, table

_INTRO = """
The store is a SQLite file or a PostgreSQL database, migrated by any command that opens it. Read
it as you like; write only through specbatch. Times are seconds since 1970 by the store's clock, a
tick is 100 ns of device time, prices are millionths of a dollar per device hour. Columns without a
remark mean what their name says. The view `token_record` has one row per token, with the columns
of the exported set [`tokens`](exports.md#tokens).
"""


def tables_page() -> str:
    """Every table, its columns, and who may write to it."""
    classes = {mapper.class_.__tablename__: mapper.class_ for mapper in mapped_classes()}
    parts = [_of_table(name, classes[name]) for name in sorted(classes)]
    return page("Tables", _INTRO, *parts)


def mapped_classes() -> list[Any]:
    """The mappers of all tables, wherever in `schemas` they are."""
    for found in pkgutil.iter_modules(schemas.__path__):
        if found.name.endswith("tables"):
            importlib.import_module(f"specbatch.schemas.{found.name}")
    return list(Base.registry.mappers)


def _of_table(name: str, cls: Any) -> str:
    remarks = column_remarks(cls)
    rows = [
        (
            code(column.name),
            str(column.type),
            "" if column.nullable else "yes",
            "yes" if column.primary_key else "",
            plain(remarks.get(column.name, "")),
        )
        for column in cls.__table__.columns
    ]
    return section(
        code(name),
        plain(inspect.getdoc(cls) or ""),
        table(("column", "type", "not null", "key", "remark"), rows),
        _writers(name),
        anchor=name,
    )


def column_remarks(cls: Any) -> Mapping[str, str]:
    """The comment behind each column in its class or in a base class."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("specbatch."):
            found |= dict(_remarks(inspect.getsource(base)))
    return found


def _remarks(source: str) -> Iterator[tuple[str, str]]:
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and "noqa" not in token.string
    }
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if said := " ".join(comments[line] for line in lines if line in comments):
                yield node.target.id, said


def _writers(name: str) -> str:
    said = []
    for role, rights in RIGHTS.items():
        verbs = ["insert"] if name in rights.inserts else []
        for verb, of_tables in (("insert", rights.inserted), ("update", rights.columns)):
            if columns := of_tables.get(name):
                verbs.append(f"{verb} of {', '.join(map(code, columns))}")
        if verbs:
            said.append(f"{code(role)}: {'; '.join(verbs)}")
    return f"On PostgreSQL it is written to by {'. '.join(said)}." if said else ""
