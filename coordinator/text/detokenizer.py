"""Incremental detokenization: what each further id makes certain, in whole code points.

After n ids the text so far is a prefix of `decode(ids)`, and with `flush` equal to it. Only a window of recent ids is
decoded again, so a step costs the same however long the text is.
"""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.text.tokenizer import TextCodec

_REPLACEMENT = "\ufffd"
_MAX_UNFINISHED_IDS = 16
"""A code point has at most four bytes: an end that stays uncertain for longer is made of invalid bytes."""


class Detokenizer:
    """One text. `push` an id, receive its new text, which may be empty while a code point is unfinished."""

    def __init__(self, codec: TextCodec, *, skip_special_tokens: bool = True) -> None:
        self._codec = codec
        self._skip = skip_special_tokens
        # the window: these ids are decoded again; the first `_num_released` code points of that are released text: they
        # give what follows its context (a decoder may strip the very first space)
        self._ids: list[int] = []
        self._pending_from = 0
        self._num_released = 0

    def push(self, token_id: int) -> str:
        if self._skip and self._codec.is_special(token_id):
            # gives no text, and what it separates stays together, as in decoding everything at once
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        certain = text.rstrip(_REPLACEMENT)
        num_pending = len(self._ids) - self._pending_from
        if len(certain) < len(text) and num_pending > _MAX_UNFINISHED_IDS:
            certain = text[:-1]
        released = certain[self._num_released :]
        self._num_released = max(self._num_released, len(certain))
        if len(certain) == len(text):
            del self._ids[: self._pending_from]
            self._pending_from = len(self._ids)
            self._num_released = len(self._decode(self._ids))
        elif num_pending > _MAX_UNFINISHED_IDS:
            self._shorten_window(text)
        return released

    def push_all(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self.push, token_ids))

    def flush(self) -> str:
        """The text has ended: an unfinished code point becomes U+FFFD."""
        text = self._decode(self._ids)[self._num_released :]
        self._num_released += len(text)
        return text

    def _shorten_window(self, text: str) -> None:
        """Among invalid bytes: starts the window at the last unfinished code point, where decoding splits cleanly."""
        for size in range(1, 5):
            start = len(self._ids) - size
            tail = self._decode(self._ids[start:])
            if tail == _REPLACEMENT and self._decode(self._ids[:start]) + tail == text:
                del self._ids[:start]
                self._pending_from = 0
                self._num_released = 0
                return

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids, skip_special_tokens=False)
