"""Protobuf messages bent at random: fields set to extreme values, lists repeated and cut, bytes flipped. Seeded."""

from __future__ import annotations

import math
import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

FLOATS = (math.nan, math.inf, -math.inf, -1.0, -0.0, 0.0, 1e-320, 1e-45, 0.5, 1.0, 1.0000001, 2.0, 1e10, 1.7e308)
INTS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), -1, 0, 1, 7, 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), -1, 0, 1, 7, 2**32, 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 1, 2, 3, 15, 16, 17, 255, 256, 257, 65_535, 2**31, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 1, 2**32, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-1, 0, 1, 2, 3, 4, 99, 2**31 - 1),
}
STRINGS = ("", "a", "model", "lookup", "auto", "\0", "é\U0001f600", "../../etc/passwd", "x" * 5000, "%s%n{}", "A\nB")


def mutate(message: Any, rng: random.Random, depth: int = 0) -> None:
    """Bends one to three fields of `message`, or of a message inside it."""
    for _ in range(rng.randint(1, 3) if message.DESCRIPTOR.fields else 0):
        _bend(message, rng.choice(message.DESCRIPTOR.fields), rng, depth)


def flip_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cut, extended or with some bytes replaced: often no message any more."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        match rng.randrange(3):
            case 0:
                del changed[rng.randrange(len(changed) + 1) :]
            case 1:
                changed += rng.randbytes(rng.randrange(1, 20))
            case 2 if changed:
                changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def _bend(message: Any, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        values = getattr(message, field.name)
        key, value = field.message_type.fields
        if value.message_type is None:
            for _ in range(rng.choice((1, 1, 3, 40))):
                values[_scalar(key, rng)] = _scalar(value, rng)
    elif field.is_repeated:
        values = getattr(message, field.name)
        match rng.randrange(4):
            case 0:
                message.ClearField(field.name)
            case 1 if len(values):
                values.extend(list(values) * rng.choice((1, 2, 50)))
            case _ if field.message_type is None:
                values.extend(_scalar(field, rng) for _ in range(rng.choice((1, 2, 5, 300))))
            case _:
                mutate(values.add(), rng, depth + 1)
    elif field.message_type is not None:
        if depth > 3 or rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            inner = getattr(message, field.name)
            inner.SetInParent()
            mutate(inner, rng, depth + 1)
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _scalar(field, rng))


def _scalar(field: FieldDescriptor, rng: random.Random) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return rng.choice(FLOATS)
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_STRING:
            return rng.choice(STRINGS)
        case FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 4, 15, 16, 17, 400)))
    return rng.choice(INTS[field.type])
