"""States of the target on their way to a draft worker, unread: what has come, what the draft worker has and lacks.

Positions count tokens. The target sends each committed token's states once, with its verdicts; what is lost on the way,
or by a draft worker that took another's place, is asked for again from where the draft worker's own end.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.peer import Peer
from outrider.serving import session_calls as wire
from outrider.serving.messages import NO_FEATURES, DraftOpening, FeatureRows, TargetOpening

MAX_HELD_BYTES = 256 << 20
"""Of a stream whose draft worker is late or gone; beyond that all are dropped, and asked for when they are needed."""
MAX_BESIDE_BYTES = 256 << 10
"""Go with the question for drafts; more is sent before, while rounds go on without drafts."""
MAX_MESSAGE_BYTES = 8 << 20
MAX_ASKED = 3
"""Times that rows are asked for again without a draft worker having more of them afterwards."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of tokens `start` to `end`, unless they were cut on their way."""

    start: int
    end: int
    rows: bytes


class FeatureRelay:
    """Of one stream: rows of consecutive tokens, between one target session and one draft session at a time.

    states: what the target sends of each token; empty: nothing. num_bytes: that came, or went.
    """

    def __init__(self) -> None:
        self.states = ""
        self.read_states: str | None = None
        """What the drafters of the draft worker at hand read; empty: nothing. None: there is no such worker."""
        self.num_bytes = self.num_held_bytes = 0
        self._parts: list[_Part] = []
        self._start = self._end = 0
        """Of the rows in `_parts`."""
        self._row_bytes = 0.0
        """Known once a draft session has taken rows."""
        self._sent = (0, 0)
        """Rows and bytes that went last."""
        self._num_had: int | None = None
        """Rows that the draft session has, or will once it has read what was sent. None: there is no such session."""
        self._most_had = self._num_asked = 0

    def lacks(self, length: int) -> bool:
        """Whether rows of the first `length` tokens are neither here nor with the draft session; the last one's come
        with the next token."""
        return self._num_had is not None and not (self._start <= self._num_had and self._end >= length - 1)

    # The target's side.

    def target_opens(self, opening: TargetOpening, states: str) -> TargetOpening:
        """The opening of a session that sends these states from where those that came before end."""
        if states != self.states:
            self.states, self._row_bytes = states, 0.0
            self._drop(0)
        return dataclasses.replace(opening, features=states, features_start=self._end if states else 0)

    def received(self, parts: Sequence[FeatureRows], end: int) -> None:
        """What came with a verdict, rows of tokens up to `end`."""
        parts = [part for part in parts if part.rows]
        if not parts:
            return
        num_bytes, start = sum(len(part.rows) for part in parts), parts[0].start
        self.num_bytes += num_bytes
        if start > self._end or (end <= self._end and start > self._start):
            return  # some before these were lost, or these are known
        if start <= self._start:
            self._drop(start)
        self.num_held_bytes += num_bytes
        ends = [*(part.start for part in parts[1:]), end]
        self._parts += [_Part(part.start, each_end, part.rows) for part, each_end in zip(parts, ends, strict=True)]
        self._end = end
        if self.num_held_bytes > MAX_HELD_BYTES:
            self._drop(self._end)

    def wanted_from(self, length: int) -> int | None:
        """Where the target is to begin again, if the draft session lacks some that are not here."""
        if not self.states or not self.lacks(length) or self._num_asked >= MAX_ASKED:
            return None
        self._num_asked += 1
        return self._num_had

    # The draft worker's side.

    def draft_opens(self) -> None:
        """A session that has nothing yet."""
        self._num_had = self._most_had = self._num_asked = 0

    def draft_closes(self) -> None:
        """There is no draft worker now."""
        self._num_had = self.read_states = None

    def draft_has(self, end: int) -> None:
        """As it tells: fewer than it was sent, where some could not be taken or were lost."""
        if self._num_had is not None:
            if end == self._num_had and self._sent[0]:
                self._row_bytes = self._sent[1] / self._sent[0]
            self._num_had = min(self._num_had, end)
        if end > self._most_had:
            self._most_had, self._num_asked = end, 0

    def take(self) -> list[FeatureRows]:
        """All that are here, in as few parts as messages allow; they are sent."""
        parts, self._num_had = list(self._joined()), self._end
        self._sent = (self._end - self._start, self.num_held_bytes)
        self.num_bytes += self.num_held_bytes
        self._drop(self._end)
        return parts

    def _joined(self) -> Iterator[FeatureRows]:
        """Parts that follow one another as one, as far as a message holds them. One that was cut on its way stays
        alone, since it would move all rows behind it."""
        run, num_bytes, end = list[_Part](), 0, -1
        for part in self._parts:
            is_whole = len(part.rows) == self._row_bytes * (part.end - part.start)
            if run and not (is_whole and part.start == end and num_bytes + len(part.rows) <= MAX_MESSAGE_BYTES):
                yield _as_one(run)
                run, num_bytes = [], 0
            run.append(part)
            num_bytes += len(part.rows)
            end = part.end if is_whole else -1
        if run:
            yield _as_one(run)

    def _drop(self, end: int) -> None:
        self._parts, self.num_held_bytes, self._start, self._end = [], 0, end, end


def _as_one(run: list[_Part]) -> FeatureRows:
    return FeatureRows(run[0].start, run[0].rows if len(run) == 1 else b"".join(part.rows for part in run))


class FeatureFeed:
    """The relay's end towards one draft session.

    states: those that the worker's drafters read; empty: none do, and nothing is sent. target_fingerprint: of the model
    that they are of.
    """

    def __init__(self, relay: FeatureRelay, peer: Peer, states: str, target_fingerprint: str) -> None:
        self._relay = relay
        self._peer = peer
        self._states = states
        self._target_fingerprint = target_fingerprint
        self._sending: asyncio.Task[None] | None = None
        relay.read_states = states

    @property
    def comes(self) -> bool:
        """Whether the target sends what the drafters read."""
        return self._relay.states == self._states

    def opens(self, opening: DraftOpening) -> DraftOpening:
        """The opening as the worker needs it."""
        if not self._states:
            return opening
        self._relay.draft_opens()
        return dataclasses.replace(opening, features=self._states, target_fingerprint=self._target_fingerprint)

    def why_not(self, length: int) -> str:
        """Why no drafts can be had behind `length` tokens now; empty: they can. Sends what is too much for a question,
        which nobody waits for."""
        if not self._states or not self.comes:
            return ""
        if self._sending is not None and not self._sending.done():
            return "draft-features-late"
        if self._relay.lacks(length):
            return "draft-lacks-features"
        if self._relay.num_held_bytes > MAX_BESIDE_BYTES:
            self._sending = self._peer.send_soon(*map(wire.draft_features, self._relay.take()))
            return "draft-features-late"
        return ""

    def take(self) -> tuple[list[Any], FeatureRows]:
        """Messages that go before a question for drafts, and what goes with it."""
        if not self._states or not self.comes:
            return [], NO_FEATURES
        parts = self._relay.take()
        return [wire.draft_features(part) for part in parts[:-1]], parts[-1] if parts else NO_FEATURES

    def has(self, features_end: int | None) -> None:
        """As an answer told."""
        if features_end is not None and self._states:
            self._relay.draft_has(features_end)

    def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
        self._relay.draft_closes()
