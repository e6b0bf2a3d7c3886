"""The heads that a target worker's settings name: loaded for its model, offered to its sessions by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from outrider.errors import InvalidArgument
from outrider.lm.interface import LoadedModel
from outrider.lm.toy import PREFIX as TOY_PREFIX
from outrider.results import TargetDrafter
from outrider.serving.equipment import Equipment
from outrider.settings import TargetWorkerSettings
from target_worker.drafters import HeldDrafter
from target_worker.toy_drafter import KIND as TOY
from target_worker.toy_drafter import HeldToy


class Heads(Equipment):
    """`held`: by name, in the order of the settings."""

    def __init__(self, settings: TargetWorkerSettings) -> None:
        self._settings = settings
        self.held: dict[str, HeldDrafter] = {}

    def prepare(self, loaded: LoadedModel) -> None:
        """Raises InvalidArgument on heads that do not exist, do not fit the model, or share a name."""
        for entry in self._settings.heads:
            name, source = _parse(entry)
            held = self._load(name, source, loaded)
            if held.description.name in self.held:
                raise InvalidArgument(
                    f"heads: two are called {held.description.name}; write name=... before one of them", field="heads"
                )
            self.held[held.description.name] = held

    @property
    def target_drafters(self) -> Sequence[TargetDrafter]:
        return [held.description for held in self.held.values()]

    def _load(self, name: str, source: str, loaded: LoadedModel) -> HeldDrafter:
        if source.startswith(TOY_PREFIX):
            return HeldToy(name or TOY, source, loaded.model)
        raise InvalidArgument(f"heads: {source!r} is none that this worker can load", field="heads")


def _parse(entry: str) -> tuple[str, str]:
    """`name=source` or a source alone, whose name follows from its kind and is empty here."""
    match = re.fullmatch(r"(?:([a-z][a-z0-9_-]*)=)?(.+)", entry)
    assert match is not None, "settings hold no empty entries"
    return match[1] or "", match[2]
