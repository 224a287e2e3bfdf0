"""Renders Jinja prompt templates for `prompt_template.py`, in a process with limits.

Jinja evaluates constants while it compiles (`"a" * 10**10`), and even while it lists the columns
that a template names. So that is done here too. The sandbox keeps a template from Python's inner
life and from changing values. Nothing in it is random, so a row always has the same prompt, unless
the template makes text of a method or a generator (`{{ name.upper | string }}`): that text has an
address of memory.

    template   `{{ x }}` writes what `cell_text` says; a value that is null ends the row
    messages   the same inside of JSON: written text cannot end the string that it stands in, and
               `| tojson` writes a whole value, and nothing else can
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, meta, nodes
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specbatch.pipeline.inputs.cell_text import cell_text, is_missing
from specbatch.pipeline.inputs.contract import RowError
from specbatch.pipeline.inputs.templates import BrokenTemplateError, serve

_GLOBALS = ("range", "namespace")
_RANDOM_FILTERS = ("random",)
_OF_OTHER_FILES = (nodes.Extends, nodes.FromImport, nodes.Import, nodes.Include)
# What they write is written once more, and would be escaped twice.
_WRITING = (nodes.AssignBlock, nodes.Block, nodes.CallBlock, nodes.FilterBlock, nodes.Macro)
_CELLS = (str, int, float, dict, list, tuple)


class _NullWrittenError(Exception):
    """The template writes a value that is null."""


class _Json(str):
    """What `tojson` has written. Whatever else is done to it makes it text again."""

    __slots__ = ()

    def __new__(cls, text: str) -> str:  # type: ignore[misc]  # the sandbox's `format` calls it
        return str(text)


class _Number(float):
    """A number that is written as the row spells it: a price of 19.90 is not 19.9."""

    __slots__ = ("_text",)  # out of the template's sight
    _text: str

    def __new__(cls, text: str) -> _Number:
        made = super().__new__(cls, text)
        made._text = text
        return made

    def __str__(self) -> str:
        return self._text


class _Templates:
    """The templates of one job, compiled when first needed."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._texts: list[str] = setup["texts"]
        self._as_json = bool(setup["as_json"])
        self._environment = _environment(_in_json if self._as_json else _in_text)
        self._compiled: list[Any] = []

    def answer(self, item: dict[str, Any]) -> list[str]:
        """The columns that all texts name, or each text rendered with a row's columns."""
        if "row" not in item:
            return sorted(set().union(*map(self._columns, self._texts)))
        if not self._compiled:
            self._compiled = [_compiled(self._environment.from_string, x) for x in self._texts]
        row = item["row"]
        try:
            return [template.render(row) for template in self._compiled]
        except _NullWrittenError:
            raise RowError("null_column", _which_is_null(row)) from None

    def _columns(self, text: str) -> set[str]:
        """The columns that a text names. One may be called `range`, as a function is."""
        environment = _environment(_in_text)
        environment.globals = {}
        tree = _compiled(environment.parse, text)
        self._check(tree)
        found: set[str] = _compiled(meta.find_undeclared_variables, tree)
        return {name for name in found if name not in _GLOBALS or not _is_only_called(tree, name)}

    def _check(self, tree: nodes.Template) -> None:
        for node in tree.find_all(_OF_OTHER_FILES):
            raise BrokenTemplateError(f"line {node.lineno}: a template cannot use other files")
        for node in tree.find_all((*_WRITING, nodes.For)) if self._as_json else ():
            if isinstance(node, nodes.For) and not node.recursive:
                continue
            raise BrokenTemplateError(
                f"line {node.lineno}: macros, recursive loops, named blocks and blocks of set, "
                "call or filter are not for messages"
            )


def prepare() -> None:
    """Its imports are what children have in common."""


def main() -> None:
    serve(lambda setup: _Templates(setup).answer, _Number)


def _environment(finalize: Callable[[Any], str]) -> ImmutableSandboxedEnvironment:
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,  # both as in chat templates
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=finalize,
    )
    made.globals = {name: made.globals[name] for name in _GLOBALS}
    made.filters = {
        name: made_by for name, made_by in made.filters.items() if name not in _RANDOM_FILTERS
    }
    made.filters["tojson"] = _to_json
    return made


def _is_only_called(tree: nodes.Template, name: str) -> bool:
    """Whether every use of a name is a call, so that a function is meant."""
    called = {id(call.node) for call in tree.find_all(nodes.Call)}
    return all(
        id(one) in called
        for one in tree.find_all(nodes.Name)
        if one.name == name and one.ctx == "load"
    )


def _compiled(compile_it: Callable[[Any], Any], what: Any) -> Any:
    try:
        return compile_it(what)
    except TemplateSyntaxError as error:
        raise BrokenTemplateError(f"line {error.lineno}: {error.message}") from None
    except RecursionError:
        raise BrokenTemplateError("it is nested too deeply") from None


# --- what `{{ }}` writes ------------------------------------------------------------------------
def _in_text(value: Any) -> str:
    if isinstance(value, Undefined):
        return str(value)  # raises, and says what is undefined
    if is_missing(value):
        raise _NullWrittenError
    if not isinstance(value, _CELLS):  # such as a method: its text has an address of memory
        raise TypeError(f"it writes a {type(value).__name__}, which is no value of a column")
    return cell_text(value)


def _in_json(value: Any) -> str:
    if type(value) is _Json:
        return value
    return json.dumps(_in_text(value), ensure_ascii=False)[1:-1]


def _to_json(value: Any, indent: int | None = None) -> _Json:
    """Jinja's own filter is for HTML and escapes `<`."""
    return str.__new__(_Json, json.dumps(value, ensure_ascii=False, indent=indent))


def _which_is_null(row: dict[str, Any]) -> str:
    null = [f"`{name}`" for name, value in row.items() if value is None]
    if len(null) == 1:
        return f"column {null[0]} is null, and the template writes it"
    among = f", perhaps of {', '.join(null)}" if null else ""
    return f"the template writes a value that is null{among}"
