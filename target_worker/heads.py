"""The heads that a target worker's settings name: loaded for its model, tried out, offered to its sessions by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.drafts import head_folder
from outrider.errors import InvalidArgument
from outrider.lm.engine import Engine
from outrider.lm.interface import LoadedModel
from outrider.lm.states import check_states, feature_model, read_states, write_states
from outrider.lm.toy import PREFIX as TOY_PREFIX
from outrider.server_info import TargetDrafter
from outrider.serving.equipment import Equipment
from outrider.settings import TargetWorkerSettings
from target_worker.drafters import HeldDrafter
from target_worker.self_drafters import SelfDrafters
from target_worker.toy_drafter import KIND as TOY
from target_worker.toy_drafter import HeldToy


class Heads(Equipment):
    """`held`: by name, in the order of the settings."""

    def __init__(self, settings: TargetWorkerSettings) -> None:
        self._settings = settings
        self._loaded: LoadedModel | None = None
        self._trained: list[Any] = []
        """Those with weights, `HeldHead`s: torch is imported where there is one."""
        self._own_layers = SelfDrafters()
        self._sent = read_states(",".join(settings.features), "features") if settings.features else ()
        self.held: dict[str, HeldDrafter] = {}

    def prepare(self, loaded: LoadedModel) -> None:
        """Has the model keep what they read. Raises InvalidArgument on heads that do not exist or do not fit the model,
        and on two of one name."""
        self._loaded = loaded
        for entry in self._settings.heads:
            name, source = parse_entry(entry)
            held = self._load(name, source, loaded)
            taken = {taken for other in self.held.values() for taken in other.description.names}
            twice = [each for each in held.description.names if each in taken]
            if twice:
                raise InvalidArgument(
                    f"heads: two are called {twice[0]}; write name=... before one of them", field="heads"
                )
            self.held[held.description.name] = held
        if self.states:
            model = feature_model(loaded.model, "heads" if self._trained else "features")
            check_states(self._sent, model.num_layers, "features")
            model.keep_features(self.states)

    async def try_out(self, engine: Engine) -> None:
        """Raises FailedPrecondition on a head that hardly ever agrees with the model."""
        assert self._loaded is not None, "prepared first"
        if self._trained:
            from target_worker.head_probe import try_out

            await try_out(self._trained, self._loaded, engine)
        await self._own_layers.try_out(self._loaded, engine)

    @property
    def states(self) -> tuple[int, ...]:
        """Those that the model keeps, for heads here and elsewhere."""
        return tuple(sorted({*self._sent, *(state for head in self._trained for state in head.states)}))

    @property
    def features(self) -> str:
        return write_states(self.states)

    @property
    def target_drafters(self) -> Sequence[TargetDrafter]:
        return [held.description for held in self.held.values()]

    def _load(self, name: str, source: str, loaded: LoadedModel) -> HeldDrafter:
        if source.startswith(TOY_PREFIX):
            return HeldToy(name or TOY, source, loaded.model)
        own_layers = self._own_layers.load(name, source, loaded)
        if own_layers is not None:
            return own_layers
        from outrider.lm.heads.target import HeadTarget
        from target_worker.head_drafter import HeldHead

        causal_lm = getattr(loaded.model, "causal_lm", None)
        if causal_lm is None:
            raise InvalidArgument(
                f"heads: {source} reads the states of a whole model in this process, and a "
                f"{type(loaded.model).__name__} has none: leave heads empty"
                + (", or tensor_parallel 1" if self._settings.tensor_parallel > 1 else ""),
                field="heads",
            )
        about, folder = loaded.description, Path(self._settings.model).expanduser()
        target = HeadTarget.of(
            causal_lm,
            name=about.model,
            vocab_size=about.vocab_size,
            fingerprint=about.model_fingerprint,
            folder=folder if folder.is_dir() else None,
        )
        held = HeldHead(name, str(head_folder(source) or source), target)
        self._trained.append(held)
        return held


def parse_entry(entry: str) -> tuple[str, str]:
    """`name=source` or a source alone, whose name follows from its kind and is empty here."""
    match = re.fullmatch(r"(?:([a-z][a-z0-9_-]*)=)?(.+)", entry)
    assert match is not None, "settings hold no empty entries"
    return match[1] or "", match[2]
