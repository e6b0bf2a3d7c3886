"""The law of sampled text, told by tables: small models with known p and q, a round loop, and chi-square.

A table model's logits depend on the last two tokens, so that the joint law of the first tokens can be enumerated and
compared with what any implementation emits over many seeds.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from outrider.drafting.proposal import Proposal, SparseQ
from outrider.sampling import (
    AcceptanceRule,
    History,
    Noise,
    Role,
    SamplingParams,
    StoppingParams,
    coupled_token,
    distribution,
    draw_draft,
    extend_hash,
    greedy_token,
    hash_ids,
    sparse_q,
)
from target_worker.acceptance import verify

PROMPT = (0, 1)
NO_STOP = StoppingParams(max_tokens=1_000)
FALSE_ALARM = 1e-4
"""Seeds are fixed, so a test either always passes or never: this is the chance that a right law was born unlucky."""


@dataclass(frozen=True)
class TableModel:
    """logits float32[V, V, V]: the row for the next token, by the last two tokens."""

    logits: np.ndarray

    @property
    def vocab_size(self) -> int:
        return self.logits.shape[-1]

    def row(self, ids: Sequence[int]) -> np.ndarray:
        return self.logits[ids[-2], ids[-1]]

    def rows(self, ids: Sequence[int], num_rows: int) -> np.ndarray:
        """The rows that follow the last `num_rows` prefixes of `ids`."""
        last = np.asarray(ids[-num_rows - 1 :])
        return self.logits[last[:-1], last[1:]]


def table_pair(vocab_size: int, seed: int, *, spread: float = 1.5, num_zeros: int = 0) -> tuple[TableModel, TableModel]:
    """(target, draft): unrelated random tables; `num_zeros` entries of each row, not the same ones, are impossible."""
    tables = []
    for rng in np.random.default_rng(seed).spawn(2):
        logits = rng.normal(scale=spread, size=(vocab_size,) * 3).astype(np.float32)
        for row in logits.reshape(-1, vocab_size):
            row[rng.permutation(vocab_size)[:num_zeros]] = -np.inf
        tables.append(TableModel(logits))
    return tables[0], tables[1]


def joint_law(
    target: TableModel,
    params: SamplingParams,
    num_tokens: int,
    *,
    prompt: Sequence[int] = PROMPT,
    begin: Callable[[Sequence[int]], History] = History,
) -> dict[tuple[int, ...], float]:
    """P(first tokens) of plain sampling, by enumeration; texts with probability 0 are left out. begin: of a prompt."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        longer = {}
        for text, probability in law.items():
            history = begin(prompt)
            for token_id in text:
                history.push(token_id)
            p = distribution(target.row([*prompt, *text]), params, NO_STOP, history)
            longer.update({(*text, x): probability * float(p[x]) for x in np.nonzero(p)[0].tolist()})
        law = longer
    return law


def chi_square(counts: Mapping[tuple[int, ...], int], law: Mapping[tuple[int, ...], float]) -> float:
    """p-value that `counts` were drawn from `law`; 0 when something impossible was counted. Thin cells are pooled."""
    if any(law.get(cell, 0.0) == 0.0 for cell in counts):
        return 0.0
    total = sum(counts.values())
    cells = sorted(law, key=lambda cell: -law[cell])
    expected = np.array([law[cell] for cell in cells]) * total
    observed = np.array([counts.get(cell, 0) for cell in cells], dtype=float)
    thick = int((expected >= 5).sum())
    expected = np.append(expected[:thick], expected[thick:].sum())
    observed = np.append(observed[:thick], observed[thick:].sum())
    used = expected > 0
    assert used.sum() > 1, "the law has one cell: this test cannot fail"
    statistic = float(((observed[used] - expected[used]) ** 2 / expected[used]).sum())
    return float(stats.chi2.sf(statistic, int(used.sum()) - 1))


GammaPolicy = Callable[[bytes], int]
"""γ of the next round from the soft acceptances of the last one (empty before the first)."""


def fixed_gamma(gamma: int) -> GammaPolicy:
    return lambda soft_acceptances: gamma


