"""The draft vocabulary: what was said, what would have been said, and what has to be in it; and what it covers."""

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from outrider.distill.acceptance import Judge  # noqa: E402
from outrider.distill.batches import Corpus  # noqa: E402
from outrider.distill.optimizer import schedule  # noqa: E402
from outrider.distill.shards import Generated, Shard  # noqa: E402
from outrider.distill.vocabulary import choose_ids, coverage  # noqa: E402

P = torch.tensor([0.0, 0.3, 0.0, 0.1, 0.0, 0.6, 0.0, 0.0])


def corpus(said, kinds=("", "")):
    """Two texts with prompt [0, 0]; the target's distribution is P at every position."""
    half = len(said) // 2
    parts = [said[:half], said[half:]]
    texts = [Generated([0, 0, *p[:-1]], 2, p[-1], 0.0, tag=k) for p, k in zip(parts, kinds, strict=True)]
    num_tokens = sum(len(t.token_ids) for t in texts)
    return Corpus([Shard(texts, torch.ones(num_tokens, 4, 1), 0.0, {})])


HEAD = torch.log(P + 1e-9)[:, None]


def test_ids_are_ranked_by_counts_and_expected_counts():
    said = [2] * 6 + [5] * 4  # id 2 was said against all odds, ids 1 and 3 never, 5 less than expected
    assert choose_ids(corpus(said), HEAD, 2, []).tolist() == [2, 5]
    assert choose_ids(corpus(said), HEAD, 3, []).tolist() == [1, 2, 5]
    assert choose_ids(corpus(said), HEAD, 3, [7]).tolist() == [2, 5, 7]
    assert choose_ids(corpus(said), HEAD, 99, []).tolist() == list(range(8))


def test_coverage_is_the_share_of_tokens_and_of_mass():
    covered = coverage(corpus([2] * 6 + [5] * 4), HEAD, torch.tensor([1, 5]))
    assert covered.tokens == pytest.approx(0.4)
    assert covered.mass == pytest.approx(0.9, abs=1e-5)


class Always(torch.nn.Module):
    """Guesses id 5 at every row."""

    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(1, 2, bias=False)
        self.lm_head.weight.data = torch.tensor([[0.0], [9.0]])

    def hidden(self, batch, num_steps):
        return [torch.ones(*batch.states.shape[:2], 1)] * num_steps


def test_kinds_of_prompts_are_told_apart():
    judge = Judge(corpus([2] * 7 + [5] * 7, ("bad", "good")), HEAD, greedy=True)
    measured = judge.measure(Always(), torch.tensor([1, 5]), torch.float32)
    assert measured.by_kind["bad"] == [1.0] * 5
    assert measured.by_kind["good"][0] == pytest.approx(2.0)
    assert 1.0 < measured.mean_lengths[0] < 2.0


def test_the_schedule_warms_up_and_falls_to_a_twentieth():
    assert schedule(0, 0.0) == pytest.approx(0.05)
    assert schedule(19, 0.0) == pytest.approx(1.0)
    assert schedule(100, 0.5) == pytest.approx(0.525)
    assert schedule(100, 1.0) == pytest.approx(0.05)
