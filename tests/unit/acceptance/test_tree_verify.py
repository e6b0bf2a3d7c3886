"""`verify_tree`: that it throws the right coins, under the right keys, over functions that the enumeration proved."""

import itertools
import random

import numpy as np
import pytest
from conftest import scaled
from law import FALSE_ALARM, NO_STOP, PROMPT, TableModel, chi_square, joint_law, table_pair
from tree_law import runs

from outrider.drafting import tree
from outrider.drafting.proposal import EMPTY, Proposal
from outrider.drafting.tree_draw import draw_children
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
)
from target_worker.acceptance import draft_q, soft_acceptance, verify
from target_worker.tree_acceptance import Left, TreeOutcome, stand, verify_tree

RATIO_RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
HASH = hash_ids(PROMPT)
BUSY = {"repetition_penalty": 1.6, "frequency_penalty": 0.6, "presence_penalty": 0.3, "logit_bias": {1: 0.4}}

#         prefix
#       0        4
#     1   3    5
#     2
SHAPE = (-1, 0, 1, 0, -1, 4)


def drawn_tree(
    draft: TableModel,
    parents: tuple[int, ...],
    params: SamplingParams,
    seed: int,
    *,
    replacement: bool = False,
    one_hot: frozenset[int] = frozenset(),
    stopping: StoppingParams = NO_STOP,
    prompt: tuple[int, ...] = PROMPT,
) -> Proposal:
    """A tree over a table model; the children of the nodes in `one_hot` are its likeliest ids."""
    noise, children = Noise(seed), tree.children(parents)
    tokens: dict[int, tuple[int, object]] = {}
    for node in range(-1, len(parents)):
        if not children[node + 1] or (node >= 0 and node not in tokens):
            continue
        path = [tokens[i][0] for i in tree.path(parents, node)]
        ids = [*prompt, *path]
        how = SamplingParams(temperature=0.0) if node in one_hot else params
        drawn = draw_children(draft.row(ids), how, stopping, History(prompt, path), noise, hash_ids(ids), len(ids),
                              len(children[node + 1]), replacement=replacement)  # fmt: skip
        for child, (token_id, q, *_) in zip(children[node + 1], drawn, strict=False):
            tokens[child] = (token_id, q)
    kept = sorted(tokens)
    places = {-1: -1, **{node: place for place, node in enumerate(kept)}}
    return Proposal(
        tuple(tokens[i][0] for i in kept),
        tuple(tokens[i][1] for i in kept),  # type: ignore[misc]
        parents=tuple(places[parents[i]] for i in kept),
    )


def tree_rows(target: TableModel, proposal: Proposal, prompt: tuple[int, ...] = PROMPT) -> np.ndarray:
    paths = [tree.path(proposal.shape, node) for node in range(-1, len(proposal))]
    return np.stack([target.row([*prompt, *(proposal.token_ids[i] for i in path)]) for path in paths])


def random_parents(seed: int, num_nodes: int) -> tuple[int, ...]:
    rng = random.Random(f"parents {seed}")
    return tuple(rng.randrange(-1, index) for index in range(num_nodes))


