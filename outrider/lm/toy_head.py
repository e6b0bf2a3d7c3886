"""A toy head far from a toy target: a second table, which agrees with the target's as far as wanted. Simulated.

It is strict where a real head would guess badly: states of other tokens, or of another target, are an error.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

from outrider.drafting.received_features import packed_rows
from outrider.errors import Internal, InvalidArgument
from outrider.lm.interface import LAST_HIDDEN, LoadedModel
from outrider.lm.toy import HIDDEN_SIZE, PREFIX, ToyModel, parse_toy
from outrider.settings import DraftWorkerSettings

if TYPE_CHECKING:
    import torch

KIND = "toy-head"
STATES = (2, LAST_HIDDEN)
BYTES_PER_PAIR = 4096
"""What a context is taken to hold for each."""


class ToyHead:
    """As an EAGLE head, `outrider/lm/heads/eagle.py`."""

    kind = KIND
    states = STATES
    draft_ids = None
    feature_width = len(STATES) * HIDDEN_SIZE

    def __init__(self, target: ToyModel, table: ToyModel) -> None:
        import torch  # here, where nobody waits: it takes a second

        self.target, self.table = target, table
        self._tensor = torch.from_numpy

    def new_context(self) -> ToyContext:
        """For one session."""
        return ToyContext(self)

    def row(self, ids: list[int]) -> torch.Tensor:
        """float32[V]: the guess after these ids."""
        return self._tensor(self.table.logits_for(ids))


class ToyContext:
    """`length` pairs were read; the id of the first token, which no pair has, is told by its state."""

    def __init__(self, head: ToyHead) -> None:
        self._head = head
        self._ids: list[int] = []
        self._guessed: list[int] = []

    @property
    def length(self) -> int:
        return max(0, len(self._ids) - 1)

    @staticmethod
    def bytes_for(length: int) -> int:
        """Of a context of so many pairs."""
        return BYTES_PER_PAIR * length

    def extend(self, features: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """As `EagleContext.extend`. Raises Internal on states of other tokens."""
        self._guessed.clear()
        for row, next_id in zip(features, next_ids.tolist(), strict=True):
            state = packed_rows(row[None])
            if not self._ids:
                self._ids = [self._first_id(state)]
            if state != self._state(self._ids):
                raise Internal(f"a toy head was given the states of another token as those of token {self.length}")
            self._ids.append(next_id)
        return self._head.row(self._ids)

    def step(self, token_id: int) -> torch.Tensor:
        """As `EagleContext.step`."""
        self._guessed.append(token_id)
        return self._head.row([*self._ids, *self._guessed])

    def truncate(self, length: int) -> None:
        """Keeps the first `length` pairs."""
        self._guessed.clear()
        del self._ids[length + 1 if length else 0 :]

    def _first_id(self, state: bytes) -> int:
        for token_id in range(self._head.target.vocab_size):
            if self._state([token_id]) == state:
                return token_id
        raise Internal("a toy head was given states that are no first token's of its target")

    def _state(self, ids: list[int]) -> bytes:
        return packed_rows(self._head.target.features_for(ids, STATES)[None])


def load_toy_head(settings: DraftWorkerSettings) -> LoadedModel:
    """`settings.head`, `toy:key=value,...`: the target's own spec, `settings.target`, with these keys changed. Raises
    InvalidArgument where only one of them is a toy."""
    from outrider.lm.head_model import HeadModel

    for field in ("head", "target"):
        if not getattr(settings, field).startswith(PREFIX):
            raise InvalidArgument(f"{field}: a toy head goes with a toy target only", field=field)
    target = ToyModel(parse_toy(settings.target))
    given = parse_toy(settings.head)
    keys = [part.partition("=")[0].strip() for part in settings.head.removeprefix(PREFIX).split(",") if part.strip()]
    table = ToyModel(dataclasses.replace(target.spec, **{key: getattr(given, key) for key in keys}))
    about = target.description
    model = HeadModel(
        ToyHead(target, table),
        vocab_size=target.vocab_size,
        context_length=target.context_length,
        target_fingerprints=(about.model_fingerprint,),
    )
    description = dataclasses.replace(
        about,
        model=settings.model_name or settings.head,
        model_fingerprint=hashlib.sha256(f"{settings.head} of {settings.target}".encode()).hexdigest(),
    )
    return LoadedModel(model, description)
