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
from typing import Any, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from outrider.errors import Internal
from outrider.sampling.grammar_bounds import check_bounds
from outrider.sampling.params import Grammar, GrammarKind
from outrider.toy_text import toy_char, toy_id

JSON_DEFAULTS: Any = {"whitespace_pattern": " ?"}
"""One blank at most between the parts, or a small model could fill its answer with them; `x-guidance` in a schema
decides otherwise."""


def _limits(initial_lexer_fuel: int, step_lexer_fuel: int) -> LLParserLimits:
    return LLParserLimits(
        initial_lexer_fuel=initial_lexer_fuel,
        step_lexer_fuel=step_lexer_fuel,
        step_max_items=25_000,
        max_lexer_states=20_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


LIMITS = _limits(100_000, 50_000)
"""A second for the whole grammar, a tenth of one for a step, at worst; a step of a usual one takes a thousandth."""
LIMITS_ANEW = _limits(2_000_000, 200_000)
"""Of a matcher that reads a whole text again: it learns at once what one that went along has learnt step by step."""
KEPT_EVERY = 64
"""Tokens: so many at most are read again on the way back, as a rule. A copy takes microseconds, and more behind
thousands of tokens."""
MAX_KEPT = 4
"""Of one state, the one before the first token among them."""
LEADS_NOWHERE = "a token may follow that leads nowhere"


class GrammarTooComplex(Internal):
    """What may come next cannot be told within the limits. Of a draft's place: as a row that cannot be read."""

    status = "INVALID_ARGUMENT"

    def __init__(self, why: str) -> None:
        self.why = why
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

        def begin(limits: LLParserLimits = LIMITS_ANEW) -> LLMatcher:
            return LLMatcher(tokens, compiled, log_level=0, limits=limits)

        matcher = begin(LIMITS)
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
    """After the tokens pushed and not popped. What it says follows from these alone, whatever was popped before.

    Matchers are never rolled back: one that takes back a token which the grammar names by its id is not where it was
    before. What remains is read again, from a copy kept at an earlier place. Copies share a lexer, what it has learnt
    and what that may cost. Where a limit is met, drafts may have spent what there was: a new matcher reads the tokens
    of this place alone, and what it meets is the text's.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, ends: Sequence[int], begin: Callable[[], LLMatcher]
    ) -> None:
        """begin: gives a new matcher, before the first token. None is taken before `try_a_step` has returned."""
        self._matcher: LLMatcher | None = matcher
        """After `_followed`; None: to be made from a kept one."""
        self._kept = [_Kept(0, matcher.deep_copy())]
        """Before the first token, and of later places the newest, in order; empty: a new one has to begin."""
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._begin = begin
        self._may_begin = False
        self._began_here = False
        """The matcher is new and has read the tokens of this place only."""
        self._num_pushed = 0
        self._followed: list[int] = []
        """Of those pushed the first ones, which the grammar allows."""
        self._fault = ""
        """Why nobody can tell whether it allows the one after them; empty: it does not."""
        self._unread = ""
        """Why nobody can tell what may follow here, once it was asked."""

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
        self._may_begin = True

    def push(self, token_id: int) -> None:
        """Appends a token, allowed or not."""
        if len(self._followed) == self._num_pushed and token_id not in self._ends and self._goes_on_with(token_id):
            self._followed.append(token_id)
            if self._kept and len(self._followed) - self._kept[-1].length >= KEPT_EVERY:
                self._keep(self._working())
        self._num_pushed += 1
        self._moved()

    def pop(self, n: int = 1) -> None:
        """Takes the last `n` tokens back."""
        if not n:
            return
        self._num_pushed -= n
        if self._num_pushed <= len(self._followed):
            self._fault = ""
        if self._num_pushed < len(self._followed):
            del self._followed[self._num_pushed :]
            while self._kept and self._kept[-1].length > self._num_pushed:
                self._kept.pop()
            self._matcher = None
        self._moved()

    def allowed(self, stop_token_ids: Collection[int]) -> np.ndarray | None:
        """bool[V]: what may come next; None: nothing is known, behind a token that was not allowed. Raises
        GrammarTooComplex."""
        if not self.follows:
            return None
        packed, may_end = self._read()
        bits = np.unpackbits(np.frombuffer(packed, np.uint8), bitorder="little")
        found = np.zeros(self._vocab_size, dtype=bool)
        known = bits[: self._vocab_size]
        found[: len(known)] = known
        found[self._ends] = False
        found[list(stop_token_ids)] = may_end
        return found

    def _read(self) -> tuple[bytes, bool]:
        """(a bit for each token that may follow here, the lowest id first; whether the text may end here). Raises
        GrammarTooComplex."""
        if self._unread:
            raise GrammarTooComplex(self._unread)
        try:
            matcher = self._working()
            may_end, packed = matcher.is_accepting(), matcher.compute_bitmask()
            if matcher.is_error() and not self._began_here:
                matcher = self._begun(matcher.get_error())
                may_end, packed = matcher.is_accepting(), matcher.compute_bitmask()
            if matcher.is_error():
                self._matcher = None
                raise GrammarTooComplex(matcher.get_error())
        except GrammarTooComplex as error:
            self._unread = error.why
            raise
        return packed, may_end

    def _goes_on_with(self, token_id: int) -> bool:
        """Whether a token is allowed here: then the matcher is behind it. A fault where nobody can tell."""
        try:
            matcher = self._working()
            if matcher.try_consume_tokens([token_id]):
                return True
            if not matcher.is_error() and not self._lets(token_id):
                return False
            matcher = self._begun(matcher.get_error() or LEADS_NOWHERE)
            if matcher.try_consume_tokens([token_id]):
                return True
            if not matcher.is_error() and not self._lets(token_id):
                return False
            raise GrammarTooComplex(matcher.get_error() or LEADS_NOWHERE)
        except GrammarTooComplex as error:
            self._matcher, self._fault = None, error.why
            return False

    def _lets(self, token_id: int) -> bool:
        """Whether the mask has it: tokens are chosen by that, so what a matcher refuses may have been."""
        packed, _ = self._read()
        return token_id < 8 * len(packed) and bool(packed[token_id // 8] >> token_id % 8 & 1)

    def _working(self) -> LLMatcher:
        """After the followed tokens. Raises GrammarTooComplex where a new one does not get there."""
        if self._matcher is not None:
            return self._matcher
        if not self._kept:
            return self._begun(LEADS_NOWHERE)
        kept = self._kept[-1]
        matcher, rest = kept.matcher.deep_copy(), self._followed[kept.length :]
        if matcher.try_consume_tokens(rest) < len(rest):
            return self._begun(matcher.get_error() or LEADS_NOWHERE)
        self._matcher = matcher
        if rest:
            self._keep(matcher)
        return matcher

    def _keep(self, matcher: LLMatcher) -> None:
        self._kept.append(_Kept(len(self._followed), matcher.deep_copy()))
        if len(self._kept) > MAX_KEPT:
            del self._kept[1]

    def _begun(self, met: str) -> LLMatcher:
        """A new one after the followed tokens. met: the limit that the one before it has met, which its copies have met
        with it. Raises GrammarTooComplex."""
        self._matcher, self._kept = None, []
        if not self._may_begin:
            raise GrammarTooComplex(met)
        matcher = self._begin()
        self._kept = [_Kept(0, matcher.deep_copy())]
        if matcher.try_consume_tokens(self._followed) < len(self._followed):
            self._kept = []
            raise GrammarTooComplex(matcher.get_error() or LEADS_NOWHERE)
        self._matcher, self._began_here = matcher, True
        return matcher

    def _moved(self) -> None:
        self._unread, self._began_here = "", False


class _Kept(NamedTuple):
    """A matcher that is only copied from, after `length` tokens."""

    length: int
    matcher: LLMatcher


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
