"""Drafting with heads: small networks that guess from the target's own states (`outrider/lm/heads/`).

Where the states come from is left open: beside the target they lie in its cache, elsewhere they are sent.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.drafting.chain import ChainDraft, drafting
from outrider.drafting.grown_tree import GrownTree, grow, planned
from outrider.drafting.proposal import MAX_Q_ENTRIES, Proposal
from outrider.drafting.tree import PREFIX, children, depths, within
from outrider.drafting.tree_draw import Child, certain_children, draw_children
from outrider.errors import Internal
from outrider.lm.interface import Program
from outrider.sampling.distribution import processed_logits

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
        return self._timed(lambda: self._chain(num_draft_tokens))
        yield  # a program: it needs no pass of the target

    def propose_tree(self, shape: Sequence[int]) -> Program[Proposal]:
        """As `propose`, but a tree: of this shape, `Proposal.parents`, where drafts are sampled; where they need not be
        of as many nodes and as deep, or where that is better. Every level is one run of the head."""
        return self._timed(lambda: self._tree(shape))
        yield

    def ingest(self) -> Program[None]:
        """Reads states that are there."""
        return
        yield

    def _num_behind(self) -> int:
        """Committed tokens that the head has yet to read."""
        return 0

    def _draft(self, chain: ChainDraft, num_draft_tokens: int) -> None:
        raise NotImplementedError

    def _grow(self, grown: GrownTree, shape: Sequence[int]) -> list[int]:
        """The nodes to propose, in order."""
        raise NotImplementedError

    def _chain(self, num_draft_tokens: int) -> Proposal:
        with drafting(self._log, max_q_entries=self._max_q_entries) as chain:
            self._draft(chain, num_draft_tokens)
            return chain.proposal(self.name)

    def _tree(self, shape: Sequence[int]) -> Proposal:
        grown = GrownTree(self._log, self._max_q_entries)
        return grown.proposal(self._grow(grown, shape), self.name)

    def _timed(self, propose: Callable[[], Proposal]) -> Proposal:
        started_ns = time.perf_counter_ns()
        num_behind = self._num_behind()
        return dataclasses.replace(
            propose(),
            compute_us=(time.perf_counter_ns() - started_ns) // 1000,
            num_ingested_tokens=num_behind - self._num_behind(),
        )

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
        logits = self._root()
        while logits is not None:
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

    def _grow(self, grown: GrownTree, shape: Sequence[int]) -> list[int]:
        """Where drafts are decided by a match, the likeliest paths, at most as deep as the shape."""
        root = self._root()
        if root is None:
            return []
        numbers = {PREFIX: PREFIX}
        """Of nodes that the head has run, their number there."""

        def rows(nodes: Sequence[int]) -> Iterator[np.ndarray]:
            parents = [numbers[grown.nodes[node].parent] for node in nodes]
            logits = self._context.branch([grown.nodes[node].child.token_id for node in nodes], parents)
            numbers.update({node: len(numbers) - 1 + place for place, node in enumerate(nodes)})
            return (self._widen(row) for row in logits.cpu())

        return grow(grown, shape, self._widen(root), rows)

    def _root(self) -> Any:
        """The row after the committed ids; None while states of them are lacking or there is more to read."""
        num_pairs = len(self._log.ids) - 1
        if self._features.num_rows < num_pairs:
            return None
        # Only reading the last pair gives its row: a context that has it already gives it up.
        self._context.truncate(min(self._context.length, num_pairs - 1))
        logits = self._read(num_pairs)
        return logits if self._context.length == num_pairs else None

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
        for logits in self._rows(num_draft_tokens):
            try:
                chain.choose(self._widen(logits))
            except Internal:
                if not chain.token_ids:
                    raise
                return
            if chain.ends_certainly:
                return

    def _grow(self, grown: GrownTree, shape: Sequence[int]) -> list[int]:
        """Of exactly this shape: the r-th child of a node at depth d is the r-th guess of head d, whatever its parent
        is. So the guesses of a depth are read once, as if nothing but the committed ids came before them."""
        log = self._log
        rows = self._rows(max(depths(shape), default=0))
        shape = within(shape, len(rows))
        width = max(map(len, children(shape)))
        guesses: dict[int, list[Child]] = {}

        def guessed(node: int, row: np.ndarray, num_children: int) -> list[Child]:
            depth = 0 if node == PREFIX else grown.nodes[node].depth
            if depth not in guesses:
                guesses[depth] = self._guesses(row, len(log.ids) + depth, width)
            return guesses[depth][:num_children]

        def below(nodes: Sequence[int]) -> Iterator[np.ndarray]:
            return (self._widen(rows[grown.nodes[node].depth]) for node in nodes)

        return planned(grown, shape, self._widen(rows[0]), below, guessed) if shape else []

    def _guesses(self, row: np.ndarray, position: int, num_guesses: int) -> list[Child]:
        """The likeliest ids of a row, one-hot under every rule."""
        log = self._log
        if log.sampling.decides_by_match:
            return draw_children(
                row, log.sampling, log.stopping, log.history, log.noise, log.prefix_hash, position, num_guesses
            )
        return certain_children(processed_logits(row, log.sampling, log.stopping, log.history), num_guesses)

    def _rows(self, num_heads: int) -> Any:
        """torch float32[num_heads, V'], fewer where there are fewer heads; none while the state is lacking."""
        place = len(self._log.ids) - 2
        if self._features.num_rows <= place or not num_heads:
            return ()
        (feature,) = self._features.rows(place, place + 1)
        return self._head.logits(feature, num_heads)
