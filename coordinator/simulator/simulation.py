"""Coordinator, draft pool and target pool as a discrete-event simulation. Simulated are the workers, the network and
the text alone: γ is chosen by the coordinator's own policies, which see the reports that a round loop would make.

A stream's round: the policy chooses, drafts come from the stream's draft worker (network, queue, a pass a token) or
were drafted ahead, the target verifies them in its next pass beside those of other streams, the coordinator commits.
Not simulated: prompts, failures, local guesses, trees, a draft worker's answer that is given up as late.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.gamma.policy import HIT, LATE, MISS, Candidate, Choice, GammaPolicy, RoundReport
from coordinator.simulator.ahead import Build, begin_build
from coordinator.simulator.engine import Clock, Device, Engine, PassCost, Work
from coordinator.simulator.texts import Text
from coordinator.simulator.world import World
from outrider.drafting.ratio_stop import NUM_DRAFT_TIMES, ChainStop, EarlyStop
from outrider.median import Median

MODEL = Candidate("model")
CREDIT_TOKENS = 64
MAX_PASS_ROWS = 2048


@dataclass(slots=True)
class Outcome:
    """Of one simulation: tokens committed in how many ms, by how many rounds of which γ, how busy workers were, and how
    many passes a target made."""

    num_tokens: int
    ms: float
    rounds: Counter[int]
    tokens: Counter[int]
    target_load: float
    draft_load: float
    num_passes: float

    @property
    def tokens_per_s(self) -> float:
        return 1000 * self.num_tokens / self.ms

    @property
    def mean_gamma(self) -> float:
        """Drafts a committed step of the target, plain ones too."""
        num_steps = sum(count if gamma else self.tokens[0] for gamma, count in self.rounds.items())
        return sum(gamma * count for gamma, count in self.rounds.items()) / num_steps if num_steps else 0.0


NewPolicy = Callable[[Text, int], GammaPolicy]
"""Of a stream that begins at this place of its text; the coordinator's own policies look at neither."""
OnRound = Callable[[RoundReport], None]


@dataclass(slots=True)
class _Stream:
    """A place that is never empty: when its stream has ended, the next one begins."""

    draft: Engine
    target: Engine
    text: Text
    offset: int
    policy: GammaPolicy
    candidates: tuple[Candidate, ...]
    num_tokens: int = 0
    """Committed of this stream."""
    choice: Choice = field(default_factory=lambda: Choice("", 0, ""))
    work: Work | None = None
    started: float = 0.0
    draft_rtt_ms: float = 0.0
    draft_ms: float = 0.0
    draft_queue_ms: float = 0.0
    num_drafts: int = 0
    stop: EarlyStop = field(default_factory=EarlyStop)
    chain: ChainStop | None = None
    build: Build | None = None
    """Of branches behind the round that is being verified."""
    ahead: str = ""
    branch_wait_ms: float = 0.0
    branch_build_ms: float = 0.0

    @property
    def place(self) -> int:
        return self.offset + self.num_tokens


