"""What `docs/exports.md` says of the exported sets is what the code writes."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest

from specbatch.schemas.export_arrow import SCHEMAS, description
from specbatch.schemas.exports import ExportKind
from support.tree import ROOT

README = (ROOT / "README.md").read_text()
DOCUMENT = (ROOT / "docs" / "exports.md").read_text()


def type_name(kind: pa.DataType) -> str:
    """A type as the document writes it."""
    if pa.types.is_list(kind):
        item = type_name(kind.value_type)
        return f"list of {'lists' + item[4:] if item.startswith('list') else item}"
    if pa.types.is_struct(kind):
        return "(" + ", ".join(f"`{kind.field(i).name}`" for i in range(kind.num_fields)) + ")"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    return str(kind)


@pytest.mark.parametrize("kind", ExportKind)
def test_every_column_is_documented_with_its_type_and_meaning(kind: ExportKind) -> None:
    section = DOCUMENT.split(f"## `{kind}`")[1].split("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", section, re.MULTILINE)
    assert documented == [
        (
            field.name,
            type_name(field.type) + (" or null" if field.nullable else ""),
            description(field),
        )
        for field in SCHEMAS[kind]
    ]


def test_every_kind_has_a_schema_and_a_line_in_the_readme() -> None:
    assert list(SCHEMAS) == list(ExportKind)
    section = README.split("## Export\n")[1].split("\n## ")[0].split("| flag |")[0]
    assert re.findall(r"^\| `([a-z]+)` \|", section, re.MULTILINE) == list(ExportKind)


def test_the_same_column_means_the_same_in_every_set() -> None:
    seen: dict[str, pa.Field] = {}
    differing = {"proposer", "ticks"}  # of a token: who drafted it, and its own share
    for schema in SCHEMAS.values():
        for field in schema:
            if field.name in seen and field.name not in differing:
                before = seen[field.name].type
                assert type_name(field.type) == type_name(before), field.name
            seen[field.name] = field
