"""Makes prompts of columns: `input.template` and `input.system`.

A reader supplies the columns that `columns_of` names, as `RawRow.columns`. `PromptTemplate` makes
of them what the prompt column would have held otherwise: text, or messages. All that follows (chat
template, tokens, lengths) is the same for both. A row whose prompt cannot be made is rejected, with
the column in its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from specbatch.pipeline.inputs.cell_text import cell_json, cell_text, is_missing
from specbatch.pipeline.inputs.contract import PromptKind, RawRow, RowError
from specbatch.pipeline.inputs.templates import MAX_CHARS, LimitedTemplate, Whose
from specbatch.schemas.errors import InputError, MissingExtraError, SpecError
from specbatch.schemas.prompt_places import Place, columns_in, parts_of
from specbatch.schemas.spec import InputSpec

_CHILD = "specbatch.pipeline.inputs.prompt_child"
_WHOSE = Whose("the template", "the template of the job", "row", "template_failed", SpecError)
_COMPILING = replace(_WHOSE, item="")  # there is no row yet
_OF_JSON = frozenset('":,\n')  # in a name: braces were meant to be braces
_INFINITE = (float("inf"), float("-inf"))
_KEPT = 64  # inputs whose columns stay known


@lru_cache(_KEPT)
def columns_of(spec: InputSpec) -> tuple[str, ...]:
    """The columns that the template and the system prompt name, each once; none without them.

    Raises `SpecError` for a Jinja template that cannot be compiled or names no column, and
    `MissingExtraError` where jinja2 is needed and absent.
    """
    texts = _texts(spec)
    if not texts:
        return ()
    if spec.template_kind == "simple":
        return tuple(dict.fromkeys(name for text in texts for name in columns_in(text)))
    named = _jinja_columns(texts, spec.writes_messages)
    if spec.template is not None and not named:
        raise SpecError(
            "job spec: field `input.template` names no column, so all rows would have the same "
            "prompt: write {{ column }} where a column's value belongs"
        )
    return named


def prompt_columns(spec: InputSpec) -> tuple[str, ...]:
    """All columns that prompts are made of. Raises as `columns_of` does."""
    whole = () if spec.read_prompt_column is None else (spec.read_prompt_column,)
    return tuple(dict.fromkeys((*whole, *columns_of(spec))))


def check_columns(
    spec: InputSpec, uri: str, there: Iterable[str], what: str = "column", within: str = ""
) -> None:
    """Raise `InputError` for columns that the template names and a file lacks, all in one sentence.

    `what` they are called there, and `within` which part of the file. Raises as `columns_of` does.
    """
    there = list(there)
    missing = [name for name in columns_of(spec) if name not in there]
    if not missing:
        return
    some = f"{what}s" if len(missing) > 1 else what
    raise InputError(
        f"{uri} has no {some} {', '.join(_hinted(name, there) for name in missing)}{within}, which "
        f"the template names; its {what}s are {', '.join(there)}"
    )


def can_read_templates(spec: InputSpec) -> bool:
    """Whether `columns_of` can answer here: who only submits may have no jinja2."""
    return spec.template_kind == "simple" or find_spec("jinja2") is not None


def _hinted(name: str, there: list[str]) -> str:
    if _OF_JSON & set(name):
        return f"`{name}` (literal braces are written {{{{ and }}}})"
    if near := get_close_matches(name, there, 1):
        return f"`{name}` (did you mean `{near[0]}`?)"
    return f"`{name}`"


def _texts(spec: InputSpec) -> tuple[str, ...]:
    return tuple(text for text in (spec.template, spec.system) if text is not None)


# --- rendering ----------------------------------------------------------------------------------
class PromptTemplate:
    """Makes the prompts of one job. Safe to share between threads."""

    def __init__(self, spec: InputSpec) -> None:
        """`spec` has a template, a system prompt or both."""
        self._has_template = spec.template is not None
        self._has_system = spec.system is not None
        self._writes_messages = spec.writes_messages
        self._render = _renderer(spec)

    def made(self, raw: RawRow) -> tuple[Any, PromptKind]:
        """The row's prompt and its kind. Raises `RowError`, and `SpecError` for a Jinja template
        that no row can be rendered with."""
        columns = raw.columns or {}
        for name, value in columns.items():
            if isinstance(value, bytes):
                raise RowError("invalid_utf8", f"column `{name}` is not valid UTF-8")
        texts = self._render(columns)
        prompt = texts[0] if self._has_template else _prompt_text(raw.prompt)
        if self._writes_messages:
            return prompt, "messages"
        if prompt == "":
            raise RowError("empty_prompt", "the prompt is empty")
        if not self._has_system:
            return prompt, "text"
        roles = (("system", texts[-1]), ("user", prompt))
        return [{"role": role, "content": content} for role, content in roles], "messages"


def _prompt_text(prompt: Any) -> str:
    """The prompt column's value where a system prompt goes before it."""
    if prompt is None:
        raise RowError("null_prompt", "the prompt is null")
    if isinstance(prompt, bytes):
        raise RowError("invalid_utf8", "the prompt is not valid UTF-8")
    if not isinstance(prompt, str):
        raise RowError(
            "wrong_type",
            f"the prompt is a {type(prompt).__name__}, and a system prompt goes before text only",
        )
    return prompt


def _renderer(spec: InputSpec) -> Callable[[Mapping[str, Any]], list[str]]:
    """What makes the texts of a template and a system prompt from a row's columns."""
    texts = _texts(spec)
    if spec.template_kind == "simple":
        parts = [parts_of(text) for text in texts]
        return lambda columns: [_filled(of_text, columns) for of_text in parts]
    template = _jinja(texts, spec.writes_messages)
    return lambda columns: template.render(cell_json({"row": columns}))


def _filled(parts: Iterable[str | Place], columns: Mapping[str, Any]) -> str:
    """The text. Its length is limited before it is made: a place may be repeated many times."""
    texts, chars = [], 0
    for part in parts:
        text = part if isinstance(part, str) else _value(part.column, columns[part.column])
        chars += len(text)
        if chars > MAX_CHARS:
            raise RowError(
                "too_long", f"the template wrote more than the {MAX_CHARS} characters that are read"
            )
        texts.append(text)
    return "".join(texts)


def _value(name: str, value: Any) -> str:
    if is_missing(value):
        what = "infinite" if value in _INFINITE else "null"
        raise RowError("null_column", f"column `{name}` is {what}, and the template needs it")
    return cell_text(value)


# --- Jinja, in a process of its own -------------------------------------------------------------
def _jinja(texts: tuple[str, ...], as_json: bool, whose: Whose = _WHOSE) -> LimitedTemplate:
    if find_spec("jinja2") is None:
        raise MissingExtraError(
            "template_kind jinja needs jinja2: pip install 'specbatch[engine]', or write a simple "
            "template"
        )
    return LimitedTemplate(_CHILD, {"texts": texts, "as_json": as_json}, whose)


def _jinja_columns(texts: tuple[str, ...], as_json: bool) -> tuple[str, ...]:
    try:
        return tuple(_jinja(texts, as_json, _COMPILING).render(b"{}"))
    except RowError as error:
        raise SpecError(f"the template of the job cannot be compiled: {error}") from None
