"""Drafters inside a target worker: what one is, and what a session makes of them. They cost speed at worst.

They draft in the program of a round, right before its pass, so that no message is sent for a draft.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from outrider.drafting.drafter import Drafter, TreeDrafter, proposed
from outrider.drafting.proposal import EMPTY, Proposal, check
from outrider.errors import InvalidArgument
from outrider.lm.interface import Program, SequenceHandle
from outrider.lm.tree import are_ordered, is_chain
from outrider.server_info import TargetDrafter
from outrider.serving.session_log import SessionCounters, SessionLog

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Of one drafter in one stream, before it is asked no more."""


class HeldDrafter(Protocol):
    """A drafter that a worker holds for all its sessions."""

    @property
    def description(self) -> TargetDrafter:
        """As the worker tells it; `name` is what rounds ask for."""

    def for_session(self, log: SessionLog, sequence: SequenceHandle) -> Drafter:
        """One for a session. `sequence` is the target's own, and holds the committed ids but the last, or fewer."""


HeldDrafters = Mapping[str, HeldDrafter]
NO_DRAFTERS: HeldDrafters = MappingProxyType({})
"""By name, the default one first."""


@dataclass(frozen=True, slots=True)
class OwnDraft:
    """What a round drafted by itself. fault: why it did not; empty: it did, or nothing was wanted."""

    proposal: Proposal = EMPTY
    fault: str = ""
    draft_us: int = 0


NOTHING_DRAFTED = OwnDraft()


class OwnDrafts:
    """The drafters of one session. One that raises or drafts nonsense is dropped for the round, counted, and after
    `MAX_FAILURES` not asked again."""

    def __init__(self, held: HeldDrafters, log: SessionLog, max_draft_tokens: int, counters: SessionCounters) -> None:
        self._held = held
        self._log = log
        self._max_draft_tokens = max_draft_tokens
        self._counters = counters
        self._drafters: dict[str, Drafter] = {}
        self._num_failures: Counter[str] = Counter()
        self._closed = False

    def check(self, message: str, drafter: str, num_draft_tokens: int, shape: Sequence[int] = ()) -> None:
        """Raises InvalidArgument naming the field of `message` unless such a draft can be asked for. shape: of a tree,
        as `Proposal.parents`."""
        if drafter and drafter not in self._held:
            offered = f"offers {', '.join(self._held)}" if self._held else "has no drafters of its own"
            raise InvalidArgument(f"{message}.drafter {drafter!r}: this worker {offered}", field=f"{message}.drafter")
        if num_draft_tokens and not self._held:
            raise InvalidArgument(
                f"{message}.num_draft_tokens is {num_draft_tokens}, this worker has no drafters of its own: give 0",
                field=f"{message}.num_draft_tokens",
            )
        if num_draft_tokens > self._max_draft_tokens:
            raise InvalidArgument(
                f"{message}.num_draft_tokens is {num_draft_tokens}, the opening announced {self._max_draft_tokens}",
                field=f"{message}.num_draft_tokens",
            )
        if shape:
            self._check_shape(f"{message}.tree_parents", drafter or next(iter(self._held), ""), num_draft_tokens, shape)

    def _check_shape(self, field: str, drafter: str, num_draft_tokens: int, shape: Sequence[int]) -> None:
        if len(shape) != num_draft_tokens:
            raise InvalidArgument(
                f"{field} has {len(shape)} nodes, num_draft_tokens is {num_draft_tokens}: give as many", field=field
            )
        if not are_ordered(shape):
            raise InvalidArgument(f"{field}: a node's parent does not come before it", field=field)
        if not self._held[drafter].description.draws_trees:
            raise InvalidArgument(f"{field}: drafter {drafter} draws chains only, leave it empty", field=field)

    def close(self) -> None:
        """Drafters that hold something for the session give it back. Any thread; nothing is drafted afterwards."""
        self._closed = True
        for drafter in list(self._drafters.values()):
            _close(drafter)

    def draft(
        self, drafter: str, num_draft_tokens: int, sequence: SequenceHandle, shape: Sequence[int] = ()
    ) -> Program[OwnDraft]:
        """At most `num_draft_tokens` after the committed ids; fewer where the stream ends. Log and cache are afterwards
        as before, whatever the drafter did. shape: of a tree, cut to its first nodes where there is room for no more;
        empty: a chain."""
        num_useful = self._log.max_length - len(self._log.ids) - 1
        num_draft_tokens = min(num_draft_tokens, num_useful)
        if num_draft_tokens < 1 or self._closed:
            return NOTHING_DRAFTED
        name = drafter or next(iter(self._held))
        if self._num_failures[name] >= MAX_FAILURES:
            return OwnDraft(fault=f"drafter {name} failed {MAX_FAILURES} times and is set aside for this stream")
        started_ns = time.perf_counter_ns()
        history, cached_length = self._log.history, len(sequence.token_ids)
        num_output_tokens = history.num_output_tokens
        fault, proposal = "", EMPTY
        try:
            if name not in self._drafters:
                self._drafters[name] = self._held[name].for_session(self._log, sequence)
                if self._closed:  # meanwhile, by another thread, which may have missed this one
                    _close(self._drafters[name])
            program = _proposing(self._drafters[name], num_draft_tokens, shape[:num_draft_tokens])
            proposal = yield from proposed(program, name)
            check(proposal, vocab_size=self._log.vocab_size, max_draft_tokens=num_draft_tokens)
        except Exception as error:
            proposal, fault = EMPTY, f"drafter {name} failed: {type(error).__name__}: {error}"
            self._num_failures[name] += 1
            self._counters.num_failed_drafts += 1
            _close(self._drafters.pop(name, None))
            log.warning("%s", fault, exc_info=self._num_failures[name] == 1)
        history.pop(history.num_output_tokens - num_output_tokens)
        if len(sequence.token_ids) > cached_length:
            sequence.truncate(cached_length)
        draft_us = (time.perf_counter_ns() - started_ns) // 1000 - proposal.queue_us
        return OwnDraft(proposal, fault, max(0, draft_us))


def _proposing(drafter: Drafter, num_draft_tokens: int, shape: Sequence[int]) -> Program[Proposal]:
    if is_chain(shape):
        return drafter.propose(num_draft_tokens)
    assert isinstance(drafter, TreeDrafter), "its description says that it draws trees"
    return drafter.propose_tree(shape)


def _close(drafter: Drafter | None) -> None:
    close = getattr(drafter, "close", None)
    if close is not None:
        close()
