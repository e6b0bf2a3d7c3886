"""What earlier streams leave for later ones: outputs, and the target's own choices at verified rows.

Bounded in bytes, least recently used first out, and kept apart by scope: a model and a tenant. Only one-hot guesses are
made of it. A stream of TOKEN or BLOCK reads it only if its seed was drawn anew for it: a text of the same seed was
decided by the very coins that its drafts would meet, and drafting what those coins let through accepts it too often.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from outrider.drafting.guess import MAX_MATCH_TOKENS, PAST, Place
from outrider.drafting.suffix import match_length

ANCHOR_TOKENS = 3
"""Shortest match in another text: shorter ones are everywhere."""
MAX_PLACES = 6
BYTES_PER_TOKEN = 400
"""Of a text and its index, at most: each place an entry of its own."""
BYTES_PER_TEXT = 1000
CONTEXT_TOKENS = 3
BYTES_PER_CORRECTION = 400
MAX_AGREEING = 15


@dataclass(slots=True)
class _Text:
    scope: Hashable
    ids: array[int]
    key: Hashable = field(default=None)

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_TEXT + BYTES_PER_TOKEN * len(self.ids)


class PastOutputs:
    """Outputs of ended streams. All scopes share `max_bytes`; a text that is used, or comes again, stays longest."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._texts: OrderedDict[int, _Text] = OrderedDict()
        self._numbers: dict[Hashable, int] = {}
        self._places: dict[Hashable, dict[tuple[int, ...], list[int]]] = {}
        self._next_number = 0
        self.num_bytes = 0

    @property
    def num_texts(self) -> int:
        return len(self._texts)

    def add(self, scope: Hashable, token_ids: Sequence[int]) -> None:
        """Of a text that would not fit, the end is kept."""
        num_tokens = max(0, self._max_bytes - BYTES_PER_TEXT) // BYTES_PER_TOKEN
        ids = array("I", token_ids[-num_tokens:] if num_tokens else ())
        if len(ids) <= ANCHOR_TOKENS:
            return
        key = (scope, ids.tobytes())
        if key in self._numbers:
            self._texts.move_to_end(self._numbers[key])
            return
        number, self._next_number = self._next_number, self._next_number + 1
        text = self._texts[number] = _Text(scope, ids, key)
        self._numbers[key] = number
        self.num_bytes += text.num_bytes
        places = self._places.setdefault(scope, {})
        for position in range(ANCHOR_TOKENS, len(ids)):
            known = places.setdefault(tuple(ids[position - ANCHOR_TOKENS : position]), [])
            known.append(number << 32 | position)
            del known[:-MAX_PLACES]
        while self.num_bytes > self._max_bytes:
            self._forget_oldest()

    def places(self, scope: Hashable, recent: Sequence[int]) -> list[Place]:
        """Where texts of the scope had the last tokens of `recent`, newest text first."""
        if len(recent) < ANCHOR_TOKENS:
            return []
        recent = recent[-MAX_MATCH_TOKENS:]
        found = []
        for packed in reversed(self._places.get(scope, {}).get(tuple(recent[-ANCHOR_TOKENS:]), [])):
            number, position = packed >> 32, packed & 0xFFFFFFFF
            ids = self._texts[number].ids
            found.append(Place(ids, position, match_length(ids, position, recent), PAST))
            self._texts.move_to_end(number)
        return found

    def _forget_oldest(self) -> None:
        number, text = self._texts.popitem(last=False)
        del self._numbers[text.key]
        self.num_bytes -= text.num_bytes
        places = self._places[text.scope]
        for position in range(ANCHOR_TOKENS, len(text.ids)):
            anchor = tuple(text.ids[position - ANCHOR_TOKENS : position])
            known = [packed for packed in places.get(anchor, ()) if packed >> 32 != number]
            if known:
                places[anchor] = known
            else:
                places.pop(anchor, None)
        if not places:
            del self._places[text.scope]


class Corrections:
    """The target's own choice after the last few tokens, wherever a row was verified: past a rejection too.

    All scopes share `max_bytes`. What was chosen again counts its repetitions.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_entries = max_bytes // BYTES_PER_CORRECTION
        self._entries: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_CORRECTION * len(self._entries)

    def learn(self, scope: Hashable, prefix: Sequence[int], token_id: int) -> None:
        """`token_id` is what the target itself chose after `prefix` (at least `CONTEXT_TOKENS` ids, or nothing is
        learnt)."""
        if len(prefix) < CONTEXT_TOKENS:
            return
        key = (scope, *prefix[-CONTEXT_TOKENS:])
        known, num_agreeing = self._entries.get(key, (token_id, 0))
        self._entries[key] = (token_id, min(MAX_AGREEING, num_agreeing + 1) if known == token_id else 1)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def choice(self, scope: Hashable, recent: Sequence[int]) -> tuple[int, int] | None:
        """(the target's choice after `recent`, how often it was the same in a row); None: never seen."""
        key = (scope, *recent[-CONTEXT_TOKENS:])
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry
