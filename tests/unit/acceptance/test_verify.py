"""`verify`: that it throws the right coins, under the right keys, over the functions that the enumeration proved."""

import itertools

import numpy as np
import pytest
from conftest import scaled
from law import FALSE_ALARM, NO_STOP, PROMPT, chi_square, table_pair

from outrider.drafting.proposal import EMPTY, Proposal, SparseQ
from outrider.errors import Internal
from outrider.sampling import (
    AcceptanceRule,
    History,
    Noise,
    Origin,
    Role,
    SamplingParams,
    StoppingParams,
    coupled_token,
    distribution,
    extend_hash,
    greedy_token,
    hash_ids,
    sparse_q,
)
from target_worker.acceptance import acceptances, correction, count_accepted, draft_q, soft_acceptance, verify

RATIO_RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
HASH = hash_ids(PROMPT)


class ScriptedNoise(Noise):
    """Coins and the last draw come from a script; what was asked for is kept."""

    def __init__(self, coins: list[float], last: float) -> None:
        super().__init__(0)
        self.coins, self.last, self.asked = list(coins), last, []

    def uniform(self, prefix_hash: int, role: Role, try_index: int = 0) -> float:
        self.asked.append((prefix_hash, role, try_index))
        return self.coins.pop(0) if role is Role.ACCEPT else self.last


def _proposal(draft, drafts: tuple[int, ...], one_hot: set[int], params: SamplingParams) -> Proposal:
    ids, q = list(PROMPT), []
    for index, token_id in enumerate(drafts):
        q.append(None if index in one_hot else sparse_q(draft.row(ids), params, NO_STOP, History(PROMPT), 64))
        ids.append(token_id)
    return Proposal(drafts, tuple(q))


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("one_hot", [set(), {0}, {1}, {0, 2}, {0, 1, 2}], ids=str)
def test_every_outcome_of_verify_is_the_enumerated_one(rule: AcceptanceRule, one_hot: set[int]) -> None:
    """All drafts x all coin results x all next tokens, on a chain of three that mixes sampled and one-hot drafts."""
    target, draft = table_pair(3, 7)
    params = SamplingParams(acceptance=rule)
    seen = set()
    for drafts in itertools.product(range(3), repeat=3):
        proposal = _proposal(draft, drafts, one_hot, params)
        rows = target.rows([*PROMPT, *drafts], 4)
        p = [distribution(row, params, NO_STOP, History(PROMPT)) for row in rows]
        q = [draft_q(proposal, i) for i in range(3)]
        chances, scales = acceptances(rule, p[:3], q, drafts)
        for success in itertools.product([True, False], repeat=3):
            # A coin that decides only by rounding error is no outcome to check.
            if any((chance if want else 1 - chance) < 1e-12 for want, chance in zip(success, chances, strict=True)):
                continue
            # The last coin below the chance, and the first at it: strictly less decides.
            coins = [np.nextafter(c, 0) if want else c for want, c in zip(success, chances, strict=True)]
            stand = count_accepted(rule, success)
            last = p[3] if stand == 3 else correction(p[stand], q[stand], scales[stand])
            edges = np.concatenate([[0.0], np.cumsum(last)]) / last.sum()
            for token_id in np.nonzero(last)[0]:
                noise = ScriptedNoise(coins, float(edges[token_id] + edges[token_id + 1]) / 2)
                history = History(PROMPT)
                got = verify(rows, proposal, params, NO_STOP, history, noise, HASH, len(PROMPT))
                seen.add((stand, int(token_id)))
                assert got.num_accepted == stand
                assert got.token_ids == (*drafts[:stand], token_id)
                assert got.origins[:-1] == (Origin.ACCEPTED,) * stand
                assert got.origins[-1] is (Origin.BONUS if stand == 3 else Origin.CORRECTION)
                assert stand == 3 or token_id != drafts[stand], "a correction never equals what it replaces"
                assert list(got.soft_acceptances) == [soft_acceptance(p[i], q[i]) for i in range(3)]
                assert history.num_output_tokens == 0
                prefixes = [hash_ids(drafts[:i], HASH) for i in range(4)]
                role = Role.BONUS if stand == 3 else Role.RESIDUAL
                assert noise.asked == [(prefixes[i], Role.ACCEPT, 0) for i in range(3)] + [(prefixes[stand], role, 0)]
    assert {stand for stand, _ in seen} == {0, 1, 2, 3}, "not every outcome was reached"


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_plain_decoding_draws_from_p_under_its_own_key(rule: AcceptanceRule) -> None:
    target, _ = table_pair(5, 3)
    params = SamplingParams(acceptance=rule)
    p = distribution(target.row(PROMPT), params, NO_STOP, History(PROMPT))
    for token_id, middle in enumerate(np.cumsum(p) - p / 2):
        noise = ScriptedNoise([], float(middle))
        got = verify(target.rows(PROMPT, 1), EMPTY, params, NO_STOP, History(PROMPT), noise, HASH, 2)
        assert (got.token_ids, got.origins, got.num_accepted) == ((token_id,), (Origin.PLAIN,), 0)
        assert (got.soft_acceptances, noise.asked) == (b"", [(HASH, Role.PLAIN, 0)])


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("one_hot", [True, False])
def test_a_coin_of_zero_accepts_nothing_impossible(rule: AcceptanceRule, one_hot: bool) -> None:
    """p(x) = 0 and u = 0: `u <= p/q` would emit an impossible token; strictly less does not."""
    rows = np.array([[-np.inf, 0.0, 1.0], [0.0, -np.inf, 1.0]], dtype=np.float32)
    q = None if one_hot else SparseQ(np.array([0, 1], dtype=np.uint32), np.array([65_535, 1]))
    noise = ScriptedNoise([0.0], 0.0)
    got = verify(rows, Proposal((0,), (q,)), SamplingParams(acceptance=rule), NO_STOP, History(()), noise, HASH, 2)
    assert got.num_accepted == 0
    assert got.token_ids[0] != 0
    p = distribution(rows[0], SamplingParams(), NO_STOP, History(()))
    (chance,), _ = acceptances(rule, [p], [draft_q(Proposal((0,), (q,)), 0)], (0,))
    assert chance == 0.0, "a rule with u <= p/q would have accepted: the test can fail"


