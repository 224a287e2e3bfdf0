"""The functions that an output may call, in the words of OpenAI's chat completions.

    tools                [{"type": "function", "function": {"name", "description", "parameters"}}]
    tool_choice          "none", "auto", "required", {"type": "function", "function": {"name"}}, or
                         {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}
    parallel_tool_calls  whether an output may have several calls

Each has one canonical text, which is its own canonical form. An output writes its calls so:

    {"name": "f", "arguments": {…}}                              one call
    [{"name": …}, {"name": …}]                                   several
    <tool_call>\\n{"name": …}\\n</tool_call>                       the same, in the tags that models
                                                                 of the Hermes and Qwen families
                                                                 are trained with; again and again
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

MOST_TOOLS = 128
_MOST_BYTES = 524_288
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_WORDS = ("none", "auto", "required")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
TAGS = ("<tool_call>", "</tool_call>")
TOOLS = "tools"  # the type of a form that `form_of` makes


@dataclass(frozen=True, slots=True)
class CallForm:
    """What an output may be."""

    functions: dict[str, Any]  # the schema of the arguments, by name
    may_answer: bool  # in text, instead of calling
    many: bool  # more than one call is allowed


def canonical_tools(given: object) -> str:
    """The tools as a chat template gets them; empty for none. Raises `ValueError`."""
    given = _json(given, "tools")
    if given is None or given == "":
        return ""
    if not isinstance(given, list | tuple):
        raise ValueError(
            "should be a list of functions: "
            '[{"type": "function", "function": {"name": …, "parameters": {…}}}]'
        )
    if len(given) > MOST_TOOLS:
        raise ValueError(f"has {len(given)} tools, more than {MOST_TOOLS}: leave some out")
    tools = [_tool(tool, number) for number, tool in enumerate(given)]
    names = [tool["function"]["name"] for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"has two functions with the name {twice!r}: rename one")
    text = _text(tools)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"has {len(text):,} bytes, more than {_MOST_BYTES:,}")
    return text if tools else ""


def canonical_choice(given: object) -> str:
    """Empty if nothing is said. Raises `ValueError`."""
    if isinstance(given, str) and given in _WORDS:
        return given
    given = _json(given, "tool_choice") if given != "" else None
    if given is None:
        return ""
    found = {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else {}
    if found.get("type") == "function" and (name := _named(found)) is not None:
        return _text({"type": "function", "function": {"name": name}})
    if found.get("type") == "allowed_tools":
        return _text({"type": "allowed_tools", "allowed_tools": _allowed(found)})
    raise ValueError(
        'is none of "none", "auto", "required", {"type": "function", "function": {"name": …}} '
        'and {"type": "allowed_tools", …}'
    )


def names_of(tools: str) -> list[str]:
    """Of canonical tools."""
    return [tool["function"]["name"] for tool in orjson.loads(tools)] if tools else []


def problem_of_choice(tools: str, choice: str) -> str | None:
    """Why a choice does not fit the tools, both canonical; None: it does."""
    names = names_of(tools)
    if not names and choice not in ("", "none", "auto"):
        return "tool_choice needs tools: add them, or leave tool_choice out"
    unknown = [name for name in _chosen(choice) or () if name not in names]
    if not unknown:
        return None
    shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
    return f"tool_choice names the function {unknown[0]!r:.80}, which is not in tools: {shown}"


def tools_in_use(tools: str, choice: str) -> str:
    """The tools, or nothing where no call is wanted."""
    return "" if choice == "none" else tools


@lru_cache(maxsize=256)
def form_of(tools: str, choice: str, parallel: bool) -> str:
    """What an output is held to, as the canonical text of a form; empty for free text.

    All three are canonical and fit together.
    """
    if not tools_in_use(tools, choice):
        return ""
    functions = {
        tool["function"]["name"]: tool["function"]["parameters"] for tool in orjson.loads(tools)
    }
    chosen = _chosen(choice)
    if chosen is not None:
        functions = {name: schema for name, schema in functions.items() if name in chosen}
    value = {
        "functions": functions,
        "may_answer": choice in ("", "auto") or _mode(choice) == "auto",
        "many": parallel and _type(choice) != "function",
    }
    return _text({"type": TOOLS, TOOLS: value})


def call_form(value: dict[str, Any]) -> CallForm:
    """Of the value of such a form."""
    return CallForm(**value)


def _json(given: object, name: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return orjson.loads(given) if given.strip() else None
    except orjson.JSONDecodeError:
        raise ValueError(f"is a text, and not the JSON of {name}") from None


def _text(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError as error:  # also too deep, or a number of more than 64 bits
        raise ValueError(f"cannot be written as JSON: {str(error).lower()}") from None


def _tool(given: Any, number: int) -> dict[str, Any]:
    where = f"tool {number}"
    tool = {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else {}
    function = tool.get("function")
    if tool.get("type") != "function":
        raise ValueError(f"{where} has type {tool.get('type')!r:.40}: only function is supported")
    if not isinstance(function, dict):
        raise ValueError(f'{where} needs an object under "function"')
    if other := next((k for k in tool if k not in ("type", "function")), None):
        raise ValueError(f"{where} has the field {other!r:.40}, which is not supported")
    return {"type": "function", "function": _function(function, where)}


def _function(given: dict[str, Any], where: str) -> dict[str, Any]:
    function = {key: value for key, value in given.items() if value is not None}
    name = function.get("name")
    if name is None:
        raise ValueError(f"{where} has no name: add function.name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where} has the name {name!r:.80}: a name has 1 to 64 letters, digits, _ and -"
        )
    where = f"{where} ({name})"
    if other := next((key for key in function if key not in _FUNCTION_FIELDS), None):
        raise ValueError(f"{where} has the field {other!r:.40}, which is not supported")
    for key, kind in (("description", str), ("strict", bool)):
        if key in function and not isinstance(function[key], kind):
            raise ValueError(f"{where} has a {key} that is no {'text' if kind is str else 'bool'}")
    shown = {key: function[key] for key in ("name", "description") if key in function}
    return shown | {"parameters": _parameters(function.get("parameters"), where)}


def _parameters(given: Any, where: str) -> dict[str, Any]:
    """A schema of objects: whoever calls a function passes its arguments by name."""
    if given is None:
        return _NO_PARAMETERS
    if not isinstance(given, dict):
        raise ValueError(f"{where} needs a JSON schema as its parameters, which is an object")
    if given.get("type", "object") != "object":
        raise ValueError(
            f"{where} has parameters of type {given['type']!r:.40}: they must be an object"
        )
    return {"type": "object"} | given


def _named(given: dict[str, Any]) -> str | None:
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _allowed(given: dict[str, Any]) -> dict[str, Any]:
    inner = given.get("allowed_tools")
    inner = inner if isinstance(inner, dict) else {}
    tools, mode = inner.get("tools"), inner.get("mode")
    tools = tools if isinstance(tools, list) else ()
    named = [_named(tool) if isinstance(tool, dict) else None for tool in tools]
    if mode not in ("auto", "required") or not named or None in named:
        raise ValueError(
            "of type allowed_tools needs a mode, auto or required, and a list of tools with names"
        )
    functions = [{"type": "function", "function": {"name": name}} for name in named]
    return {"mode": mode, "tools": functions}


def _type(choice: str) -> str:
    return orjson.loads(choice)["type"] if choice.startswith("{") else choice


def _mode(choice: str) -> str | None:
    given = orjson.loads(choice) if choice.startswith("{") else {}
    return given["allowed_tools"]["mode"] if given.get("type") == "allowed_tools" else None


def _chosen(choice: str) -> set[str] | None:
    """The functions that a choice names; None: it names none, so that all are meant."""
    given = orjson.loads(choice) if choice.startswith("{") else {}
    if given.get("type") == "function":
        return {given["function"]["name"]}
    if given.get("type") == "allowed_tools":
        return {tool["function"]["name"] for tool in given["allowed_tools"]["tools"]}
    return None