class ScriptedNoise(Noise):
    """Coins by their key, one value for the last draw; what was asked for is kept."""

    def __init__(self, coins: dict[tuple[int, int], float], last: float) -> None:
        super().__init__(0)
        self.coins, self.last, self.asked = coins, last, []

    def uniform(self, prefix_hash: int, role: Role, try_index: int = 0) -> float:
        self.asked.append((prefix_hash, role, try_index))
        return self.coins[prefix_hash, try_index] if role is Role.ACCEPT else self.last


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize("one_hot", [frozenset(), frozenset({-1}), frozenset({0, 4})], ids=str)
def test_every_outcome_of_verify_tree_is_the_enumerated_one(rule: AcceptanceRule, one_hot: frozenset[int]) -> None:
    target, draft = table_pair(3, 7)
    params = SamplingParams(acceptance=rule)
    stood = set()
    for seed in range(scaled(40, at_least=8)):
        proposal = drawn_tree(draft, SHAPE, params, seed, one_hot=one_hot)
        shape, drafts = proposal.shape, proposal.token_ids
        children = tree.children(shape)
        rows = tree_rows(target, proposal)
        p = {n: distribution(rows[n + 1], params, NO_STOP, History(PROMPT)) for n in range(-1, len(drafts))}
        at_parents = {n: row for n, row in p.items() if children[n + 1]}
        q = [draft_q(proposal, i) for i in range(len(drafts))]
        hashes = {n: hash_ids([drafts[i] for i in tree.path(shape, n)], HASH) for n in p}
        key = {c: (hashes[n], t) for n in p for t, c in enumerate(children[n + 1])}

        def decide(coin, children=children, drafts=drafts, p=at_parents, q=q, rule=rule):
            thrown = {}

            def noted(child, chance):
                thrown[child] = (coin(child, chance), chance)
                return thrown[child][0]

            return stand(rule, children, drafts, p, q, noted), thrown

        for probability, ((node, left), thrown) in runs(decide):
            if probability < 1e-9:
                continue
            stood.add(node)
            # At the chance itself a coin fails: strictly less decides.
            coins = {
                key[n]: float(np.nextafter(c, 0) if success else min(c, 1.0)) for n, (success, c) in thrown.items()
            }
            last = left.p if left else p[node]
            edges = np.concatenate([[0.0], np.cumsum(last)]) / last.sum()
            for token_id in np.nonzero(last > 1e-9)[0]:
                noise = ScriptedNoise(coins, float(edges[token_id] + edges[token_id + 1]) / 2)
                history = History(PROMPT)
                got = verify_tree(rows, proposal, params, NO_STOP, history, noise, HASH, len(PROMPT))
                assert got.path == tree.path(shape, node)
                assert got.token_ids == (*(drafts[i] for i in got.path), token_id)
                assert got.origins == (Origin.ACCEPTED,) * got.num_accepted + (
                    Origin.CORRECTION if left else Origin.BONUS,
                )
                assert left is None or token_id not in [drafts[c] for c in children[node + 1]]
                assert noise.asked[-1] == (hashes[node], Role.RESIDUAL if left else Role.BONUS, 0)
                assert {(h, t) for h, role, t in noise.asked if role is Role.ACCEPT} == set(coins)
                assert history.num_output_tokens == 0
    assert len(stood) >= 5, "too few nodes were reached"


def one_by_one(proposal: Proposal) -> Proposal:
    return Proposal(proposal.token_ids, proposal.q, parents=tree.chain_parents(len(proposal)))


@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("bad_row", [None, 2, 3])
def test_a_chain_as_a_tree_is_the_chain_bit_for_bit(
    rule: AcceptanceRule, temperature: float, bad_row: int | None
) -> None:
    """Tokens, origins, soft acceptances and errors, with penalties, masks, stop tokens and rows that cannot be read."""
    num_accepted, num_failed = 0, 0
    stopping = StoppingParams(max_tokens=99, min_tokens=3, stop_token_ids=frozenset({3}))
    for seed in range(scaled(600, at_least=100)):
        target, draft = table_pair(4, seed % 7, num_zeros=seed % 2)
        params = SamplingParams(acceptance=rule, temperature=temperature, **BUSY)
        proposal = drawn_tree(draft, tree.chain_parents(seed % 5), params, seed, stopping=stopping)
        ends = [i + 1 for i, token_id in enumerate(proposal.token_ids) if token_id == 3]
        proposal = proposal.kept(range(min(ends, default=len(proposal))))
        rows = tree_rows(target, proposal)
        if bad_row is not None:
            rows[bad_row % len(rows), 0] = np.nan
        answers = []
        for verifier, drafts in [(verify, proposal), (verify_tree, one_by_one(proposal))]:
            history = History(PROMPT, (2,))
            try:
                answers.append(verifier(rows, drafts, params, stopping, history, Noise(seed), HASH, 3))
            except Internal as error:
                answers.append(error)
            assert history.output_ids == (2,)
        plain, as_tree = answers
        if isinstance(plain, Internal):
            num_failed += 1
            assert isinstance(as_tree, Internal)
            assert as_tree.message == plain.message
            continue
        assert isinstance(as_tree, TreeOutcome)
        assert (as_tree.num_accepted, as_tree.token_ids, as_tree.origins, as_tree.soft_acceptances) == (
            plain.num_accepted, plain.token_ids, plain.origins, plain.soft_acceptances,
        )  # fmt: skip
        assert as_tree.path == tuple(range(plain.num_accepted))
        num_accepted += plain.num_accepted
    assert num_accepted > 0, "INCONCLUSIVE"
    assert (num_failed > 0) == (bad_row is not None)