@pytest.mark.parametrize("rule", list(AcceptanceRule))
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_penalties_count_the_drafts_before_each_row(rule: AcceptanceRule, temperature: float) -> None:
    """Soft acceptances, accepted drafts and the last token equal those of a row-by-row sequential decode."""
    target, _ = table_pair(4, 5)
    params = SamplingParams(
        temperature=temperature, repetition_penalty=1.7, frequency_penalty=0.6, presence_penalty=0.4, acceptance=rule
    )
    stopping = StoppingParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({3}))
    num_checked = 0
    for drafts in itertools.product(range(4), repeat=3):
        rows = target.rows([*PROMPT, *drafts], 4)
        noise, history = Noise(sum(drafts)), History(PROMPT)
        got = verify(rows, Proposal(drafts), params, stopping, history, noise, HASH, 2)
        sequential = History(PROMPT)
        for index, draft in enumerate(drafts):
            if temperature == 0 or rule is AcceptanceRule.COUPLED:
                choice = coupled_token(rows[index], params, stopping, sequential, noise, 2 + index)
                assert got.soft_acceptances[index] == 255 * (choice == draft)
            else:
                p = distribution(rows[index], params, stopping, sequential)
                assert got.soft_acceptances[index] == round(255 * p[draft])
            sequential.push(draft)
        assert (history.num_output_tokens, history.output_ids) == (0, ())
        assert got.token_ids[0] != 3, "min_tokens forbids it"
        num_checked += got.num_accepted > 0
    assert num_checked > 0


