"""States of the target that verdicts carry to a drafter elsewhere: each committed token's once, or again when asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from outrider.drafting.received_features import packed_rows
from outrider.errors import InvalidArgument
from outrider.lm.interface import SequenceHandle
from outrider.lm.states import read_states
from outrider.serving.messages import NO_FEATURES, FeatureRows, TargetOpening

MAX_MESSAGE_BYTES = 8 << 20
"""Of rows; more go in messages of their own before the verdict."""


class SentFeatures:
    """Of one session. The cache holds every committed token's states but the last one's, right after a pass.

    offered: states that the model keeps. Raises InvalidArgument, naming the field, for others.
    """

    def __init__(self, opening: TargetOpening, offered: Sequence[int]) -> None:
        self._states = read_states(opening.features, "open.features") if opening.features else ()
        missing = [str(state) for state in self._states if state not in offered]
        if missing:
            there = f"offers {', '.join(map(str, offered))}" if offered else "offers none: start it with features"
            raise InvalidArgument(
                f"open.features asks for {', '.join(missing)}: this worker {there}", field="open.features"
            )
        if opening.features_start and not self._states:
            raise InvalidArgument("open.features_start needs features as well", field="open.features_start")
        self._end = opening.features_start

    def check(self, message: str, features_start: int | None) -> None:
        """Raises InvalidArgument where `message` asks for what the opening did not."""
        if features_start is not None and not self._states:
            raise InvalidArgument(
                f"{message}.features_start is set, and the opening asked for no features: leave it unset",
                field=f"{message}.features_start",
            )

    def send_from(self, start: int | None) -> None:
        """From here on again, whether sent before or not. None: no change."""
        if start is not None:
            self._end = start

    def take(self, sequence: SequenceHandle, num_tokens: int) -> FeatureRows:
        """Rows of the first `num_tokens` tokens that were not taken before. Right after a pass, on its thread."""
        if not self._states or num_tokens <= self._end:
            return NO_FEATURES
        start, self._end = self._end, num_tokens
        return FeatureRows(start, packed_rows(sequence.features(start, num_tokens, self._states)))


def in_messages(features: FeatureRows, end: int) -> Iterator[FeatureRows]:
    """Rows of tokens up to `end`, as parts of whole rows that fit a message; the verdict takes the last one."""
    num_rows = end - features.start if features.rows else 0
    row_bytes = len(features.rows) // num_rows if num_rows else 1
    rows_at_once = max(1, MAX_MESSAGE_BYTES // row_bytes)
    for first in range(0, num_rows, rows_at_once):
        part = features.rows[first * row_bytes : (first + rows_at_once) * row_bytes]
        yield FeatureRows(features.start + first, part)
    if not num_rows:
        yield NO_FEATURES
