"""Names in the settings: aliases of models, and which draft model belongs to which target."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import InvalidArgument


def read_pairs(entries: Sequence[str], field: str) -> dict[str, str]:
    """`name=model` entries of a setting. Raises InvalidArgument, naming it, on one that is none or comes twice."""
    pairs: dict[str, str] = {}
    for entry in entries:
        name, _, model = (part.strip() for part in entry.partition("="))
        if not name or not model:
            raise InvalidArgument(f"{field}: {entry!r:.100} is not name=model", field=field)
        if name in pairs:
            raise InvalidArgument(f"{field}: {name!r:.100} is given twice", field=field)
        pairs[name] = model
    return pairs


def read_aliases(entries: Sequence[str]) -> dict[str, str]:
    """Model by alias. Raises InvalidArgument, too, on an alias of an alias."""
    aliases = read_pairs(entries, "model_aliases")
    for alias, model in aliases.items():
        if model in aliases:
            raise InvalidArgument(
                f"model_aliases: {alias!r:.100} names {model!r:.100}, which is an alias itself: name its model",
                field="model_aliases",
            )
    return aliases
