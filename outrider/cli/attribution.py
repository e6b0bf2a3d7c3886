"""Which token wrote which part of a stream's text. Text comes later than its tokens, in whole characters; a token may
write a part of one, or nothing (special ones)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from outrider.sampling.params import Origin

Pieces = list[tuple[str, Origin]]


class Attribution:
    """Of one stream. A character is the work of the token that completes it."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[bytes, Origin]] = deque()
        self._last = Origin.PLAIN

    def add(self, written: Sequence[bytes], origins: Sequence[Origin]) -> None:
        """Committed tokens: what each writes, and where it came from."""
        self._tokens.extend(zip(written, origins, strict=True))

    def pieces(self, text: str) -> Pieces:
        """The next text of the stream in runs of one origin."""
        runs: Pieces = []
        for character in text:
            origin = self._writer(character.encode())
            if runs and runs[-1][1] is origin:
                runs[-1] = (runs[-1][0] + character, origin)
            else:
                runs.append((character, origin))
        return runs

    def _writer(self, character: bytes) -> Origin:
        if not _joined(self._tokens).startswith(character):
            self._skip_silent(character)
        rest = character
        while rest and self._tokens:
            written, self._last = self._tokens.popleft()
            if len(written) > len(rest):
                self._tokens.appendleft((written[len(rest) :], self._last))
            # what no text holds as it is, such as half a character that was never finished, ends here too
            rest = rest[len(written) :] if rest.startswith(written) else b""
        return self._last

    def _skip_silent(self, character: bytes) -> None:
        """Leaves out tokens, or a space that a tokenizer adds before a text, up to where the character stands; nothing
        where it stands nowhere."""
        for index, (written, origin) in enumerate(self._tokens):
            for spared in (written, written.removeprefix(b" ")):
                rest = deque([(spared, origin), *islice(self._tokens, index + 1, None)])
                if spared and _joined(rest).startswith(character):
                    self._tokens = rest
                    return


def _joined(tokens: deque[tuple[bytes, Origin]]) -> bytes:
    return b"".join(written for written, _ in tokens)
