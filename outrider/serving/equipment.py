"""What a worker has besides its model: loaded before it, tried out once the engine runs, told in its description."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from outrider.lm.engine import Engine
from outrider.lm.interface import LoadedModel
from outrider.server_info import TargetDrafter


class Equipment:
    """None. Workers that have some override what they need."""

    def prepare(self, loaded: LoadedModel) -> None:
        """Loads it for the model, on a thread, before the engine takes the model over. Raises OutriderError."""

    async def try_out(self, engine: Engine) -> None:
        """Once the engine runs and before anybody is served. Raises OutriderError."""

    @property
    def target_drafters(self) -> Sequence[TargetDrafter]:
        """As in `DescribeWorkerResponse`, like the rest."""
        return ()

    @property
    def features(self) -> str:
        return ""

    @property
    def drafters(self) -> Sequence[str]:
        return ()

    @property
    def drafter_features(self) -> Mapping[str, str]:
        return {}

    @property
    def target_fingerprints(self) -> Sequence[str]:
        return ()

    @property
    def num_held_blocks(self) -> int:
        """Of the engine's cache those that this holds now, and no sequence does."""
        return 0

    @property
    def num_evictions(self) -> int:
        """Sessions that lost what they held of it while they were idle."""
        return 0
