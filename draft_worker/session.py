"""One stream on the draft worker: what is committed, and the programs that propose what may come next. No I/O."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from draft_worker.draft_ahead import DraftAhead, settle
from draft_worker.early_stop import SessionStop, StopMemory
from draft_worker.ids import ForeignIds
from draft_worker.model_drafter import NAME as MODEL
from draft_worker.model_drafter import ModelDrafter
from draft_worker.text_drafter import NAME as TEXT
from draft_worker.text_drafter import TextDrafter
from draft_worker.tree_drafter import NAME as TREE
from draft_worker.tree_drafter import TreeDrafter
from outrider.drafting.drafter import Drafter, proposed
from outrider.drafting.proposal import MAX_STEP_ROWS, Proposal
from outrider.drafting.ratio_stop import UNJUDGED, Judged, Price
from outrider.drafting.translation import Translator
from outrider.errors import InvalidArgument
from outrider.lm.interface import LoadedModel, Program, SequenceHandle
from outrider.sampling.grammar import GrammarVocabulary
from outrider.serving.checks import check_draft_opening, check_num_drafts
from outrider.serving.messages import AheadWish, Branches, DraftOpening, Header
from outrider.serving.session_log import SessionCounters, SessionLog

if TYPE_CHECKING:
    from outrider.settings import DraftWorkerSettings

MAX_TREE_WIDTH = 16
AHEAD_DRAFT_TOKENS = 8
"""Room is kept for so many drafts behind each branch; deeper ones are fewer."""
KNOWN_DRAFTERS = (MODEL, TEXT, TREE)


class DraftSession:
    """One epoch of one stream. Its programs run one at a time.

    drafters: names offered, the default first. translator: None where draft and target share their tokenizer.
    max_ahead_branches: outcomes of a round that are drafted ahead for; none where they do not share it. vocab_size: the
    target's. Raises InvalidArgument on an opening that cannot be served.
    """

    def __init__(
        self,
        opening: DraftOpening,
        *,
        vocab_size: int,
        context_length: int,
        drafters: Sequence[str] = (MODEL,),
        translator: Translator | None = None,
        max_draft_tokens: int = 16,
        width: int = 2,
        max_ahead_branches: int = 0,
        counters: SessionCounters | None = None,
        stops: StopMemory | None = None,
        grammars: GrammarVocabulary | None = None,
    ) -> None:
        check_draft_opening(opening, vocab_size=vocab_size)
        self.log = SessionLog(opening, vocab_size=vocab_size, grammars=grammars if translator is None else None)
        self.counters = counters or SessionCounters()
        self.sequence: SequenceHandle | None = None
        self.tenant = opening.tenant
        self._offered = tuple(drafters)
        self._default = self._checked("open.drafter", opening.drafter or self._offered[0])
        self._max_draft_tokens = max_draft_tokens
        self._max_q_entries = opening.max_q_entries
        self._context_length = context_length
        self._width = width
        self.stop = SessionStop(stops or StopMemory(), opening.tenant, opening.sampling)
        self._translator = translator
        self._drafters: dict[str, Drafter] = {}
        self._chain: Proposal | None = None
        """What is verified on top of the log, where it is a chain of the model drafter."""
        self._max_ahead_branches = max_ahead_branches if translator is None else 0
        self.entry_us = self.catch_up_us = 0
        """Of the message at hand: the latter see `Proposal`."""
        self.ahead = DraftAhead(self.log, opening.max_q_entries, self.counters, MODEL)

    @classmethod
    def of(
        cls,
        opening: DraftOpening,
        loaded: LoadedModel,
        settings: DraftWorkerSettings,
        *,
        counters: SessionCounters | None = None,
        stops: StopMemory | None = None,
        grammars: GrammarVocabulary | None = None,
    ) -> DraftSession:
        """As a worker with this model and these settings serves it."""
        return cls(
            opening,
            vocab_size=loaded.description.vocab_size,
            context_length=loaded.description.context_length,
            drafters=settings.drafters,
            translator=loaded.translator,
            max_draft_tokens=settings.max_draft_tokens,
            width=settings.tree_width,
            max_ahead_branches=settings.ahead_branches,
            counters=counters,
            stops=stops,
            grammars=grammars,
        )

    @property
    def reserved_length(self) -> int:
        """Cached tokens at most. 0: the stream began beyond the draft model's context, and gets no cache."""
        if len(self.log.ids) > self._context_length:
            return 0
        # a foreign tokenizer may need more tokens for the same text
        factor = 1 if self._translator is None else 2
        return min(factor * self.log.max_length - 1, self._context_length)

    @property
    def ahead_length(self) -> int:
        """Cached tokens at most with room for the tree of branches."""
        room = self._max_draft_tokens + self._max_ahead_branches * AHEAD_DRAFT_TOKENS if self._max_ahead_branches else 0
        return min(self.reserved_length + room, self._context_length) if self.reserved_length else 0

    def needs_sequence(self, drafter: str = "") -> bool:
        """Whether `sequence` must be set before this drafter (empty: the session's) can propose."""
        return self.sequence is None and (drafter or self._default) in (MODEL, TEXT, TREE) and self.reserved_length > 0

    def prefill(self) -> Program[None]:
        """Computes the prompt, or whatever else the session's own drafter prepares."""
        yield from self._drafter("").ingest()

    def advance(
        self,
        header: Header,
        committed_ids: Sequence[int],
        num_draft_tokens: int,
        drafter: str = "",
        tree_width: int = 0,
        price: Price | None = None,
        judged: Judged = UNJUDGED,
    ) -> Program[Proposal | None]:
        """Commits `committed_ids` and proposes what may follow. None: nothing was wanted, or the message is stale.

        `tree_width`: of the tree drafter, 0: the worker's own. `price`: what drafts must earn, None: chains are as long
        as wanted. `judged`: how the target found an earlier proposal. Raises OutOfStep, with nothing changed;
        InvalidArgument on an unknown drafter, too many drafts or too wide a tree.
        """
        if header.epoch < self.log.epoch:
            self.counters.num_stale_messages += 1
            return None
        check_num_drafts(num_draft_tokens, self._max_draft_tokens)
        if tree_width > MAX_TREE_WIDTH:
            raise InvalidArgument(
                f"advance.tree_width is {tree_width}, must be at most {MAX_TREE_WIDTH}", field="advance.tree_width"
            )
        chosen = self._drafter(drafter)
        if isinstance(chosen, TreeDrafter):
            chosen.width = tree_width or self._width
        self.log.catch_up(header, committed_ids, self.counters)
        self._chain = None
        self.stop.price = price
        self.stop.judge(judged)
        self.ahead.observe()
        if self.sequence is not None:
            settle(self.sequence, self.log.ids)
        if num_draft_tokens == 0:
            yield from chosen.ingest()
            return None
        self.counters.num_proposals += 1
        # The stream's last token needs no draft: the target yields one more than it accepts.
        num_useful = self.log.max_length - len(self.log.ids) - 1
        if num_useful < 1:
            return Proposal(drafter=chosen.name)
        num_draft_tokens = min(num_draft_tokens, num_useful)
        branch = self.ahead.take()
        if branch is None or chosen.name != MODEL:
            num_ingested_tokens = yield from self._catch_up(chosen)
            branch = yield from proposed(chosen.propose(num_draft_tokens), chosen.name)
            branch = dataclasses.replace(
                self.asked_for(branch), num_ingested_tokens=branch.num_ingested_tokens + num_ingested_tokens
            )
            if chosen.name != MODEL:
                return branch
            self.ahead.drafted(branch)
        self._chain = branch
        return branch

    def asked_for(self, drafted: Proposal) -> Proposal:
        """What the drafter made for the message at hand, with what that waited for beside the drafter."""
        return dataclasses.replace(drafted, queue_us=self.entry_us + drafted.queue_us, catch_up_us=self.catch_up_us)

    def _catch_up(self, drafter: Drafter) -> Program[int]:
        """Tokens computed."""
        sequence = self.sequence
        if sequence is None or len(self.log.ids) - len(sequence.token_ids) <= MAX_STEP_ROWS:
            return 0
        started_ns, before = time.perf_counter_ns(), len(sequence.token_ids)
        yield from drafter.ingest()
        self.catch_up_us += (time.perf_counter_ns() - started_ns) // 1000
        return len(sequence.token_ids) - before

    def check_ahead(self, wish: AheadWish) -> None:
        """Raises InvalidArgument where more is wanted than this worker drafts ahead, or its value is none."""
        if wish.num_branches > self._max_ahead_branches:
            raise InvalidArgument(
                f"advance.ahead_branches is {wish.num_branches}, this worker allows {self._max_ahead_branches}",
                field="advance.ahead_branches",
            )
        if wish.num_draft_tokens > self._max_draft_tokens:
            raise InvalidArgument(
                f"advance.ahead_draft_tokens is {wish.num_draft_tokens}, this worker allows {self._max_draft_tokens}",
                field="advance.ahead_draft_tokens",
            )
        if not 0 <= wish.value_ms < math.inf:
            raise InvalidArgument(
                f"advance.ahead_value_ms is {wish.value_ms}, must be 0 or more, and finite",
                field="advance.ahead_value_ms",
            )

    def draft_ahead(self, wish: AheadWish) -> Program[Branches | None]:
        """Proposals behind the likeliest outcomes of the round over what `advance` proposed; None: it was no chain of
        the model drafter, or there is no cache. Dropped when the next message comes; see `DraftAhead`."""
        if self.sequence is None or self._chain is None:
            return None
        return (yield from self.ahead.prepare(self.sequence, self._chain, wish))

    def _drafter(self, name: str) -> Drafter:
        name = self._checked("advance.drafter", name or self._default)
        if name not in self._drafters:
            self._drafters[name] = self._make(name)
        return self._drafters[name]

    def _make(self, name: str) -> Drafter:
        if name == TEXT:
            assert self._translator is not None, "checked at start: the text drafter translates"
            return TextDrafter(self.log, self.sequence, self._translator)
        ids = None if self._translator is None else ForeignIds(self.log, self._translator)
        if name == TREE:
            return TreeDrafter(self.log, self.sequence, self._max_q_entries, ids, width=self._width)
        return ModelDrafter(self.log, self.sequence, self._max_q_entries, ids, self.stop)

    def _checked(self, field: str, name: str) -> str:
        if name not in self._offered:
            raise InvalidArgument(
                f"{field} {name!r} is not offered here; choose one of {', '.join(self._offered)}", field=field
            )
        return name
