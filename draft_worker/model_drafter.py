"""The model drafter of one session: samples from the draft model with the stream's own parameters.

Every draft is a function of the exact prefix (drafts before it included), the parameters and the seed, so that a
session that fell behind, or a fresh one, proposes the same.
"""

from __future__ import annotations

import time

import numpy as np

from draft_worker.device_decision import DraftDecision
from draft_worker.early_stop import SessionStop
from draft_worker.ids import DraftIds, OwnIds
from outrider.drafting.chain import draw_token, length_in_step
from outrider.drafting.confidence import matched_confidence, sampled_confidence
from outrider.drafting.proposal import Proposal, SparseQ
from outrider.errors import Internal
from outrider.lm.interface import Forward, Program, SequenceHandle
from outrider.sampling.noise import Role, extend_hash
from outrider.sampling.sparse_q import draw_draft
from outrider.serving.session_log import SessionLog

NAME = "model"


class ModelDrafter:
    """Keeps a cache of the draft model in step with the committed ids, lazily: it is mended when tokens are wanted.

    sequence: None when the stream began beyond the draft model's context; proposals are then empty.
    ids: the committed text in the draft model's own ids; None: they are the target's. stop: where chains end by
    themselves; None: nowhere.
    """

    name = NAME

    def __init__(
        self,
        log: SessionLog,
        sequence: SequenceHandle | None,
        max_q_entries: int,
        ids: DraftIds | None = None,
        stop: SessionStop | None = None,
    ) -> None:
        self._log = log
        self._ids = ids or OwnIds(log)
        self._sequence = sequence
        self._max_q_entries = max_q_entries
        self._stop = stop
        self._num_in_step = 0
        """Leading cached tokens that are known to be committed ones."""

    def propose(self, num_draft_tokens: int) -> Program[Proposal]:
        """Ends where the draft model's context ends, where the next draft is not worth its price, and after a drafted
        stop token unless that token was sampled: a proposal that comes sooner for what was drawn is late less often,
        and lateness must not select among draws. Whoever can be told of each draft is, before the next row: so neither
        the end of a chain by its price nor the death of this worker selects.

        A row that cannot be read ends it too, before its draft: that row depends on the drafts before alone. Raises
        Internal when it is the first one.
        """
        started_ns = time.perf_counter_ns()
        log, sequence = self._log, self._sequence
        num_draft_tokens = min(num_draft_tokens, self._room())
        if sequence is None or num_draft_tokens < 1:
            return Proposal(drafter=NAME)
        rows = self._not_cached(sequence)
        num_ingested_tokens = len(rows)
        drafts: list[int] = []
        q: list[SparseQ | None] = []
        queue_us = 0
        prefix_hash = log.prefix_hash
        stop = self._stop
        chain = stop.chain(NAME) if stop is not None else None

        def drafted(start: int) -> Proposal:
            """The drafts from this one on, and what all of them took so far."""
            elapsed_us = (time.perf_counter_ns() - started_ns) // 1000
            return Proposal(
                token_ids=tuple(drafts[start:]),
                q=tuple(q[start:]) if q[0] is not None else (),
                drafter=NAME,
                queue_us=queue_us,
                # passes, sampling, and the engine's own work between the passes
                compute_us=max(0, elapsed_us - queue_us),
                num_ingested_tokens=num_ingested_tokens,
            )

        try:
            ended = False
            while not ended and (chain is None or chain.wants_row()):
                if stop is not None and drafts and q[0] is not None:
                    stop.tell(drafted)
                position = len(log.ids) + len(drafts)
                decision = self._decision(position)
                asked_ns = time.perf_counter_ns()
                num_chained = num_draft_tokens - len(drafts) - 1 if decision is not None and decision.can_chain else 0
                result = yield Forward(sequence, rows, num_logits=1, decision=decision, num_chained=num_chained)
                queue_us += result.queue_us
                self._had_row(bool(drafts) and not num_chained, time.perf_counter_ns() - asked_ns)
                if result.decided is not None and log.sampling.decides_by_match:
                    chain = None  # nobody was told how sure the model is
                for line in [None] if result.decided is None else result.decided:
                    try:
                        if line is None or decision is None:
                            logits = self._ids.widen(result.logits[-1])
                            token_id, token_q = self._draw(logits, prefix_hash, position=position)
                        else:
                            token_id, token_q = self._read(decision, line, prefix_hash)
                        # of a sampled draft its q alone may be looked at
                        if chain is not None and not chain.wants_draft(
                            self._matched_confidence(token_id, result.logits[-1])
                            if token_q is None
                            else sampled_confidence(token_q)
                        ):
                            ended = True
                            break
                    except Internal:
                        if not drafts:
                            raise
                        ended = True
                        break
                    drafts.append(token_id)
                    q.append(token_q)
                    log.history.push(token_id)
                    prefix_hash = extend_hash(prefix_hash, token_id)
                    ends_text = token_q is None and token_id in log.stopping.stop_token_ids
                    ended = len(drafts) == num_draft_tokens or ends_text
                    if ended:
                        break
                rows = [self._ids.to_draft(drafts[-1])] if drafts else []
        finally:
            log.history.pop(len(drafts))
        if stop is not None and chain is not None:
            stop.proposed(log.prefix_hash, NAME, chain)
        return drafted(0)

    def ingest(self) -> Program[None]:
        """Computes all committed ids but the last, whose logits the next proposal needs."""
        sequence = self._sequence
        if sequence is None:
            return
        rows = self._not_cached(sequence)[:-1][: sequence.max_length - len(sequence.token_ids)]
        if rows:
            yield Forward(sequence, rows, num_logits=0)
            self._num_in_step = min(len(sequence.token_ids), self._ids.num_final())

    def _decision(self, position: int) -> DraftDecision | None:
        """None: the draft's ids are not the target's, and only the host translates."""
        if not isinstance(self._ids, OwnIds):
            return None
        log = self._log
        return DraftDecision(log.sampling, log.stopping, log.history, log.noise, position, self._max_q_entries)

    def _read(self, decision: DraftDecision, line: np.ndarray, prefix_hash: int) -> tuple[int, SparseQ | None]:
        """As `_draw`, of what the model decided."""
        token_id, q = decision.read(line)
        if token_id is not None:
            return token_id, None
        assert q is not None
        return draw_draft(q, self._log.noise.integer16(prefix_hash, Role.DRAFT)), q

    def _draw(self, logits: np.ndarray, prefix_hash: int, position: int) -> tuple[int, SparseQ | None]:
        """One draft and its q; None where the rule is a match of ids, which needs none."""
        log = self._log
        return draw_token(
            logits, log.sampling, log.stopping, log.history, log.noise, prefix_hash, position, self._max_q_entries
        )

    def _had_row(self, is_further: bool, elapsed_ns: int) -> None:
        """is_further: of a draft behind another one, a single row."""
        if self._stop is not None:
            self._stop.has_row()
            if is_further:
                self._stop.drafted(elapsed_ns / 1e6)

    def _matched_confidence(self, token_id: int, row: np.ndarray) -> float:
        log = self._log
        return matched_confidence(token_id, self._ids.widen(row), log.sampling, log.stopping, log.history)

    def _room(self) -> int:
        """Drafts that the cache has room for. The last one is not computed itself, so one more than tokens fit."""
        if self._sequence is None or not self._ids.ends_whole():
            return 0
        return self._sequence.max_length - len(self._ids.committed()) + 1

    def _not_cached(self, sequence: SequenceHandle) -> list[int]:
        """Forgets cached drafts that were not committed; gives the committed ids left to compute, at least the last."""
        committed = self._ids.committed()
        length = length_in_step(sequence.token_ids, committed, self._num_in_step)
        sequence.truncate(length)
        assert sequence.token_ids[self._num_in_step :] == committed[self._num_in_step : length], "cache left the prefix"
        self._num_in_step = min(length, self._ids.num_final())
        sequence.committed_length = self._ids.num_final()
        return committed[length:]
