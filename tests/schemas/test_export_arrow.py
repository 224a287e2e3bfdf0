"""Every column of the exported sets says what it means; `docs/howto/exports.md` has every set."""

from __future__ import annotations

import re

import pyarrow as pa
import pytest

from specbatch.schemas.export_arrow import SCHEMAS, description
from specbatch.schemas.exports import ExportKind
from specbatch.tools.site.exports_page import type_name
from support.tree import ROOT

DOCUMENT = (ROOT / "docs" / "howto" / "exports.md").read_text()


@pytest.mark.parametrize("kind", ExportKind)
def test_every_column_says_what_it_means(kind: ExportKind) -> None:
    for field in SCHEMAS[kind]:
        assert description(field), field.name


def test_every_kind_has_a_schema_and_a_line_in_the_document() -> None:
    assert list(SCHEMAS) == list(ExportKind)
    table = DOCUMENT.split("| `--what` |")[1].split("| option |")[0]
    assert re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE) == list(ExportKind)


def test_the_same_column_means_the_same_in_every_set() -> None:
    seen: dict[str, pa.Field] = {}
    differing = {"proposer", "ticks"}  # of a token: who drafted it, and its own share
    for schema in SCHEMAS.values():
        for field in schema:
            if field.name in seen and field.name not in differing:
                before = seen[field.name].type
                assert type_name(field.type) == type_name(before), field.name
            seen[field.name] = field
