"""Drafts by text: the draft model writes greedily in its own ids, and its words are spelt in the target's, one-hot.

For models with different tokenizers. Whatever the spelling, a one-hot guess is exact under every rule.
"""

from __future__ import annotations

import time
from typing import Any

from draft_worker.ids import ForeignIds
from draft_worker.model_drafter import ModelDrafter
from outrider.drafting.proposal import Proposal
from outrider.drafting.translation import Translator
from outrider.errors import Internal
from outrider.lm.interface import Forward, Program, SequenceHandle
from outrider.sampling.masks import num_allowed
from outrider.serving.session_log import SessionLog

NAME = "text"


class TextDrafter(ModelDrafter):
    """`num_draft_tokens` tokens of the draft model, and at most as many of the target's."""

    name = NAME

    def __init__(self, log: SessionLog, sequence: SequenceHandle | None, translator: Translator) -> None:
        super().__init__(log, sequence, max_q_entries=1, ids=ForeignIds(log, translator))
        self._translator = translator

    def propose(self, num_draft_tokens: int) -> Program[Proposal]:
        """Ends where the draft model's context ends, after a drafted stop token, and before one that the stream's masks
        rule out. Raises Internal when the first row cannot be read."""
        started_ns = time.perf_counter_ns()
        sequence = self._sequence
        num_own = min(num_draft_tokens, self._room())
        if sequence is None or num_own < 1:
            return Proposal(drafter=NAME)
        rows = self._not_cached(sequence)
        num_ingested_tokens, queue_us = len(rows), 0
        own: list[int] = []
        while True:
            result = yield Forward(sequence, rows, num_logits=1)
            queue_us += result.queue_us
            token_id = _likeliest(result.logits[-1])
            if token_id is None and not own:
                raise Internal("the draft model's logits hold NaN or +inf", reason="BAD_LOGITS")
            if token_id is None:
                break
            own.append(token_id)
            if len(own) == num_own or token_id in self._translator.draft.special_ids:
                break
            rows = [token_id]
        log = self._log
        drafts = self._translator.spell(log.ids, own)[:num_draft_tokens]
        drafts = drafts[: num_allowed(drafts, log.sampling, log.stopping, log.history)]
        return Proposal(
            token_ids=tuple(drafts),
            drafter=NAME,
            queue_us=queue_us,
            compute_us=max(0, (time.perf_counter_ns() - started_ns) // 1000 - queue_us),
            num_ingested_tokens=num_ingested_tokens,
        )


def _likeliest(logits: Any) -> int | None:
    """Lowest id of the highest logit, float32[V]; None for a row that holds NaN or +inf, or nothing finite."""
    best = int(logits.argmax())
    return best if abs(float(logits[best])) < float("inf") else None
