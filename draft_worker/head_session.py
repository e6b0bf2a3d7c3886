"""One stream of a draft worker that has a head: what is committed, states that came, and the head's own context.

What is lost of the latter two, or never came, is asked for again and costs drafts until it is there. No I/O.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

from draft_worker.head_memory import HeadMemory
from outrider.drafting.drafter import proposed
from outrider.drafting.heads import PAIRS_AT_ONCE, EagleDrafter
from outrider.drafting.proposal import Proposal
from outrider.drafting.received_features import ReceivedFeatures
from outrider.errors import InvalidArgument
from outrider.lm.head_model import HeadModel
from outrider.lm.interface import Program
from outrider.sampling.grammar import GrammarVocabulary
from outrider.serving.checks import check_draft_opening, check_num_drafts
from outrider.serving.messages import DraftOpening, FeatureRows, Header
from outrider.serving.session_log import SessionCounters, SessionLog

log = logging.getLogger(__name__)


class HeadSession:
    """One epoch of one stream. Its programs run one at a time, on the engine's thread, and need no pass.

    features: what the opening must name, the head's states. memory: shared by all sessions. Raises InvalidArgument,
    naming the field, on an opening that cannot be served, one of another target among them.
    """

    def __init__(
        self,
        opening: DraftOpening,
        model: HeadModel,
        *,
        name: str,
        features: str,
        memory: HeadMemory,
        max_draft_tokens: int = 16,
        counters: SessionCounters | None = None,
        grammars: GrammarVocabulary | None = None,
    ) -> None:
        check_draft_opening(opening, vocab_size=model.vocab_size)
        _check(opening, name, features, model)
        self.log = SessionLog(opening, vocab_size=model.vocab_size, grammars=grammars)
        self.counters = counters or SessionCounters()
        self.closed = False
        self.entry_us = 0
        self._name = name
        self._model = model
        self._memory = memory
        self._max_draft_tokens = max_draft_tokens
        self._max_q_entries = opening.max_q_entries
        self._num_faults = 0
        self._is_too_long = False
        self._forget()

    @property
    def features_end(self) -> int | None:
        """States of tokens before this one have come. None: none are wanted, since there is no room for them."""
        return None if self._is_too_long else self._rows.num_rows

    def take(self, features: FeatureRows) -> Program[bool]:
        """States that came, and reading some of them; whether there is more to read. Those that cannot be taken are
        counted, and will be asked for again."""
        num_bytes = self._num_bytes(self._head.context.length) + len(features.rows)
        if not self._has_room(num_bytes):
            return False
        if features.start <= self._rows.num_rows:  # else it lacks those before, since it was evicted
            try:
                self._rows.append(features.start, features.rows)
            except InvalidArgument as fault:
                self.counters.num_faulty_features += 1
                self._num_faults += 1
                (log.warning if self._num_faults == 1 else log.debug)("%s: %s", self._name, fault.message)
        return (yield from self.read())

    def read(self) -> Program[bool]:
        """Some of the states that are there, as far as their next tokens are known; whether there is more."""
        num_pairs = min(len(self.log.ids) - 2, self._rows.num_rows)
        context = self._head.context
        at_once = min(num_pairs, context.length + PAIRS_AT_ONCE)
        if context.length < at_once and self._has_room(self._num_bytes(at_once)):
            yield from self._make_drafter().ingest()
            self._settle()
        return not self.closed and self._head.context.length < num_pairs and not self._is_too_long

    def advance(
        self, header: Header, committed_ids: Sequence[int], num_draft_tokens: int, drafter: str = ""
    ) -> Program[Proposal | None]:
        """Commits `committed_ids` and proposes what may follow: nothing while states of them are lacking. None: nothing
        was wanted, or the message is stale.

        Raises OutOfStep, with nothing changed; InvalidArgument on an unknown drafter or too many drafts.
        """
        if header.epoch < self.log.epoch:
            self.counters.num_stale_messages += 1
            return None
        if drafter not in ("", self._name):
            raise InvalidArgument(
                f"advance.drafter {drafter!r} is not offered here; choose {self._name}", field="advance.drafter"
            )
        check_num_drafts(num_draft_tokens, self._max_draft_tokens)
        self.log.catch_up(header, committed_ids, self.counters)
        if not num_draft_tokens:
            yield from self.read()
            return None
        self.counters.num_proposals += 1
        # The stream's last token needs no draft: the target yields one more than it accepts.
        num_useful = min(num_draft_tokens, self.log.max_length - len(self.log.ids) - 1)
        num_pairs = len(self.log.ids) - 1
        if num_useful < 1 or self._rows.num_rows < num_pairs:
            return Proposal(drafter=self._name)
        if not self._has_room(self._num_bytes(num_pairs)):
            return Proposal(drafter=self._name)
        proposal = yield from proposed(self._make_drafter().propose(num_useful), self._name)
        self._settle()
        return dataclasses.replace(proposal, queue_us=self.entry_us + proposal.queue_us)

    def evict(self) -> None:
        """Loses all states that came and all that was made of them."""
        self._forget()

    def close(self) -> None:
        """Gives back what it holds. Any thread."""
        self.closed = True
        self._memory.release(self)

    def _forget(self) -> None:
        self._rows = ReceivedFeatures(self._model.head.feature_width, self.log.max_length)
        self._head = _WatchedHead(self._model.head)
        self._drafter: EagleDrafter | None = None

    def _make_drafter(self) -> EagleDrafter:
        if self._drafter is None:
            self._drafter = EagleDrafter(self._name, self._head, self.log, self._rows, self._max_q_entries)
        return self._drafter

    def _has_room(self, num_bytes: int) -> bool:
        if self._is_too_long or self.closed:
            return False
        if not self._memory.claim(self, num_bytes):
            self._is_too_long = True
            self._forget()
            self._memory.settle(self, 0)
            log.warning("%s: a text of %d tokens needs more memory than all heads have", self._name, len(self.log.ids))
            return False
        return True

    def _num_bytes(self, num_pairs: int) -> int:
        """Held at most once so many pairs were read."""
        return self._model.context_bytes(num_pairs + self._max_draft_tokens) + self._rows.num_bytes

    def _settle(self) -> None:
        # the last pair is read again by the next proposal: only so its row is had
        self._rows.forget_before(self._head.context.length - 1)
        self._memory.settle(self, self._num_bytes(self._head.context.length))


class _WatchedHead:
    """A head with one context, to be looked at from outside."""

    def __init__(self, head: Any) -> None:
        self.draft_ids = head.draft_ids
        self.context = head.new_context()

    def new_context(self) -> Any:
        return self.context


def _check(opening: DraftOpening, name: str, features: str, model: HeadModel) -> None:
    if opening.drafter not in ("", name):
        raise InvalidArgument(
            f"open.drafter {opening.drafter!r} is not offered here; choose {name}", field="open.drafter"
        )
    if opening.features != features:
        raise InvalidArgument(
            f"open.features is {opening.features!r}, the {name} head here reads {features!r}", field="open.features"
        )
    if opening.target_fingerprint not in model.target_fingerprints:
        raise InvalidArgument(
            f"open.target_fingerprint is {opening.target_fingerprint[:16] or '(none)'}..., the head here was made for "
            "another model, or for other weights of it: its states mean nothing to it",
            field="open.target_fingerprint",
            reason="WRONG_TARGET",
        )