@pytest.mark.parametrize("gamma", [0, 1, 2, 4])
def test_coupled_emits_the_targets_own_perturbed_argmax(gamma: int) -> None:
    """For every noise drawn: each emitted token is argmax(ln p + Gumbel) at its place, whatever was drafted."""
    target, draft = table_pair(5, 2, num_zeros=1)
    params = SamplingParams(acceptance=AcceptanceRule.COUPLED, temperature=0.9)
    num_accepted = num_rejected = 0
    for seed in range(scaled(20_000)):
        noise, history, ids = Noise(seed), History(PROMPT), list(PROMPT)
        for _ in range(gamma):
            ids.append(coupled_token(draft.row(ids), params, NO_STOP, history, noise, len(ids)))
        drafts = tuple(ids[2:])
        got = verify(target.rows(ids, gamma + 1), Proposal(drafts), params, NO_STOP, history, noise, HASH, 2)
        text = list(PROMPT)
        for token_id in got.token_ids:
            with np.errstate(divide="ignore"):
                scores = np.log(distribution(target.row(text), params, NO_STOP, history)) + noise.gumbel(len(text), 5)
            assert token_id == np.argmax(scores)
            text.append(token_id)
        assert set(got.soft_acceptances) <= {0, 255}
        assert list(got.soft_acceptances[: got.num_accepted]) == [255] * got.num_accepted
        num_accepted += got.num_accepted
        num_rejected += got.num_accepted < gamma
    assert gamma == 0 or min(num_accepted, num_rejected) > 0


def test_coupled_first_token_has_the_targets_law() -> None:
    target, _ = table_pair(5, 2)
    params = SamplingParams(acceptance=AcceptanceRule.COUPLED)
    p = distribution(target.row(PROMPT), params, NO_STOP, History(PROMPT))
    tokens = [
        verify(target.rows(PROMPT, 1), EMPTY, params, NO_STOP, History(PROMPT), Noise(seed), HASH, 2).token_ids
        for seed in range(scaled(100_000))
    ]
    counts = {(x,): tokens.count((x,)) for x in range(5)}
    assert chi_square(counts, {(x,): float(p[x]) for x in range(5)}) > FALSE_ALARM


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_greedy_is_the_argmax_under_every_rule(rule: AcceptanceRule) -> None:
    target, _ = table_pair(4, 8)
    params = SamplingParams(temperature=0.0, acceptance=rule)
    ids = list(PROMPT)
    for _ in range(4):
        ids.append(greedy_token(target.row(ids), params, NO_STOP, History(())))
    right = tuple(ids[2:])
    for stand in range(4):
        drafts = list(right[:3])
        if stand < 3:
            drafts[stand] = (drafts[stand] + 1) % 4
        rows = target.rows([*PROMPT, *drafts], 4)
        got = verify(rows, Proposal(tuple(drafts)), params, NO_STOP, History(PROMPT), ScriptedNoise([], 0.0), HASH, 2)
        assert (got.num_accepted, got.token_ids) == (stand, right[: stand + 1])


@pytest.mark.parametrize("rule", list(AcceptanceRule))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("bad", "says"), [(np.nan, "NaN at id 1"), (np.inf, r"\+inf at id 1")])
@pytest.mark.parametrize("row", [0, 1])
def test_bad_logits_fail_by_name_and_leave_the_history(rule, temperature, bad, says, row) -> None:
    rows = np.zeros((2, 4), dtype=np.float32)
    rows[row, 1] = bad
    history = History(PROMPT, (2, 2))
    params = SamplingParams(temperature=temperature, acceptance=rule, repetition_penalty=1.2)
    with pytest.raises(Internal, match=says):
        # Token 0 is the argmax of the good row and one coin of zero accepts it, so that row 1 is looked at.
        verify(rows, Proposal((0,)), params, NO_STOP, history, _AcceptsZero(), HASH, 4)
    assert history.output_ids == (2, 2)


class _AcceptsZero(ScriptedNoise):
    def __init__(self) -> None:
        super().__init__([0.0], 0.0)

    def gumbel(self, position: int, ids: np.ndarray | int) -> np.ndarray:
        return np.zeros(ids if isinstance(ids, int) else len(ids))


def test_rows_must_match_drafts() -> None:
    with pytest.raises(ValueError, match="1 rows of logits for 1 drafts"):
        verify(np.zeros((1, 3)), Proposal((0,)), SamplingParams(), NO_STOP, History(()), Noise(0), HASH, 0)


def test_extend_hash_is_what_verify_walks_with() -> None:
    assert hash_ids((4, 5), HASH) == extend_hash(extend_hash(HASH, 4), 5)
