"""The APIs that harnesses speak, and how they are told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coldframe.inference.dialects.base import Asked, Dialect, RefusedError
from coldframe.inference.dialects.chat import Chat
from coldframe.inference.dialects.messages import Messages
from coldframe.inference.dialects.responses import Responses

__all__ = [
    "CHAT",
    "MESSAGES",
    "RESPONSES",
    "Asked",
    "Dialect",
    "RefusedError",
    "by_body",
    "by_path",
]

CHAT: Dialect = Chat()
RESPONSES: Dialect = Responses()
MESSAGES: Dialect = Messages()
_ENDINGS = {"/chat/completions": CHAT, "/responses": RESPONSES, "/messages": MESSAGES}


def by_path(path: str, headers: Mapping[bytes, bytes]) -> Dialect | None:
    """Return the dialect that a path or, where that is only the API's, a header names."""
    for ending, dialect in _ENDINGS.items():
        if path.endswith(ending):
            return dialect
    return MESSAGES if b"anthropic-version" in headers else None


def by_body(body: dict[str, Any]) -> Dialect:
    """Return the dialect that only a body can name."""
    return RESPONSES if "input" in body else CHAT
