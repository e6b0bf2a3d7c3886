"""A conversation as OpenAI's clients send it, as the service takes it: a role and a text each."""

from __future__ import annotations

from typing import Any

from coordinator.gateway.errors import unsupported
from outrider.errors import InvalidArgument
from outrider.serving.write_request import Message

_FIELDS = ("role", "content")


def read_messages(given: Any) -> list[Message]:
    """Raises InvalidArgument naming the turn. Fields of a turn that are null or empty ask for nothing: clients send an
    earlier answer back with all of its own."""
    if not isinstance(given, list) or not given:
        raise InvalidArgument("messages must be a list of at least one message", field="messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(given)]


def _message(path: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise InvalidArgument(f"{path} must be an object with role and content", field=path)
    for name, value in message.items():
        if name not in _FIELDS and value not in (None, [], {}, ""):
            raise unsupported(f"{path}.{name:.80}", _FIELDS)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidArgument(f"{path}.role is missing: give system, user or assistant", field=f"{path}.role")
    return {"role": role, "content": _content(f"{path}.content", message.get("content"))}


def _content(path: str, content: Any) -> str:
    """Parts are joined as vLLM does it, a line each."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InvalidArgument(f"{path} must be a string or a list of text parts", field=path)
    return "\n".join(_part(f"{path}[{index}]", part) for index, part in enumerate(content))


def _part(path: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise InvalidArgument(f"{path} must be an object", field=path)
    if part.get("type") != "text":
        raise InvalidArgument(
            f"{path} is of type {part.get('type')!r:.40}: only text is supported here",
            field=f"{path}.type",
            reason="UNSUPPORTED_PARAMETER",
        )
    if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise InvalidArgument(f"{path} must have a type and a text, and nothing else", field=path)
    return part["text"]
