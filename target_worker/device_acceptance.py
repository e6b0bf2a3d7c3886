"""The acceptance rules where the logits are: the rounds of many streams at once, and a few numbers back for each.

The fast twin of acceptance.py, which explains the rules. Greedy decides exactly what it decides. COUPLED and the
distributions of TOKEN and BLOCK are float64 here as there and equal to rounding, so that a decision differs with a
probability of the order of 1e-13. A round with a row that cannot be read is left to acceptance.py.

S rounds, G the most drafts of one, R rows of all, K the most entries of a q; what is shorter is filled up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from outrider.lm.gpu.noise import gumbel, signed
from outrider.lm.gpu.sampling import Filters, RowContext, draw, greedy, is_readable, log_weights, probabilities, process
from outrider.sampling.noise import Role, extend_hash
from outrider.sampling.params import AcceptanceRule
from target_worker.acceptance import draft_q
from target_worker.device_decision import RoundDecision


def decide(decisions: Sequence[RoundDecision], rows: torch.Tensor) -> torch.Tensor:
    """rows float32[R, V], len(drafts) + 1 of each round in order -> float64[S, 3 + 2 G], on the same device.

    Of each round: how many drafts stand, or NaN where that is left to the host; the token after them; per draft 255
    times its soft acceptance, rounded; and per row the likeliest id of its raw logits.
    """
    drafts = [d.proposal.token_ids for d in decisions]
    contexts = [RowContext(d.params, d.stopping, d.history, own) for d, own in zip(decisions, drafts, strict=True)]
    processed = process(rows, contexts)
    readable = is_readable(rows)
    if processed is not rows:
        readable &= is_readable(processed)

    width = max(map(len, drafts))
    ends = np.cumsum([len(own) + 1 for own in drafts])
    row_of = np.array(
        [
            [min(end - len(own) - 1 + i, end - 1) for i in range(width + 1)]
            for own, end in zip(drafts, ends, strict=True)
        ]
    )
    where = torch.from_numpy(row_of).to(rows.device)

    result = torch.empty(len(decisions), 2 + width, dtype=torch.float64, device=rows.device)
    by_match = [index for index, d in enumerate(decisions) if d.params.decides_by_match]
    by_ratio = [index for index, d in enumerate(decisions) if not d.params.decides_by_match]
    for group, rule in ((by_match, _by_match), (by_ratio, _by_ratio)):
        if group:
            chosen = torch.tensor(group, device=rows.device)
            result[chosen] = rule([decisions[index] for index in group], processed, where[chosen], width)
    result[:, 0].masked_fill_(~readable[where].all(1), torch.nan)
    return torch.cat([result, rows.argmax(1)[where].double()], 1)


def _by_match(
    decisions: Sequence[RoundDecision], processed: torch.Tensor, where: torch.Tensor, width: int
) -> torch.Tensor:
    """COUPLED and greedy: a draft stands when it is what the target chose."""
    choices = torch.empty(where.shape, dtype=torch.int64, device=processed.device)
    for is_greedy, choose in ((True, _greedy_choices), (False, _coupled_choices)):
        group = [index for index, d in enumerate(decisions) if d.params.greedy is is_greedy]
        if group:
            chosen = torch.tensor(group, device=processed.device)
            own = where[chosen]
            flat = choose([decisions[index] for index in group], processed[own.flatten()], own.shape[1])
            choices[chosen] = flat.view(own.shape)
    drafts = _filled([d.proposal.token_ids for d in decisions], width, -1, torch.int64, processed.device)
    matches = choices[:, :width] == drafts
    stand = matches.long().cumprod(1).sum(1)
    return torch.cat([stand[:, None], choices.gather(1, stand[:, None]), 255 * matches.long()], 1).double()


def _greedy_choices(decisions: Sequence[RoundDecision], rows: torch.Tensor, num_each: int) -> torch.Tensor:
    return greedy(rows)


def _coupled_choices(decisions: Sequence[RoundDecision], rows: torch.Tensor, num_each: int) -> torch.Tensor:
    """num_each: rows of every round."""
    keys = [signed(d.noise.gumbel_key(d.position + i)) for d in decisions for i in range(num_each)]
    weights = log_weights(rows, Filters.of([d.params for d in decisions for _ in range(num_each)]))
    return (weights + gumbel(torch.tensor(keys, device=rows.device), rows.shape[1])).argmax(1)


def _by_ratio(
    decisions: Sequence[RoundDecision], processed: torch.Tensor, where: torch.Tensor, width: int
) -> torch.Tensor:
    """TOKEN and BLOCK."""
    device = processed.device
    num_rounds, num_each = where.shape
    filters = Filters.of([d.params for d in decisions for _ in range(num_each)])
    p = probabilities(log_weights(processed[where.flatten()], filters)).view(num_rounds, num_each, -1)

    counts = torch.tensor([len(d.proposal) for d in decisions], device=device)
    is_block = torch.tensor([d.params.acceptance is AcceptanceRule.BLOCK for d in decisions], device=device)
    accept_u, last_u = _uniforms(decisions, width, device)
    if not width:
        tokens = draw(p[:, 0], last_u[:, 0])
        return torch.stack([torch.zeros_like(tokens), tokens], 1).double()
    drafts = _filled([d.proposal.token_ids for d in decisions], width, 0, torch.int64, device)
    q_ids, q = _q(decisions, width, device)
    is_draft = torch.arange(width, device=device)[None] < counts[:, None]

    p_on_q = p[:, :width].gather(2, q_ids)
    is_entry = q > 0.0
    q_at_draft = torch.where(q_ids == drafts[:, :, None], q, 0.0).sum(2)
    ratio = p[:, :width].gather(2, drafts[:, :, None])[:, :, 0] / torch.where(is_draft, q_at_draft, 1.0)
    joint = [torch.ones(num_rounds, dtype=torch.float64, device=device)]
    for index in range(width):
        joint.append((joint[-1] * ratio[:, index]).clamp(max=1.0))
    joints = torch.stack(joint, 1)
    chances = torch.where(
        is_block[:, None], _block_chances(p_on_q, q, is_entry, joints, counts, is_draft), ratio.clamp(max=1.0)
    )
    coins = (accept_u < chances) & is_draft
    order = torch.arange(1, width + 1, device=device)[None]
    stand = torch.where(is_block, torch.where(coins, order, 0).amax(1), coins.long().cumprod(1).sum(1))

    rounds = torch.arange(num_rounds, device=device)
    scale = torch.where(is_block, joints[rounds, stand], 1.0)
    p_last = p[rounds, stand]
    at = stand.clamp(max=width - 1)
    ids, taken = q_ids[rounds, at], q[rounds, at]
    residual = p_last * scale[:, None]
    # max(r - q, 0) as r - min(r, q), which is the same number; entries that only fill up take nothing.
    residual.scatter_add_(1, ids, -torch.minimum(residual.gather(1, ids), taken))
    is_corrected = (stand < counts) & (residual.sum(1) > 0.0)
    tokens = draw(torch.where(is_corrected[:, None], residual, p_last), last_u[rounds, stand])

    soft = torch.where(is_entry, torch.minimum(p_on_q, q), 0.0).sum(2)
    soft = (255.0 * soft).round().clamp(max=255.0)
    return torch.cat([stand[:, None].double(), tokens[:, None].double(), torch.where(is_draft, soft, 0.0)], 1)


def _block_chances(
    p_on_q: torch.Tensor,
    q: torch.Tensor,
    is_entry: torch.Tensor,
    joints: torch.Tensor,
    counts: torch.Tensor,
    is_draft: torch.Tensor,
) -> torch.Tensor:
    """float64[S, G]: Z / (Z + 1 - P) after each draft but the last, P after that one."""
    scale = joints[:, :-1]  # P before draft i; the surplus at row i belongs to the chance of draft i - 1
    inside = torch.where(is_entry, (scale[:, :, None] * p_on_q - q).clamp(min=0.0), 0.0).sum(2)
    outside = (1.0 - torch.where(is_entry, p_on_q, 0.0).sum(2)).clamp(min=0.0)
    surplus = inside + scale * outside
    shortfall = 1.0 - scale
    total = surplus + shortfall
    chances = torch.where(total > 0.0, surplus / torch.where(total > 0.0, total, 1.0), 1.0)
    shifted = torch.cat([chances[:, 1:], chances[:, :1]], 1)
    is_last = torch.arange(1, q.shape[1] + 1, device=q.device)[None] == counts[:, None]
    return torch.where(is_draft & ~is_last, shifted, joints[:, 1:])


def _uniforms(
    decisions: Sequence[RoundDecision], width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64[S, G] of the coins, and float64[S, G + 1] of the last token, by how many drafts stand before it.

    All are keyed by the exact prefix, so they are known before anything is decided.
    """
    coins, lasts = [], []
    for decision in decisions:
        drafts, noise = decision.proposal.token_ids, decision.noise
        hashes = [decision.prefix_hash]
        for token_id in drafts:
            hashes.append(extend_hash(hashes[-1], token_id))
        coins.append([noise.uniform(h, Role.ACCEPT) for h in hashes[:-1]])
        after_all = Role.BONUS if drafts else Role.PLAIN
        lasts.append([*(noise.uniform(h, Role.RESIDUAL) for h in hashes[:-1]), noise.uniform(hashes[-1], after_all)])
    return (
        _filled(coins, width, 0.0, torch.float64, device),
        _filled(lasts, width + 1, 0.0, torch.float64, device),
    )


def _q(decisions: Sequence[RoundDecision], width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int64[S, G, K] and probabilities float64[S, G, K] of every draft's q; entries that fill up have q = 0."""
    entries = [[draft_q(d.proposal, index) for index in range(len(d.proposal))] for d in decisions]
    most = max((len(q.ids) for own in entries for q in own), default=1)
    ids = np.zeros((len(decisions), width, most), np.int64)
    probability = np.zeros((len(decisions), width, most))
    for round_index, own in enumerate(entries):
        for index, q in enumerate(own):
            ids[round_index, index, : len(q.ids)] = q.ids
            probability[round_index, index, : len(q.ids)] = q.probabilities
    return torch.from_numpy(ids).to(device), torch.from_numpy(probability).to(device)


def _filled(
    lists: Sequence[Sequence[float]], width: int, filler: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[S, width]."""
    return torch.tensor([[*own, *[filler] * (width - len(own))] for own in lists], dtype=dtype, device=device).view(
        len(lists), width
    )
