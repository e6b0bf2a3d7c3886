"""Messages and dataclasses whose fields are called alike."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def write(message_type: Any, value: Any, **given: Any) -> Any:
    """A message from the dataclass `value`, but for fields that are given. None leaves a field unset."""
    names = (field.name for field in dataclasses.fields(value))
    return message_type(**{name: getattr(value, name) for name in names if name not in given}, **given)


def read(cls: type[T], message: Any, **given: Any) -> T:
    """`cls` from the fields of the same names; unset optional ones become None, repeated ones tuples."""
    values = dict(given)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name in given:
            continue
        descriptor = message.DESCRIPTOR.fields_by_name[field.name]
        if descriptor.has_presence and not message.HasField(field.name):
            values[field.name] = None
        else:
            value = getattr(message, field.name)
            values[field.name] = tuple(value) if descriptor.is_repeated else value
    return cls(**values)
