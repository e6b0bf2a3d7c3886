"""The exact tables of acceptance against rounds played out, and a draft whose acceptance is known."""

import itertools

import numpy as np
import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from outrider.distill.acceptance import Judge, expected_passes, summarize  # noqa: E402
from outrider.distill.batches import Corpus  # noqa: E402
from outrider.distill.shards import Generated, Shard  # noqa: E402


def played(table, num_guesses):
    """Mean passes over every outcome of every guess, weighted by its probability: the slow twin."""
    length = table.shape[1]
    cells = [(j, m) for j in range(num_guesses) for m in range(length) if m >= j]
    mean = 0.0
    for outcome in itertools.product([0, 1], repeat=len(cells)):
        stands = dict(zip(cells, outcome, strict=True))
        weight = np.prod([table[cell] if up else 1 - table[cell] for cell, up in stands.items()])
        at = passes = 0
        while at < length:
            passes += 1
            accepted = 0
            while accepted < num_guesses and at + accepted < length and stands[accepted, at + accepted]:
                accepted += 1
            at += accepted + 1
        mean += weight * passes
    return mean


@pytest.mark.parametrize("num_guesses", [1, 2, 3])
def test_expected_passes_are_those_of_all_outcomes(num_guesses):
    table = np.random.default_rng(0).random((num_guesses, 5))
    assert expected_passes(table) == pytest.approx(played(table, num_guesses), rel=1e-12)


def test_places_of_a_chain_are_conditional():
    table = np.array([[0.5, 0.5, 0.5, 0.5], [0.25, 0.25, 0.25, 0.25]])
    summary = summarize([table])
    assert summary.positions == pytest.approx([0.5, 0.25])
    assert summary.num_tokens == 4
    assert summarize([np.ones((3, 12))]).mean_lengths == pytest.approx([2.0, 3.0, 4.0])
    assert summarize([np.zeros((3, 12))]).mean_lengths == pytest.approx([1.0, 1.0, 1.0])


class FixedDraft(torch.nn.Module):
    """Says the same at every row: its head's bias-free logits of a constant state."""

    def __init__(self, logits):
        super().__init__()
        self.lm_head = torch.nn.Linear(1, len(logits), bias=False)
        self.lm_head.weight.data = torch.tensor(logits)[:, None]

    def hidden(self, batch, num_steps):
        return [torch.ones(*batch.states.shape[:2], 1)] * num_steps


@pytest.mark.parametrize("greedy", [False, True])
def test_a_known_draft_is_measured_as_it_is(greedy):
    """Text drawn from a fixed p over 4 ids, a fixed q over three of them: mean acceptance is sum min(p, q)."""
    p, q_logits, draft_ids = np.array([0.5, 0.3, 0.15, 0.05]), [0.0, 1.0, -1.0], torch.tensor([0, 1, 3])
    chance = np.random.default_rng(0)
    ids = np.where(chance.random(4001) < 0.4, 1, 0) if greedy else chance.choice(4, size=4001, p=p)
    head = torch.tensor(np.log(p))[:, None].float()
    states = torch.ones(4000, 4, 1)
    sequence = Generated(ids[:-1].tolist(), 2, int(ids[-1]), 0.0)
    corpus = Corpus([Shard([sequence], states, 0.0, {})])
    measured = Judge(corpus, head, greedy=greedy).measure(FixedDraft(q_logits), draft_ids, torch.float32)
    if greedy:
        expected = float((ids[3:] == 1).mean())  # the draft always says id 1
        assert measured.positions[0] == pytest.approx(expected, abs=1e-6)
    else:
        q = np.exp(q_logits) / np.exp(q_logits).sum()
        expected = float(np.minimum(p[[0, 1, 3]], q).sum())
        assert measured.positions == pytest.approx([expected] * 5, abs=0.06)
        assert measured.mean_lengths[1] == pytest.approx(1 + expected + expected**2, abs=0.08)
    assert measured.num_tokens == 3998