@pytest.mark.parametrize("rule", [AcceptanceRule.COUPLED, AcceptanceRule.BLOCK])
def test_a_match_tree_emits_what_the_target_chooses_for_itself(rule: AcceptanceRule) -> None:
    """COUPLED, and greedy under another rule: token for token the plain text, whatever the tree."""
    temperature = 0.9 if rule is AcceptanceRule.COUPLED else 0.0
    params = SamplingParams(acceptance=rule, temperature=temperature, **BUSY)
    num_accepted = 0
    for seed in range(scaled(400, at_least=60)):
        target, draft = table_pair(4, seed % 5)
        noise = Noise(seed)
        proposal = drawn_tree(draft, random_parents(seed, 1 + seed % 9), params, seed)
        got = verify_tree(tree_rows(target, proposal), proposal, params, NO_STOP, History(PROMPT), noise, HASH, 2)
        text: list[int] = []
        for _ in got.token_ids:
            row = target.row([*PROMPT, *text])
            text.append(coupled_token(row, params, NO_STOP, History(PROMPT, text), noise, 2 + len(text)))
        assert got.token_ids == tuple(text)
        assert got.token_ids[:-1] == tuple(proposal.token_ids[i] for i in got.path)
        assert set(got.soft_acceptances) <= {0, 255}
        for node in range(len(proposal)):
            path = [proposal.token_ids[i] for i in tree.path(proposal.shape, proposal.shape[node])]
            row, history = target.row([*PROMPT, *path]), History(PROMPT, path)
            chosen = coupled_token(row, params, NO_STOP, history, noise, 2 + len(path))
            assert got.soft_acceptances[node] == 255 * (chosen == proposal.token_ids[node])
        deeper = tree.children(proposal.shape)[(got.path[-1] if got.path else -1) + 1]
        assert got.token_ids[-1] not in [proposal.token_ids[c] for c in deeper], "the walk ended too early"
        num_accepted += got.num_accepted
    assert num_accepted > 0, "INCONCLUSIVE"


def test_coupled_children_are_those_that_the_target_would_choose_first() -> None:
    """Drafted with the target's own logits the first child is always right, and none repeats another."""
    target, _ = table_pair(5, 1)
    params = SamplingParams(acceptance=AcceptanceRule.COUPLED)
    for seed in range(50):
        proposal = drawn_tree(target, (-1, -1, -1, 0, 0, 3), params, seed)
        got = verify_tree(tree_rows(target, proposal), proposal, params, NO_STOP, History(PROMPT), Noise(seed), HASH, 2)
        assert got.path == (0, 3, 5)
        assert len({proposal.token_ids[i] for i in range(3)}) == 3


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_penalties_count_each_nodes_own_path(rule: AcceptanceRule) -> None:
    """Soft acceptances and what is drawn equal those computed from each node's prefix alone."""
    target, draft = table_pair(4, 5)
    params = SamplingParams(acceptance=rule, **BUSY)
    stopping = StoppingParams(max_tokens=9, min_tokens=2, stop_token_ids=frozenset({3}))
    num_told_apart = 0
    for seed in range(scaled(200, at_least=30)):
        proposal = drawn_tree(draft, SHAPE, params, seed, stopping=stopping)
        rows, children = tree_rows(target, proposal), tree.children(proposal.shape)
        got = verify_tree(rows, proposal, params, stopping, History(PROMPT), Noise(seed), HASH, 2)
        for node in range(-1, len(proposal)):
            path = [proposal.token_ids[i] for i in tree.path(proposal.shape, node)]
            if 3 in path or not children[node + 1]:
                continue
            p = distribution(rows[node + 1], params, stopping, History(PROMPT, path))
            other = distribution(rows[node + 1], params, stopping, History(PROMPT))
            left = Left(1.0, p)
            for child in children[node + 1]:
                q = draft_q(proposal, child)
                assert got.soft_acceptances[child] == soft_acceptance(left.p, q)
                left = left.without(q).normalised()
            num_told_apart += not np.allclose(p, other)
    assert num_told_apart > 0, "INCONCLUSIVE: no penalty made a difference"


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_a_stop_token_ends_its_path(rule: AcceptanceRule) -> None:
    """Its children are out of the proposal, and the row after it is never looked at."""
    rows = np.zeros((4, 3), dtype=np.float32)
    rows[0, 2] = 60.0  # sure of the stop token
    rows[2] = np.nan
    proposal = Proposal((1, 2, 0), parents=(-1, -1, 1))
    stopping = StoppingParams(max_tokens=9, stop_token_ids=frozenset({2}))
    got = verify_tree(rows, proposal, SamplingParams(acceptance=rule), stopping, History(PROMPT), Noise(1), HASH, 2)
    assert (got.path, got.token_ids, got.origins) == ((1,), (2,), (Origin.ACCEPTED,))
    assert got.soft_acceptances[2] == 0


