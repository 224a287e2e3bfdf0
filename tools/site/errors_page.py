"""The page of exit codes, errors and quarantine codes."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from specbatch.pipeline import inputs as ingest
from specbatch.schemas import errors
from specbatch.tools.site.markdown import code, page, plain, section, table

_INTRO = """
An error is one sentence that names the thing and the remedy. Passwords in it are masked. Anything
with a traceback is a bug.
"""

EXIT_CODES = {
    0: "done, or submitted",
    1: "a bug, with its traceback; of `chaos` and `demo`: a promise was broken; "
    "of `doctor`: something is wrong; of `diff`: different; of `spot-check --least`: below it",
    2: "bad usage, spec, setting, input, model or output; nothing was started",
    3: "partial: some rows failed, the rest is in the output; of `audit`, `replay`: findings; "
    "of `train`: not surely better; of `models try`: it does not pay; of `spend`: above the limit; "
    "of `schedules --missed`: there are some",
    4: "failed, or the store or broker is out of reach",
    5: "cancelled, or stopped by its deadline or budget",
    6: "gave up waiting; the job continues",
    7: "of a worker: its device is gone, or it ended by itself; restart it, its groups continue",
    130: "interrupted",
}


def errors_page() -> str:
    """All of them."""
    exits = table(("exit code", "meaning"), [(code(n), said) for n, said in EXIT_CODES.items()])
    rows = [(code(cls.__name__), code(cls.exit_code), plain(_first(cls))) for cls in classes()]
    bad = table(("code", "the row"), [(code(c), plain(said)) for c, said in quarantine_codes()])
    return page(
        "Errors and exit codes",
        _INTRO,
        section("Exit codes", exits),
        section("Errors", _ABOUT_ERRORS, table(("error", "exit code", "meaning"), rows)),
        section("Quarantine codes", _ABOUT_ROWS, bad),
    )


_ABOUT_ERRORS = (
    "The client library raises these; commands print the message and exit with the code."
)
_ABOUT_ROWS = """
An input row that cannot be processed is quarantined with a code and a reason, and the job
continues without it. The output has it with `error` as its finish reason, and `specbatch show`
counts such rows by code.
"""


def classes() -> Iterator[type[errors.SpecbatchError]]:
    """Every error of ours, in the order of the source."""
    for value in vars(errors).values():
        if inspect.isclass(value) and issubclass(value, errors.SpecbatchError):
            yield value


def quarantine_codes() -> list[tuple[str, str]]:
    """Code and meaning, from where rows are checked."""
    # Read, not imported: it leads to numpy, which these pages do without.
    source = Path(ingest.__path__[0]) / "rows.py"
    docstring = ast.get_docstring(ast.parse(source.read_text()), clean=False) or ""
    said = re.findall(r"^    ([a-z_0-9]+)  +(\S.*)$", docstring, re.MULTILINE)
    return [(name, text) for name, text in said if name != "code"]


def _first(cls: type) -> str:
    return (inspect.getdoc(cls) or "").split("\n\n")[0]
