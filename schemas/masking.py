"""Masks passwords of URLs wherever a text quotes them.

There are two filters. Patterns find what looks like a password: `user:…@` in a URL, `password=…` in
a query. And `remember` takes the URLs of the settings, so that their passwords are found however a
library quotes them (decoded, or without the URL). Remembered passwords stay in this process's
memory; nothing here shows them.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from urllib.parse import unquote

MASK = "***"
_SHORTEST = 8  # a shorter secret may be a common word, and would black out half a message

_USERINFO = re.compile(r"(://[^\s:/@]*:)[^\s/@]+@")
# Of a value that is one URL, or several with `;`: the last @ ends the password, whatever is in it.
_USERINFO_OF_URL = re.compile(r"(://[^\s:/@]*:)\S+@")
# Of a query string, or of libpq's `host=… password=…`; not `eos_token=`, which is no secret.
_NAMES = r"(?:\b[a-z_]*passw(?:or)?d|[?&](?:sig|[a-z_-]*(?:secret|token|signature)[a-z_-]*))"
_PARAMETERS = re.compile(rf"(?i)({_NAMES}=)([^&\s\"';,)]+)")
_PASSWORDS = re.compile(r"://[^\s:/@]*:(\S+)@")

_secrets: set[str] = set()
_log_filters: list[Callable[[str], str]] = []
_lock = threading.Lock()


def mask_url(url: str) -> str:
    """`redis://user:secret@host` becomes `redis://user:***@host`, and so in query parameters."""
    return _known_out(_PARAMETERS.sub(rf"\1{MASK}", _USERINFO_OF_URL.sub(rf"\1{MASK}@", url)))


def masked(text: str) -> str:
    """The text with passwords of URLs and remembered passwords masked."""
    if "://" in text:
        text = _USERINFO.sub(rf"\1{MASK}@", text)
    return _known_out(_PARAMETERS.sub(rf"\1{MASK}", text))


def masked_log(text: str) -> str:
    """The text as a log may show it: masked, then filtered by `hide_in_logs`."""
    for hide in _log_filters:
        text = hide(text)
    return masked(text)


def hide_in_logs(hide: Callable[[str], str]) -> None:
    """From now on pass this process's logs through `hide`, replacing an earlier filter."""
    _log_filters[:] = [hide]


def remember(urls: Iterable[str]) -> None:
    """Mask the passwords of these URLs from now on; ignore what is no URL."""
    found: set[str] = set()
    for value in urls:
        for url in value.split(";") if "://" in value else ():
            found.update(_PASSWORDS.findall(url))
            found.update(secret for _, secret in _PARAMETERS.findall(url))
    remember_secrets(found | {unquote(secret) for secret in found})


def remember_secrets(secrets: Iterable[str]) -> None:
    """Mask these from now on."""
    with _lock:
        _secrets.update(secret for secret in secrets if len(secret) >= _SHORTEST)


def _known_out(text: str) -> str:
    for secret in tuple(_secrets):
        if secret in text:
            text = text.replace(secret, MASK)
    return text
