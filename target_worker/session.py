"""One stream on the target: what is committed, and the programs that commit more. No I/O, no wire format.

A round is one transaction with one committed length. After every round the cache holds exactly the committed ids but
the last, whose logits the next round's first row gives.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from outrider.drafting.proposal import EMPTY, Proposal, ProposalFault, check
from outrider.drafting.tree import PREFIX
from outrider.errors import FailedPrecondition, Internal, InvalidArgument
from outrider.lm.interface import Forward, ForwardResult, Program, SequenceHandle
from outrider.sampling.logprobs import raw_logprobs
from outrider.sampling.params import Finish
from outrider.serving.checks import check_target_opening
from outrider.serving.messages import Header, OutOfStep, TargetOpening, TokenLogprobs, Verdict
from outrider.serving.session_log import SessionCounters, SessionLog
from target_worker.acceptance import Outcome, verify
from target_worker.device_decision import RoundDecision
from target_worker.tree_acceptance import TreeOutcome, verify_tree

MAX_PROMPT_LOGIT_BYTES = 32 << 20
MAX_PROMPT_LOGIT_ROWS = 256
"""Prompt logprobs are computed so many rows at a time: logits of a whole prompt would not fit in memory."""

TellPrompt = Callable[[int, TokenLogprobs], None]
"""(position of the first prompt token, logprobs of it and the next ones); on the thread that runs the program."""


class TargetSession:
    """One epoch of one stream. Its programs run one at a time; `sequence` must be set before the first.

    Raises InvalidArgument, naming the field, on an opening that cannot be served.
    """

    sequence: SequenceHandle

    def __init__(
        self,
        opening: TargetOpening,
        *,
        vocab_size: int,
        context_length: int,
        max_draft_tokens: int,
        counters: SessionCounters | None = None,
    ) -> None:
        check_target_opening(
            opening, vocab_size=vocab_size, context_length=context_length, max_draft_tokens=max_draft_tokens
        )
        self.log = SessionLog(opening, vocab_size=vocab_size, context_length=context_length)
        self.finish = Finish.NONE
        self.counters = counters or SessionCounters()
        self._max_draft_tokens = opening.max_draft_tokens
        self._num_prompt_tokens = len(opening.prompt_ids)
        self._num_top = opening.top_logprobs if opening.logprobs else None
        self._num_prompt_top = opening.prompt_logprobs
        self._last: Verdict | None = None
        self._credit_tokens = 0
        self._stop_requested = False

    @property
    def reserved_length(self) -> int:
        """Cached tokens at most: the stream's last token is never computed, and drafts stop short of it."""
        return self.log.max_length - 1

    def open(self, tell_prompt: TellPrompt | None = None) -> Program[Verdict]:
        """Prefill: the prompt's own pass yields the first token. Before it, `tell_prompt` gets the logprobs that the
        opening asks for."""
        if self._num_prompt_top is None or tell_prompt is None:
            return (yield from self._round(EMPTY, time.perf_counter_ns()))
        started_ns = time.perf_counter_ns()
        queue_us, compute_us = yield from self._compute_prompt(tell_prompt, self._num_prompt_top)
        sampling_us = max(0, (time.perf_counter_ns() - started_ns) // 1000 - queue_us - compute_us)
        verdict = yield from self._round(EMPTY, time.perf_counter_ns())
        self._last = dataclasses.replace(
            verdict,
            queue_us=verdict.queue_us + queue_us,
            compute_us=verdict.compute_us + compute_us,
            sampling_us=verdict.sampling_us + sampling_us,
        )
        return self._last

    def _compute_prompt(self, tell: TellPrompt, num_top: int) -> Program[tuple[int, int]]:
        """All prompt rows but the last, each with logits, so that none can be taken from a prefix cache. Returns time
        waited and computed, in us."""
        log, sequence = self.log, self.sequence
        last = self._num_prompt_tokens - 1
        num_rows = max(1, min(MAX_PROMPT_LOGIT_ROWS, MAX_PROMPT_LOGIT_BYTES // (4 * log.vocab_size)))
        sequence.truncate(0)
        sequence.committed_length = len(log.ids)
        queue_us = compute_us = 0
        if last == 0:
            tell(1, TokenLogprobs())
        for start in range(0, last, num_rows):
            end = min(start + num_rows, last)
            result = yield Forward(sequence, log.ids[start:end], num_logits=end - start)
            queue_us += result.queue_us
            compute_us += result.compute_us
            if not np.isfinite(result.logits.max(axis=1)).all():
                raise Internal(
                    f"the model's logits after prompt tokens {start} to {end - 1} hold NaN or +inf", reason="BAD_LOGITS"
                )
            tell(start + 1, _logprobs(result.logits, log.ids[start + 1 : end + 1], num_top))
        return queue_us, compute_us

    def verify(
        self, header: Header, committed_ids: Sequence[int] = (), proposal: Proposal = EMPTY, fault: str = ""
    ) -> Program[Verdict | None]:
        """Checks a proposal for the prefix that `header` names. None: the message is stale, and dropped.

        The header of the last verdict again gets that verdict again, whatever the proposal. `fault` says why the
        proposal could not even be read; a faulty one is dropped and the round is plain. Raises OutOfStep.
        """
        started_ns = time.perf_counter_ns()
        if self._is_stale(header):
            return None
        if self._last is not None and header == self._last.header:
            self.counters.num_repeated_verifies += 1
            return self._last
        self._catch_up(header, committed_ids)
        self.counters.num_verifies += 1
        try:
            if fault:
                raise ProposalFault(fault)
            check(proposal, vocab_size=self.log.vocab_size, max_draft_tokens=self._max_draft_tokens)
        except ProposalFault as reason:
            self.counters.num_faulty_proposals += 1
            return (yield from self._round(EMPTY, started_ns, fault=str(reason)))
        return (yield from self._round(self._shorten(proposal), started_ns))

    def decode(
        self, header: Header, committed_ids: Sequence[int], credit_tokens: int, emit: Callable[[Verdict], None]
    ) -> Program[None]:
        """Plain decoding: `emit` gets a verdict per token, on the thread that runs the program.

        Exactly one verdict, the last, has `decode_ended`: the one that uses up the credit, ends the stream, or is the
        first decided after `stop_decoding`.
        """
        if credit_tokens < 1:
            raise InvalidArgument(
                f"decode.credit_tokens is {credit_tokens}, must be at least 1", field="decode.credit_tokens"
            )
        # Here and not in the generator: a stop may come before the engine takes the program up.
        self._stop_requested = False
        return self._decode(header, committed_ids, credit_tokens, emit)

    def stop_decoding(self) -> None:
        """Ends a running `decode` with the token in flight. Any thread."""
        self._stop_requested = True

    def _decode(
        self, header: Header, committed_ids: Sequence[int], credit_tokens: int, emit: Callable[[Verdict], None]
    ) -> Program[None]:
        if self._is_stale(header):
            return
        self._catch_up(header, committed_ids)
        self._credit_tokens = credit_tokens
        while self._credit_tokens:
            verdict = yield from self._round(EMPTY, time.perf_counter_ns())
            self._credit_tokens = 0 if verdict.decode_ended else self._credit_tokens - 1
            emit(verdict)

    def _round(self, proposal: Proposal, started_ns: int, fault: str = "") -> Program[Verdict]:
        """One pass over (what is not cached yet, drafts), one decision, one committed length. Of a tree the cache keeps
        the path that stands.

        started_ns: when this round's work began here. All of it but the pass and the wait for it counts as sampling.
        """
        log, sequence = self.log, self.sequence
        header = log.header
        base, num_drafts = len(log.ids), len(proposal)
        not_cached = log.ids[len(sequence.token_ids) :]
        sequence.committed_length = base
        parents = () if proposal.is_chain else proposal.parents
        subject = (proposal, log.sampling, log.stopping, log.history, log.noise, log.prefix_hash, base)
        # Logprobs need the logits, and trees are decided on the host.
        decision = None if parents or self._num_top is not None else RoundDecision(*subject)
        rows = [*not_cached, *proposal.token_ids]
        result = yield Forward(sequence, rows, num_logits=num_drafts + 1, parents=parents, decision=decision)

        if decision is not None and result.decided is not None:
            outcome = decision.outcome(result.decided[0])
        else:
            decide: Callable[..., Outcome] = verify_tree if parents else verify
            outcome = decide(result.logits, *subject)
        path_rows = result.logits
        if isinstance(outcome, TreeOutcome):
            sequence.keep_path(outcome.path)
            path_rows = result.logits[[0, *(node + 1 for node in outcome.path)]]
        num_committed, self.finish = self._where_it_ends(outcome.token_ids)
        committed_ids = outcome.token_ids[:num_committed]
        for token_id in committed_ids:
            log.append(token_id)
        sequence.truncate(len(log.ids) - 1)
        sequence.committed_length = len(log.ids) - 1
        assert sequence.token_ids[base - 1 :] == log.ids[base - 1 : -1], "the cache left the committed prefix"

        logprobs = TokenLogprobs()
        if self._num_top is not None:
            logprobs = _logprobs(path_rows, committed_ids, self._num_top)
        worked_us = (time.perf_counter_ns() - started_ns) // 1000
        self._last = Verdict(
            header=header,
            committed_ids=committed_ids,
            origins=outcome.origins[:num_committed],
            num_accepted=min(outcome.num_accepted, num_committed),
            num_draft_tokens=num_drafts,
            soft_acceptances=outcome.soft_acceptances,
            finish=self.finish,
            matched_stop_token_id=committed_ids[-1] if self.finish is Finish.STOP else None,
            logprobs=logprobs,
            proposal_fault=fault,
            queue_us=result.queue_us,
            compute_us=result.compute_us,
            sampling_us=max(0, worked_us - result.queue_us - result.compute_us),
            num_batch_rows=result.num_batch_rows,
            decode_ended=bool(self._credit_tokens) and self._decode_ends(),
            num_cached_tokens=min(result.num_cached_tokens, self._num_prompt_tokens),
            row_choices=_row_choices(decision, result) if num_drafts else (),
        )
        return self._last

    def _where_it_ends(self, token_ids: tuple[int, ...]) -> tuple[int, Finish]:
        """How many of these tokens the stream takes, in order, and why no more."""
        room = self.log.max_length - len(self.log.ids)
        for count, token_id in enumerate(token_ids, start=1):
            if token_id in self.log.stopping.stop_token_ids:
                return count, Finish.STOP
            if count == room:
                return count, Finish.LENGTH
        return len(token_ids), Finish.NONE

    def _decode_ends(self) -> bool:
        return self._credit_tokens == 1 or self.finish is not Finish.NONE or self._stop_requested

    def _shorten(self, proposal: Proposal) -> Proposal:
        """Cuts drafts that the stream has no room for: the last token that it can take needs no draft, nor does any
        after a drafted stop token. What is cut is known from the drafts before it, so every rule stays exact."""
        room = max(0, self.log.max_length - len(self.log.ids) - 1)
        goes_on = {PREFIX}
        kept: list[int] = []
        for node, parent in enumerate(proposal.shape):
            if len(kept) == room:
                break
            if parent in goes_on:
                kept.append(node)
                if proposal.token_ids[node] not in self.log.stopping.stop_token_ids:
                    goes_on.add(node)
        return proposal if len(kept) == len(proposal) else proposal.kept(kept)

    def _is_stale(self, header: Header) -> bool:
        if header.epoch >= self.log.epoch:
            return False
        self.counters.num_stale_messages += 1
        return True

    def _catch_up(self, header: Header, committed_ids: Sequence[int]) -> None:
        try:
            self.log.catch_up(header, committed_ids)
        except OutOfStep:
            self.counters.num_out_of_step += 1
            raise
        ended = self.finish is not Finish.NONE or len(self.log.ids) >= self.log.max_length
        if ended or self._ends_with_stop_token():
            raise FailedPrecondition(f"the stream ended at {len(self.log.ids)} tokens", reason="STREAM_ENDED")

    def _ends_with_stop_token(self) -> bool:
        """Only after a gap was filled with ids that already end the text."""
        return self.log.history.num_output_tokens > 0 and self.log.ids[-1] in self.log.stopping.stop_token_ids


def _row_choices(decision: RoundDecision | None, result: ForwardResult) -> tuple[int, ...]:
    if decision is not None and result.decided is not None:
        return tuple(decision.row_choices(result.decided[0]))
    return tuple(map(int, result.logits.argmax(axis=1)))


def _logprobs(logits: np.ndarray, token_ids: Sequence[int], num_top: int) -> TokenLogprobs:
    """Of token i in row i."""
    rows = [raw_logprobs(logits[i], token_id, num_top) for i, token_id in enumerate(token_ids)]
    return TokenLogprobs(
        token_logprobs=tuple(logprob for logprob, _, _ in rows),
        top_ids=tuple(tuple(int(i) for i in ids) for _, ids, _ in rows),
        top_logprobs=tuple(tuple(float(x) for x in logprobs) for _, _, logprobs in rows),
    )
