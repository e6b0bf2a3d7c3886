"""Which outcomes of a round are likeliest: how many drafts of a chain stand, and which token comes after them.

P(a stand, then y) = (chance that the first a stand) * (chance that the next one falls) * P(y | it fell); where all
stand, y follows the last one. Nothing here knows a model or waits; what it says decides work, never a text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from statistics import median
from typing import NamedTuple, Protocol

import numpy as np

from outrider.median import Median

TEMPERATURES = (0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.5)
"""Of a match: how far the target's scores are from the draft's, as a temperature of the draft's own."""
START_TEMPERATURE = 0.5
FORGET = 0.98
NUM_BINS = 8
NUM_PASSES = 24
"""Of late, of either kind."""
PRIOR_CHANCE, PRIOR_WEIGHT = 0.7, 4.0
WAITED_SHARE = 0.25
"""Of a build's time that somebody waits for: builds are as long as pays, so that half of them are late, and what a late
one lacks is waited for by half, since one round's wait is the next one's head start."""
MAX_CHANCE = 0.98
"""That a draft stands: below 1, so that the first drafts of a branch come before its later ones."""


class Place(NamedTuple):
    """What may stand at one place: ids, likeliest first, and of each the draft's score (ln q + noise under COUPLED,
    the logit under greedy) or, where drafts are sampled, its q. int64[k], float64[k]."""

    ids: np.ndarray
    values: np.ndarray


class Outcome(NamedTuple):
    """`num_accepted` drafts stand, then comes `token_id`."""

    num_accepted: int
    token_id: int
    probability: float


class Outlook(Protocol):
    """How the draft's own numbers tell what the target will say; it learns from what the target said."""

    def stands(self, place: Place, draft: int) -> float:
        """Chance that this draft stands, those before it standing."""

    def after(self, place: Place, fallen: int | None) -> np.ndarray:
        """float64[k]: chances of the place's ids once draft `fallen` has not stood there, or none was (None)."""

    def observe(self, places: Sequence[Place], drafts: Sequence[int], num_accepted: int, token_id: int) -> None:
        """So it went. places: one more than drafts."""


class MatchOutlook:
    """Greedy and COUPLED: a draft stands where the target's best id is the draft's, so the draft's scores tell, each
    place by itself: the target's id is y with chance softmax(scores / t)[y]. The t that has foretold most is used."""

    def __init__(self) -> None:
        self._log_likelihoods = np.zeros(len(TEMPERATURES))
        self._log_likelihoods[TEMPERATURES.index(START_TEMPERATURE)] = 1.0

    @property
    def temperature(self) -> float:
        return TEMPERATURES[int(self._log_likelihoods.argmax())]

    def stands(self, place: Place, draft: int) -> float:
        return _share(place, softmax(place.values / self.temperature), draft)

    def after(self, place: Place, fallen: int | None) -> np.ndarray:
        chances = softmax(place.values / self.temperature)
        return chances if fallen is None else without(place, chances, fallen)

    def observe(self, places: Sequence[Place], drafts: Sequence[int], num_accepted: int, token_id: int) -> None:
        said = [*drafts[:num_accepted], token_id]
        self._log_likelihoods *= FORGET
        for place, token in zip(places, said, strict=False):
            for index, temperature in enumerate(TEMPERATURES):
                share = _share(place, softmax(place.values / temperature), token)
                self._log_likelihoods[index] += math.log(max(share, 1e-4))


class RatioOutlook:
    """TOKEN and BLOCK: coins decide. How often drafts stood by how sure the draft was of them; what comes instead of
    one that fell is likely where q is, that draft itself left out, since p is below q there."""

    def __init__(self) -> None:
        self._stood = np.full(NUM_BINS, PRIOR_CHANCE * PRIOR_WEIGHT)
        self._seen = np.full(NUM_BINS, PRIOR_WEIGHT)

    def stands(self, place: Place, draft: int) -> float:
        bin_ = self._bin(place, draft)
        return float(self._stood[bin_] / self._seen[bin_])

    def after(self, place: Place, fallen: int | None) -> np.ndarray:
        chances = place.values / place.values.sum()
        return chances if fallen is None else without(place, chances, fallen)

    def observe(self, places: Sequence[Place], drafts: Sequence[int], num_accepted: int, token_id: int) -> None:
        for index, (place, draft) in enumerate(zip(places, drafts, strict=False)):
            if index > num_accepted:
                break
            bin_ = self._bin(place, draft)
            self._stood[bin_] = FORGET * self._stood[bin_] + (index < num_accepted)
            self._seen[bin_] = FORGET * self._seen[bin_] + 1

    @staticmethod
    def _bin(place: Place, draft: int) -> int:
        return min(NUM_BINS - 1, int(NUM_BINS * _share(place, place.values / place.values.sum(), draft)))


