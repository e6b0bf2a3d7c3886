"""What a client does when a stream of its breaks: which losses are mended, how, and when to give up. No network here.

A text is resumed from the ids that were delivered, under the seed and rule that its first coordinator told. What was
delivered never changes. Greedy and COUPLED texts go on as they would have. Under TOKEN and BLOCK what follows has the
target's law given what was delivered: noise is keyed by the exact prefix, and what breaks streams does not read them.
"""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from outrider.errors import (
    DRAINING,
    STARTING,
    Aborted,
    Internal,
    InvalidArgument,
    OutriderError,
    ResourceExhausted,
    Unavailable,
)


@dataclass(frozen=True, slots=True)
class Resume:
    """What a client does about a loss before its caller hears of it. Raises InvalidArgument."""

    patience_s: float = 30.0
    """From a loss on without a token since: then the caller hears of it."""
    max_losses: int = 8
    """Of one text that had begun, announced ones not counted: one that brings its coordinators down stops there."""
    min_wait_s: float = 0.05
    max_wait_s: float = 2.0
    """Between tries: doubling from the one to the other, each shortened at random by up to half."""

    def __post_init__(self) -> None:
        for name in ("patience_s", "max_losses", "min_wait_s"):
            if not getattr(self, name) >= 0:
                raise InvalidArgument(f"resume.{name} is {getattr(self, name)}, must be 0 or more", field=name)
        if not self.min_wait_s <= self.max_wait_s < float("inf"):
            raise InvalidArgument(
                f"resume.max_wait_s is {self.max_wait_s}, must be at least min_wait_s, which is {self.min_wait_s}",
                field="max_wait_s",
            )

    def wait_s(self, num_tries: int, rng: random.Random) -> float:
        """After so many tries in a row, at least 1."""
        whole = min(self.max_wait_s, self.min_wait_s * 2.0 ** min(num_tries - 1, 32))
        return whole * rng.uniform(0.5, 1.0)


class Mend(enum.Enum):
    """What can be done about a failure."""

    NOTHING = enum.auto()
    """Another coordinator would say the same."""
    ELSEWHERE = enum.auto()
    """Each other coordinator may be asked once."""
    PATIENCE = enum.auto()
    """Trying again mends it, for as long as it may take."""


def about_coordinator(error: OutriderError, *, is_bare: bool) -> bool:
    """Whether it is the coordinator that is gone, or about to be, and not something behind it. is_bare: the status came
    from the transport, not from a server of ours."""
    return error.reason in (DRAINING, STARTING) or (is_bare and isinstance(error, Unavailable | Internal))


def mend(error: OutriderError, *, is_bare: bool, is_accepted: bool, is_known: bool) -> Mend:
    """is_accepted: a coordinator had begun with the request. is_known: one has answered this client before, so that its
    addresses are no mistake."""
    if is_bare and isinstance(error, ResourceExhausted):
        return Mend.NOTHING  # a message too large for the transport
    gone = about_coordinator(error, is_bare=is_bare)
    if is_accepted:
        mends = gone or isinstance(error, Unavailable | Aborted | ResourceExhausted)
        return Mend.PATIENCE if mends else Mend.NOTHING
    if gone and (is_known or not is_bare):
        return Mend.PATIENCE
    return Mend.ELSEWHERE if gone or isinstance(error, Unavailable | Aborted) else Mend.NOTHING


class Losses:
    """Of one text, and how long they may go on."""

    def __init__(
        self, policy: Resume, *, clock: Callable[[], float] = time.monotonic, rng: random.Random | None = None
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._rng = rng
        """None: not needed yet. Most texts know no loss."""
        self._num_losses = 0
        self._num_tries = 0
        self._since = 0.0

    def progressed(self) -> None:
        """Something of the text has come."""
        self._num_tries = 0

    def wait_s(self, error: OutriderError, *, had_begun: bool) -> float:
        """Until the next try after `error`. Raises it where it is the last straw. had_begun: the coordinator that was
        asked last had begun with the text."""
        if not self._num_tries:
            self._since = self._clock()
        self._num_tries += 1
        self._num_losses += had_begun and error.reason != DRAINING
        if self._num_losses > self._policy.max_losses or self._clock() - self._since > self._policy.patience_s:
            raise error
        self._rng = self._rng or random.Random()
        return self._policy.wait_s(self._num_tries, self._rng)
