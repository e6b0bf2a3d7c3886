"""The target side of a stream: one link, and another one where it breaks and another worker can take over."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from coordinator.gamma.median import Median
from coordinator.gamma.policy import Candidate, Choice
from coordinator.stream import Stream
from coordinator.target_link import TargetLink, Timed
from outrider.errors import Aborted, OutriderError, ResourceExhausted, Unavailable
from outrider.serving.messages import TargetOpening
from outrider.serving.session_calls import SealedProposal

MAX_REOPENINGS = 3
"""In a row, without a token between."""
MIN_NETWORK_MS, MIN_ROUND_TRIPS = 2.0, 3
"""Of a round trip, as the median of at least so many: from here on it is hidden."""
MAX_LOSSES = 8
"""Of one stream in all: one that kills its workers, a token apart, must not go round for ever."""


class TargetLost(Exception):
    """The session is gone; the log is whole. Carries the worker's error."""

    def __init__(self, error: OutriderError) -> None:
        super().__init__(error.message)
        self.error = error


class TargetPool(Protocol):
    """Where links come from."""

    def connect_target(self, stream: Stream, avoid: frozenset[str]) -> TargetLink:
        """A link to the least loaded healthy worker not in `avoid`. Raises Unavailable when there is none."""

    def disconnect(self, link: TargetLink, error: Exception | None = None) -> None:
        """The link is not used any more; `error` is why, when it failed."""

    def target_candidates(self, link: TargetLink) -> tuple[Candidate, ...]:
        """Drafters inside that worker."""


class TargetSide:
    """Opens, asks, and opens elsewhere. Errors that another worker would repeat go to the client."""

    def __init__(self, stream: Stream, pool: TargetPool) -> None:
        self._stream = stream
        self._pool = pool
        self._link: TargetLink | None = None
        self._failed: set[str] = set()
        self._num_losses = 0
        self._epoch = 0
        self._network = Median()

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Drafters of the worker that has the stream now, the request's choice considered."""
        if self._link is None or not self._stream.request.max_draft_tokens:
            return ()
        named = self._stream.request.drafter
        return tuple(c for c in self._pool.target_candidates(self._link) if named in ("", c.name))

    async def open(self) -> Timed:
        """The first token, from the first worker that gives it."""
        try:
            return await self._open()
        except TargetLost as lost:
            return await self.reopen(lost)

    @property
    def pipelines(self) -> bool:
        """Whether the way to the worker is so long that a round is better sent before the verdict of the one before."""
        if self._link is None or self._link.sends_features or len(self._network) < MIN_ROUND_TRIPS:
            return False
        return self._network.value() >= MIN_NETWORK_MS

    @property
    def is_verifying(self) -> bool:
        """Whether the worker has the log's next round already."""
        return self._link is not None and self._link.is_verifying

    def verify_next(self, base_length: int, prefix_hash: int, token_id: int, proposal: SealedProposal) -> None:
        """See `TargetLink.verify_next`."""
        if self._link is not None:
            self._link.verify_next(base_length, prefix_hash, token_id, proposal)

    async def verify(self, proposal: SealedProposal) -> Timed:
        assert self._link is not None
        try:
            timed = await self._link.verify(proposal)
        except OutriderError as error:
            raise _lost_or(error) from None
        if not timed.is_pipelined:
            self._network.add(timed.network_ms)
        return timed

    async def decode(self, choice: Choice) -> AsyncGenerator[Timed, None]:
        """Step by step, with drafts of the worker's own where the choice names one of its drafters."""
        assert self._link is not None
        drafts: tuple[str, int, tuple[int, ...]] = ("", 0, ())
        if choice.num_draft_tokens:
            name = choice.candidate.asked_as if choice.candidate is not None else choice.drafter
            drafts = (name, choice.num_draft_tokens, choice.shape)
        try:
            async with aclosing(self._link.decode(choice.credit_tokens, *drafts)) as verdicts:
                async for timed in verdicts:
                    yield timed
        except OutriderError as error:
            raise _lost_or(error) from None

    async def stop_decoding(self) -> None:
        """The running `decode` ends with the token in flight."""
        assert self._link is not None
        try:
            await self._link.stop_decoding()
        except OutriderError as error:
            raise _lost_or(error) from None

    async def reopen(self, lost: TargetLost) -> Timed:
        """The next token, from another worker: its session begins with all that is committed. Raises the error that
        the client should see when no other worker can."""
        for _ in range(MAX_REOPENINGS):
            assert self._link is not None
            if not isinstance(lost.error, Aborted):
                # aborted is the session alone (its lease, a restart): the worker itself may take it again
                self._failed.add(self._link.address)
                self._num_losses += 1
            self.close(lost.error)
            if self._num_losses > MAX_LOSSES:
                break
            try:
                return await self._open()
            except TargetLost as again:
                lost = again
            except Unavailable:
                break
        raise lost.error

    def close(self, error: Exception | None = None) -> None:
        """Frees the session. Harmless when repeated."""
        if self._link is not None:
            link, self._link = self._link, None
            self._pool.disconnect(link, error)
            link.close()

    async def _open(self) -> Timed:
        self._link = self._pool.connect_target(self._stream, frozenset(self._failed))
        self._epoch += 1
        request = self._stream.request
        opening = TargetOpening(
            **self._stream.opening_fields(self._epoch),
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            max_draft_tokens=request.max_draft_tokens,
            priority=request.priority,
            prompt_logprobs=request.prompt_logprobs if self._stream.wants_prompt_logprobs else None,
        )
        try:
            timed = await self._link.open(opening)
        except OutriderError as error:
            raise _lost_or(error) from None
        # with a token between, a worker that failed once may have another try: it may be another process by now
        self._failed.clear()
        return timed


def _lost_or(error: OutriderError) -> Exception:
    """Loss of a worker is mended elsewhere; what another worker would say too is the client's to know."""
    return TargetLost(error) if isinstance(error, Unavailable | Aborted | ResourceExhausted) else error
