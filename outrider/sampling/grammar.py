"""Texts of a given form: which tokens may come next. The grammars themselves are llguidance's.

A state follows the output token by token, back and forth, so that a drafted place is masked as its own prefix wants it.
A text may end, with one of its stop tokens, where the grammar accepts what is there and nowhere else; where nothing
else can follow, it has to. A token that the grammar does not allow leads nowhere: nothing is masked behind it, for its
own probability is 0 and nobody gets there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from outrider.sampling.params import Grammar, GrammarKind
from outrider.toy_text import toy_char, toy_id

JSON_DEFAULTS: Any = {"whitespace_pattern": " ?"}
"""One blank at most between the parts, or a small model could fill its answer with them; `x-guidance` in a schema
decides otherwise."""
MAX_GRAMMAR_CHARS = 65_536


class GrammarVocabulary:
    """What a model's tokens spell. Read when a grammar first asks, which takes up to a second; any thread may."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        """tokenizer_json: of a `tokenizers` tokenizer; empty: the toy alphabet. vocab_size: the model's."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = [token_id for token_id in eos_token_ids if token_id < vocab_size]
        self._tokens: LLTokenizer | None = None
        self._lock = Lock()

    def state(self, grammar: Grammar) -> GrammarState:
        """Before the first token. Raises ValueError saying what is wrong with the grammar."""
        tokens = self._read()
        matcher = LLMatcher(tokens, _compiled(grammar), log_level=0)
        if matcher.is_error():
            raise ValueError(_on_one_line(matcher.get_error()))
        ends = [token_id for token_id in tokens.eos_tokens if token_id < self._vocab_size]
        return GrammarState(matcher, self._vocab_size, ends)

    def _read(self) -> LLTokenizer:
        with self._lock:
            if self._tokens is None:
                if self._tokenizer_json:
                    text = self._tokenizer_json.decode()
                    self._tokens = LLTokenizer(text, eos_token=self._eos_token_ids or None)
                else:
                    self._tokens = LLTokenizer(TokenizerWrapper(_ToyTokens(self._vocab_size)))
            return self._tokens


class GrammarState:
    """After the tokens pushed and not popped."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._num_pushed = 0
        self._num_followed = 0
        """Of those pushed the first ones, which the grammar allows."""

    def push(self, token_id: int) -> None:
        """Appends a token, allowed or not."""
        if self._num_followed == self._num_pushed and token_id not in self._ends:
            self._num_followed += self._matcher.try_consume_tokens([token_id])
        self._num_pushed += 1

    def pop(self, n: int = 1) -> None:
        """Takes the last `n` tokens back."""
        self._num_pushed -= n
        num_back = max(0, self._num_followed - self._num_pushed)
        if num_back:
            self._matcher.rollback(num_back)
            self._num_followed -= num_back

    def allowed(self, stop_token_ids: Collection[int]) -> np.ndarray | None:
        """bool[V]: what may come next; None: nothing is known, behind a token that was not allowed."""
        if self._num_followed < self._num_pushed:
            return None
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        found = np.zeros(self._vocab_size, dtype=bool)
        known = bits[: self._vocab_size]
        found[: len(known)] = known
        found[self._ends] = False
        found[list(stop_token_ids)] = self._matcher.is_accepting()
        return found


def check_grammar(grammar: Grammar) -> None:
    """Raises ValueError saying what is wrong with it, as far as no tokenizer is needed to know."""
    problem = LLMatcher.validate_grammar(_compiled(grammar))
    if problem and not problem.startswith("WARNING"):
        raise ValueError(_on_one_line(problem))


def _compiled(grammar: Grammar) -> str:
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_DEFAULTS)
    make = LLMatcher.grammar_from_regex if grammar.kind is GrammarKind.REGEX else LLMatcher.grammar_from_lark
    return make(grammar.text)


def _on_one_line(text: str) -> str:
    return " ".join(text.split())[:300]


class _ToyTokens:
    """The toy alphabet as llguidance asks for it: one more token stands for the end."""

    def __init__(self, vocab_size: int) -> None:
        self.tokens = [*(toy_char(token_id).encode() for token_id in range(vocab_size)), b"\xff"]
        self.eos_token_id = vocab_size
        self.bos_token_id = None
        self.special_token_ids = [vocab_size]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):
            raise TypeError("text, not bytes")
        return [token_id for token_id in map(toy_id, text) if 0 <= token_id < self.eos_token_id]
