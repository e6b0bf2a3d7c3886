"""The lookup drafter of one session: n-gram continuations as one-hot drafts."""

from __future__ import annotations

import time

from outrider.drafting.lookup import NgramIndex
from outrider.drafting.proposal import Proposal
from outrider.lm.interface import Program
from outrider.sampling.masks import is_masked
from outrider.serving.session_log import SessionLog

NAME = "lookup"


class LookupDrafter:
    """Needs no model, no cache and no context limit."""

    name = NAME

    def __init__(self, log: SessionLog, min_ngram: int, max_ngram: int) -> None:
        self._log = log
        self._index = NgramIndex(min_ngram, max_ngram)

    def propose(self, num_draft_tokens: int) -> Program[Proposal]:
        """Ends after a drafted stop token, and before one that the stream's masks rule out."""
        started_ns = time.perf_counter_ns()
        log = self._log
        drafts: list[int] = []
        for token_id in self._index.continuation(log.ids, num_draft_tokens):
            if is_masked(token_id, log.sampling, log.stopping, log.history):
                break
            drafts.append(token_id)
            log.history.push(token_id)
            if token_id in log.stopping.stop_token_ids:
                break
        log.history.pop(len(drafts))
        compute_us = (time.perf_counter_ns() - started_ns) // 1000
        return Proposal(token_ids=tuple(drafts), drafter=NAME, compute_us=compute_us)
        yield  # a program, though one that asks for no forward

    def ingest(self) -> Program[None]:
        """Extends the index."""
        self._index.extend(self._log.ids)
        return
        yield
