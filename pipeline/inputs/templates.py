"""Renders templates in a child process, whatever they do: chat templates, and what prompts use.

A chat template comes with the model, a Jinja prompt template with the job. Either may loop for ever
or write without end, and nothing can stop a thread that renders it. So a child process renders, and
the kernel ends it at a limit. The limits are processor time and memory, thousands of times what a
template needs, so that a busy machine refuses no row.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from specbatch.pipeline.inputs.contract import RowError
from specbatch.pipeline.inputs.limited import (
    KilledError,
    LimitedProcess,
    LimitError,
    limit_memory,
    limit_time,
)
from specbatch.schemas.errors import ModelError, UsageError

CHAT_SEC = 5.0  # of the processor, for one chat or row
CHAT_BYTES = 512 << 20  # of memory
MAX_CHARS = 16 << 20  # of a rendered chat or prompt
MOST_IN_A_ROW = 3  # chats or rows beyond a limit, before the template is at fault


@dataclass(frozen=True, slots=True)
class Whose:
    """How messages speak of a template, and the error for one that nothing can be rendered with."""

    short: str  # "the chat template"
    whole: str  # the same with its owner
    item: str  # what it renders; empty while it is only compiled
    code: str  # of an item that it refuses
    error: type[UsageError]
    otherwise: str = ""  # what helps beside a better template


class BrokenTemplateError(Exception):
    """In the child: no item can be rendered with this template."""


class LimitedTemplate:
    """A template in a child process with limits. Safe to share between threads."""

    def __init__(self, module: str, setup: Mapping[str, Any], whose: Whose) -> None:
        """`module` has the child's `main`, which gets `setup` and calls `serve`, and a `prepare`
        for what its children have in common."""
        self._module = module
        limits = {"sec": CHAT_SEC, "memory_bytes": CHAT_BYTES, "chars": MAX_CHARS}
        self._setup = json.dumps({**setup, **limits}, default=_placeholder).encode()
        self._whose = whose
        self._child: LimitedProcess | None = None
        self._over = 0  # items beyond a limit, one after the other
        self._lock = threading.Lock()

    def render(self, line: bytes) -> Any:
        """What the child's `render` returns for an item, given as a line of JSON.

        Raises `RowError` (`too_long`, or the template's own code) for an item that the template
        refuses or that exceeds a limit, and the template's error if it is broken or exceeds a limit
        with several items in a row.
        """
        whose = self._whose
        with self._lock:
            try:
                answer = self._answer(line)
            except LimitError as error:
                self._child = None
                self._over += 1
                if self._over >= MOST_IN_A_ROW:
                    raise whose.error(
                        f"{whose.whole} did not finish for {self._over} {whose.item}s in a row: "
                        f"{error}; fix the template{whose.otherwise}"
                    ) from None
                with_it = f" with this {whose.item}" if whose.item else ""
                raise RowError(
                    whose.code, f"{whose.short} did not finish{with_it}: {error}"
                ) from None
            except BaseException:  # such as Ctrl-C: the next item would get this one's answer
                if self._child is not None:
                    self._child.close()
                    self._child = None
                raise
            return self._read(answer)

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            return self._ask(line)
        except KilledError:  # not by our limits, so the template need not be at fault
            self._child = None
            return self._ask(line)

    def _ask(self, line: bytes) -> dict[str, Any]:
        if self._child is None:
            self._child = LimitedProcess.fork(self._module)
            self._child.send(self._setup, b"\n")
        self._child.send(line, b"\n")
        answer: dict[str, Any] = json.loads(self._child.line())
        return answer

    def _read(self, answer: dict[str, Any]) -> Any:
        whose = self._whose
        if "broken" in answer:
            raise whose.error(
                f"{whose.whole} cannot be compiled ({answer['broken']}): fix it{whose.otherwise}"
            )
        if "memory" in answer:
            self._over += 1
            if self._over >= MOST_IN_A_ROW:
                raise whose.error(
                    f"{whose.whole} needed more than {CHAT_BYTES >> 20} MiB for {self._over} "
                    f"{whose.item}s in a row: fix it{whose.otherwise}"
                )
            raise RowError("too_long", f"{whose.short} needs more than {CHAT_BYTES >> 20} MiB")
        self._over = 0
        if "long" in answer:
            raise RowError(
                "too_long",
                f"{whose.short} wrote {answer['long']} characters; at most {MAX_CHARS} are read",
            )
        if "refused" in answer:
            it = f" the {whose.item}" if whose.item else ""
            raise RowError(whose.code, f"the template refused{it}: {answer['refused']}")
        if "code" in answer:
            raise RowError(answer["code"], answer["reason"])
        return answer["made"]


class ChatTemplate:
    """One model's template. Safe to share between threads."""

    def __init__(self, template: str, names: Mapping[str, Any], model: str) -> None:
        """`names`: what the template may use beside the messages, such as `bos_token`."""
        whose = Whose(
            "the chat template",
            f"the chat template of model `{model}`",
            "chat",
            "bad_messages",
            ModelError,
            ", or use text prompts",
        )
        setup = {"template": template, "names": dict(names)}
        self._limited = LimitedTemplate(__name__, setup, whose)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        today: float,
    ) -> str:
        """A chat, ready for the assistant's answer. `tools`: what the answer may call.

        `today` (seconds since the epoch) is the time that the template writes, in UTC, if it writes
        one: by the worker's clock, a retry on another day would write another prompt.

        Raises `RowError` (`bad_messages` or `too_long`) for a chat that the template refuses or
        that exceeds a limit (`no_tool_template` for tools or calls that it does not show), and
        `ModelError` for a template that is broken or that exceeds a limit with several chats in a
        row.
        """
        chat = {"messages": list(messages), "tools": list(tools) if tools else None, "today": today}
        return str(self._limited.render(json.dumps(chat, default=_placeholder).encode()))


