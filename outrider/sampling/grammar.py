"""Texts of a given form: which tokens may come next. The grammars themselves are llguidance's.

A state follows the output token by token, back and forth, so that a drafted place is masked as its own prefix wants it.
A text may end, with one of its stop tokens, where the grammar accepts what is there and nowhere else; where nothing
else can follow, it has to. A token that the grammar does not allow leads nowhere: nothing is masked behind it, for its
own probability is 0 and nobody gets there.

Grammars are written by clients, and some would take minutes: what reading one, or a step along it, may take is bounded.
What is beyond that is refused, never left unmasked.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from threading import Lock
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from outrider.errors import Internal
from outrider.sampling.grammar_bounds import check_bounds
from outrider.sampling.params import Grammar, GrammarKind
from outrider.toy_text import toy_char, toy_id

JSON_DEFAULTS: Any = {"whitespace_pattern": " ?"}
"""One blank at most between the parts, or a small model could fill its answer with them; `x-guidance` in a schema
decides otherwise."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=100_000,
    step_lexer_fuel=50_000,
    step_max_items=25_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)
"""A second for the whole grammar, a tenth of one for a step, at worst; a step of a usual one takes a thousandth."""
MAX_BEGINNINGS = 16
"""Of one state: a matcher that has met a limit is of no use any more, and its text is read again by a new one."""


class GrammarTooComplex(Internal):
    """What may come next cannot be told within the limits. Of a draft's place: as a row that cannot be read."""

    status = "INVALID_ARGUMENT"

    def __init__(self, why: str) -> None:
        super().__init__(
            f"structured_output is too complex to follow ({_on_one_line(why)}): give a simpler form",
            field="structured_output",
            reason="GRAMMAR_TOO_COMPLEX",
        )


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
        """Before the first token. Raises ValueError saying what is wrong with the grammar, GrammarTooComplex. May take
        a second: not for an event loop."""
        tokens, compiled = self._read(), _compiled(grammar)

        def begin() -> LLMatcher:
            return LLMatcher(tokens, compiled, log_level=0, limits=LIMITS)

        matcher = begin()
        if matcher.is_error():
            raise ValueError(_on_one_line(matcher.get_error()))
        ends = [token_id for token_id in tokens.eos_tokens if token_id < self._vocab_size]
        state = GrammarState(matcher, self._vocab_size, ends, begin)
        state.try_a_step()
        return state

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
    """After the tokens pushed and not popped. What it says follows from these alone, whatever was popped before."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, ends: Sequence[int], begin: Callable[[], LLMatcher]
    ) -> None:
        """begin: gives a new matcher, before the first token."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._begin = begin
        self._num_beginnings = 1
        self._met = ""
        """The last limit that a matcher has met."""
        self._num_pushed = 0
        self._followed: list[int] = []
        """Of those pushed the first ones, which the grammar allows."""
        self._fault = ""
        """Why nobody can tell whether it allows the one after them; empty: it does not."""

    @property
    def follows(self) -> bool:
        """Whether the grammar allows all tokens so far. Raises GrammarTooComplex where nobody can tell."""
        if self._fault:
            raise GrammarTooComplex(self._fault)
        return len(self._followed) == self._num_pushed

    def try_a_step(self) -> None:
        """Raises GrammarTooComplex where not even the first one can be followed by one matcher."""
        first = self.allowed(())
        (ids,) = np.nonzero(first if first is not None else ())
        if len(ids):
            self.push(int(ids[0]))
            self.allowed(())
            self.pop()
        if self._num_beginnings > 1:
            raise GrammarTooComplex(self._met)

    def push(self, token_id: int) -> None:
        """Appends a token, allowed or not."""
        if len(self._followed) == self._num_pushed and token_id not in self._ends and self._consumes(token_id):
            self._followed.append(token_id)
        self._num_pushed += 1

    def pop(self, n: int = 1) -> None:
        """Takes the last `n` tokens back."""
        self._num_pushed -= n
        if self._num_pushed <= len(self._followed):
            self._fault = ""
        num_back = max(0, len(self._followed) - self._num_pushed)
        if num_back:
            del self._followed[self._num_pushed :]
            if not self._matcher.is_error():
                self._matcher.rollback(num_back)

    def allowed(self, stop_token_ids: Collection[int]) -> np.ndarray | None:
        """bool[V]: what may come next; None: nothing is known, behind a token that was not allowed. Raises
        GrammarTooComplex."""
        if not self.follows:
            return None
        packed = self._working().compute_bitmask()
        if self._matcher.is_error():
            packed = self._working().compute_bitmask()
            if self._matcher.is_error():
                raise GrammarTooComplex(self._matcher.get_error())
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        found = np.zeros(self._vocab_size, dtype=bool)
        known = bits[: self._vocab_size]
        found[: len(known)] = known
        found[self._ends] = False
        found[list(stop_token_ids)] = self._matcher.is_accepting()
        return found

    def _consumes(self, token_id: int) -> bool:
        took = self._working().try_consume_tokens([token_id])
        if not took and self._matcher.is_error():
            took = self._working().try_consume_tokens([token_id])
            self._fault = self._matcher.get_error()
        return bool(took)

    def _working(self) -> LLMatcher:
        """One that has met no limit. What drafts that were popped have cost one counts against it for good, so that
        the next one may go further."""
        if self._matcher.is_error() and self._num_beginnings < MAX_BEGINNINGS:
            self._num_beginnings += 1
            self._met = self._matcher.get_error()
            self._matcher = self._begin()
            self._matcher.try_consume_tokens(self._followed)
        return self._matcher


def check_grammar(grammar: Grammar) -> None:
    """Raises ValueError saying what is wrong with it, as far as no tokenizer is needed to know."""
    problem = LLMatcher.validate_grammar(_compiled(grammar), limits=LIMITS)
    if problem and not problem.startswith("WARNING"):
        raise ValueError(_on_one_line(problem))


def _compiled(grammar: Grammar) -> str:
    check_bounds(grammar)
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults=JSON_DEFAULTS)
    make = LLMatcher.grammar_from_regex if grammar.kind is GrammarKind.REGEX else LLMatcher.grammar_from_lark
    return make(grammar.text)


def _on_one_line(text: str) -> str:
    if "panic:" in text:
        return "it has something that llguidance cannot follow with the tokens of this model"
    return " ".join(text.replace("<non-verbose/>", "").split())[:300]


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
        return list(takewhile(lambda token_id: 0 <= token_id < self.eos_token_id, map(toy_id, text)))
