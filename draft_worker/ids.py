"""A session's committed text in the ids that the draft model reads, its guesses in the ids that the target reads."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from outrider.drafting.translation import DraftContext, Translator
from outrider.serving.session_log import SessionLog


class DraftIds(Protocol):
    """A pure function of the session's committed ids, asked for as these stand."""

    def committed(self) -> list[int]:
        """The committed text in the draft model's ids. Not to be changed."""

    def num_final(self) -> int:
        """Leading ids of `committed` that no later text changes."""

    def ends_whole(self) -> bool:
        """False where the text ends within a character, which the draft model cannot read yet."""

    def widen(self, logits: np.ndarray) -> np.ndarray:
        """The draft model's logits, float32, over the target's ids: -inf for what the draft model cannot say."""

    def to_draft(self, token_id: int) -> int:
        """The draft model's id of a token drawn from `widen`."""


class OwnIds:
    """Draft and target share their tokenizer."""

    def __init__(self, log: SessionLog) -> None:
        self._log = log

    def committed(self) -> list[int]:
        return self._log.ids

    def num_final(self) -> int:
        return len(self._log.ids)

    def ends_whole(self) -> bool:
        return True

    def widen(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def to_draft(self, token_id: int) -> int:
        return token_id


class ForeignIds:
    """The draft model has a tokenizer of its own."""

    def __init__(self, log: SessionLog, translator: Translator) -> None:
        self._log = log
        self._translator = translator
        self._context = DraftContext(translator)
        self._followed: tuple[int, tuple[list[int], int, bool]] = (-1, ([], 0, True))

    def committed(self) -> list[int]:
        return self._follow()[0]

    def num_final(self) -> int:
        return self._follow()[1]

    def ends_whole(self) -> bool:
        return self._follow()[2]

    def widen(self, logits: np.ndarray) -> np.ndarray:
        return self._translator.token_map.widen(logits, self._translator.target_vocab_size)

    def to_draft(self, token_id: int) -> int:
        draft_id = self._translator.token_map.to_draft(token_id)
        assert draft_id is not None, "drafted what the draft model cannot say"
        return draft_id

    def _follow(self) -> tuple[list[int], int, bool]:
        """Once per committed length: a session's log only grows."""
        length = len(self._log.ids)
        if self._followed[0] != length:
            self._followed = length, self._context.follow(self._log.ids)
        return self._followed[1]
