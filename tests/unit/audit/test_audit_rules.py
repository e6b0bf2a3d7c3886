"""The slow path of an audit beside the code that serves: the same p, the same decisions, from two sources."""

import numpy as np
import pytest
from conftest import scaled

from outrider.audit.law import Law, Text, coupled_scores, greedy_scores, law, processed
from outrider.audit.rules import Round, Uniform
from outrider.drafting.proposal import Proposal
from outrider.drafting.tree import PREFIX
from outrider.drafting.tree_draw import draw_children
from outrider.sampling.distribution import coupled_token, distribution, greedy_token
from outrider.sampling.history import History
from outrider.sampling.noise import Noise, extend_hash
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from target_worker.tree_acceptance import verify_tree

VOCAB = 24
TOLERANCE = 1e-6


def random_params(rng: np.random.Generator, rule: AcceptanceRule, temperature: float) -> SamplingParams:
    def pick(*values):
        return values[rng.integers(len(values))]

    return SamplingParams(
        temperature=temperature,
        top_k=int(pick(0, 0, 5, 12)),
        top_p=float(pick(1.0, 0.9, 0.6)),
        min_p=float(pick(0.0, 0.0, 0.05)),
        repetition_penalty=float(pick(1.0, 1.3, 0.8)),
        presence_penalty=float(pick(0.0, 0.5)),
        frequency_penalty=float(pick(0.0, -0.4)),
        logit_bias=pick({}, {3: 1.5, 7: -2.0}),
        allowed_token_ids=pick((), (*range(0, VOCAB, 2), 1, 3)),
        bad_words=pick((), ((4,), (2, 6))),
        seed=int(rng.integers(2**62)),
        acceptance=rule,
    )


def random_logits(rng: np.random.Generator) -> np.ndarray:
    row = (2.0 * rng.standard_normal(VOCAB)).astype(np.float32)
    if rng.integers(3) == 0:  # ties, which go to the lower id
        row = np.round(row)
    return row


def test_p_and_choices_are_those_that_are_served() -> None:
    rng = np.random.default_rng(1)
    for case in range(scaled(4000)):
        params = random_params(rng, AcceptanceRule.BLOCK, float(rng.choice([0.5, 1.0, 1.7])))
        stopping = StoppingParams(50, min_tokens=int(rng.integers(3)), stop_token_ids=frozenset({0, 9}))
        prompt, output = rng.integers(0, VOCAB, 3).tolist(), rng.integers(0, VOCAB, rng.integers(4)).tolist()
        logits, history, text = random_logits(rng), History(prompt, output), Text(prompt, output)
        row = processed(logits, params, stopping, text)
        assert row is not None
        expected = distribution(logits, params, stopping, history)
        found = law(row, params, TOLERANCE)
        differs = np.abs(found.p - expected) > found.error + 1e-12
        assert not differs.any(), f"case {case}: {params}"
        noise = Noise(params.seed)
        coupled = coupled_scores(row, params, TOLERANCE, noise.gumbel(7, VOCAB))
        assert coupled.choice == coupled_token(logits, params, stopping, history, noise, 7)
        assert greedy_scores(row, params, TOLERANCE).choice == greedy_token(logits, params, stopping, history)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_cannot_be_read_is_told(bad: float) -> None:
    row = np.full(VOCAB, -np.inf if bad == -np.inf else 1.0, np.float32)
    row[3] = bad
    assert processed(row, SamplingParams(), StoppingParams(5), Text((1,))) is None


def test_what_logits_may_be_off_by_bounds_what_p_is_off_by() -> None:
    """To the first order: logits are moved by as much as the tolerance allows, p stays within its error."""
    rng = np.random.default_rng(2)
    tolerance, num_wider = 1e-3, 0
    for _ in range(scaled(4000)):
        params = random_params(rng, AcceptanceRule.TOKEN, float(rng.choice([0.5, 1.0])))
        stopping, text = StoppingParams(50), Text((1, 2), (3,))
        logits = random_logits(rng)
        moved = logits + (tolerance * rng.uniform(-1, 1, VOCAB)).astype(np.float32)
        rows = processed(logits, params, stopping, text), processed(moved, params, stopping, text)
        assert rows[0] is not None
        assert rows[1] is not None
        here, there = law(rows[0], params, tolerance), law(rows[1], params, tolerance)
        # ids that the filters leave open are bounded by the mass that they may have, and that moves too
        assert (np.abs(here.p - there.p) <= 1.05 * here.error + 1e-9).all(), params
        num_wider += bool((here.error > 0.01).any())
    assert num_wider > 0, "no filter was near a tie"


