"""Renders chats with a model's template, whatever the template does.

A template comes with the model. It may loop for ever or write without end, and nothing can stop a
thread that renders it. So a child process renders, and the kernel ends it at a limit. The limits
are processor time and memory, thousands of times what a template needs, so that a busy machine
refuses no row.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from specbatch.pipeline.inputs.contract import RowError
from specbatch.pipeline.inputs.limited import (
    LimitedProcess,
    LimitError,
    limit_memory,
    limit_time,
)
from specbatch.schemas.errors import ModelError

CHAT_SEC = 5.0  # of the processor, for one chat
CHAT_BYTES = 512 << 20  # of memory
MAX_CHARS = 16 << 20  # of a rendered chat
MOST_IN_A_ROW = 3  # chats beyond a limit, before the template is at fault


class ChatTemplate:
    """One model's template. Safe to share between threads."""

    def __init__(self, template: str, names: Mapping[str, Any], model: str) -> None:
        """`names`: what the template may use beside the messages, such as `bos_token`."""
        self._model = model
        self._setup = {
            "template": template,
            "names": dict(names),
            "sec": CHAT_SEC,
            "memory_bytes": CHAT_BYTES,
            "chars": MAX_CHARS,
        }
        self._child: LimitedProcess | None = None
        self._over = 0  # chats beyond a limit, one after the other
        self._lock = threading.Lock()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """A chat, ready for the assistant's answer.

        Raises `RowError` (`bad_messages` or `too_long`) for a chat that the template refuses or
        that exceeds a limit, and `ModelError` for a template that is broken or that exceeds a limit
        with several chats in a row.
        """
        with self._lock:
            try:
                answer = self._ask(messages)
            except LimitError as error:
                self._child = None
                self._over += 1
                if self._over >= MOST_IN_A_ROW:
                    raise ModelError(
                        f"the chat template of model `{self._model}` does not end: {error}, with "
                        f"each of {self._over} chats; fix the template, or use text prompts"
                    ) from None
                raise RowError(
                    "bad_messages", f"the chat template did not finish with this chat: {error}"
                ) from None
            return self._text(answer)

    def _ask(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        line = json.dumps(list(messages), default=_placeholder).encode()
        if self._child is None:
            self._child = LimitedProcess.start(__name__)
            self._child.send(json.dumps(self._setup, default=_placeholder).encode(), b"\n")
        self._child.send(line, b"\n")
        answer: dict[str, Any] = json.loads(self._child.line())
        return answer

    def _text(self, answer: dict[str, Any]) -> str:
        if "broken" in answer:
            raise ModelError(
                f"the chat template of model `{self._model}` cannot be compiled "
                f"({answer['broken']}): fix it, or use text prompts"
            )
        if "memory" in answer:
            self._over += 1
            if self._over >= MOST_IN_A_ROW:
                raise ModelError(
                    f"the chat template of model `{self._model}` needs more than "
                    f"{CHAT_BYTES >> 20} MiB with each of {self._over} chats: fix it, or use text "
                    "prompts"
                )
            raise RowError("too_long", f"the chat template needs more than {CHAT_BYTES >> 20} MiB")
        self._over = 0
        if "long" in answer:
            raise RowError(
                "too_long",
                f"the chat template wrote {answer['long']} characters; at most {MAX_CHARS} "
                "are read",
            )
        if "refused" in answer:
            raise RowError("bad_messages", f"the template refused the chat: {answer['refused']}")
        return str(answer["text"])


def _placeholder(value: Any) -> str:
    """The text of a value that is not JSON, as transformers shows it to a template."""
    return f"<{type(value).__name__}>"


# --- in the child -------------------------------------------------------------------------------
def main() -> None:
    """Render chats in a process of its own: a line in, a line out.

    The first line holds the template and its names, every other line a chat. The sandbox of
    transformers limits what a template may touch, but neither its loops nor its output.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    setup = json.loads(sys.stdin.buffer.readline())
    limit_memory(setup["memory_bytes"])
    for line in sys.stdin.buffer:
        limit_time(setup["sec"])
        answer = _answer(render_jinja_template, setup, json.loads(line))
        limit_time(0)
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def _answer(render: Any, setup: dict[str, Any], chat: list[dict[str, Any]]) -> bytes:
    try:
        texts, _ = render(
            [chat], chat_template=setup["template"], add_generation_prompt=True, **setup["names"]
        )
        if len(texts[0]) > setup["chars"]:
            return json.dumps({"long": len(texts[0])}).encode()
        return json.dumps({"text": texts[0]}).encode()
    except MemoryError:
        return b'{"memory": true}'
    except Exception as error:  # templates raise whatever Jinja and Python do
        first = str(error).strip().partition("\n")[0] or type(error).__name__
        kind = "broken" if type(error).__name__ == "TemplateSyntaxError" else "refused"
        return json.dumps({kind: first[:500]}).encode()


if __name__ == "__main__":
    main()
