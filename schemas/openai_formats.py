"""The two formats of OpenAI batch files: the endpoint of their requests tells them apart."""

from __future__ import annotations

from typing import Final

CHATS: Final = "openai"
COMPLETIONS: Final = "openai-completions"
OPENAI_FORMATS = (CHATS, COMPLETIONS)
URLS = {CHATS: "/v1/chat/completions", COMPLETIONS: "/v1/completions"}
FORMATS = {url: format for format, url in URLS.items()}
EITHER = ("auto", *OPENAI_FORMATS)  # of a spec whose requests may say their own sampling


def openai_format(name: str) -> str | None:
    """The name of an input's format, if it is one of these."""
    return name if name in OPENAI_FORMATS else None


def format_of_url(url: object) -> str:
    """The format of a file whose first line has this URL. Chats, where it has none or another."""
    return COMPLETIONS if url == URLS[COMPLETIONS] else CHATS