def drafted_tree(
    rng: np.random.Generator, shape: list[int], params: SamplingParams, stopping: StoppingParams, prefix_hash: int
) -> tuple[Proposal, dict[int, int]]:
    """Drawn from rows of nobody's, as the drafters draw them."""
    ids: list[int] = []
    q = []
    hashes = {PREFIX: prefix_hash}
    drawn: dict[int, list] = {}
    places: dict[int, int] = {}
    for node, parent in enumerate(shape):
        if parent not in drawn:
            free = SamplingParams(seed=params.seed, acceptance=params.acceptance)
            drawn[parent] = draw_children(
                random_logits(rng), free, stopping, History(()), Noise(params.seed), hashes[parent], 0,
                shape.count(parent), max_entries=8,
            )  # fmt: skip
        child = drawn[parent][places.get(parent, 0)]
        places[parent] = places.get(parent, 0) + 1
        is_certain = rng.integers(6) == 0 and child.token_id not in [
            ids[other] for other in range(node) if shape[other] == parent
        ]
        ids.append(child.token_id)
        q.append(None if is_certain and shape.count(parent) == 1 else child.q)
        hashes[node] = extend_hash(hashes[parent], child.token_id)
    return Proposal(tuple(ids), q=tuple(q), parents=tuple(shape)), hashes


def coins(noise: Noise, hashes: dict[int, int]) -> Uniform:
    return lambda node, role, try_index: noise.uniform(hashes[node], role, try_index)


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
@pytest.mark.parametrize("shape", [[], [-1], [-1, 0, 1, 2], [-1, -1, 0, 0, 2], [-1, -1, -1, 1, 1, 4]], ids=str)
def test_rounds_are_decided_as_they_are_served(rule: AcceptanceRule, shape: list[int]) -> None:
    rng = np.random.default_rng(len(shape))
    num_accepted = set()
    num_refused = num_tried = 0
    for case in range(scaled(1500)):
        params = random_params(rng, rule, 1.0)
        stopping = StoppingParams(50, stop_token_ids=frozenset({9}))
        prompt, prefix_hash = [1, 2], int(rng.integers(2**62))
        proposal, hashes = drafted_tree(rng, shape, params, stopping, prefix_hash)
        logits = np.stack([random_logits(rng) for _ in range(len(shape) + 1)])
        served = verify_tree(
            logits, proposal, params, stopping, History(prompt), Noise(params.seed), prefix_hash, len(prompt)
        )

        laws: dict[int, Law] = {}
        for node in range(PREFIX, len(shape)):
            text, path, at = Text(prompt), [], node
            while at != PREFIX:
                path.append(proposal.token_ids[at])
                at = shape[at]
            for token_id in path[::-1]:
                text.push(token_id)
            row = processed(logits[node + 1], params, stopping, text)
            if row is not None:
                laws[node] = law(row, params, TOLERANCE)

        round_ = Round(rule, proposal, stopping.stop_token_ids, laws, coins(Noise(params.seed), hashes))
        again = round_.decide()
        assert tuple(again.path) == served.path, f"case {case}"
        accepted = tuple(proposal.token_ids[node] for node in again.path)
        ids = accepted if again.token_id is None else (*accepted, again.token_id)
        assert ids == served.token_ids, f"case {case}"
        assert all(comparison.margin >= -comparison.error for comparison in again.comparisons)

        led = round_.against(again.path[-1] if again.path else PREFIX, again.token_id)
        assert led.comparisons == again.comparisons, "led where the coins fall, nothing speaks against it"
        if again.token_id is not None:
            other = round_.against(again.path[-1] if again.path else PREFIX, (again.token_id + 1) % VOCAB)
            num_refused += any(comparison.is_breach for comparison in other.comparisons)
            num_tried += 1
        num_accepted.add(len(again.path))
    assert len(num_accepted) > 1 or not shape, "every round ended alike: nothing was compared"
    assert num_refused > 0.7 * num_tried, "another token passes only where ties leave the filters open"