@pytest.mark.parametrize("rule", AcceptanceRule)
def test_a_bad_row_prunes_what_is_below_and_the_law_is_exact(rule: AcceptanceRule) -> None:
    """The target never says 2, the draft does, rows after it are bad, and siblings of it are accepted all the same."""
    target, draft = table_pair(3, 4)
    logits = target.logits.copy()
    logits[:, :, 2] = -np.inf
    logits[:, 2] = np.nan
    target = TableModel(logits)
    params = SamplingParams(acceptance=rule)
    counts: dict[tuple[int, ...], int] = {}
    num_poisoned = 0
    for seed in range(scaled(10_000)):
        proposal = drawn_tree(draft, SHAPE, params, seed)
        poisoned = [n for n in range(len(proposal)) if proposal.token_ids[n] == 2]
        num_poisoned += any(tree.children(proposal.shape)[n + 1] for n in poisoned)
        rows = tree_rows(target, proposal)
        got = verify_tree(rows, proposal, params, NO_STOP, History(PROMPT), Noise(seed), HASH, 2)
        for node in range(len(proposal)):
            if {*tree.path(proposal.shape, proposal.shape[node])} & {*poisoned}:
                assert got.soft_acceptances[node] == 0
        counts[got.token_ids[:1]] = counts.get(got.token_ids[:1], 0) + 1
    assert num_poisoned > 0, "INCONCLUSIVE"
    assert chi_square(counts, joint_law(target, params, 1)) > FALSE_ALARM


@pytest.mark.parametrize("rule", AcceptanceRule)
@pytest.mark.parametrize("bad", [0, 2])
def test_a_bad_row_that_is_needed_fails_by_name_and_leaves_the_history(rule: AcceptanceRule, bad: int) -> None:
    rows = np.zeros((4, 4), dtype=np.float32)
    rows[0, 1] = 60.0  # node 1 surely stands
    rows[bad, 1] = np.nan
    history = History(PROMPT, (2, 2))
    params = SamplingParams(acceptance=rule, repetition_penalty=1.2)
    with pytest.raises(Internal, match="NaN at id 1"):
        verify_tree(rows, Proposal((0, 1, 3), parents=(-1, -1, 1)), params, NO_STOP, history, Noise(0), HASH, 4)
    assert history.output_ids == (2, 2)


@pytest.mark.parametrize("rule", RATIO_RULES)
def test_repeated_tokens_among_siblings_are_tried_and_never_stand_twice(rule: AcceptanceRule) -> None:
    target, draft = table_pair(3, 2)
    params = SamplingParams(acceptance=rule)
    num_repeats = 0
    for seed in range(scaled(400, at_least=60)):
        proposal = drawn_tree(draft, (-1,) * 4, params, seed, replacement=True)
        got = verify_tree(tree_rows(target, proposal), proposal, params, NO_STOP, History(PROMPT), Noise(seed), HASH, 2)
        first = {token_id: proposal.token_ids.index(token_id) for token_id in proposal.token_ids}
        num_repeats += len(first) < 4
        assert all(first[proposal.token_ids[node]] == node for node in got.path)
        repeats = [i for i, token_id in enumerate(proposal.token_ids) if first[token_id] != i]
        p = distribution(target.row(PROMPT), params, NO_STOP, History(PROMPT))
        left = Left(1.0, p)
        for node in range(4):
            q = draft_q(proposal, node)
            assert node not in repeats or left.chance_of(q, proposal.token_ids[node]) in (0.0, 1.0)
            left = left.without(q).normalised()
    assert num_repeats > 0, "INCONCLUSIVE"


def test_no_tree_is_plain_decoding() -> None:
    target, _ = table_pair(5, 3)
    for rule, temperature in itertools.product(AcceptanceRule, (0.0, 1.0)):
        params = SamplingParams(acceptance=rule, temperature=temperature)
        rows = target.rows(PROMPT, 1)
        plain = verify(rows, EMPTY, params, NO_STOP, History(PROMPT), Noise(4), HASH, 2)
        got = verify_tree(rows, EMPTY, params, NO_STOP, History(PROMPT), Noise(4), HASH, 2)
        assert (got.token_ids, got.origins, got.path) == (plain.token_ids, (Origin.PLAIN,), ())
    assert greedy_token(target.row(PROMPT), params, NO_STOP, History(PROMPT)) in range(5)


def test_rows_must_match_nodes() -> None:
    with pytest.raises(ValueError, match="1 rows of logits for 2 drafts"):
        verify_tree(
            np.zeros((1, 3)), Proposal((0, 1), parents=(-1, -1)), SamplingParams(), NO_STOP, History(()), Noise(0),
            HASH, 0,
        )  # fmt: skip


def test_extend_hash_is_what_verify_tree_walks_with() -> None:
    assert hash_ids((4, 5), HASH) == extend_hash(extend_hash(HASH, 4), 5)