def likeliest_outcomes(
    places: Sequence[Place],
    drafts: Sequence[int],
    outlook: Outlook,
    num_outcomes: int,
    *,
    min_probability: float = 0.0,
    left_out: Collection[int] = (),
) -> list[Outcome]:
    """The `num_outcomes` likeliest, in order, of at least this probability. places: one more than drafts: what may
    stand at each one's place, and after the last. left_out: ids that end the text, after which nothing is wanted."""
    found: list[Outcome] = []
    reached = 1.0
    for index, place in enumerate(places):
        draft = drafts[index] if index < len(drafts) else None
        stands = outlook.stands(place, draft) if draft is not None else 0.0
        for token_id, chance in zip(place.ids.tolist(), outlook.after(place, draft).tolist(), strict=True):
            probability = reached * (1 - stands) * chance
            if token_id != draft and token_id not in left_out and probability > 0:
                found.append(Outcome(index, token_id, probability))
        reached *= stands
        if draft is not None and draft in left_out:
            break
    found.sort(key=lambda outcome: -outcome.probability)
    return [outcome for outcome in found[:num_outcomes] if outcome.probability >= min_probability]


def allotted(
    probabilities: Sequence[float],
    chance: float,
    num_draft_tokens: int,
    *,
    max_drafts: int,
    value_ms: float = 0.0,
    row_ms: float = 0.0,
) -> list[int]:
    """Drafts behind each outcome, at most `num_draft_tokens`, `max_drafts` in all: where they are likeliest to be used.

    The i-th draft of a branch is used with probability * chance^i. chance: that a draft stands. value_ms: what a whole
    branch saves; of it each draft has its share, and one is left out whose row is expected to save less than it costs.
    0: not told; then branches are whole, or not at all. row_ms: what a row adds to a pass.
    """
    if not value_ms:
        num_whole = max_drafts // num_draft_tokens
        return [num_draft_tokens * (rank < num_whole) for rank in range(len(probabilities))]
    reached = min(chance, MAX_CHANCE) ** np.arange(1, num_draft_tokens + 1)
    gains = np.multiply.outer(np.asarray(probabilities, np.float64), reached)
    order = np.argsort(-gains, axis=None, kind="stable")[: max(0, max_drafts)]
    order = order[value_ms * gains.ravel()[order] / reached.sum() >= WAITED_SHARE * row_ms]
    return np.bincount(order // num_draft_tokens, minlength=len(gains)).tolist()


class Chance:
    """That a draft stands if those before it do, over all places of late."""

    def __init__(self) -> None:
        self._stood, self._seen = PRIOR_CHANCE * PRIOR_WEIGHT, PRIOR_WEIGHT

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        self._stood = FORGET * self._stood + num_accepted
        self._seen = FORGET * self._seen + min(num_drafts, num_accepted + 1)

    @property
    def value(self) -> float:
        return self._stood / self._seen


class RowCost:
    """What another row adds to a pass of the draft model, its draw included, from passes of different sizes of late:
    by medians, so that one slow pass moves nothing."""

    def __init__(self) -> None:
        self._one_ms = Median(NUM_PASSES)
        self._many: deque[tuple[int, float]] = deque(maxlen=NUM_PASSES)

    def observe(self, num_rows: int, ms: float) -> None:
        if num_rows == 1:
            self._one_ms.add(ms)
        else:
            self._many.append((num_rows, ms))

    @property
    def ms(self) -> float:
        """0 until passes of one and of more rows were seen."""
        if not self._one_ms or not self._many:
            return 0.0
        one_ms = self._one_ms.value()
        return max(0.0, median((ms - one_ms) / (num_rows - 1) for num_rows, ms in self._many))


def softmax(values: np.ndarray) -> np.ndarray:
    """Of no values: none."""
    masses = np.exp(values - values.max(initial=-np.inf))
    return masses / masses.sum()


def without(place: Place, chances: np.ndarray, fallen: int) -> np.ndarray:
    """The chances given that it is not `fallen`."""
    left = np.where(place.ids == fallen, 0.0, chances)
    total = left.sum()
    return left / total if total > 0 else left


def _share(place: Place, chances: np.ndarray, token_id: int) -> float:
    (where,) = np.nonzero(place.ids == token_id)
    return float(chances[where[0]]) if len(where) else 0.0
