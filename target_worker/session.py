"""One stream on the target: what is committed, and the programs that commit more. No I/O, no wire format.

A round is one transaction with one committed length. After every round the cache holds exactly the committed ids but
the last, whose logits the next round's first row gives.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from outrider.drafting.proposal import EMPTY, Proposal, ProposalFault, check
from outrider.drafting.tree import PREFIX
from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.lm.interface import Forward, ForwardResult, Program, SequenceHandle
from outrider.sampling.grammar import GrammarVocabulary
from outrider.sampling.params import Finish
from outrider.serving.checks import check_target_opening
from outrider.serving.messages import NO_FEATURES, Header, TargetOpening, Verdict
from outrider.serving.session_log import SessionCounters, SessionLog
from outrider.serving.token_logprobs import NO_LOGPROBS
from target_worker.acceptance import Outcome, verify
from target_worker.device_decision import RoundDecision
from target_worker.drafters import NO_DRAFTERS, NOTHING_DRAFTED, HeldDrafters, OwnDraft, OwnDrafts
from target_worker.losslessness import NO_METER, LosslessnessMeter, MeteredStream
from target_worker.prompt_pass import TellPrompt, compute_prompt, logprobs
from target_worker.sent_features import SentFeatures
from target_worker.tree_acceptance import TreeOutcome, verify_tree

INGESTED_ROWS = 128
"""Of a prefix that nobody waits for, computed in one pass: a question that comes meanwhile waits no longer."""


class TargetSession:
    """One epoch of one stream. Its programs run one at a time; `sequence` must be set before the first.

    drafters: those that this worker has of its own. states: those that the model keeps. meter: of the worker, for
    streams with fresh seeds. grammars: what its tokens spell. Raises InvalidArgument, naming the field, on an opening
    that cannot be served.
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
        drafters: HeldDrafters = NO_DRAFTERS,
        states: Sequence[int] = (),
        meter: LosslessnessMeter = NO_METER,
        grammars: GrammarVocabulary | None = None,
    ) -> None:
        check_target_opening(
            opening, vocab_size=vocab_size, context_length=context_length, max_draft_tokens=max_draft_tokens
        )
        self.log = SessionLog(opening, vocab_size=vocab_size, context_length=context_length, grammars=grammars)
        self.finish = Finish.NONE
        self.entry_us = 0
        self.counters = counters or SessionCounters()
        self._max_draft_tokens = opening.max_draft_tokens
        self._own = OwnDrafts(drafters, self.log, opening.max_draft_tokens, self.counters)
        self._sent = SentFeatures(opening, states)
        self._metered = MeteredStream(meter if opening.has_fresh_seed else NO_METER, opening.sampling, opening.stopping)
        self._num_prompt_tokens = len(opening.prompt_ids)
        self._num_top = opening.top_logprobs if opening.logprobs else None
        self._num_prompt_top = opening.prompt_logprobs
        self._tells_drafted = opening.tells_drafted
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
        queue_us, compute_us = yield from compute_prompt(
            self.log, self.sequence, self._num_prompt_tokens, tell_prompt, self._num_prompt_top
        )
        sampling_us = max(0, (time.perf_counter_ns() - started_ns) // 1000 - queue_us - compute_us)
        verdict = yield from self._round(EMPTY, time.perf_counter_ns())
        self._last = dataclasses.replace(
            verdict,
            queue_us=verdict.queue_us + queue_us,
            compute_us=verdict.compute_us + compute_us,
            sampling_us=verdict.sampling_us + sampling_us,
        )
        return self._last

    def verify(
        self,
        header: Header,
        committed_ids: Sequence[int] = (),
        proposal: Proposal = EMPTY,
        fault: str = "",
        *,
        drafter: str = "",
        num_draft_tokens: int = 0,
        tree_parents: Sequence[int] = (),
        features_start: int | None = None,
        expected_token_id: int | None = None,
        tell_prompt: TellPrompt | None = None,
    ) -> Program[Verdict | None]:
        """Checks a proposal for the prefix that `header` names. None: the message is stale, and dropped.

        The header of the last verdict again gets that verdict again, whatever the proposal. `fault` says why the
        proposal could not even be read; a faulty one is dropped and the round is plain. Without drafts the worker's own
        `drafter` (empty: its first) makes `num_draft_tokens`, as a tree of shape `tree_parents` if one is given.
        `features_start`: the verdict carries features from there on, sent before or not. `expected_token_id`: of a
        pipelined verify, the last committed id that it counts on: it is stale, and counted, unless the log ends so now.
        `tell_prompt`: as in `open`, of an opening that was deferred.
        Raises OutOfStep; InvalidArgument where there is no such drafter or tree of it, so many drafts were not
        announced, or no features.
        """
        started_ns = time.perf_counter_ns()
        self._own.check("verify", drafter, num_draft_tokens, tree_parents)
        self._sent.check("verify", features_start)
        if self.drops(header, expected_token_id):
            return None
        if self._is_stale(header):
            return None
        if self._last is not None and header == self._last.header:
            self.counters.num_repeated_verifies += 1
            return self._last
        self._catch_up(header, committed_ids)
        self._sent.send_from(features_start)
        if self._last is None and self._num_prompt_top is not None and tell_prompt is not None:
            return (yield from self.open(tell_prompt))
        self.counters.num_verifies += 1
        try:
            if fault:
                raise ProposalFault(fault)
            check(proposal, vocab_size=self.log.vocab_size, max_draft_tokens=self._max_draft_tokens)
        except ProposalFault as reason:
            self.counters.num_faulty_proposals += 1
            return (yield from self._round(EMPTY, started_ns, fault=str(reason)))
        if proposal or not num_draft_tokens:
            return (yield from self._round(self._shorten(proposal), started_ns))
        return (yield from self._own_round(drafter, num_draft_tokens, tree_parents))

    def drops(self, header: Header, expected_token_id: int | None) -> bool:
        """Whether a pipelined verify, see `verify`, counts on another verdict than came before it; counted. Between
        programs."""
        log = self.log
        if expected_token_id is None:
            return False
        if header == log.header and log.ids[-1] == expected_token_id and self.finish is Finish.NONE:
            return False
        self.counters.num_dropped_verifies += 1
        return True

    def decode(
        self,
        header: Header,
        committed_ids: Sequence[int],
        credit_tokens: int,
        emit: Callable[[Verdict], None],
        *,
        drafter: str = "",
        num_draft_tokens: int = 0,
        tree_parents: Sequence[int] = (),
        features_start: int | None = None,
    ) -> Program[None]:
        """Rounds without a message for each, plain or with drafts of the worker's own as in `verify`: `emit` gets a
        verdict per round, on the thread that runs the program. `features_start`: of the first verdict, as in `verify`.

        Exactly one verdict, the last, has `decode_ended`: the one that uses up the credit, ends the stream, or is the
        first decided after `stop_decoding`. No more tokens are committed than the credit has.
        """
        if credit_tokens < 1:
            raise InvalidArgument(
                f"decode.credit_tokens is {credit_tokens}, must be at least 1", field="decode.credit_tokens"
            )
        self._own.check("decode", drafter, num_draft_tokens, tree_parents)
        self._sent.check("decode", features_start)
        # Here and not in the generator: a stop may come before the engine takes the program up.
        self._stop_requested = False
        asked = (drafter, num_draft_tokens, tree_parents)
        return self._decode(header, committed_ids, credit_tokens, emit, asked, features_start)

    def ingest(self, header: Header, committed_ids: Sequence[int] = ()) -> Program[Header]:
        """Computes the prefix that `header` names, but its last token, whenever there is nothing else to compute. A
        session that is opened with this prefix finds it in the cache. Raises OutOfStep."""
        if not self._is_stale(header):
            self._catch_up(header, committed_ids)
            yield from self._compute_prefix(INGESTED_ROWS, background=True)
        return self.log.header

    def close(self) -> None:
        """What its drafters hold is given back; the sequence is its maker's to close. Any thread."""
        self._own.close()

    def stop_decoding(self) -> None:
        """Ends a running `decode` with the token in flight. Any thread."""
        self._stop_requested = True

    def _decode(
        self,
        header: Header,
        committed_ids: Sequence[int],
        credit_tokens: int,
        emit: Callable[[Verdict], None],
        asked: tuple[str, int, Sequence[int]],
        features_start: int | None,
    ) -> Program[None]:
        drafter, num_draft_tokens, tree_parents = asked
        if self._is_stale(header):
            return
        self._catch_up(header, committed_ids)
        self._sent.send_from(features_start)
        self._credit_tokens = credit_tokens
        while self._credit_tokens:
            # A round commits one token more than it has drafts.
            num_wanted = min(num_draft_tokens, self._credit_tokens - 1)
            verdict = yield from self._own_round(drafter, num_wanted, tree_parents)
            self._credit_tokens = 0 if verdict.decode_ended else self._credit_tokens - len(verdict.committed_ids)
            emit(verdict)

    def _own_round(self, drafter: str, num_draft_tokens: int, tree_parents: Sequence[int]) -> Program[Verdict]:
        """A round over drafts of the worker's own; a plain one where nothing is wanted or drafted."""
        if not num_draft_tokens:
            return (yield from self._round(EMPTY, time.perf_counter_ns()))
        if not self.sequence.token_ids:  # the opening was deferred: drafters read what an earlier pass left
            yield from self._compute_prefix(len(self.log.ids))
        own = yield from self._own.draft(drafter, num_draft_tokens, self.sequence, tree_parents)
        own = dataclasses.replace(own, proposal=self._shorten(own.proposal))
        return (yield from self._round(own.proposal, time.perf_counter_ns(), own.fault, own))

    def _compute_prefix(self, num_rows: int, *, background: bool = False) -> Program[None]:
        """All committed tokens but the last, so many rows at a time."""
        sequence, ids = self.sequence, self.log.ids
        while len(sequence.token_ids) < len(ids) - 1:
            start = len(sequence.token_ids)
            end = min(start + num_rows, len(ids) - 1)
            sequence.committed_length = end
            yield Forward(sequence, ids[start:end], num_logits=0, background=background)

    def _round(
        self, proposal: Proposal, started_ns: int, fault: str = "", own: OwnDraft = NOTHING_DRAFTED
    ) -> Program[Verdict]:
        """One pass over (what is not cached yet, drafts), one decision, one committed length. Of a tree the cache keeps
        the path that stands.

        own: set where the drafts are the worker's own.
        started_ns: when this round's work began here. All of it but the pass and the wait for it counts as sampling.
        """
        log, sequence = self.log, self.sequence
        header = log.header
        base, num_drafts = len(log.ids), len(proposal)
        not_cached = log.ids[len(sequence.token_ids) :]
        sequence.committed_length = base
        parents = () if proposal.is_chain else proposal.parents
        subject = (proposal, log.sampling, log.stopping, log.history, log.noise, log.prefix_hash, base)
        is_metered = self._metered.begin_round(proposal.drafter)
        # Logprobs and the meter need the logits, and trees are decided on the host.
        decision = None if parents or self._num_top is not None or is_metered else RoundDecision(*subject)
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
        if is_metered:
            self._metered.decided(path_rows, committed_ids, log.history)
        for token_id in committed_ids:
            log.append(token_id)
        sequence.truncate(len(log.ids) - 1)
        sequence.committed_length = len(log.ids) - 1
        assert sequence.token_ids[base - 1 :] == log.ids[base - 1 : -1], "the cache left the committed prefix"

        features = NO_FEATURES if self.finish is not Finish.NONE else self._sent.take(sequence, len(log.ids) - 1)
        told_logprobs = NO_LOGPROBS
        if self._num_top is not None:
            told_logprobs = logprobs(path_rows, committed_ids, self._num_top)
        worked_us = (time.perf_counter_ns() - started_ns) // 1000
        entry_us, self.entry_us = self.entry_us, 0
        self._last = Verdict(
            header=header,
            committed_ids=committed_ids,
            origins=outcome.origins[:num_committed],
            num_accepted=min(outcome.num_accepted, num_committed),
            num_draft_tokens=num_drafts,
            soft_acceptances=outcome.soft_acceptances,
            finish=self.finish,
            matched_stop_token_id=committed_ids[-1] if self.finish is Finish.STOP else None,
            logprobs=told_logprobs,
            proposal_fault=fault,
            queue_us=entry_us + result.queue_us,
            compute_us=result.compute_us,
            sampling_us=max(0, worked_us - result.queue_us - result.compute_us),
            num_batch_rows=result.num_batch_rows,
            decode_ended=bool(self._credit_tokens) and self._decode_ends(num_committed),
            num_cached_tokens=min(result.num_cached_tokens, self._num_prompt_tokens),
            row_choices=_row_choices(decision, result) if num_drafts else (),
            drafted_ids=own.proposal.token_ids,
            drafted_parents=() if own.proposal.is_chain else own.proposal.parents,
            drafted_q=own.proposal.q if self._tells_drafted else None,
            draft_us=own.draft_us,
            features=features,
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

    def _decode_ends(self, num_committed: int) -> bool:
        return self._credit_tokens <= num_committed or self.finish is not Finish.NONE or self._stop_requested

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
        self.log.catch_up(header, committed_ids, self.counters)
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
