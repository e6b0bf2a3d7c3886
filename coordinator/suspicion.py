"""Whether a request kills the target workers that compute it, or was only there when one died.

A worker's death proves nothing against one of its streams: all that it was computing were there. So each of them is a
suspect, and is opened on the next worker to be computed alone among suspects, of all coordinators, until it has the
tokens that were being decided at the death (`target_worker.suspects`); streams without suspicion go on beside it. One
that gets them is cleared. One whose worker dies in that time, too, was the only stream present at both deaths that had
not come past them: it has killed both, fails alone, and no third worker is asked. Those that waited for their turn are
as suspected as before, and no more. One in whose worker another suspect's turn has come since is past its trial, though
it has not heard of all its tokens (`coordinator.fleet.trials`); of turns of other coordinators' streams nobody tells.

A death counts while it is one: before a stream is found guilty the workers that died under it are asked for a while,
and one that answers, frozen or cut off before, was not killed; nor was one by this stream that another one was found to
have killed.

The streams of one request are one suspect: they are tried one at a time, wherever they go.

Unless workers die anyway: where others were lost of late, at which the request was not present and that no stream is
known to have killed (`coordinator.fleet.deaths`), a machine that failed or a wave of preemptions is as good a reason,
and it is tried alone once more.

What dies at the same token every time is found by that. What kills a little later each time is not, and is stopped by
the number of deaths with hardly a token between.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection
from dataclasses import dataclass

TRIAL_TOKENS = 4
"""Of a run: a worker that dies may have decided so many that were never heard of, and those of LATE_MS."""
LATE_MS = 250.0
"""On a busy machine news of a token may be so late, and are lost with the worker that sent them."""
MAX_TRIAL_TOKENS = 64
CLOSE_TOKENS = 32
MAX_CLOSE_DEATHS = 8
"""In a row, with fewer than CLOSE_TOKENS tokens from each to the next."""
MAX_SPARED = 1
"""Times that the deaths of others speak for a request, in such a row."""
DOUBT_S, SILENT_DOUBT_S = 2.0, 10.0
"""So long a stream waits for a worker whose connection broke, or which fell silent, to answer before it is found guilty
of its death: the way there may have broken, and a process that stands still may go on."""


def trial_tokens(num_left: int, token_ms: float) -> int:
    """Of a run that has so many tokens left and takes so long for each (0: not known): it may have killed the worker
    with any token that was decided unheard, so it is on trial until it is past them all."""
    num_late = math.ceil(LATE_MS / token_ms) if token_ms else 0
    return min(num_left, max(TRIAL_TOKENS, num_late), MAX_TRIAL_TOKENS)


@dataclass(frozen=True, slots=True)
class Death:
    """Of a worker that computed the stream. is_failure: it lives, and said that its pass failed. is_silent: nothing was
    heard of it, which may be a process that stands still."""

    incarnation: str
    address: str
    is_failure: bool = False
    is_silent: bool = False


class RequestSuspicion:
    """What the streams of one request share: they have one prompt, and one of them alone is tried at a time."""

    def __init__(self) -> None:
        self.alone = asyncio.Lock()
        self.is_convicted = False
        """None of it is to be tried any more."""
        self.streams: list[Suspicion] = []

    def of_stream(self) -> Suspicion:
        """For one more of its streams."""
        self.streams.append(Suspicion(self))
        return self.streams[-1]

    @property
    def deaths(self) -> list[Death]:
        """While workers computed any of its streams, close to where these are now."""
        return [death for stream in self.streams for death in stream.deaths]

    @property
    def gone(self) -> list[Death]:
        """Those of whose workers nothing is heard any more."""
        return [death for death in self.deaths if not death.is_failure]

    @property
    def present_at(self) -> set[str]:
        """Incarnations of the workers of these deaths."""
        return {death.incarnation for death in self.deaths}

    def absolved(self, incarnations: Collection[str]) -> None:
        """These have not died after all, or another request has killed them."""
        for stream in self.streams:
            stream.absolved(incarnations)


class Suspicion:
    """Of one stream."""

    def __init__(self, request: RequestSuspicion) -> None:
        self.request = request
        self.deaths: list[Death] = []
        """In a row, with fewer than CLOSE_TOKENS tokens from each to the next, the last one last."""
        self._is_suspect = self._has_turn = self._died_on_trial = False
        self._num_trial_tokens = 0
        """Left; 0: it is not on trial."""
        self._num_spared = 0
        self._died_at = -CLOSE_TOKENS

    @property
    def is_suspect(self) -> bool:
        """It was being computed when a worker died, or another stream of its request was."""
        return any(stream._is_suspect for stream in self.request.streams)

    async def take_turn(self) -> None:
        """Waits until no other stream of its request is tried: on different workers they would kill one each."""
        if not self._has_turn:
            await self.request.alone.acquire()
            self._has_turn = True

    def on_trial(self, num_tokens: int) -> None:
        """Its turn has come: from now on it is computed alone among suspects, until it has so many tokens."""
        self._num_trial_tokens = num_tokens

    def answered(self, num_tokens: int) -> None:
        """So many tokens more stand."""
        self._num_trial_tokens -= min(num_tokens, self._num_trial_tokens)
        if not self._num_trial_tokens:
            self.cleared()

    def cleared(self) -> None:
        """What was asked when a worker died has been answered by another one."""
        self._is_suspect = False
        self.interrupted()

    def died(self, length: int, death: Death) -> None:
        """A worker died, or fell silent, while it computed the stream, whose log had this length."""
        self._died_on_trial = self._num_trial_tokens > 0
        # a trial is about the death before it, however long it is
        if length - self._died_at >= CLOSE_TOKENS and not self._died_on_trial:
            self.deaths, self._num_spared = [], 0
        self._died_at = length
        self.deaths.append(death)
        self._is_suspect, self._num_trial_tokens = True, 0

    @property
    def is_accused(self) -> bool:
        """Whether the last death was the stream's doing, as far as it is known by which processes have died."""
        of_others = self.request.present_at - {death.incarnation for death in self.deaths}
        is_second = len(self.deaths) + len(of_others) > 1
        return (self._died_on_trial and is_second) or len(self.deaths) > MAX_CLOSE_DEATHS

    def absolved(self, incarnations: Collection[str]) -> None:
        """See `RequestSuspicion.absolved`."""
        left = [death for death in self.deaths if death.is_failure or death.incarnation not in incarnations]
        if left[-1:] != self.deaths[-1:]:
            self._died_on_trial = False
        self.deaths = left

    def is_spared(self, num_other_deaths: int) -> bool:
        """Whether it gets the benefit of the doubt: so many workers died of late without its request."""
        if not num_other_deaths or sum(stream._num_spared for stream in self.request.streams) >= MAX_SPARED:
            return False
        self._num_spared += 1
        return True

    @property
    def doubt_s(self) -> float:
        """How long what has died is waited for."""
        return max((SILENT_DOUBT_S if death.is_silent else DOUBT_S for death in self.request.gone), default=0.0)

    def interrupted(self) -> None:
        """Its session ended in another way: its trial, if there was one, is to be held again. Others of its request go
        first."""
        self._num_trial_tokens = 0
        if self._has_turn:
            self._has_turn = False
            self.request.alone.release()
