"""Tokens that may not come next: everything outside `allowed_token_ids`, the ends of `bad_words`, stop ids before
`min_tokens`, what a grammar does not let follow. Masked logits are -inf, so a masked token has probability 0 under
every rule, on draft and target alike.

A bad word is a sequence of ids, as vLLM defines it: its last id is masked where the output ends with the ids before it.
Only the output is looked at, drafts before the position included; the prompt may hold what it likes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from outrider.errors import DeadEnd
from outrider.sampling.history import History

if TYPE_CHECKING:
    from outrider.sampling.params import SamplingParams, StoppingParams


class TokenSet(tuple[int, ...]):
    """Ids, ascending and unique; empty stands for the whole vocabulary."""

    @cached_property
    def array(self) -> np.ndarray:
        """int64[n]."""
        return np.array(self, dtype=np.int64)

    @cached_property
    def ids(self) -> frozenset[int]:
        """For questions about one id."""
        return frozenset(self)


class BadWords(tuple[tuple[int, ...], ...]):
    """Sequences of ids, none of them empty."""

    @cached_property
    def always_banned(self) -> list[int]:
        """Words of one id: banned everywhere."""
        return sorted({word[0] for word in self if len(word) == 1})

    @cached_property
    def _by_last_but_one(self) -> dict[int, list[tuple[list[int], int]]]:
        """(ids before the last, last id) of the longer words, by the id that the output must end with."""
        words = defaultdict(list)
        for word in self:
            if len(word) > 1:
                words[word[-2]].append((list(word[:-1]), word[-1]))
        return dict(words)

    def banned_after(self, history: History) -> list[int]:
        """Ids that would complete a word."""
        last = history.last_output_id
        if last is None or last not in self._by_last_but_one:
            return self.always_banned
        completed = [end for before, end in self._by_last_but_one[last] if history.output_ends_with(before)]
        return self.always_banned + completed


ALL_TOKENS = TokenSet()
NO_BAD_WORDS = BadWords()


def needs_masks(params: SamplingParams, stopping: StoppingParams, history: History) -> bool:
    """Whether `apply_masks` could change anything."""
    masks_always = params.allowed_token_ids or params.bad_words or history.grammar is not None
    return bool(masks_always) or _masks_stops(stopping, history)


def apply_masks(logits: np.ndarray, params: SamplingParams, stopping: StoppingParams, history: History) -> None:
    """Sets masked entries of float32[V] to -inf, in place."""
    if params.allowed_token_ids:
        allowed = params.allowed_token_ids.array
        kept = logits[allowed]
        logits.fill(-np.inf)
        logits[allowed] = kept
    if params.bad_words:
        logits[params.bad_words.banned_after(history)] = -np.inf
    if _masks_stops(stopping, history):
        logits[list(stopping.stop_token_ids)] = -np.inf
    if history.grammar is not None:
        may_follow = history.grammar.allowed(stopping.stop_token_ids)
        if may_follow is not None:
            logits[~may_follow[: len(logits)]] = -np.inf


def dead_end(params: SamplingParams, stopping: StoppingParams, history: History) -> DeadEnd:
    """For the client of a request whose masks leave this place no token: why, and which field is to be changed."""
    wanted = history.grammar.allowed(()) if history.grammar is not None else None
    stops = [i for i in sorted(stopping.stop_token_ids) if wanted is not None and i < len(wanted) and wanted[i]]
    if stops:
        field = "stopping.stop_token_ids"
        why = f"structured_output goes on with token {stops[0]}, which is among {field} and may follow a complete text "
        why += "only: let another token end the text, or give another form"
    elif wanted is not None:
        field = "structured_output"
        why = f"{field} goes on with nothing that this model can write: give another form"
    else:
        masks = {
            "sampling.allowed_token_ids": params.allowed_token_ids,
            "sampling.bad_words": params.bad_words,
            "stopping.min_tokens": stopping.min_tokens,
        }
        given = [name for name, is_set in masks.items() if is_set]
        field, why = given[0], f"{' and '.join(given)} rule out all that may follow: loosen one of them"
    return DeadEnd(
        f"no token is left after logit_bias, penalties and masks, at output token {history.num_output_tokens}: {why}",
        field=field,
        reason="NO_TOKEN_LEFT",
    )


def is_masked(token_id: int, params: SamplingParams, stopping: StoppingParams, history: History) -> bool:
    """Whether this id may not come next."""
    if params.allowed_token_ids and token_id not in params.allowed_token_ids.ids:
        return True
    if params.bad_words and token_id in params.bad_words.banned_after(history):
        return True
    return _masks_stops(stopping, history) and token_id in stopping.stop_token_ids


def num_allowed(token_ids: Sequence[int], params: SamplingParams, stopping: StoppingParams, history: History) -> int:
    """How many of these guesses may follow the output: none from a masked id on, none after a stop token.

    history: as before when it returns.
    """
    count = 0
    for token_id in token_ids:
        if is_masked(token_id, params, stopping, history):
            break
        history.push(token_id)
        count += 1
        if token_id in stopping.stop_token_ids:
            break
    history.pop(count)
    return count


def leaves_a_token(params: SamplingParams, stopping: StoppingParams, vocab_size: int) -> bool:
    """Whether some id is never masked, whatever the output: else a stream, or a draft of one, could have nowhere to go.

    Stricter than need be for bad words that never come true together, so that the answer depends on the request alone.
    """
    maskable = {word[-1] for word in params.bad_words}
    if stopping.min_tokens:
        maskable |= stopping.stop_token_ids
    if params.allowed_token_ids:
        return any(token_id not in maskable for token_id in params.allowed_token_ids)
    return len(maskable) < vocab_size


def _masks_stops(stopping: StoppingParams, history: History) -> bool:
    return history.num_output_tokens < stopping.min_tokens and bool(stopping.stop_token_ids)
