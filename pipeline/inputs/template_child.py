"""Renders chats, for `templates.py`, in a process of its own: a line in, a line out.

The first line has the template and its names, each further one a chat. transformers renders it, in
its sandbox, which forbids what a template may not touch but neither loops nor sizes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from specbatch.pipeline.inputs.limited import limit_memory, limit_time


def main() -> None:
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
