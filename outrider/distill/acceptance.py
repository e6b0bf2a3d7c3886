"""How many tokens a pass of the target yields with a draft, exactly, from text that the target said.

Along such text a guess of token x at a position stands with probability min(1, q(x) / p(x)): that is what verification
of a guess drawn from q, coupled to the target's draw of x from p, comes to. At temperature 0 it stands when both say x.
So nothing needs to be drawn: expectations over all rounds follow from the text, by dynamic programming from its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from outrider.distill.batches import Batch, Corpus
from outrider.distill.target import LAST

MAX_GUESSES = 5
CHUNK_ROWS = 256
BATCH_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Acceptance:
    """positions[j]: the share of guesses that stand at place j of a chain, given that those before it stood.

    mean_lengths[g - 1]: tokens a pass of the target yields with g guesses, its own included. num_tokens: seen.
    by_kind: mean_lengths of each kind of prompt, where prompts have kinds.
    """

    positions: list[float]
    mean_lengths: list[float]
    num_tokens: int
    by_kind: dict[str, list[float]] = field(default_factory=dict)


class Judge:
    """The target's side of the measurement, made once for text of one kind: ln p of each token it said."""

    def __init__(self, corpus: Corpus, head: torch.Tensor, *, greedy: bool) -> None:
        """head [V, H]: the target's. greedy: the text was said at temperature 0, otherwise at 1."""
        self.corpus, self.greedy = corpus, greedy
        self._log_p: list[torch.Tensor] = []
        for index, sequence in enumerate(corpus.sequences):
            said = torch.tensor([*sequence.token_ids[sequence.prompt_length + 1 :], sequence.next_token])
            states = corpus.states_of(index)[sequence.prompt_length :, LAST]
            parts = [torch.zeros(0)]
            if not greedy:
                for rows, ids in zip(states.split(CHUNK_ROWS), said.split(CHUNK_ROWS), strict=True):
                    log_p = torch.log_softmax((rows @ head.T).float(), -1)
                    parts.append(log_p.gather(1, ids[: len(rows), None])[:, 0])
            self._log_p.append(torch.cat(parts))

    @torch.inference_mode()
    def measure(
        self,
        draft: Any,
        draft_ids: torch.Tensor,
        compute_dtype: torch.dtype,
    ) -> Acceptance:
        """Of `draft`, whose head guesses the ids draft_ids, int64[dV]."""
        tables: list[np.ndarray] = []
        kinds: dict[str, list[np.ndarray]] = {}
        for indices in self.corpus.in_order(BATCH_TOKENS):
            batch = self.corpus.batch(indices)
            with torch.autocast("cpu", compute_dtype, enabled=compute_dtype != torch.float32):
                hidden = draft.hidden(batch, MAX_GUESSES)
            for row, index in enumerate(indices):
                table = self._table(batch, row, index, hidden, draft.lm_head.weight, draft_ids, compute_dtype)
                if table.shape[1]:
                    tables.append(table)
                    kinds.setdefault(self.corpus.sequences[index].tag, []).append(table)
        by_kind = {kind: summarize(own).mean_lengths for kind, own in sorted(kinds.items()) if kind}
        return replace(summarize(tables), by_kind=by_kind)

    def _table(
        self,
        batch: Batch,
        row: int,
        index: int,
        hidden: list[torch.Tensor],
        weight: torch.Tensor,
        draft_ids: torch.Tensor,
        compute_dtype: torch.dtype,
    ) -> np.ndarray:
        """float64[MAX_GUESSES, M]: probability that the guess of the m-th token stands after j guesses that did."""
        first, end = int(batch.prompt_lengths[row]), int(batch.lengths[row])
        said = batch.next_ids()[row, first:end]
        places = torch.searchsorted(draft_ids, said).clamp_max(len(draft_ids) - 1)
        is_listed = draft_ids[places] == said
        rows = []
        for states in hidden:
            logits = (states[row, first:end].to(compute_dtype) @ weight.to(compute_dtype).T).float()
            if self.greedy:
                stands = (logits.argmax(-1) == places) & is_listed
                rows.append(stands.double())
            else:
                log_q = torch.log_softmax(logits, -1).gather(1, places[:, None])[:, 0]
                ratio = torch.exp(log_q - self._log_p[index]).clamp_max(1.0)
                rows.append(torch.where(is_listed, ratio, 0.0).double())
        return torch.stack(rows).numpy()


def summarize(tables: list[np.ndarray]) -> Acceptance:
    """From the tables [G, M] of all texts, as `Judge` makes them."""
    num_guesses = len(tables[0]) if tables else MAX_GUESSES
    reached, stood = np.zeros(num_guesses), np.zeros(num_guesses)
    passes, num_tokens = np.zeros(num_guesses), 0
    for table in tables:
        length = table.shape[1]
        num_tokens += length
        alive = np.ones(length)
        for place in range(num_guesses):
            starts = max(0, length - place)  # a chain that would run past the text's end tells nothing there
            reached[place] += alive[:starts].sum()
            alive[:starts] *= table[place, place:]
            stood[place] += alive[:starts].sum()
            passes[place] += expected_passes(table[: place + 1])
    positions = stood / np.maximum(reached, 1e-300)
    return Acceptance(positions.tolist(), (num_tokens / np.maximum(passes, 1.0)).tolist(), num_tokens)


def expected_passes(table: np.ndarray) -> float:
    """Passes of the target until a text of M tokens is said with g guesses a round; table: float64[g, M]."""
    num_guesses, length = table.shape
    left = np.zeros(length + num_guesses + 1)
    for start in range(length - 1, -1, -1):
        passes, alive = 1.0, 1.0
        for place in range(num_guesses):
            stands = table[place, start + place] if start + place < length else 0.0
            passes += alive * (1 - stands) * left[start + place + 1]
            alive *= stands
        left[start] = passes + alive * left[start + num_guesses + 1]
    return float(left[0])
