"""The head that a draft worker has in the place of a model, and what the worker tells of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draft_worker.head_memory import HeadMemory
from draft_worker.head_session import HeadSession
from outrider.errors import InvalidArgument
from outrider.lm.engine import Engine
from outrider.lm.head_model import HeadModel
from outrider.lm.interface import LoadedModel
from outrider.lm.states import write_states
from outrider.sampling.grammar import GrammarVocabulary
from outrider.serving.equipment import Equipment
from outrider.serving.messages import DraftOpening
from outrider.serving.session_log import SessionCounters
from outrider.settings import DraftWorkerSettings

OF_MODELS = ("model", "drafters", "target_tokenizer", "weight_dtype", "draft_vocab", "kv_cache_dtype")
"""Settings that mean nothing to a head."""


def check_head_settings(settings: DraftWorkerSettings) -> None:
    """Raises InvalidArgument, naming the setting, on what a head needs or has no use for."""
    if not settings.head:
        for name in ("target", "head_states"):
            if getattr(settings, name):
                raise InvalidArgument(f"{name}: it is for a head: give head as well, or leave it empty", field=name)
        return
    if not settings.target:
        raise InvalidArgument(
            f"target: the head {settings.head} shares its target's embedding: name the target's folder, bundle or hub "
            "id",
            field="target",
        )
    for name in OF_MODELS:
        if name in settings.model_fields_set and getattr(settings, name) not in ("", "auto", ()):
            raise InvalidArgument(
                f"{name}: it is for a draft model, and {settings.head} is a head: give one of the two", field=name
            )


class HeldHead(Equipment):
    """One for all sessions."""

    def __init__(self, settings: DraftWorkerSettings) -> None:
        self._settings = settings

    def prepare(self, loaded: LoadedModel) -> None:
        assert isinstance(loaded.model, HeadModel)
        self.model = loaded.model
        self.name = str(self.model.head.kind)
        self._features = write_states(self.model.head.states)

    async def try_out(self, engine: Engine) -> None:
        """The engine has sized what heads may hold."""
        self.memory = HeadMemory(self.model.max_bytes)

    def session(self, opening: DraftOpening, counters: SessionCounters, grammars: GrammarVocabulary) -> HeadSession:
        return HeadSession(
            opening,
            self.model,
            name=self.name,
            features=self._features,
            memory=self.memory,
            max_draft_tokens=self._settings.max_draft_tokens,
            counters=counters,
            grammars=grammars,
        )

    @property
    def drafters(self) -> Sequence[str]:
        return (self.name,)

    @property
    def drafter_features(self) -> Mapping[str, str]:
        return {self.name: self._features}

    @property
    def target_fingerprints(self) -> Sequence[str]:
        return self.model.target_fingerprints

    @property
    def num_held_blocks(self) -> int:
        return -(-self.memory.num_bytes // self.model.bytes_per_block(self._settings.block_size))

    @property
    def num_evictions(self) -> int:
        return self.memory.num_evictions
