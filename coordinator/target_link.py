"""What the round loop asks of a target worker's session: a verdict for a proposal, or for a run of its own.

A worker that is out of step is sent what it lacks; the log decides, never the worker. The clock of each answer starts
when its question is sent.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from coordinator.features import FeatureRelay
from coordinator.log import Log
from coordinator.peer import MAX_RESENDS, Peer
from outrider.errors import SESSION_LOST, Aborted, OutriderError, Unavailable
from outrider.serving import session_calls as wire
from outrider.serving.messages import FeatureRows, Header, TargetOpening, Verdict

BAD_VERDICT = "BAD_VERDICT"
"""The reason of a worker that was lost for a verdict that cannot be."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A verdict and how long it took from its question, or from the verdict before; ms."""

    verdict: Verdict
    elapsed_ms: float
    prompt_logprobs: tuple[wire.SealedPromptLogprobs, ...] = ()
    """With the first verdict, when the opening asked for them."""
    target: str = ""
    """Address of the worker."""
    is_pipelined: bool = False
    """The question was there before the verdict before: its way took no time."""
    is_recovery: bool = False
    """Another worker was asked first, and lost: times tell of a prefill, not of a round."""

    @property
    def queue_ms(self) -> float:
        return self.verdict.queue_us / 1000

    @property
    def work_ms(self) -> float:
        """The model's pass and sampling."""
        return (self.verdict.compute_us + self.verdict.sampling_us) / 1000

    @property
    def draft_ms(self) -> float:
        """Drafting by the target itself."""
        return self.verdict.draft_us / 1000

    @property
    def sampling_ms(self) -> float:
        """Of the work: distributions and acceptance."""
        return self.verdict.sampling_us / 1000

    @property
    def network_ms(self) -> float:
        return max(0.0, self.elapsed_ms - self.queue_ms - self.draft_ms - self.work_ms)


