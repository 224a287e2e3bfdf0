"""The built-in policy `patterns`: regular expressions of RE2, whose time is linear in the text."""

from __future__ import annotations

from functools import lru_cache
from importlib.metadata import version
from typing import Any

from specbatch.pipeline.privacy.redactor import Span, merged, replaced
from specbatch.schemas.errors import MissingExtraError, UsageError
from specbatch.schemas.policies import ALLOWED, PolicySpec, Ruling, Verdict


class Patterns:
    """Finds any of some patterns. Raises `UsageError` for an invalid one, and
    `MissingExtraError`."""

    def __init__(self, spec: PolicySpec) -> None:
        self._ruling = spec.if_met
        self._patterns = {name: _compiled(name, text) for name, text in spec.patterns.items()}
        self.version = f"re2 {version('google-re2')}"

    def judge(self, text: str) -> Verdict:
        """The code is the name of the first pattern that was found."""
        spans = [
            Span(match.start(), match.end(), name)
            for name, pattern in self._patterns.items()
            for match in pattern.finditer(text)
            if match.start() < match.end()
        ]
        if not spans:
            return ALLOWED
        found = merged(spans)
        if self._ruling is Ruling.REDACT:
            return Verdict.redact(replaced(text, found), found[0].kind)
        return Verdict(self._ruling, code=found[0].kind)


@lru_cache(maxsize=1024)
def _compiled(name: str, text: str) -> Any:
    try:
        import re2
    except ImportError:
        raise MissingExtraError(
            "policy patterns needs RE2: pip install 'specbatch[engine]'"
        ) from None
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(text, options)
    except re2.error as error:
        why = error.args[0] if error.args else error
        why = why.decode() if isinstance(why, bytes) else why
        raise UsageError(f"pattern `{name}` of policy patterns is not valid RE2: {why}") from None