class Simulation:
    """`num_streams` at once, each of `stream_tokens` tokens, one after the other. `run` may be called repeatedly."""

    def __init__(
        self,
        world: World,
        texts: Sequence[Text],
        new_policy: NewPolicy,
        *,
        num_streams: int = 1,
        stream_tokens: int = 1 << 30,
        max_draft_tokens: int = 16,
        seed: int = 0,
        candidates: tuple[Candidate, ...] = (MODEL,),
        on_round: OnRound | None = None,
    ) -> None:
        self.world = world
        self.clock = Clock()
        self.num_tokens = 0
        self._new_policy = new_policy
        self._stream_tokens = stream_tokens
        self._max_draft_tokens = max_draft_tokens
        self._on_round = on_round
        self._rng = random.Random(seed)
        self._stops = EarlyStop()
        self._draft_ms = Median(NUM_DRAFT_TIMES)
        self._rounds: Counter[int] = Counter()
        self._tokens: Counter[int] = Counter()
        devices = [Device() for _ in range(world.num_targets)]
        self._targets = [self._engine(device, lambda: world.target) for device in devices]
        for index, engine in enumerate(self._targets):
            engine.name = f"target-{index}"
        drafts = devices if world.colocated else [Device() for _ in range(world.num_drafts)]
        self._drafts = [self._engine(device, lambda: world.draft) for device in drafts]
        offsets = random.Random(seed)
        self._streams = [
            _Stream(
                self._drafts[i % len(self._drafts)],
                self._targets[i % len(self._targets)],
                text := texts[i % len(texts)],
                offset := offsets.randrange(text.length),
                new_policy(text, offset),
                candidates,
                stop=EarlyStop(self._stops),
            )
            for i in range(num_streams)
        ]
        # streams do not begin all at once, but within a pass over all of a target
        by_target = -(-num_streams // world.num_targets)
        begin_ms = world.target(by_target, 0, by_target) if num_streams > 1 else 0.0
        for stream in self._streams:
            self.clock.after(self._rng.random() * begin_ms, self._begin, stream)

    def run(self, num_tokens: int) -> Outcome:
        """Until so many more tokens are committed."""
        before, ms = self._counted_tokens(), self.clock.now
        rounds, by_gamma = self._rounds.copy(), self._tokens.copy()
        busy = [engine.busy_ms for engine in (*self._targets, *self._drafts)]
        num_passes = sum(engine.num_passes for engine in self._targets)
        while self.num_tokens < before + num_tokens:
            self.clock.step()
        elapsed_ms = self.clock.now - ms
        spent = [engine.busy_ms - b for engine, b in zip((*self._targets, *self._drafts), busy, strict=True)]
        num_targets = len(self._targets)
        return Outcome(
            self._counted_tokens() - before,
            elapsed_ms,
            self._rounds - rounds,
            self._tokens - by_gamma,
            sum(spent[:num_targets]) / num_targets / elapsed_ms,
            sum(spent[num_targets:]) / len(self._drafts) / elapsed_ms,
            (sum(engine.num_passes for engine in self._targets) - num_passes) / num_targets,
        )

    def read(self, texts: Sequence[Text]) -> None:
        """From now on the streams go on in these texts."""
        for i, stream in enumerate(self._streams):
            stream.text = texts[i % len(texts)]

    def _engine(self, device: Device, cost: Callable[[], PassCost]) -> Engine:
        return Engine(self.clock, device, cost, self._rng, jitter=self.world.jitter, max_rows=MAX_PASS_ROWS)

    def _counted_tokens(self) -> int:
        """Those of runs in progress too."""
        return self.num_tokens + sum(
            stream.work.num_passes - max(0, stream.work.end_pass - stream.target.num_passes)
            for stream in self._streams
            if stream.work is not None and not stream.choice.num_draft_tokens and stream.work.end_pass
        )

    def _trip(self, ms: float) -> float:
        return ms * (1 + self.world.jitter * (2 * self._rng.random() - 1)) if self.world.jitter else ms

    def _begin(self, stream: _Stream) -> None:
        """A round."""
        left = self._stream_tokens - stream.num_tokens
        cap, credit = min(self._max_draft_tokens, left - 1), min(CREDIT_TOKENS, left)
        stream.choice = choice = stream.policy.choose(cap, credit, stream.candidates)
        stream.started, stream.work = self.clock.now, None
        stream.ahead, stream.branch_wait_ms, stream.branch_build_ms = "", 0.0, 0.0
        if not choice.num_draft_tokens:
            self._drop_build(stream)
            self._ask_target(stream)
            return
        stream.draft_rtt_ms = 0.0 if self.world.colocated else self._trip(self.world.draft_rtt_ms)
        way_ms = stream.draft_rtt_ms / 2
        if stream.build is not None:
            if self._rng.random() < self.world.branch_survival**stream.num_drafts:
                is_there = stream.build.ended + way_ms <= self.clock.now
                self._use(stream) if is_there else self.clock.after(way_ms, self._wait, stream)
                return
            stream.ahead = MISS
        self.clock.after(way_ms, self._draft, stream)

    def _wait(self, stream: _Stream) -> None:
        """The draft worker knows which of its branches somebody waits for, unless all were on their way already."""
        build, way_ms = stream.build, stream.draft_rtt_ms / 2
        assert build is not None
        if build.is_whole:
            self.clock.after(max(0.0, build.ended + way_ms - self.clock.now), self._use, stream)
            return
        build.narrow()
        build.then = lambda: self.clock.after(way_ms, self._use, stream)

    def _use(self, stream: _Stream) -> None:
        """A branch is at hand: it is verified, and the draft worker goes on from it."""
        assert stream.build is not None
        stream.branch_wait_ms = self.clock.now - stream.started
        stream.ahead, stream.branch_build_ms = LATE if stream.branch_wait_ms else HIT, stream.build.ms
        stream.num_drafts = min(stream.build.num_drafts, stream.choice.num_draft_tokens)
        stream.draft_ms = stream.draft_queue_ms = 0.0
        stream.chain = stream.build = None
        if stream.choice.ahead:
            self.clock.after(stream.draft_rtt_ms / 2, self._build, stream)
        stream.draft_rtt_ms = 0.0
        self._ask_target(stream)

    def _build(self, stream: _Stream) -> None:
        """The draft worker has what to draft ahead of."""
        wish, context = stream.choice.ahead, self.world.context_tokens + stream.num_tokens
        if stream.build is None and wish:
            stream.build = begin_build(self.clock, stream.draft, wish.num_branches, wish.num_draft_tokens, context)

    def _drop_build(self, stream: _Stream) -> None:
        if stream.build is not None:
            stream.build.drop()
            stream.build = None

    def _draft(self, stream: _Stream) -> None:
        """The draft worker has the question. How far it drafts may depend on its own confidence alone."""
        self._drop_build(stream)
        num_passes = self._num_passes(stream)
        context = self.world.context_tokens + stream.num_tokens

        def done(work: Work) -> None:
            stream.draft_ms, stream.draft_queue_ms = self.clock.now - work.arrived, work.queue_ms
            self._draft_ms.add(stream.draft_ms / num_passes)
            self._build(stream)
            self.clock.after(stream.draft_rtt_ms / 2, self._ask_target, stream)

        stream.draft.submit(Work(1, num_passes, context, done))

    def _num_passes(self, stream: _Stream) -> int:
        """Decides how many drafts there will be. A row whose draft turns out not to be worth its place was computed."""
        num_wanted, price = stream.choice.num_draft_tokens, stream.choice.price
        stream.chain, stream.num_drafts = None, num_wanted
        if price is None:
            return num_wanted
        stream.chain = chain = stream.stop.chain(price, self._draft_ms.value())
        num_drafts = 0
        while num_drafts < num_wanted and chain.wants_row():
            if not chain.wants_draft(stream.text.confidence(stream.place + num_drafts)):
                stream.num_drafts = num_drafts
                return num_drafts + 1
            num_drafts += 1
        stream.num_drafts = num_drafts
        return num_drafts

    def _ask_target(self, stream: _Stream) -> None:
        trip_ms = self._trip(self.world.target_rtt_ms)
        self.clock.after(trip_ms / 2 + self.world.overhead_ms, self._verify, (stream, trip_ms))

    def _verify(self, asked: tuple[_Stream, float]) -> None:
        """The target has the question."""
        stream, trip_ms = asked
        choice = stream.choice
        num_rows = stream.num_drafts + 1 if choice.num_draft_tokens else 1
        num_passes = 1 if choice.num_draft_tokens else choice.credit_tokens

        def done(work: Work) -> None:
            verify_ms = self.clock.now - work.arrived
            self.clock.after(trip_ms / 2, self._commit, (stream, work, verify_ms, trip_ms))

        stream.work = Work(num_rows, num_passes, self.world.context_tokens + stream.num_tokens, done)
        stream.target.submit(stream.work)

    def _commit(self, told: tuple[_Stream, Work, float, float]) -> None:
        """The coordinator has the verdict."""
        stream, work, verify_ms, trip_ms = told
        choice, draft_ms, draft_rtt_ms = stream.choice, stream.draft_ms, stream.draft_rtt_ms
        draft_queue_ms = stream.draft_queue_ms
        if choice.num_draft_tokens:
            num_accepted, soft = stream.text.verify(stream.place, stream.num_drafts)
            num_drafts, num_committed = stream.num_drafts, num_accepted + 1
        else:
            num_accepted = num_drafts = 0
            draft_ms = draft_queue_ms = draft_rtt_ms = 0.0
            soft, num_committed = b"", choice.credit_tokens
        if num_drafts and stream.chain is not None and choice.price is not None:
            stream.stop.observe(choice.price, stream.chain.confidences, [byte / 255 for byte in soft])
        stream.num_tokens += num_committed
        ended = stream.num_tokens >= self._stream_tokens
        report = RoundReport(
            choice=choice,
            num_draft_tokens=num_drafts,
            num_accepted=num_accepted,
            num_committed=num_committed,
            soft_acceptances=soft,
            ended=ended,
            draft_ms=draft_ms,
            draft_network_ms=draft_rtt_ms,
            verify_ms=verify_ms,
            verify_network_ms=trip_ms,
            round_ms=self.clock.now - stream.started,
            draft_queue_ms=draft_queue_ms,
            verify_queue_ms=work.queue_ms,
            target=stream.target.name,
            num_batch_rows=work.num_batch_rows,
            ahead=stream.ahead,
            branch_wait_ms=stream.branch_wait_ms,
            branch_build_ms=stream.branch_build_ms,
        )
        stream.policy.observe(report)
        self.num_tokens += num_committed
        self._rounds[num_drafts] += 1
        self._tokens[num_drafts] += num_committed
        stream.work = None
        if self._on_round is not None:
            self._on_round(report)
        if ended:
            self._drop_build(stream)
            stream.offset += stream.num_tokens
            stream.num_tokens = 0
            stream.policy = self._new_policy(stream.text, stream.offset)
            stream.stop = EarlyStop(self._stops)
        self._begin(stream)
