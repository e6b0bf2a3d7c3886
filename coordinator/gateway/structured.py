"""The form of a text, in the ways that clients say it: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coordinator.gateway.errors import unsupported
from outrider.errors import InvalidArgument

_OBJECT = {"type": "object"}
_META = re.compile(r"([\\.^$|?*+()\[\]{}])")
_VLLM_KINDS = ("json", "json_object", "regex", "choice", "grammar")


def structured_options(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The field that decides, and options of `outrider.Client.generate`; none where any text will do. `given`: those of
    the fields that are there. Raises InvalidArgument."""
    wishes = [(field, _options(field, value)) for field, value in given.items()]
    wishes = [(field, options) for field, options in wishes if options]
    if len(wishes) > 1:
        first, second = wishes[0][0], wishes[1][0]
        raise InvalidArgument(f"{first} and {second} both give the text a form: give one", field=second)
    return wishes[0] if wishes else ("response_format", {})


def _options(field: str, value: Any) -> dict[str, Any]:
    if field == "response_format":
        return _response_format(value)
    if field == "structured_outputs":
        return _structured_outputs(value)
    return _one(field, field.removeprefix("guided_"), value)


def _response_format(value: Mapping[str, Any]) -> dict[str, Any]:
    path = "response_format"
    match value.get("type"):
        case "text":
            _refuse_others(path, value, ("type",))
            return {}
        case "json_object":
            _refuse_others(path, value, ("type",))
            return {"json_schema": _OBJECT}
        case "json_schema":
            _refuse_others(path, value, ("type", "json_schema"))
            inner = value.get("json_schema")
            if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
                at = f"{path}.json_schema.schema"
                raise InvalidArgument(f"{at} is missing: give the JSON schema, an object", field=at)
            _refuse_others(f"{path}.json_schema", inner, ("name", "description", "schema", "strict"))
            return {"json_schema": inner["schema"]}
        case other:
            at = f"{path}.type"
            raise InvalidArgument(f"{at} is {other!r:.40}, must be text, json_object or json_schema", field=at)


def _structured_outputs(value: Mapping[str, Any]) -> dict[str, Any]:
    path = "structured_outputs"
    asked = {name: wish for name, wish in value.items() if wish is not None and wish is not False}
    _refuse_others(path, asked, _VLLM_KINDS)
    if len(asked) != 1:
        raise InvalidArgument(f"{path} must have exactly one of {', '.join(_VLLM_KINDS)}", field=path)
    ((kind, wish),) = asked.items()
    return _one(f"{path}.{kind}", kind, wish)


def _one(path: str, kind: str, wish: Any) -> dict[str, Any]:
    match kind, wish:
        case "json", str() | dict():
            return {"json_schema": wish}
        case "json_object", True:
            return {"json_schema": _OBJECT}
        case "regex" | "grammar", str():
            return {kind: wish}
        case "choice", [_, *_] if all(isinstance(word, str) for word in wish):
            return {"regex": "|".join(map(_literally, wish))}
    raise InvalidArgument(f"{path} cannot be {wish!r:.80}", field=path)


def _refuse_others(path: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in value:
        if name not in known and value[name] is not None:
            raise unsupported(f"{path}.{name:.80}", known)


def _literally(word: str) -> str:
    return _META.sub(r"\\\1", word)
