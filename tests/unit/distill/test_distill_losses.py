"""Losses and their hand-made gradients against plain autograd."""

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from outrider.distill import losses  # noqa: E402


def naive(hidden, weight, p, row_weights, acceptance_aware):
    log_q = torch.log_softmax(hidden @ weight.T, -1)
    q = log_q.exp()
    acceptance = torch.minimum(p, q).sum(-1)
    entropy = -(p * log_q).sum(-1)
    loss = entropy
    if acceptance_aware:
        share = torch.exp(-3.0 * acceptance.detach())
        divergence = (p * (torch.where(p > 0, p, 1.0).log() - log_q)).sum(-1)
        loss = share * divergence + (1 - share) * 0.5 * (p - q).abs().sum(-1)
    return (loss * row_weights).sum(), (entropy * row_weights).sum(), (acceptance * row_weights).sum()


@pytest.mark.parametrize("acceptance_aware", [False, True])
@pytest.mark.parametrize("chunk_rows", [3, 512])
def test_values_and_gradients_are_those_of_autograd(acceptance_aware, chunk_rows, monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ROWS", chunk_rows)
    torch.manual_seed(0)
    num_rows, hidden_size, vocab_size = 8, 5, 11
    hidden, weight = torch.randn(num_rows, hidden_size), torch.randn(vocab_size, hidden_size)
    p = torch.softmax(2 * torch.randn(num_rows, vocab_size), -1)
    p[0] = torch.eye(vocab_size)[3]  # zeros in p
    row_weights = torch.rand(num_rows)
    results = []
    for function in (naive, losses.head_loss):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        if function is naive:
            values = function(*leaves, p, row_weights, acceptance_aware)
        else:
            values = function(*leaves, p, row_weights, acceptance_aware=acceptance_aware)
        (2.0 * values[0]).backward()
        results.append(([v.detach() for v in values], [t.grad for t in leaves]))
    (values, grads), (own_values, own_grads) = results
    torch.testing.assert_close(own_values, values)
    torch.testing.assert_close(own_grads, grads, atol=1e-5, rtol=1e-4)


def test_the_hybrid_turns_to_acceptance_where_much_is_accepted():
    """Its gradient there is that of the total variation; where nothing is accepted that of the divergence."""
    p = torch.tensor([[0.6, 0.4, 0.0]])
    log_q = torch.log_softmax(torch.tensor([[0.2, 0.0, -9.0]]), -1)
    _, aware = losses._row_losses(p, log_q, True)
    _, plain = losses._row_losses(p, log_q, False)
    assert not torch.allclose(aware, plain, atol=1e-3)
    far = torch.log_softmax(torch.tensor([[-30.0, -30.0, 30.0]]), -1)
    torch.testing.assert_close(losses._row_losses(p, far, True)[1], losses._row_losses(p, far, False)[1])
