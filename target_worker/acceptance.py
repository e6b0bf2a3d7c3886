"""The acceptance rules: which drafted tokens stand, and what is emitted after them. Pure functions over arrays.

TOKEN is speculative sampling (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318), BLOCK is
block verification (Sun et al. 2025, arXiv:2403.10444), COUPLED accepts what the target's own Gumbel draw confirms.
Whatever was drafted, the emitted tokens follow the target's distribution exactly. Plain decoding is zero drafts.

Letters as in the papers: p[i] is the target's distribution after i drafts, q[i] the one that draft i was sampled from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from outrider.drafting.proposal import Q_TOTAL, Proposal
from outrider.errors import Internal
from outrider.sampling.distribution import coupled_token, distribution, draw, greedy_token
from outrider.sampling.history import History
from outrider.sampling.noise import Noise, Role, extend_hash
from outrider.sampling.params import AcceptanceRule, Origin, SamplingParams, StoppingParams


@dataclass(frozen=True, slots=True)
class Outcome:
    """One verified round: the accepted drafts and one more token, which only an accepted stop token at the end spares.

    soft_acceptances: one byte per draft, 255 times the chance that position gave acceptance, past a rejection too; 0
    from the first row on that cannot be read.
    """

    num_accepted: int
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    soft_acceptances: bytes


class DraftQ(NamedTuple):
    """q as probabilities: ids int64[K], unique; probabilities float64[K]; 0 elsewhere. One-hot is K = 1."""

    ids: np.ndarray
    probabilities: np.ndarray


class Acceptances(NamedTuple):
    """probabilities[i]: chance that the coin of draft i succeeds, given the drafts.

    residual_scales[i]: what p is multiplied by in the residual when exactly i drafts stand.
    """

    probabilities: list[float]
    residual_scales: list[float]


def verify(
    logits: np.ndarray,
    proposal: Proposal,
    params: SamplingParams,
    stopping: StoppingParams,
    history: History,
    noise: Noise,
    prefix_hash: int,
    position: int,
) -> Outcome:
    """Decides one round.

    logits: float32[len(proposal) + 1, V], row i following the committed prefix and i drafts.
    history: at the committed prefix, before and after the call, also when it raises.
    prefix_hash, position: hash and number of the committed ids; the first emitted token will stand at `position`.

    Raises Internal when the row that the next token would be drawn from holds NaN or +inf or leaves no token to choose;
    a bad row after drafts that do not stand hurts nobody. ValueError when rows and drafts do not match.
    """
    with checked_round(logits, proposal, history):
        if params.decides_by_match:
            return _verify_by_match(logits, proposal, params, stopping, history, noise, position)
        return _verify_by_ratio(logits, proposal, params, stopping, history, noise, prefix_hash)


@contextmanager
def checked_round(logits: np.ndarray, proposal: Proposal, history: History) -> Iterator[None]:
    """Around a decision, which may push drafts: `history` is afterwards as before. ValueError as `verify` raises it."""
    if len(logits) != len(proposal) + 1:
        raise ValueError(f"{len(logits)} rows of logits for {len(proposal)} drafts, need one more than drafts")
    num_output_tokens = history.num_output_tokens
    try:
        yield
    finally:
        history.pop(history.num_output_tokens - num_output_tokens)


def _verify_by_ratio(
    logits: np.ndarray,
    proposal: Proposal,
    params: SamplingParams,
    stopping: StoppingParams,
    history: History,
    noise: Noise,
    prefix_hash: int,
) -> Outcome:
    """TOKEN and BLOCK. Every coin is keyed by the exact prefix it follows, the drafts before it included.

    A row that cannot be read ends the proposal before its draft: a function of the drafts before, so the law is exact.
    """
    drafts = proposal.token_ids
    p, hashes = [], [prefix_hash]
    for index, token_id in enumerate(drafts):
        try:
            p.append(distribution(logits[index], params, stopping, history))
        except Internal:
            drafts = drafts[:index]
            break
        history.push(token_id)
        hashes.append(extend_hash(hashes[-1], token_id))
    q = [draft_q(proposal, index) for index in range(len(drafts))]

    chances, residual_scales = acceptances(params.acceptance, p, q, drafts)
    coins = [noise.uniform(hashes[index], Role.ACCEPT) < chance for index, chance in enumerate(chances)]
    stand = count_accepted(params.acceptance, coins)

    soft_acceptances = bytes(map(soft_acceptance, p, q)).ljust(len(proposal), b"\0")
    if ends_text(drafts[:stand], stopping):
        return outcome_of(drafts, stand, None, soft_acceptances)
    if stand < len(drafts):
        last, role = correction(p[stand], q[stand], residual_scales[stand]), Role.RESIDUAL
    else:
        last, role = distribution(logits[stand], params, stopping, history), Role.BONUS if drafts else Role.PLAIN
    return outcome_of(drafts, stand, draw(last, noise.uniform(hashes[stand], role)), soft_acceptances)


def _verify_by_match(
    logits: np.ndarray,
    proposal: Proposal,
    params: SamplingParams,
    stopping: StoppingParams,
    history: History,
    noise: Noise,
    position: int,
) -> Outcome:
    """COUPLED and greedy: the target chooses for itself, and a draft stands when it is what the target chose."""

    def target_choice(index: int) -> int:
        if params.greedy:
            return greedy_token(logits[index], params, stopping, history)
        return coupled_token(logits[index], params, stopping, history, noise, position + index)

    drafts = proposal.token_ids
    choices: list[int] = []
    matches: list[bool] = []
    for index, token_id in enumerate(drafts):
        try:
            choices.append(target_choice(index))
        except Internal:
            if all(matches):
                raise
            break  # nobody reaches this row
        matches.append(choices[-1] == token_id)
        history.push(token_id)
    stand = matches.index(False) if False in matches else len(drafts)
    soft_acceptances = bytes(255 * match for match in matches).ljust(len(drafts), b"\0")
    if ends_text(drafts[:stand], stopping):
        return outcome_of(drafts, stand, None, soft_acceptances)
    next_token = choices[stand] if stand < len(drafts) else target_choice(stand)
    return outcome_of(drafts, stand, next_token, soft_acceptances)


def acceptances(
    rule: AcceptanceRule, p: Sequence[np.ndarray], q: Sequence[DraftQ], drafts: Sequence[int]
) -> Acceptances:
    """What TOKEN or BLOCK decides before any coin: p[i] float64[V], q[i] and drafts[i] for each drafted position."""
    return _block_acceptances(p, q, drafts) if rule is AcceptanceRule.BLOCK else _token_acceptances(p, q, drafts)


def count_accepted(rule: AcceptanceRule, coins: Sequence[bool]) -> int:
    """How many drafts stand. TOKEN ends at the first failure, BLOCK at the *last* success, whatever failed before."""
    if rule is AcceptanceRule.BLOCK:
        return max((index + 1 for index, success in enumerate(coins) if success), default=0)
    return list(coins).index(False) if False in coins else len(coins)


def correction(p: np.ndarray, q: DraftQ, scale: float) -> np.ndarray:
    """max(scale * p - q, 0), float64[V], not normalised: what replaces the first draft that does not stand.

    Without mass there is nothing to correct: p and q agree to rounding, such a rejection has probability of the order
    of 1e-16, and p itself is returned.
    """
    residual = p * scale
    residual[q.ids] = np.maximum(residual[q.ids] - q.probabilities, 0.0)
    return residual if residual.sum() > 0.0 else p


def soft_acceptance(p: np.ndarray, q: DraftQ) -> int:
    """round(255 * sum(min(p, q))): the chance that a draft from q is accepted here; p(x) when q is one-hot on x."""
    return min(255, round(255.0 * float(np.minimum(p[q.ids], q.probabilities).sum())))


def draft_q(proposal: Proposal, index: int) -> DraftQ:
    """q of draft `index`; a draft that was not sampled is one-hot."""
    q = proposal.q_at(index)
    if q is None:
        return DraftQ(np.array([proposal.token_ids[index]]), np.ones(1))
    return DraftQ(q.ids.astype(np.int64), q.counts / Q_TOTAL)


def _token_acceptances(p: Sequence[np.ndarray], q: Sequence[DraftQ], drafts: Sequence[int]) -> Acceptances:
    chances = [min(1.0, ratio(*position)) for position in zip(p, q, drafts, strict=True)]
    return Acceptances(chances, [1.0] * len(drafts))


def _block_acceptances(p: Sequence[np.ndarray], q: Sequence[DraftQ], drafts: Sequence[int]) -> Acceptances:
    """P_0 = 1, P_i = min(1, P_{i-1} p/q at draft i); Z_i = sum max(P_i p - q, 0) over the position after draft i;
    chance of draft i: Z_i / (Z_i + 1 - P_i), and P_i for the last one. Residual scale after i drafts: P_i.

    P is a plain product: each factor is at most 65,536 and P at most 1, so it cannot overflow, and an underflow moves a
    probability by less than 1e-300.
    """
    joint = [1.0]
    for position in zip(p, q, drafts, strict=True):
        joint.append(min(1.0, joint[-1] * ratio(*position)))
    chances = []
    for index in range(1, len(drafts)):
        surplus = residual_mass(p[index], q[index], joint[index])
        shortfall = 1.0 - joint[index]
        # 0/0: the path is wholly accepted (P = 1) and p equals q next, so nothing is ever corrected there.
        chances.append(surplus / (surplus + shortfall) if surplus + shortfall > 0.0 else 1.0)
    return Acceptances(chances + joint[1:][-1:], joint[:-1])


def ratio(p: np.ndarray, q: DraftQ, token_id: int) -> float:
    """p/q at the draft; q there is positive, or the draft could not have been drawn."""
    return float(p[token_id]) / float(q.probabilities[q.ids == token_id][0])


def residual_mass(p: np.ndarray, q: DraftQ, scale: float) -> float:
    """sum(max(scale * p - q, 0)), touching only the K ids of q: all other ids add scale times their p."""
    p_on_q = p[q.ids]
    outside = max(0.0, 1.0 - float(p_on_q.sum()))
    return float(np.maximum(scale * p_on_q - q.probabilities, 0.0).sum()) + scale * outside


def ends_text(accepted: tuple[int, ...], stopping: StoppingParams) -> bool:
    """Nothing follows a stop token: the row after it is not even looked at."""
    return bool(accepted) and accepted[-1] in stopping.stop_token_ids


def outcome_of(drafts: tuple[int, ...], stand: int, next_token: int | None, soft_acceptances: bytes) -> Outcome:
    after_all = Origin.BONUS if drafts else Origin.PLAIN
    origin = Origin.CORRECTION if stand < len(drafts) else after_all
    return Outcome(
        num_accepted=stand,
        token_ids=drafts[:stand] if next_token is None else (*drafts[:stand], next_token),
        origins=(Origin.ACCEPTED,) * stand + ((origin,) if next_token is not None else ()),
        soft_acceptances=soft_acceptances,
    )
