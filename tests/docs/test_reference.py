"""The made pages have everything that the code has."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel

from specbatch.pipeline.observe.metrics.metric_names import METRICS
from specbatch.schemas import errors
from specbatch.schemas.arrow import OUTPUT
from specbatch.schemas.export_arrow import SCHEMAS
from specbatch.schemas.settings import Settings
from specbatch.schemas.spec import JobSpec
from specbatch.schemas.tables import Base, Job
from specbatch.tools.site.cli_page import cli_page, commands
from specbatch.tools.site.errors_page import EXIT_CODES, errors_page, quarantine_codes
from specbatch.tools.site.exports_page import exports_page
from specbatch.tools.site.figures import bench_command, few, machines, result
from specbatch.tools.site.metrics_page import metrics_page
from specbatch.tools.site.plots import Panel, charts
from specbatch.tools.site.spec_page import settings_page, spec_page
from specbatch.tools.site.tables_page import column_remarks, mapped_classes, tables_page
from support.tree import ROOT


def first_cells(page: str) -> list[str]:
    return re.findall(r"^\| `+ ?([^`|]+?) ?`+", page, re.MULTILINE)


def fields(model: type[BaseModel], prefix: str = "") -> list[str]:
    found = []
    for name, field in model.model_fields.items():
        inner: Any = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += fields(inner, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


def test_every_field_of_a_spec_is_there_and_says_what_it_means() -> None:
    rows = [row for row in spec_page().splitlines() if row.startswith("| `")]
    assert sorted(first_cells(spec_page())) == sorted(fields(JobSpec))
    for row in rows:
        _, takes, default, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
        assert takes != "anything", row
        assert default, row
        assert meaning, row


@pytest.mark.parametrize(
    ("field", "takes", "default"),
    [
        ("sampling.max_tokens", "integer from 1 to 131,072", "`128`"),
        ("sampling.seed", "integer from 0 below 2^63", "`0`"),
        ("speculation.max_depth", "integer from 0 to 32 or null", "`null`"),
        ("speculation.verification", "`coupled`, `rejection`, `block`", '`"coupled"`'),
        ("speculation.prompt_depths", "list of [integer from 0, integer from 0 to 32], 16 at most",
         "`[[8192, 4], [32768, 2]]`"),
        ("input.uri", "text (not empty)", "**required**"),
        ("deadline_sec", "number above 0 or null", "`null`"),
    ],
)  # fmt: skip
def test_bounds_and_defaults_are_those_of_the_model(field: str, takes: str, default: str) -> None:
    (row,) = [row for row in spec_page().splitlines() if row.startswith(f"| `{field}` |")]
    assert row.startswith(f"| `{field}` | {takes} | {default} |")


def test_every_setting_is_there_and_says_what_it_means() -> None:
    names = [f"SPECBATCH_{name.upper()}" for name in Settings.model_fields]
    assert first_cells(settings_page()) == names
    assert all(field.description for field in Settings.model_fields.values())


def test_every_command_and_option_is_there() -> None:
    page = cli_page()
    for name, command in commands().items():
        section = page.split(f"{{ #{name} }}")[1].split("\n## ")[0]
        for param in command.params:
            if param.param_type_name == "option":
                assert f"`{param.opts[0]}`" in section
                assert param.help


def test_every_metric_is_there() -> None:
    assert {metric.name for metric in METRICS} <= set(first_cells(metrics_page()))


def test_every_table_and_column_is_there() -> None:
    page = tables_page()
    mapped_classes()
    for table in Base.metadata.tables.values():
        section = page.split(f"{{ #{table.name} }}")[1].split("\n## ")[0]
        assert first_cells(section) == [column.name for column in table.columns]


def test_remarks_are_the_comments_beside_the_columns() -> None:
    remarks = column_remarks(Job)
    assert remarks["generation"] == "the fencing token: rises with each claim"
    assert remarks["cursor"] == "SourcePosition to read on from"
    assert "tenant" not in remarks


def test_every_exported_column_is_there() -> None:
    for kind, schema in SCHEMAS.items():
        section = exports_page().split(f"{{ #{kind.value} }}")[1].split("\n## ")[0]
        assert first_cells(section) == schema.names


def test_every_output_column_is_there() -> None:
    page = (ROOT / "docs" / "reference" / "output.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == OUTPUT.names


def test_every_exit_and_quarantine_code_is_there() -> None:
    page = errors_page()
    assert len(quarantine_codes()) > 10
    for code, meaning in quarantine_codes():
        assert f"| `{code}` |" in page
        assert meaning
    from specbatch.jobs.cli.outcome import EXIT_CODES as BY_STATE

    assert {*BY_STATE.values(), 0, 2, 6, 7, 130} <= set(EXIT_CODES)


def test_the_tree_of_errors_has_each_under_its_parent_with_its_exit_code() -> None:
    above = {0: "SpecbatchError"}
    drawn = {}
    assert errors.__doc__ is not None
    for indent, name, code in re.findall(
        r"^    ([ │]*)[├└]── (\w+)  .*?(?:exit (\d+))?$",
        errors.__doc__.split("\n\n")[1],
        re.MULTILINE,
    ):
        depth = len(indent) // 4 + 1
        above[depth] = name
        drawn[name] = (above[depth - 1], int(code) if code else None)
    classes = {c.__name__: c for c in vars(errors).values() if isinstance(c, type)}
    ours = {n: c for n, c in classes.items() if issubclass(c, errors.SpecbatchError)}
    assert {*drawn} == {*ours} - {"SpecbatchError"}
    for name, (parent, code) in drawn.items():
        assert ours[name].__base__ is ours[parent]
        assert ours[name].exit_code == (ours[parent].exit_code if code is None else code), name


def test_charts_are_drawn_to_one_scale() -> None:
    drawn = charts(
        [Panel("a", {"auto": [(0, 1), (1, 2)]}), Panel("b", {"auto": [(0, 4)]})], "x", "y", "c <d>"
    )
    assert drawn.count("<svg") == 2
    assert "c &lt;d&gt;" in drawn
    heights = [float(y) for y in re.findall(r'<circle class="s0" cx="[\d.]+" cy="([\d.]+)"', drawn)]
    assert heights[2] < heights[1] < heights[0]  # 4 is above 2, and 2 above 1


@pytest.mark.parametrize(
    ("counts", "shown"),
    [
        ([1, 2, 4, 8, 16, 32, 64], [1, 8, 32]),
        ([64], [64]),  # as far as a benchmark has come on another machine
        ([1, 64], [1]),
        ([1, 2, 4, 8], [1, 4, 8]),
    ],
)
def test_charts_show_what_was_measured(counts: list[int], shown: list[int]) -> None:
    assert few(counts) == shown


def test_the_command_of_a_comparison_is_that_of_its_run() -> None:
    assert bench_command(result("bench-llama-230m")) == (
        "specbatch bench --model llama-230m --n 8,32 --acceptance 0.7 "
        "--engines ours,transformers,openvino --new-tokens 32 --runs 1 --dtype bfloat16 --threads 2"
    )


def test_a_figure_names_each_machine_that_its_rows_are_of() -> None:
    """A run goes on where an earlier one ended, maybe elsewhere: kept rows have their own."""
    here = {"cpu": "b", "threads": 2, "date": "2026-01-02"}
    before = {"cpu": "a", "cores": 4, "date": "2026-01-01"}
    rows = [{"n": 8}, {"n": 32, "machine": before}, {"n": 64, "machine": before}, {"n": 1}]
    assert machines({"machine": here, "rows": rows}) == (
        "at 1, 8 sequences: 2026-01-02, 2 threads of b; "
        "at 32, 64 sequences: 2026-01-01, 4 threads of a"
    )
    for alone in ({}, {"rows": [{"model": "m"}]}):
        assert machines({"machine": here, **alone}) == "2026-01-02, 2 threads of b"