def _placeholder(value: Any) -> str:
    """The text of a value that is not JSON, as transformers shows it to a template."""
    return f"<{type(value).__name__}>"


# --- in the child -------------------------------------------------------------------------------
def prepare() -> None:
    """Import what renders a chat, once before any child: it takes longer than most jobs' chats."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _chat(
        render_jinja_template,
        {"template": "", "names": {}},
        {"messages": [], "tools": None, "today": 0.0},
    )


def main() -> None:
    """Render chats. The sandbox of transformers limits what a template may touch, but neither its
    loops nor its output."""
    from transformers.utils import chat_template_utils

    # Its `strftime_now` asks this name for the time, and it makes text of functions it is given.
    vars(chat_template_utils)["datetime"] = _Today
    serve(lambda setup: partial(_chat, chat_template_utils.render_jinja_template, setup))


class _Today:
    """Stands for `datetime` where templates ask for the time."""

    at = 0.0  # of the chat that is rendered, in seconds since the epoch

    @classmethod
    def now(cls) -> datetime:
        return datetime.fromtimestamp(cls.at, UTC)


def serve(
    prepared: Callable[[dict[str, Any]], Callable[[Any], Any]],
    number: Callable[[str], float] = float,
) -> None:
    """Answer in a process of its own: a line in, a line out.

    The first line is the setup, every other line an item in JSON. `prepared` makes of the setup
    what renders an item, which must not compile the template before the first item is there: then
    the limits hold. `number` makes the numbers of an item that are not integers.
    """
    setup = json.loads(sys.stdin.buffer.readline())
    limit_memory(setup["memory_bytes"])
    render = prepared(setup)
    for line in sys.stdin.buffer:
        limit_time(setup["sec"])
        answer = _answer(render, json.loads(line, parse_float=number), setup["chars"])
        limit_time(0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _chat(render: Any, setup: dict[str, Any], chat: dict[str, Any]) -> str:
    messages, tools = chat["messages"], chat["tools"]
    _Today.at = chat["today"]

    def text_of(messages: list[dict[str, Any]], tools: Any) -> str:
        texts, _ = render(
            [messages],
            tools=tools,
            chat_template=setup["template"],
            add_generation_prompt=True,
            **setup["names"],
        )
        return str(texts[0])

    def is_same(messages: list[dict[str, Any]], tools: Any) -> bool:
        try:
            return text_of(messages, tools) == text
        except MemoryError:
            raise
        except Exception:  # what is missing is used
            return False

    text = text_of(messages, tools)
    if tools and is_same(messages, None):  # it would be asked to call what it cannot know
        raise RowError("no_tool_template", _SHOWS_NOT.format(what="tools"))
    calling = any(message.get("tool_calls") for message in messages)
    if calling and is_same([_without_calls(message) for message in messages], tools):
        raise RowError("no_tool_template", _SHOWS_NOT.format(what="the tool calls of messages"))
    return text


_SHOWS_NOT = (
    "the model's chat template does not show it {what}: use a model whose template does, or "
    "write them in a message, and ask for a response_format"
)


def _without_calls(message: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _answer(render: Callable[[Any], Any], item: Any, most_chars: int) -> bytes:
    try:
        made = render(item)
        size = len(made) if isinstance(made, str) else sum(map(len, made))
        if size > most_chars:
            return json.dumps({"long": size}).encode()
        return json.dumps({"made": made}).encode()
    except MemoryError:
        return b'{"memory": true}'
    except RowError as error:
        return json.dumps({"code": error.code, "reason": str(error)[:500]}).encode()
    except Exception as error:  # templates raise whatever Jinja and Python do
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        is_broken = isinstance(error, BrokenTemplateError) or (
            type(error).__name__ == "TemplateSyntaxError"  # of jinja2
        )
        return json.dumps({"broken" if is_broken else "refused": first[:500]}).encode()
