"""Drafting with heads: small networks that guess from the target's own states (`outrider/lm/heads/`).

Where the states come from is left open: beside the target they lie in its cache, elsewhere they are sent.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.drafting.chain import ChainDraft, drafting
from outrider.drafting.proposal import MAX_Q_ENTRIES, Proposal
from outrider.errors import Internal
from outrider.lm.interface import Program

if TYPE_CHECKING:
    from outrider.serving.session_log import SessionLog

PAIRS_AT_ONCE = 512
"""Of a long prompt a head reads so many in a round, which then stays plain: other streams wait meanwhile."""


class Features(Protocol):
    """The target's states at a session's committed tokens, from the first one on."""

    @property
    def num_rows(self) -> int:
        """Leading tokens whose states can be read now."""

    def rows(self, start: int, end: int) -> Any:
        """torch [end - start, W], of tokens start to end - 1."""


class _HeadDrafter:
    def __init__(self, name: str, head: Any, log: SessionLog, features: Features, max_q_entries: int) -> None:
        self.name = name
        self._head = head
        self._log = log
        self._features = features
        self._max_q_entries = max_q_entries
        self._draft_ids: np.ndarray | None = None if head.draft_ids is None else head.draft_ids.cpu().numpy()
        self._row = np.full(log.vocab_size, -np.inf, np.float32)

    def propose(self, num_draft_tokens: int) -> Program[Proposal]:
        """Empty while states of committed tokens are lacking. Ends after a stop token, unless that was sampled, and
        before a row that cannot be read; raises Internal where that is the first one."""
        started_ns = time.perf_counter_ns()
        num_behind = self._num_behind()
        with drafting(self._log, max_q_entries=self._max_q_entries) as chain:
            self._draft(chain, num_draft_tokens)
            proposal = chain.proposal(self.name)
        return dataclasses.replace(
            proposal,
            compute_us=(time.perf_counter_ns() - started_ns) // 1000,
            num_ingested_tokens=num_behind - self._num_behind(),
        )
        yield  # a program: it needs no pass of the target

    def ingest(self) -> Program[None]:
        """Reads states that are there."""
        return
        yield

    def _num_behind(self) -> int:
        """Committed tokens that the head has yet to read."""
        return 0

    def _draft(self, chain: ChainDraft, num_draft_tokens: int) -> None:
        raise NotImplementedError

    def _widen(self, logits: Any) -> np.ndarray:
        """float32[V], valid until the next call: -inf for what the head cannot say. logits: torch float32[V']."""
        values = logits.cpu().numpy()
        if self._draft_ids is None:
            return np.asarray(values[: self._log.vocab_size])
        self._row[self._draft_ids] = values
        return self._row


class EagleDrafter(_HeadDrafter):
    """A chain, each draft from the one before it. The head keeps a pair for each committed token but the last: its
    state, and the id of the next one."""

    def __init__(
        self, name: str, head: Any, log: SessionLog, features: Features, max_q_entries: int = MAX_Q_ENTRIES
    ) -> None:
        super().__init__(name, head, log, features, max_q_entries)
        self._context = head.new_context()

    def ingest(self) -> Program[None]:
        """Reads the pairs that are there but the last, whose row the next draft needs."""
        self._read(min(len(self._log.ids) - 2, self._features.num_rows))
        return
        yield

    def _num_behind(self) -> int:
        return len(self._log.ids) - 1 - int(self._context.length)

    def _draft(self, chain: ChainDraft, num_draft_tokens: int) -> None:
        num_pairs = len(self._log.ids) - 1
        if self._features.num_rows < num_pairs:
            return
        # Only reading the last pair gives its row: a context that has it already gives it up.
        self._context.truncate(min(self._context.length, num_pairs - 1))
        logits = self._read(num_pairs)
        if self._context.length < num_pairs:
            return
        while True:
            try:
                token_id = chain.draw(self._widen(logits))
                if len(chain.token_ids) == num_draft_tokens or chain.ends_certainly:
                    return
                logits = self._context.step(token_id)
            except Exception:
                # What was drawn stands: to drop it for what comes after it would select among draws.
                if not chain.token_ids:
                    raise
                return

    def _read(self, num_pairs: int) -> Any:
        """Up to so many pairs are kept then, as far as one round may read; the row after the last, if any was new."""
        import torch  # this module is free of it until a head is there

        start = self._context.length
        end = min(num_pairs, start + PAIRS_AT_ONCE)
        if end <= start:
            return None
        next_ids = torch.tensor(self._log.ids[start + 1 : end + 1], dtype=torch.int64)
        return self._context.extend(self._features.rows(start, end), next_ids)


class MedusaDrafter(_HeadDrafter):
    """A chain of guesses that know nothing of one another, all from the last cached token's state: one-hot, as guesses
    at such a distance are too vague to be drawn."""

    def __init__(self, name: str, head: Any, log: SessionLog, features: Features) -> None:
        super().__init__(name, head, log, features, MAX_Q_ENTRIES)

    def _draft(self, chain: ChainDraft, num_draft_tokens: int) -> None:
        place = len(self._log.ids) - 2
        if self._features.num_rows <= place:
            return
        (feature,) = self._features.rows(place, place + 1)
        for logits in self._head.logits(feature, num_draft_tokens):
            try:
                chain.choose(self._widen(logits))
            except Internal:
                if not chain.token_ids:
                    raise
                return
            if chain.ends_certainly:
                return
