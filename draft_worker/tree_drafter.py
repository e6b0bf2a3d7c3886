"""The tree drafter of one session: the model drafter's chain, with second and third guesses beside each of its tokens.

The trunk is what a chain would be; the others are leaves, which the draft model never computes. So a level costs one
pass, as a chain's token does, and where the trunk is wrong a leaf may be right.
"""

from __future__ import annotations

import time

from draft_worker.ids import DraftIds
from draft_worker.model_drafter import ModelDrafter
from outrider.drafting.proposal import Proposal
from outrider.drafting.tree import PREFIX
from outrider.drafting.tree_draw import Child, draw_children
from outrider.errors import Internal
from outrider.lm.interface import Forward, Program, SequenceHandle
from outrider.sampling.noise import extend_hash
from outrider.serving.session_log import SessionLog

NAME = "tree"


class TreeDrafter(ModelDrafter):
    """width: children of each trunk node, at least 1 and counted among the drafts that are asked for. It may be set
    between proposals: no draw depends on it."""

    name = NAME

    def __init__(
        self,
        log: SessionLog,
        sequence: SequenceHandle | None,
        max_q_entries: int,
        ids: DraftIds | None = None,
        *,
        width: int,
    ) -> None:
        super().__init__(log, sequence, max_q_entries, ids)
        self.width = width

    def propose(self, num_draft_tokens: int) -> Program[Proposal]:
        """Level by level, as many levels as `num_draft_tokens` fill or the draft model's context allows. Where each
        ends otherwise is as in `ModelDrafter`: the number of passes never follows from what was sampled."""
        started_ns = time.perf_counter_ns()
        log, sequence = self._log, self._sequence
        num_levels = min(-(-num_draft_tokens // self.width), self._room())
        if sequence is None or num_levels < 1:
            return Proposal(drafter=NAME)
        rows = self._not_cached(sequence)
        num_ingested_tokens = len(rows)
        drafts: list[Child] = []
        parents: list[int] = []
        trunk, num_pushed, queue_us = PREFIX, 0, 0
        prefix_hash = log.prefix_hash
        try:
            for level in range(num_levels):
                result = yield Forward(sequence, rows, num_logits=1)
                queue_us += result.queue_us
                try:
                    children = draw_children(
                        self._ids.widen(result.logits[-1]), log.sampling, log.stopping, log.history, log.noise,
                        prefix_hash, len(log.ids) + level, min(self.width, num_draft_tokens - level * self.width),
                        max_entries=self._max_q_entries,
                    )  # fmt: skip
                except Internal:
                    if not drafts:
                        raise
                    break
                parents += [trunk] * len(children)
                trunk = len(drafts)
                drafts += children
                token_id, q = children[0].token_id, children[0].q
                log.history.push(token_id)
                num_pushed += 1
                prefix_hash = extend_hash(prefix_hash, token_id)
                if q is None and token_id in log.stopping.stop_token_ids:
                    break
                rows = [self._ids.to_draft(token_id)]
        finally:
            log.history.pop(num_pushed)
        return Proposal(
            token_ids=tuple(child.token_id for child in drafts),
            q=tuple(child.q for child in drafts) if drafts[0].q is not None else (),
            drafter=NAME,
            queue_us=queue_us,
            compute_us=max(0, (time.perf_counter_ns() - started_ns) // 1000 - queue_us),
            num_ingested_tokens=num_ingested_tokens,
            parents=tuple(parents) if self.width > 1 else (),
        )
