"""A session's truth on a worker: prompt, committed ids, parameters, noise; and whether a message fits it.

The coordinator owns the log; this is the worker's copy. Nothing here waits or computes logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outrider.errors import InvalidArgument
from outrider.sampling.history import History
from outrider.sampling.noise import Noise, extend_hash, hash_ids
from outrider.serving.checks import check_ids
from outrider.serving.messages import Header, Opening, OutOfStep

if TYPE_CHECKING:
    from outrider.sampling.grammar import GrammarState, GrammarVocabulary


@dataclass(slots=True)
class SessionCounters:
    """What a worker's sessions counted since it started."""

    num_stale_messages: int = 0
    num_out_of_step: int = 0
    num_repeated_verifies: int = 0
    num_faulty_proposals: int = 0
    num_verifies: int = 0
    num_proposals: int = 0
    num_failed_drafts: int = 0
    num_faulty_features: int = 0
    num_dropped_verifies: int = 0
    """Pipelined ones that counted on another verdict."""
    num_ahead_draft_tokens: int = 0
    """Drafted ahead of verdicts, used or not."""


class SessionLog:
    """Committed ids (prompt first) of one epoch, with what follows from them: rolling hash and penalty history.

    max_length: committed tokens at most, prompt included; the stream ends there.
    """

    def __init__(
        self,
        opening: Opening,
        *,
        vocab_size: int,
        context_length: int | None = None,
        grammars: GrammarVocabulary | None = None,
    ) -> None:
        """grammars: None: nothing is known of what tokens spell. Raises InvalidArgument on a grammar that cannot be
        followed, and on committed ids that do not follow it."""
        self.epoch = opening.epoch
        self.tenant = opening.tenant
        self.sampling = opening.sampling
        self.stopping = opening.stopping
        self.noise = Noise(opening.sampling.seed, opening.sampling.choice)
        self.vocab_size = vocab_size
        self.ids: list[int] = [*opening.prompt_ids, *opening.committed_ids]
        self.prefix_hash = hash_ids(self.ids)
        self.history = History(opening.prompt_ids, opening.committed_ids, _grammar_state(opening, grammars))
        if self.history.grammar is not None and not self.history.grammar.follows:
            raise InvalidArgument(
                "open.committed_ids are no beginning of a text of the wanted form (open.sampling.grammar)",
                field="open.committed_ids",
            )
        self.max_length = len(opening.prompt_ids) + opening.stopping.max_tokens
        if context_length is not None:
            self.max_length = min(self.max_length, context_length)

    @property
    def header(self) -> Header:
        """The state as messages name it."""
        return Header(self.epoch, len(self.ids), self.prefix_hash)

    def append(self, token_id: int) -> None:
        """Commits one token."""
        self.ids.append(token_id)
        self.prefix_hash = extend_hash(self.prefix_hash, token_id)
        self.history.push(token_id)

    def catch_up(self, header: Header, committed_ids: Sequence[int], counters: SessionCounters) -> None:
        """Commits what `header` has beyond this log, from the end of `committed_ids`.

        Raises OutOfStep, counted and nothing changed, when these ids do not fill the gap or lead to another hash;
        InvalidArgument on ids that no vocabulary of ours has, or past the stream's last token.
        """
        num_missing = header.base_length - len(self.ids)
        fills_gap = header.epoch == self.epoch and 0 <= num_missing <= len(committed_ids)
        missing = committed_ids[len(committed_ids) - num_missing :] if fills_gap else ()
        if not fills_gap or hash_ids(missing, self.prefix_hash) != header.prefix_hash:
            counters.num_out_of_step += 1
            raise OutOfStep(self.header)
        check_ids("committed_ids", missing, self.vocab_size)
        if header.base_length > self.max_length:
            raise InvalidArgument(
                f"header.base_length is {header.base_length}, the stream ends at {self.max_length} tokens",
                field="header.base_length",
            )
        for token_id in missing:
            self.append(token_id)


def _grammar_state(opening: Opening, grammars: GrammarVocabulary | None) -> GrammarState | None:
    grammar = opening.sampling.grammar
    if grammar is None or grammars is None:
        return None
    try:
        return grammars.state(grammar)
    except ValueError as error:
        raise InvalidArgument(f"open.sampling.grammar: {error}", field="open.sampling.grammar") from None
