"""Who has signed in with an API key, and the tokens of forms. In memory: a restart ends all.

A browser has a random cookie, and this process only its hash. Whether the key still counts is asked
of the store at every request, so a session never outlives its key. A form's token is made of the
cookie by a secret of this process: another site has neither.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

LIFE_SEC = 12 * 3600.0  # of a session
MOST_OF_KEY = 20  # the oldest of a key ends for another one
_FORM = re.compile(r"[\w-]{43}", re.ASCII)


@dataclass(slots=True)
class Session:
    """A browser that has signed in."""

    key_id: str
    until: float
    said: str | None = None  # to be shown once, on the next page


class Sessions:
    """All open sessions. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._of: dict[bytes, Session] = {}  # by the cookie's hash, oldest first
        self._lock = threading.Lock()

    def begin(self, key_id: str) -> str:
        """The cookie of a new session."""
        cookie = new_cookie()
        with self._lock:
            now = self._clock()
            self._of = {known: one for known, one in self._of.items() if one.until > now}
            mine = [known for known, one in self._of.items() if one.key_id == key_id]
            for known in mine[: max(0, len(mine) + 1 - MOST_OF_KEY)]:
                del self._of[known]
            self._of[_hash(cookie)] = Session(key_id, now + LIFE_SEC)
        return cookie

    def find(self, cookie: str) -> Session | None:
        """None: there is none, or its time is over."""
        with self._lock:
            found = self._of.get(_hash(cookie))
            return found if found is not None and found.until > self._clock() else None

    def end(self, cookie: str) -> None:
        with self._lock:
            self._of.pop(_hash(cookie), None)

    def say(self, cookie: str, words: str) -> None:
        """Show this on the session's next page."""
        if (found := self.find(cookie)) is not None:
            found.said = words

    def take_said(self, cookie: str) -> str | None:
        found = self.find(cookie)
        if found is None:
            return None
        words, found.said = found.said, None
        return words

    def form_token(self, cookie: str) -> str:
        """What a form sends beside the cookie."""
        return hmac.new(self._secret, cookie.encode(), hashlib.sha256).hexdigest()

    def is_form_token(self, cookie: str, token: str) -> bool:
        right = self.form_token(cookie).encode()
        return bool(cookie) and hmac.compare_digest(right, token.encode("utf-8", "replace"))


def new_cookie() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def is_cookie(text: str) -> bool:
    """Whether it has the form of one of ours."""
    return _FORM.fullmatch(text) is not None


def _hash(cookie: str) -> bytes:
    return hashlib.sha256(cookie.encode("utf-8", "replace")).digest()
