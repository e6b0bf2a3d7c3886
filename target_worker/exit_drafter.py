"""Self-speculation: the target's own first E layers, then an exit adapter, guess; the round's pass runs the rest.

What the first layers computed for a draft is kept for the pass that checks it, so they run once per drafted token.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.drafting.chain import drafting, length_in_step
from outrider.drafting.proposal import Proposal
from outrider.lm.interface import Forward, Program, SequenceHandle
from outrider.server_info import TargetDrafter
from outrider.serving.session_log import SessionLog

if TYPE_CHECKING:
    from outrider.lm.exit_block import ExitHead

KIND = "exit"
ROWS_AT_ONCE = 512
"""Of a long prompt the adapter reads so many in a round, which then stays plain: other streams wait meanwhile."""


class HeldExit:
    """One adapter for all sessions. vocab_size: the target's."""

    def __init__(self, name: str, source: str, head: ExitHead, vocab_size: int) -> None:
        self._head, self._vocab_size = head, vocab_size
        self.exit_layer = head.exit_layer
        self.description = TargetDrafter(
            name, KIND, source=source, num_parameters=head.num_parameters, weight_bytes=head.weight_bytes
        )

    def told(self, measured: dict[str, Any]) -> None:
        """Fields of the description."""
        self.description = dataclasses.replace(self.description, **measured)

    def for_session(self, log: SessionLog, sequence: SequenceHandle) -> ExitDrafter:
        return ExitDrafter(self.description.name, self._head, log, sequence, self._vocab_size)


class ExitDrafter:
    """Keeps the adapter's keys and values of the committed ids, lazily: what is missing is read from the target's
    cache when drafts are wanted."""

    def __init__(self, name: str, head: ExitHead, log: SessionLog, sequence: SequenceHandle, vocab_size: int) -> None:
        self.name = name
        self._log, self._sequence = log, sequence
        self._exit_layer = head.exit_layer
        self._context = head.new_context()
        self._context_ids: list[int] = []
        """Those whose keys and values the adapter has: committed ones, then drafts of the last proposal."""
        self._num_in_step = 0
        """Leading context ids that are known to be committed ones."""
        self._draft_ids = head.draft_ids.numpy()
        self._row = np.full(vocab_size, -np.inf, np.float32)

    def propose(self, num_draft_tokens: int) -> Program[Proposal]:
        """Ends after a drafted stop token, and before a row that cannot be had; raises where that is the first one.
        Empty while the adapter reads a long prompt, in parts."""
        log, sequence = self._log, self._sequence
        self._fall_in_step()
        rows = log.ids[len(sequence.token_ids) :]
        queue_us = 0
        with drafting(log) as chain:
            while len(chain.token_ids) < num_draft_tokens and not chain.ends_text:
                result = yield Forward(sequence, rows, num_logits=0, num_layers=self._exit_layer)
                queue_us += result.queue_us
                try:
                    logits = self._read([*log.ids, *chain.token_ids])
                    if logits is None:
                        break
                    rows = [chain.draw(logits)]
                except Exception:
                    # What was drawn stands: to drop it for what comes after it would select among draws.
                    if not chain.token_ids:
                        raise
                    break
            return dataclasses.replace(chain.proposal(self.name), queue_us=queue_us)

    def ingest(self) -> Program[None]:
        """Nothing to prepare: the target computes what is committed."""
        return
        yield

    def _fall_in_step(self) -> None:
        """Forgets drafts that were not committed, and the last committed id: only a pass over it gives its logits."""
        own = self._context_ids
        self._num_in_step = length_in_step(own, self._log.ids, self._num_in_step)
        self._context.truncate(self._num_in_step)
        del own[self._num_in_step :]

    def _read(self, ids: list[int]) -> np.ndarray | None:
        """float32[V] after `ids`, the last of which the first layers have just computed: -inf for what the adapter
        cannot say; valid until the next call. None: there is more to read than one round may."""
        sequence: Any = self._sequence
        start = len(self._context_ids)
        end = min(len(ids), start + ROWS_AT_ONCE)
        logits = self._context.extend(sequence.features(start, end, (self._exit_layer,)))
        self._context_ids += ids[start:end]
        if end < len(ids):
            return None
        self._row[self._draft_ids] = logits.cpu().numpy()
        return self._row
