"""Chains that end by themselves, for one stream: the price of the round, what was learnt of it, what a draft takes.

Streams leave to later ones of their tenant what drafts of some confidence are worth, and to all what a draft takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from outrider.drafting.proposal import Proposal
from outrider.drafting.ratio_stop import NUM_DRAFT_TIMES, ChainStop, EarlyStop, Judged, Price
from outrider.median import Median
from outrider.sampling.params import AcceptanceRule, SamplingParams

MAX_SCOPES = 1024
"""Tenants and ways of drafting whose priors are kept; the least recently used go first."""
MAX_UNJUDGED = 4
"""Proposals whose verdict may still come."""


class StopMemory:
    """Of one worker. It is used on the engine's thread alone."""

    def __init__(self) -> None:
        self._scopes: OrderedDict[Hashable, EarlyStop] = OrderedDict()
        self.draft_ms = Median(NUM_DRAFT_TIMES)
        """Of a draft of any stream."""

    def prior(self, scope: Hashable) -> EarlyStop:
        """Of a tenant, a drafter and a way of accepting drafts."""
        prior = self._scopes.setdefault(scope, EarlyStop())
        self._scopes.move_to_end(scope)
        while len(self._scopes) > MAX_SCOPES:
            self._scopes.popitem(last=False)
        return prior


class SessionStop:
    """Of one stream. `price` is that of the round at hand, None: its chain is as long as wanted. `begun` is called once
    the first row is there, before anything is drawn from it. `tells` gets each draft with its q, where another row is
    computed after it, before anybody waits for that row; `num_told` counts them."""

    def __init__(self, memory: StopMemory, tenant: str, sampling: SamplingParams) -> None:
        self.price: Price | None = None
        self.begun: Callable[[], object] | None = None
        self.tells: Callable[[Proposal], object] | None = None
        self.num_told = 0
        self._memory = memory
        self._scope = (tenant, _kind(sampling))
        self._learnt: dict[str, EarlyStop] = {}
        self._unjudged: OrderedDict[int, tuple[str, ChainStop]] = OrderedDict()

    def chain(self, drafter: str) -> ChainStop | None:
        """Of the next proposal."""
        return None if self.price is None else self._of(drafter).chain(self.price, self._memory.draft_ms.value())

    def has_row(self) -> None:
        """The first row of a proposal."""
        if self.begun is not None:
            self.begun()
            self.begun = None

    def tell(self, drafted: Callable[[int], Proposal]) -> None:
        """Drafts that stand in the chain whatever follows. drafted: gives those from one on, if anybody is told."""
        if self.tells is not None:
            untold = drafted(self.num_told)
            self.tells(untold)
            self.num_told += len(untold)

    def drafted(self, ms: float) -> None:
        """A further draft, and what it took."""
        self._memory.draft_ms.add(ms)

    def proposed(self, prefix_hash: int, drafter: str, chain: ChainStop) -> None:
        """The chain will be judged, if it is verified."""
        self._unjudged[prefix_hash] = (drafter, chain)
        while len(self._unjudged) > MAX_UNJUDGED:
            self._unjudged.popitem(last=False)

    def judge(self, judged: Judged) -> None:
        """Nothing is learnt from what this stream's worker knows nothing of."""
        drafter, chain = self._unjudged.pop(judged.prefix_hash, ("", None))
        if chain is not None and judged.soft_acceptances:
            accepted = [byte / 255 for byte in judged.soft_acceptances[: len(chain.confidences)]]
            self._of(drafter).observe(chain.price, chain.confidences, accepted)

    def _of(self, drafter: str) -> EarlyStop:
        if drafter not in self._learnt:
            self._learnt[drafter] = EarlyStop(self._memory.prior((drafter, *self._scope)))
        return self._learnt[drafter]


def _kind(sampling: SamplingParams) -> str:
    """Confidence means something else for each."""
    if sampling.greedy:
        return "greedy"
    return "coupled" if sampling.acceptance is AcceptanceRule.COUPLED else "sampled"