class TargetLink:
    """A session on a target worker. Every method raises OutriderError once the worker is lost or refuses."""

    def __init__(
        self,
        peer: Peer,
        address: str,
        log: Log,
        features: FeatureRelay,
        states: str,
        incarnation: str = "",
        numerics_fingerprint: str = "",
    ) -> None:
        """states: of the target, that its verdicts shall carry to `features`; empty: none. incarnation,
        numerics_fingerprint: of the process that answered at the address last."""
        self.address = address
        self.incarnation = incarnation
        self.numerics_fingerprint = numerics_fingerprint
        self._peer = peer
        self._log = log
        self._features = features
        self._states = states
        self._epoch = 0
        self._next: Header | None = None
        """Of a verify that was sent before the verdict that it counts on."""
        self._arrived_at = 0.0
        self._prompt_logprobs: list[wire.SealedPromptLogprobs] = []
        self._owes_prompt_logprobs = False
        self._early: Verdict | None = None
        self._is_getting_ready = False
        self._ingested_length = 0

    async def open(self, opening: TargetOpening) -> Timed:
        """The first token after the opening's committed ids; logprobs of the whole prompt with it, if asked for."""
        opening = self._opens(opening)
        return await self._ask(lambda missing: wire.target_open(opening))

    async def open_deferred(self, opening: TargetOpening) -> None:
        """A session for the question that comes next, whose answer has the logprobs of the prompt, if asked for. Of a
        suspect it waits for its turn, see `num_suspect_tokens`."""
        self._peer.num_outstanding = int(opening.num_suspect_tokens > 0)
        self._is_getting_ready = True
        await self._peer.send(wire.target_open(self._opens(dataclasses.replace(opening, deferred=True))))
        if opening.num_suspect_tokens:
            await self._ready()
        self._is_getting_ready = False

    async def ingest(self) -> None:
        """Of a session that is asked nothing: the worker has computed the log as it stands when it has nothing else to
        do. Returns then."""
        header, missing = self._log.header(self._epoch), self._log.since(self._ingested_length)
        self._peer.num_outstanding = 1
        await self._peer.send(wire.target_ingest(header, missing))
        await self._ready()
        self._ingested_length = header.base_length

    @property
    def was_asked(self) -> bool:
        """Whether the worker was computing something of the stream when it was lost, and not waiting with it."""
        return (self._peer.was_asked and not self._is_getting_ready) or self._next is not None

    @property
    def unheard_s(self) -> float:
        """At most so long before its loss was known, the worker was lost."""
        return self._peer.unheard_s

    @property
    def is_verifying(self) -> bool:
        """Whether the worker has the log's next round already: `verify` then waits for its verdict only."""
        return self._next is not None and self._next == self._log.header(self._epoch)

    @property
    def sends_features(self) -> bool:
        return bool(self._states)

    def verify_next(self, base_length: int, prefix_hash: int, token_id: int, proposal: wire.SealedProposal) -> None:
        """Sends the round after the one that is being verified, on top of what that one may make of the log: so many
        ids with this hash, `token_id` the last of them. After another verdict the worker drops it."""
        self._next = Header(self._epoch, base_length, prefix_hash)
        message = wire.target_verify(self._next, (), proposal, expected_token_id=token_id)
        self._peer.send_soon(message)  # a verdict must not wait for it

    async def verify(self, proposal: wire.SealedProposal) -> Timed:
        header, is_sent = self._log.header(self._epoch), self.is_verifying
        self._next = None
        if is_sent:
            return await self._sent_verdict()
        return await self._ask(lambda missing: wire.target_verify(header, missing, proposal))

    async def decode(
        self, credit_tokens: int, drafter: str = "", num_draft_tokens: int = 0, tree_parents: tuple[int, ...] = ()
    ) -> AsyncGenerator[Timed, None]:
        """One verdict per step, over drafts of the worker's own where some are wanted, a tree if a shape is given; the
        caller commits each before it asks for the next, and may end early."""
        header = self._log.header(self._epoch)
        self._next = None  # a round that was dropped there: what the run makes of the log may be its prefix after all
        timed = await self._ask(
            lambda missing: wire.target_decode(
                header,
                missing,
                credit_tokens,
                drafter=drafter,
                num_draft_tokens=num_draft_tokens,
                tree_parents=tree_parents,
            )
        )
        arrived = time.perf_counter()
        yield timed
        while not timed.verdict.decode_ended:
            verdict = await self._asked_verdict()
            before, arrived = arrived, time.perf_counter()
            timed = Timed(verdict, 1000 * (arrived - before), target=self.address)
            yield timed

    async def stop_decoding(self) -> None:
        """A running `decode` ends with the token in flight, whose verdict comes as any other."""
        await self._peer.send(wire.target_stop())

    def close(self) -> None:
        self._peer.close()

    async def _sent_verdict(self) -> Timed:
        verdict = await self._asked_verdict()
        before, self._arrived_at = self._arrived_at, time.perf_counter()
        return Timed(verdict, 1000 * (self._arrived_at - before), target=self.address, is_pipelined=True)

    async def _asked_verdict(self) -> Verdict:
        """Of a question that was asked before, and is not asked again."""
        self._peer.num_outstanding = 1
        try:
            return await self._verdict()
        except _Lags as lags:
            raise self._lost(f"is at another text ({lags.header})") from None
        finally:
            self._peer.num_outstanding = 0

    async def _ask(self, message: Callable[[tuple[int, ...]], Any]) -> Timed:
        started = time.perf_counter()
        missing: tuple[int, ...] = ()
        features_start = self._features.wanted_from(self._log.length)
        for _ in range(MAX_RESENDS):
            self._peer.num_outstanding = 1
            await self._peer.send(wire.features_from(message(missing), features_start))
            try:
                verdict = await self._verdict()
                self._arrived_at = time.perf_counter()
                timed = Timed(verdict, 1000 * (self._arrived_at - started), target=self.address)
                return self._with_prompt(timed)
            except _Lags as lags:
                self._next = None  # it came after a round that was not verified, and was dropped
                if lags.header.epoch != self._epoch or not self._log.holds(lags.header):
                    raise self._lost(f"is at another text ({lags.header})") from None
                missing = self._log.since(lags.header.base_length)
            finally:
                self._peer.num_outstanding = 0
        raise self._lost("stays out of step")

    def _opens(self, opening: TargetOpening) -> TargetOpening:
        self._epoch = opening.epoch
        self._owes_prompt_logprobs = opening.prompt_logprobs is not None
        self._ingested_length = len(opening.prompt_ids) + len(opening.committed_ids)
        opening = dataclasses.replace(opening, worker_incarnation=self.incarnation)
        return self._features.target_opens(opening, self._states)

    def _with_prompt(self, timed: Timed) -> Timed:
        if not self._owes_prompt_logprobs:
            return timed
        self._owes_prompt_logprobs = False
        whole, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        position = 1
        for told in whole:
            if told.first_position != position:
                break
            position += told.num_tokens
        if position != len(self._log.prompt_ids):
            raise self._lost("left out logprobs of the prompt")
        return dataclasses.replace(timed, prompt_logprobs=whole)

    async def _ready(self) -> None:
        """Waits until the worker stands where it was told to. One of an older version gives a token at once instead."""
        try:
            while not isinstance(message := await self._peer.receive(), wire.Ready):
                if isinstance(message, wire.Lagging):
                    raise self._lost(f"is at another text ({message.header})")
                if isinstance(message, Verdict):
                    self._early = message
                    return
        finally:
            self._peer.num_outstanding = 0

    async def _verdict(self) -> Verdict:
        """The next one for the log as it stands; older ones are no-ops. Raises Unavailable on one about another text:
        there will be no other one."""
        expected = self._log.header(self._epoch)
        features: list[FeatureRows] = []
        while True:
            message, self._early = self._early or await self._peer.receive(), None
            if isinstance(message, wire.Lagging):
                raise _Lags(message.header)
            if isinstance(message, wire.SealedPromptLogprobs) and self._owes_prompt_logprobs:
                self._prompt_logprobs.append(message)
            if isinstance(message, FeatureRows):
                features.append(message)
            if isinstance(message, Verdict):
                if message.header == expected and message.committed_ids:
                    end = expected.base_length + len(message.committed_ids) - 1
                    self._features.received([*features, message.features], end)
                    return message
                if message.header.epoch == self._epoch and message.header.base_length >= expected.base_length:
                    raise Unavailable(
                        f"target worker {self.address} gave a verdict about another text ({message.header}), or none",
                        reason=BAD_VERDICT,
                    )
                features.clear()

    def _lost(self, what: str) -> OutriderError:
        return Aborted(f"target worker {self.address} {what}", reason=SESSION_LOST, retry_delay_s=0.5)


class _Lags(Exception):
    def __init__(self, header: Header) -> None:
        self.header = header