def adaptive_gamma(soft_acceptances: bytes) -> int:
    """Follows the last drafted position, which usually lies past the rejection: what a real controller sees as well."""
    if not soft_acceptances:
        return 4
    return 4 if soft_acceptances[-1] > 127 else 1


@dataclass
class RoundLoop:
    """A draft and a target session in one: propose, verify, commit, round after round, over the shipped functions.

    begin: the history of a prompt.
    one_hot_every: every so many-th absolute position is drafted as the draft's argmax with q = one-hot (0: never).
    extend: how a prefix hash grows; a fault can be put here.
    """

    target: TableModel
    draft: TableModel
    params: SamplingParams
    gamma: GammaPolicy
    begin: Callable[[Sequence[int]], History] = History
    one_hot_every: int = 0
    max_entries: int = 64
    extend: Callable[[int, int], int] = extend_hash
    num_drafted: int = 0
    num_accepted: int = 0
    _q: dict[tuple[int, ...], SparseQ] = field(default_factory=dict)

    def text(self, noise: Noise, num_tokens: int, *, prompt: Sequence[int] = PROMPT) -> tuple[int, ...]:
        """The first `num_tokens` sampled tokens."""
        committed, history = list(prompt), self.begin(prompt)
        prefix_hash = functools.reduce(self.extend, prompt, hash_ids(()))
        soft_acceptances = b""
        while history.num_output_tokens < num_tokens:
            proposal = self.propose(committed, history, noise, prefix_hash, self.gamma(soft_acceptances))
            rows = self.target.rows([*committed, *proposal.token_ids], len(proposal) + 1)
            outcome = verify(rows, proposal, self.params, NO_STOP, history, noise, prefix_hash, len(committed))
            self.num_drafted += len(proposal)
            self.num_accepted += outcome.num_accepted
            soft_acceptances = outcome.soft_acceptances
            for token_id in outcome.token_ids:
                committed.append(token_id)
                history.push(token_id)
                prefix_hash = self.extend(prefix_hash, token_id)
        return tuple(committed[len(prompt) :][:num_tokens])

    def propose(
        self, committed: Sequence[int], history: History, noise: Noise, prefix_hash: int, gamma: int
    ) -> Proposal:
        """A chain of γ drafts, each from its q given the ones before it."""
        ids, q = list(committed), []
        for _ in range(gamma):
            row = self.draft.row(ids)
            if self.params.greedy or self.params.acceptance is AcceptanceRule.COUPLED:
                token_id, q_here = coupled_token(row, self.params, NO_STOP, history, noise, len(ids)), None
            elif self.one_hot_every and len(ids) % self.one_hot_every == 0:
                token_id, q_here = greedy_token(row, self.params, NO_STOP, history), None
            else:
                q_here = self._sparse_q(row, ids, history)
                token_id = draw_draft(q_here, noise.integer16(prefix_hash, Role.DRAFT))
            q.append(q_here)
            ids.append(token_id)
            history.push(token_id)
            prefix_hash = self.extend(prefix_hash, token_id)
        history.pop(gamma)
        return Proposal(token_ids=tuple(ids[len(committed) :]), q=tuple(q))

    def _sparse_q(self, row: np.ndarray, ids: Sequence[int], history: History) -> SparseQ:
        """Without penalties q is a function of the last two tokens, and computing it once is enough."""
        if self.params.needs_history:
            return sparse_q(row, self.params, NO_STOP, history, self.max_entries)
        key = (ids[-2], ids[-1])
        if key not in self._q:
            self._q[key] = sparse_q(row, self.params, NO_STOP, history, self.max_entries)
        return self._q[key]

    def counts(self, num_seeds: int, num_tokens: int) -> Counter[tuple[int, ...]]:
        """How often each text came over seeds 0, 1, ...; fails when nothing was drafted or nothing rejected."""
        counts = Counter(self.text(Noise(seed), num_tokens) for seed in range(num_seeds))
        assert 0 < self.num_accepted < self.num_drafted, "INCONCLUSIVE: no draft was accepted, or none rejected"
        return counts
