"""From logits to a token: processing, filters, keyed randomness and exact draft distributions. numpy only, no torch.

Draft and target run this same code, so that what the one proposes the other can check bit for bit. Everything is a pure
function of its arguments; `History` alone has state, and a `push` is undone by a `pop`.
"""

from outrider.sampling.distribution import coupled_token, distribution, draw, greedy_token, processed_logits
from outrider.sampling.history import History
from outrider.sampling.logprobs import raw_logprobs
from outrider.sampling.noise import ROOT_HASH, Noise, Role, extend_hash, hash_ids
from outrider.sampling.params import AcceptanceRule, Finish, Origin, SamplingParams, StoppingParams
from outrider.sampling.sparse_q import draw_draft, sparse_q

__all__ = [
    "ROOT_HASH",
    "AcceptanceRule",
    "Finish",
    "History",
    "Noise",
    "Origin",
    "Role",
    "SamplingParams",
    "StoppingParams",
    "coupled_token",
    "distribution",
    "draw",
    "draw_draft",
    "extend_hash",
    "greedy_token",
    "hash_ids",
    "processed_logits",
    "raw_logprobs",
    "sparse_q",
]
