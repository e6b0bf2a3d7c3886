"""One suspect at a time.

A stream that was being computed when a target worker died may have killed it, and would kill the next one too. All
streams of that worker come together to another one, and if that died as well nobody could tell which of them it was.
So of streams that their coordinators suspect one alone is computed here until it has a few tokens; the others wait,
while streams that nobody suspects go on beside it. If this worker dies then, that one stream is known to be the cause,
to whichever coordinator it belongs. It costs the others the time of one prefill and a few passes each.
"""

from __future__ import annotations

import asyncio

from outrider.errors import SESSION_LOST, Aborted

MAX_UNASKED_S = 2.0
"""A turn in which nothing is asked ends: whoever it was told to may be frozen."""


class Suspects:
    """Of one worker, on its event loop."""

    def __init__(self) -> None:
        self._alone = asyncio.Lock()

    def turn(self) -> Turn:
        """For one session."""
        return Turn(self._alone)


class Turn:
    """A session's time alone among suspects; none unless it is taken."""

    def __init__(self, alone: asyncio.Lock) -> None:
        self._alone = alone
        self._num_tokens_left = 0
        self._has_lapsed = False
        self._lapse: asyncio.TimerHandle | None = None

    async def take(self, num_tokens: int) -> None:
        """Waits for it. It lasts for so many tokens, at least 1, or until `end`; one that lasts is taken anew. Unless
        it is `used` soon, it lapses."""
        if not self._num_tokens_left:
            await self._alone.acquire()
        self._has_lapsed = False
        self.used()
        self._num_tokens_left = num_tokens
        self._lapse = asyncio.get_running_loop().call_later(MAX_UNASKED_S, self._lapses)

    def used(self) -> None:
        """The session's question has come. Harmless when repeated, or when no turn was taken. Raises Aborted where it
        comes too late: whoever asks takes the session for alone, and others have their turn."""
        if self._lapse is not None:
            self._lapse.cancel()
            self._lapse = None
        if self._has_lapsed:
            raise Aborted(
                f"the session was asked nothing for {MAX_UNASKED_S:g} s in its turn among suspects: open it again",
                reason=SESSION_LOST,
                retry_delay_s=0.0,
            )

    def decided(self, num_tokens: int) -> None:
        """So many tokens more stand: the session is cleared with the last of its turn."""
        if 0 < self._num_tokens_left <= num_tokens:
            self.end()
        elif self._num_tokens_left:
            self._num_tokens_left -= num_tokens

    def _lapses(self) -> None:
        self.end()
        self._has_lapsed = True

    def end(self) -> None:
        """Harmless when repeated, or when it was never taken."""
        if self._lapse is not None:
            self._lapse.cancel()
            self._lapse = None
        if self._num_tokens_left:
            self._num_tokens_left = 0
            self._alone.release()
