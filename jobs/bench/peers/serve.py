"""A peer's process: `python -I serve.py ENGINE.py` answers JSON lines. Knows nothing of specbatch.

The first line is one of the first two, those after a model the third. An answer may be `{"error":
reason}` instead. Completions are greedy and ignore the end of text.

    {"convert": folder, "into": folder, "dtype": name}                   -> {"done": true}
    {"model": folder, "dtype": name, "threads": n, "options": {...}}     -> {"versions": {...}}
    {"prompts": [[id, ...], ...], "new_tokens": n}    -> {"seconds": s, "outputs": [[id, ...], ...]}

ENGINE.py defines `convert(source, target, dtype)` and `Engine(model, dtype, threads, options)` with
`versions()`, `prepare(sequences, tokens)` (not timed) and `generate(prompts, new_tokens)` (timed).

An engine that drafts is also asked with `"depth": n`, which `generate` then gets, and one that
replays with `"known"` and `"drafts"` (shaped like the outputs: what will come, and guesses of it),
which its `learn(prompts, known, drafts)` gets before (not timed). Its `counts` (tokens `proposed`
and `accepted`) are in the answer.
Isolated (`-I`), for else this folder's `llama_cpp.py` would hide the package it imports.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any, TextIO


def main(source: str) -> None:
    # Libraries write to file descriptor 1 as well: they get the error stream instead.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    state: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            answer = reply(json.loads(line), source, state)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        write(answers, answer)


def reply(asked: dict[str, Any], source: str, state: dict[str, Any]) -> dict[str, Any]:
    """Answer one line; `state` keeps the engine once there is one."""
    if "prompts" in asked:
        engine, prompts, new_tokens = state["engine"], asked["prompts"], asked["new_tokens"]
        engine.prepare(len(prompts), max(map(len, prompts)) + new_tokens)
        if "drafts" in asked:
            engine.learn(prompts, asked["known"], asked["drafts"])
        depth = {"depth": asked["depth"]} if "depth" in asked else {}
        begun = time.perf_counter()
        outputs = engine.generate(prompts, new_tokens, **depth)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "outputs": outputs, "counts": getattr(engine, "counts", {})}
    module = runpy.run_path(source)
    if "convert" in asked:
        module["convert"](Path(asked["convert"]), Path(asked["into"]), asked["dtype"])
        return {"done": True}
    state["engine"] = module["Engine"](
        Path(asked["model"]), asked["dtype"], asked["threads"], asked["options"]
    )
    return {"versions": state["engine"].versions()}


def write(stream: TextIO, answer: dict[str, Any]) -> None:
    stream.write(json.dumps(answer) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(sys.argv[1])
