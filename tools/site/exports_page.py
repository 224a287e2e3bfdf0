"""The page of exported sets, from their Arrow schemas."""

from __future__ import annotations

import pyarrow as pa

from specbatch.schemas.export_arrow import SCHEMAS, description
from specbatch.tools.site.markdown import code, page, plain, section, table

_INTRO = """
What `specbatch export` writes, column by column; [how to export](../howto/exports.md) says the
rest. Each column's meaning is also in the file, in its field's metadata under `description`.
Token ids that privacy has masked are -1.
"""


def exports_page() -> str:
    """Every set with its columns."""
    parts = []
    for kind, schema in SCHEMAS.items():
        rows = [
            (
                code(field.name),
                type_name(field.type) + (" or null" if field.nullable else ""),
                plain(description(field)),
            )
            for field in schema
        ]
        shown = table(("column", "type", "meaning"), rows)
        parts.append(section(code(kind.value), shown, anchor=kind.value))
    return page("Exported sets", _INTRO, *parts)


def type_name(kind: pa.DataType) -> str:
    """A type in words."""
    if pa.types.is_list(kind):
        item = type_name(kind.value_type)
        return f"list of {'lists' + item[4:] if item.startswith('list') else item}"
    if pa.types.is_struct(kind):
        return "(" + ", ".join(code(kind.field(i).name) for i in range(kind.num_fields)) + ")"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    return str(kind)
