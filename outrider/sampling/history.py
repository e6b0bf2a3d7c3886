"""The tokens that penalties, masks and min_tokens look at, with cheap push and pop for drafted tokens.

Definitions are vLLM's and OpenAI's: the repetition penalty reads prompt and output, the presence and frequency
penalties the output only. https://docs.vllm.ai/en/latest/api/vllm/sampling_params/
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from outrider.sampling.grammar import GrammarState


class History:
    """Prompt and output so far. `push` and `pop` take constant time; after equal numbers of both nothing has changed.

    Each distinct token owns a slot in two parallel arrays, in order of first appearance. A slot that a push created is
    the newest one when that push is undone, so pop only ever drops the last slot.
    """

    __slots__ = ("_counts", "_ids", "_num_prompt_slots", "_output", "_slots", "grammar")

    def __init__(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int] = (), grammar: GrammarState | None = None
    ) -> None:
        """grammar: before the first token of the output; it goes along."""
        self.grammar = grammar
        prompt = list(dict.fromkeys(prompt_ids))
        self._num_prompt_slots = len(prompt)
        self._slots = {token_id: slot for slot, token_id in enumerate(prompt)}
        self._ids = np.zeros(len(prompt) + 64, dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(len(self._ids), dtype=np.int64)
        self._output: list[int] = []
        for token_id in output_ids:
            self.push(token_id)

    @property
    def num_output_tokens(self) -> int:
        """Tokens pushed and not popped."""
        return len(self._output)

    @property
    def output_ids(self) -> tuple[int, ...]:
        """The output so far."""
        return tuple(self._output)

    @property
    def last_output_id(self) -> int | None:
        """The newest output token; None before the first."""
        return self._output[-1] if self._output else None

    def output_ends_with(self, ids: list[int]) -> bool:
        """Whether the last output tokens are `ids`, at least one. An output that is shorter does not."""
        return self._output[-len(ids) :] == ids

    def push(self, token_id: int) -> None:
        """Appends an output token."""
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] += 1
        self._output.append(token_id)
        if self.grammar is not None:
            self.grammar.push(token_id)

    def pop(self, n: int = 1) -> None:
        """Takes back the last `n` output tokens; ValueError when there are fewer."""
        if not 0 <= n <= len(self._output):
            raise ValueError(f"cannot pop {n} of {len(self._output)} output tokens")
        if self.grammar is not None:
            self.grammar.pop(n)
        for _ in range(n):
            token_id = self._output.pop()
            slot = self._slots[token_id]
            self._counts[slot] -= 1
            if self._counts[slot] == 0 and slot >= self._num_prompt_slots:
                del self._slots[token_id]

    def seen(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64[n], counts int64[n]): each distinct token of prompt or output, and how often the output has it."""
        return self._ids[: len(self._slots)], self._counts[: len(self._slots)]
