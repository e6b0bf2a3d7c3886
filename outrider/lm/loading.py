"""What `model` in the settings may name, and how each becomes a model that runs. Imports torch only for real models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from outrider.errors import InvalidArgument
from outrider.lm import toy
from outrider.lm.interface import LoadedModel
from outrider.settings import WorkerSettings

Progress = Callable[[str, float | None], None]
"""Told what is being done, and how far it is in 0 to 1 (None: not known)."""


def load_model(settings: WorkerSettings, on_progress: Progress | None = None) -> LoadedModel:
    """Loads `settings.model`: a bundle name, hub id, local folder, GGUF file, or `toy:key=value,...`.

    Raises InvalidArgument naming the field and the fix when it cannot be loaded.
    """
    if settings.model.startswith(toy.PREFIX):
        spec = toy.parse_toy(settings.model)
        context = context_length(spec.context, settings)
        loaded = toy.load_toy(dataclasses.replace(spec, context=context).text())
        return dataclasses.replace(
            loaded, description=dataclasses.replace(loaded.description, model=settings.model_name or settings.model)
        )
    raise InvalidArgument(f"cannot load {settings.model!r}", field="model")


def context_length(own: int, settings: WorkerSettings) -> int:
    """The longest sequence to serve. Raises InvalidArgument when more is asked for than the model's own length."""
    if settings.max_context_length > own:
        raise InvalidArgument(
            f"max_context_length is {settings.max_context_length}, the model reaches {own}: lower it, or give 0",
            field="max_context_length",
        )
    return settings.max_context_length or own
