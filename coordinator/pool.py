"""Links for streams: picks a worker, opens a session stream on its channel, counts it, remembers what rounds cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from coordinator.draft_link import DraftLink
from coordinator.features import FeatureFeed, FeatureRelay
from coordinator.fleet.directory import WorkerDirectory
from coordinator.fleet.picking import PrefixMemory, prefix_keys
from coordinator.fleet.standing import Conduct
from coordinator.fleet.worker import WorkerRecord
from coordinator.gamma.adaptive import AdaptiveGamma
from coordinator.gamma.fixed import FixedGamma
from coordinator.gamma.guarded import GuardedGamma
from coordinator.gamma.policy import Candidate, GammaPolicy
from coordinator.gamma.shared import PairEstimates, SharedEstimates
from coordinator.gamma.told import draft_candidates, target_candidates, tell
from coordinator.local_drafts import LocalDrafts, LocalMemory
from coordinator.peer import WORKER_LOST, WORKER_SILENT, Peer
from coordinator.request import ResolvedRequest
from coordinator.stream import Stream
from coordinator.suspicion import Death
from coordinator.target_link import TargetLink
from outrider.errors import Unavailable
from outrider.median import Median
from outrider.server_info import DraftRounds
from outrider.serving import session_calls as wire
from outrider.settings import CoordinatorSettings

LAST_PROBE_S = 2.0
"""How long workers that a stream may have killed have to show that they live."""


class SessionPool:
    """Every session stream of this coordinator. `deadline` of a stream is its call's: loop time, or None."""

    def __init__(self, directory: WorkerDirectory, settings: CoordinatorSettings) -> None:
        self._directory = directory
        self._settings = settings
        self._sessions: dict[TargetLink | DraftLink, WorkerRecord] = {}
        self._promised_to: dict[TargetLink | DraftLink, int] = {}
        """Blocks that targets have to promise to sessions."""
        self._choices_at: dict[int, list[str]] = {}
        """Addresses of the targets that have choices of a request, by its identity, once for each."""
        self._request_of: dict[TargetLink | DraftLink, int] = {}
        self._estimates = SharedEstimates()
        self._memory = LocalMemory(settings)
        self._prefixes = PrefixMemory()
        self._numerics: WeakKeyDictionary[Stream, str] = WeakKeyDictionary()
        """Of the target that a stream had last: its rows may differ in the last bits from those of others."""

    def policy(self, request: ResolvedRequest) -> GammaPolicy:
        """Fixed or adaptive, as the request says. Streams of one model share what they learn of costs, those of one
        tenant how far drafts survive, unless they might have one another's coins."""
        shared = self._estimates.apart(request.model)
        if request.learns_from_others:
            shared = self._estimates.of(request.model, request.tenant, greedy=request.sampling.greedy)
        self._tell(shared, request)
        if request.num_speculative_tokens is not None:
            drafts_ahead = self._settings.draft_ahead == "on"
            return FixedGamma(request.num_speculative_tokens, drafts_ahead=drafts_ahead, shared=shared)
        return AdaptiveGamma(
            shared,
            request.max_speculative_tokens,
            draft_ahead=self._settings.draft_ahead,
            # a draft worker ends chains by what it learnt of all streams
            ends_chains=request.learns_from_others,
        )

    def guarded_policy(self, stream: Stream) -> GammaPolicy:
        """The stream's, which costs speed where it fails, and what it shares with others is learnt anew."""
        request = stream.request
        return GuardedGamma(partial(self.policy, request), stream, partial(self._estimates.forget, request.model))

    def not_of_draft_workers(self, stream: Stream) -> tuple[str, ...]:
        """Drafters that run elsewhere: here, or inside targets."""
        return (*self._settings.local_drafters, *self._directory.target_only_drafters(stream.request.model))

    def local_drafts(self, stream: Stream) -> LocalDrafts:
        """Guesses for this stream, from what it and its tenant's earlier streams wrote."""
        return LocalDrafts(stream, self._memory)

    def connect_target(self, stream: Stream, avoid: frozenset[str], standby: str = "", drafter: str = "") -> TargetLink:
        request = stream.request
        keys = prefix_keys((request.model_fingerprint, request.tenant), request.prompt_ids)
        worker = self._directory.pick_target(
            request.model,
            request.model_fingerprint,
            avoid,
            request.drafter or drafter,
            cached=self._prefixes.cached(keys),
            numerics=self._numerics.get(stream, ""),
            standby=standby,
            others_at=self._choices_at.get(id(request), ()),
            num_cached_tokens=request.num_cached_tokens,
            max_draft_tokens=request.max_draft_tokens,
        )
        self._prefixes.remember(keys, worker.address)
        numerics = self._numerics[stream] = worker.told.model.numerics_fingerprint
        states, reads = "", stream.features.read_states
        if request.max_draft_tokens:
            states = self._directory.wanted_features(request.model, worker, request.drafter, reads)
        peer, incarnation = self._target_peer(stream, worker), worker.told.incarnation
        link = TargetLink(peer, worker.address, stream.log, stream.features, states, incarnation, numerics)
        self._request_of[link] = id(request)
        self._choices_at.setdefault(id(request), []).append(worker.address)
        return self._enlist(link, worker, worker.num_blocks_of(request.num_cached_tokens))

    def has_draft(self, stream: Stream, avoid: frozenset[str]) -> bool:
        return self._directory.pick_draft(stream.request.model, stream.request.drafter, avoid) is not None

    def connect_draft(self, stream: Stream, avoid: frozenset[str] = frozenset()) -> DraftLink | None:
        request = stream.request
        worker = self._directory.pick_draft(request.model, request.drafter, avoid)
        if worker is None:
            return None
        call = wire.draft_call(worker.channel, self._timeout_s(stream), worker.metadata)
        peer = self._peer(call, wire.read_draft, worker, wire.DRAFT_HEARTBEAT)
        states = next(iter(worker.told.drafter_features.values()), "")
        feed = FeatureFeed(stream.features, peer, states, request.model_fingerprint)
        conduct = Conduct(self._directory.standing(worker), worker.told.incarnation)
        return self._enlist(DraftLink(peer, worker.address, stream.log, feed, stream.statistics.ahead, conduct), worker)

    def has_died(self, incarnation: str) -> bool:
        """Whether this process of a draft worker was lost and has not answered since."""
        return self._directory.draft_deaths.has_died(incarnation)

    async def without_guilt(self, deaths: Collection[Death]) -> set[str]:
        """Incarnations of those that answer after all, or that another stream is known to have killed."""
        known = {death.incarnation for death in deaths if self._directory.deaths.is_explained(death.incarnation)}
        asked = {death.incarnation: death.address for death in deaths if death.incarnation not in known}
        answers = await asyncio.gather(
            *(self._directory.answers_as(address, name, LAST_PROBE_S) for name, address in asked.items())
        )
        return known | {name for name, answered in zip(asked, answers, strict=True) if answered}

    def num_other_deaths(self, incarnations: Collection[str]) -> int:
        """Workers lost of late, besides these, that no stream is known to have killed."""
        return self._directory.deaths.num_besides(incarnations)

    def killed(self, incarnations: Collection[str]) -> None:
        """A request has killed these."""
        self._directory.deaths.explained(incarnations)

    def trial_begins(self, link: TargetLink) -> int:
        """A suspect's turn has come there. Its number."""
        return self._directory.trials.begins(link.incarnation)

    def is_trial_over(self, link: TargetLink, number: int) -> bool:
        """Whether another suspect's turn has come there since."""
        return self._directory.trials.is_over(link.incarnation, number)

    def connect_standby(self, stream: Stream, avoid: str) -> TargetLink:
        request, numerics = stream.request, self._numerics.get(stream, "")
        worker = self._directory.pick_target(
            request.model,
            request.model_fingerprint,
            frozenset({avoid}),
            numerics=numerics,
            num_cached_tokens=request.num_cached_tokens,
        )
        link = TargetLink(self._target_peer(stream, worker), worker.address, stream.log, FeatureRelay(), "")
        return self._enlist(link, worker)  # its blocks are as good as others': they are promised to no stream that runs

    def next_change(self) -> asyncio.Event:
        """Set once the health of any worker may have changed."""
        return self._directory.next_change()

    def disconnect(self, link: TargetLink | DraftLink, error: Exception | None = None) -> None:
        """The link is not used any more; `error` is why, when it failed."""
        worker = self._sessions.pop(link, None)
        if worker is None:
            return
        worker.num_sessions -= 1
        worker.num_promised_blocks -= self._promised_to.pop(link, 0)
        if (request := self._request_of.pop(link, None)) is not None:
            self._choices_at[request].remove(worker.address)
            if not self._choices_at[request]:
                del self._choices_at[request]
        if isinstance(error, Unavailable):
            worker.suspect()
            if error.reason in (WORKER_LOST, WORKER_SILENT):
                if isinstance(link, TargetLink):
                    self._directory.deaths.lost(link.incarnation)
                else:
                    self._directory.draft_deaths.lost(link.conduct.incarnation)

    def num_streams(self, link: DraftLink) -> int:
        return self._sessions[link].num_sessions

    def draft_candidates(self, link: DraftLink) -> tuple[Candidate, ...]:
        told = self._sessions[link].told
        reads = told.drafter_features
        return tuple(c for c in draft_candidates(told) if link.features.comes or not reads.get(c.name))

    def target_candidates(self, link: TargetLink) -> tuple[Candidate, ...]:
        return tuple(target_candidates(self._sessions[link].told))

    def proposal_ms(self, link: DraftLink) -> Median:
        return self._sessions[link].proposal_ms

    def catch_up_ms(self, link: DraftLink) -> Median:
        return self._sessions[link].catch_up_ms

    def count_round(self, link: DraftLink, round: DraftRounds) -> None:
        worker, known = self._sessions[link], self._sessions[link].draft_rounds
        sums = {name: getattr(known, name) + getattr(round, name) for name in DraftRounds.__dataclass_fields__}
        worker.draft_rounds = DraftRounds(**sums)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def _tell(self, shared: PairEstimates, request: ResolvedRequest) -> None:
        """What workers have measured, for where nothing was measured here."""
        for worker in self._directory.healthy(request.model):
            tell(shared, worker.told, num_context_tokens=len(request.prompt_ids))

    def _enlist(self, link: Any, worker: WorkerRecord, num_blocks: int = 0) -> Any:
        self._sessions[link] = worker
        self._promised_to[link] = num_blocks
        worker.num_sessions += 1
        worker.num_promised_blocks += num_blocks
        return link

    def _timeout_s(self, stream: Stream) -> float | None:
        if stream.deadline is None:
            return None
        return max(0.0, stream.deadline - asyncio.get_running_loop().time())

    def _target_peer(self, stream: Stream, worker: WorkerRecord) -> Peer:
        call = wire.target_call(worker.channel, self._timeout_s(stream), worker.metadata)
        return self._peer(call, wire.read_target, worker, wire.TARGET_HEARTBEAT)

    def _peer(self, call: Any, read: Callable[[Any], Any], worker: WorkerRecord, heartbeat: Any) -> Peer:
        return Peer(
            call,
            read,
            address=worker.address,
            heartbeat=heartbeat,
            is_heartbeat=lambda content: isinstance(content, wire.Alive),
            interval_s=self._settings.heartbeat_ms / 1000,
            timeout_s=self._settings.peer_timeout_s,
        )
