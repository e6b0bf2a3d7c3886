"""A running test of the promise itself: every committed token was drawn from the target's distribution p.

Given all tokens before, these have mean 0 for a y drawn from p: 1[y is p's likeliest] - p(likeliest); a bounded ln p(y)
less its mean; for fixed sets of ids 1[y is in the set] - p(set). Whoever bets on them wins nothing in the long run; the
wealth of fair bets that began with 1 is an e-value: at whatever time one looks, it is 1,000 or more with a chance of
1/1,000 at most unless tokens do not follow p (Ville, 1939; Shafer 2021, "Testing by betting"; Ramdas et al. 2023,
arXiv:2210.01948).

What is looked at are runs of tokens that begin with a round and go on through the next ones, all of them, wherever
rounds end. To look at whole rounds would be wrong: how many tokens a round commits follows from drafts that it holds
itself. Only streams count whose seed was drawn for them, once: a client's may come again, with the same tokens.

p comes from the same pass as the decision: what this test sees are faults of drafting, acceptance and sampling, not a
pass that computes a wrong p.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outrider.sampling.distribution import distribution
from outrider.sampling.history import History
from outrider.sampling.params import SamplingParams, StoppingParams

STAKES = np.array([stake * sign for stake in (0.01, 0.03, 0.1, 0.3) for sign in (-1, 1)])
"""Shares of its wealth that each bet risks, both ways: small ones find small biases, late."""
FLOOR = -8.0
"""ln p below this counts as this: a bet has to know what it can lose."""
RUN_TOKENS = 16
NUM_SETS = 4
"""Of ids, half of all in each, at random: they see what favours some tokens whatever their p."""
NUM_STATISTICS = 2 + NUM_SETS
MAX_E_VALUES = 64
"""Drafters name themselves."""
NO_DRAFTS, OTHERS = "none", "others"
GREEDY = "greedy"


class EValue:
    """Evidence against 'all these statistics have mean 0 given those before'. Each lies in [-1, 1].

    One bettor per stake and statistic, and the same anew after 1, 2, 4, 8, ... observations, each with a share of the
    first capital: a fault that begins after a billion good tokens is found in as many more at most, not never.
    """

    def __init__(self, num_statistics: int) -> None:
        self.count = 0
        self._num_bettors = num_statistics * len(STAKES)
        self._log_wealths = np.zeros((0, num_statistics, len(STAKES)))
        self._is_impossible = False

    def add(self, statistics: Sequence[float]) -> None:
        """One observation."""
        if self.count & (self.count - 1) == 0:
            self._log_wealths = np.concatenate([self._log_wealths, np.zeros((1, *self._log_wealths.shape[1:]))])
        self.count += 1
        self._log_wealths += np.log1p(np.outer(np.asarray(statistics, dtype=np.float64), STAKES))

    def add_impossible(self) -> None:
        """What has probability 0 was seen."""
        self.count += 1
        self._is_impossible = True

    @property
    def log10(self) -> float:
        """Of the e-value; infinite after what cannot be."""
        if self._is_impossible:
            return math.inf
        log_wealths = self._log_wealths  # once: the engine's thread may put a longer one in its place
        num_begun = len(log_wealths)
        shares = 1.0 / ((np.arange(num_begun) + 1.0) * (np.arange(num_begun) + 2.0))
        not_begun = 1.0 - shares.sum()
        logs = log_wealths + np.log(shares / self._num_bettors)[:, None, None]
        top = max(float(logs.max(initial=-math.inf)), math.log(not_begun))
        return (top + math.log(float(np.exp(logs - top).sum()) + not_begun * math.exp(-top))) / math.log(10.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """num_tokens: looked at. log10_e_value: 6 means that an honest worker shows this once in a million."""

    num_tokens: int
    log10_e_value: float


class LosslessnessMeter:
    """Of one worker: an e-value per rule ("greedy" at temperature 0) and drafter. One thread writes; any may read."""

    def __init__(self, every_rounds: int) -> None:
        """every_rounds: one round of so many begins a run that is looked at; 0: none does."""
        self._every_rounds = every_rounds
        self._num_rounds = 0
        self._e_values: dict[tuple[str, str], EValue] = {}

    def wants_run(self) -> bool:
        """Whether the round that is about to be decided begins a run. Asked once for each."""
        if not self._every_rounds:
            return False
        self._num_rounds += 1
        return self._num_rounds % self._every_rounds == 0

    def e_value(self, rule: str, drafter: str) -> EValue:
        """That of these two, begun where it is new; further ones share one."""
        if (rule, drafter) not in self._e_values and len(self._e_values) >= MAX_E_VALUES:
            drafter = OTHERS
        return self._e_values.setdefault((rule, drafter), EValue(NUM_STATISTICS))

    def readings(self) -> dict[tuple[str, str], Reading]:
        """By rule and drafter."""
        return {key: Reading(e_value.count, e_value.log10) for key, e_value in list(self._e_values.items())}


NO_METER = LosslessnessMeter(0)


class MeteredStream:
    """The part of one stream that is looked at. A run belongs to the drafter that its first round was asked for."""

    def __init__(self, meter: LosslessnessMeter, params: SamplingParams, stopping: StoppingParams) -> None:
        self._meter, self._params, self._stopping = meter, params, stopping
        self._rule = GREEDY if params.greedy else str(params.acceptance)
        self._num_left = 0
        self._e_value = EValue(NUM_STATISTICS)

    def begin_round(self, drafter: str) -> bool:
        """Before a round is decided; whether its rows have to be there afterwards."""
        if not self._num_left and self._meter.wants_run():
            self._num_left = RUN_TOKENS
            self._e_value = self._meter.e_value(self._rule, drafter or NO_DRAFTS)
        return self._num_left > 0

    def decided(self, logits: np.ndarray, committed_ids: Sequence[int], history: History) -> None:
        """logits: float32[>= n, V], row i following the prefix and i of the n committed ids. history: at the prefix,
        before and after the call."""
        looked_at = committed_ids[: self._num_left]
        self._num_left -= len(looked_at)
        num_output_tokens = history.num_output_tokens
        try:
            for row, token_id in zip(logits, looked_at, strict=False):
                p = distribution(row, self._params, self._stopping, history)
                if p[token_id] > 0.0:
                    self._e_value.add(statistics(p, token_id))
                else:
                    self._e_value.add_impossible()
                history.push(token_id)
        finally:
            history.pop(history.num_output_tokens - num_output_tokens)


def statistics(p: np.ndarray, token_id: int) -> list[float]:
    """Of a token with p(token) > 0, each with mean 0 under p and within [-1, 1]. p: float64[V]."""
    mode = int(np.argmax(p))
    (ids,) = np.nonzero(p)
    masses = p[ids]
    surprise = max(math.log(p[token_id]), FLOOR) - float(masses @ np.maximum(np.log(masses), FLOOR))
    sets = _sets(len(p))
    in_sets = sets[token_id] - masses @ sets[ids]
    return [float(token_id == mode) - float(p[mode]), surprise / -FLOOR, *map(float, in_sets)]


@functools.lru_cache(maxsize=4)
def _sets(vocab_size: int) -> np.ndarray:
    """float64[V, NUM_SETS] of 0 and 1."""
    return np.random.default_rng(0).integers(0, 2, (vocab_size, NUM_SETS)).astype(np.float64)
