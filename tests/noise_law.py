"""The exact joint law over rounds when noise is made of numbers with keys: what is used twice is the same number.

Drafts, coins and corrections are all read off uniform numbers, as the services do. A number is known to lie in an
interval after each use; used again under the same key it lies there still. So keys that come back in a later round,
or that two roles share, show as what they are: dependence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from round_law import Text, Tree, draft_q

from outrider.sampling import AcceptanceRule, Role
from target_worker.acceptance import acceptances, correction, count_accepted

Key = Callable[[Role, Text], Hashable]
"""Of the number for a role after a prefix."""
Known = dict[Hashable, tuple[float, float]]
GammaAfter = Callable[[Text], int]
"""γ of the next round from the drafts of the last one, whether they stood or not: a controller sees all of them."""


def by_prefix(role: Role, prefix: Text) -> Hashable:
    """As it should be."""
    return role, prefix


def by_position(role: Role, prefix: Text) -> Hashable:
    """A generator that is read on from token to token, and begun anew by each round."""
    return role, len(prefix)


def one_for_all_roles(role: Role, prefix: Text) -> Hashable:
    """A number after each prefix, whatever for."""
    return prefix


@dataclass(frozen=True)
class RoundsLaw:
    """nodes: p and q after every text of less than `num_tokens` tokens."""

    nodes: Tree
    rule: AcceptanceRule
    num_tokens: int
    key: Key = by_prefix
    gamma_after: GammaAfter = lambda drafts: 2

    def law(self) -> dict[Text, float]:
        """P(first num_tokens tokens) over all rounds."""
        law: dict[Text, float] = defaultdict(float)
        for text, mass in self._texts((), 1.0, {}, self.gamma_after(())):
            law[text[: self.num_tokens]] += mass
        return law

    def distance(self) -> float:
        """Total variation to the target's own law."""
        law, target = self.law(), {(): 1.0}
        for _ in range(self.num_tokens):
            target = {(*t, x): m * p for t, m in target.items() for x, p in enumerate(self.nodes.p[t])}
        return sum(abs(law.get(text, 0.0) - target.get(text, 0.0)) for text in {*law, *target}) / 2

    def _texts(self, text: Text, mass: float, known: Known, gamma: int) -> Iterator[tuple[Text, float]]:
        if len(text) >= self.num_tokens:
            yield text, mass
            return
        gamma = min(gamma, self.num_tokens - len(text) - 1)
        for drafts, drawn, after_drafts in self._drafts(text, gamma, known):
            p = [self.nodes.p[(*text, *drafts[:i])] for i in range(gamma + 1)]
            q = [draft_q(self.nodes.q[(*text, *drafts[:i])]) for i in range(gamma)]
            chances, scales = acceptances(self.rule, p[:-1], q, drafts)
            for coins, thrown, after_coins in self._coins(text, drafts, chances, after_drafts):
                stand = count_accepted(self.rule, coins)
                last = correction(p[stand], q[stand], scales[stand]) if stand < gamma else p[stand]
                role = Role.RESIDUAL if stand < gamma else Role.BONUS if gamma else Role.PLAIN
                prefix = (*text, *drafts[:stand])
                for x, chance, after in self._draw(last / last.sum(), self.key(role, prefix), after_coins):
                    yield from self._texts(
                        (*prefix, x), mass * drawn * thrown * chance, after, self.gamma_after(drafts)
                    )

    def _drafts(self, text: Text, gamma: int, known: Known) -> Iterator[tuple[Text, float, Known]]:
        if not gamma:
            yield (), 1.0, known
            return
        for x, chance, after in self._draw(self.nodes.q[text], self.key(Role.DRAFT, text), known):
            for more, mass, known_then in self._drafts((*text, x), gamma - 1, after):
                yield (x, *more), chance * mass, known_then

    def _coins(
        self, text: Text, drafts: Text, chances: Sequence[float], known: Known
    ) -> Iterator[tuple[list[bool], float, Known]]:
        ways: list[tuple[list[bool], float, Known]] = [([], 1.0, known)]
        for index, chance in enumerate(chances):
            key = self.key(Role.ACCEPT, (*text, *drafts[:index]))
            sides = np.array([chance, 1.0 - chance])
            ways = [
                ([*coins, side == 0], mass * share, after)
                for coins, mass, before in ways
                for side, share, after in self._draw(sides, key, before)
            ]
        yield from ways

    def _draw(self, row: Sequence[float], key: Hashable, known: Known) -> Iterator[tuple[int, float, Known]]:
        """(id, its chance given what is known of the number, what is known then)."""
        low, high = known.get(key, (0.0, 1.0))
        end = 0.0
        for x, mass in enumerate(row):
            begin, end = end, end + float(mass)
            inside = (max(low, begin), min(high, end))
            if inside[1] > inside[0]:
                yield x, (inside[1] - inside[0]) / (high - low), {**known, key: inside}
