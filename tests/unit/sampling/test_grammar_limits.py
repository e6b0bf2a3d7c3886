"""Forms that nobody could follow in time: refused by name, never left unmasked, and no draft's cost is the text's."""

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits

from outrider.errors import InvalidArgument
from outrider.sampling import grammar as grammars
from outrider.sampling.distribution import distribution
from outrider.sampling.grammar import GrammarState, GrammarTooComplex, GrammarVocabulary
from outrider.sampling.history import History
from outrider.sampling.params import AcceptanceRule, Grammar, GrammarKind, SamplingParams, StoppingParams
from outrider.serving.messages import TargetOpening
from outrider.toy_text import toy_id
from target_worker.session import TargetSession

VOCAB, STOP = 128, 127
VOCABULARY = GrammarVocabulary(b"", VOCAB)
MONSTER = Grammar(GrammarKind.REGEX, "(a{1000}){1000}")
"""Fifteen characters, of which the first mask took a quarter of a minute, and the first token an error."""
NUM_RULES = 800
RULES = [f"r{i}" for i in range(NUM_RULES)]
LATER = Grammar(
    GrammarKind.LARK,
    'start: "xx" big | "x" /[bc]*/\nbig: ' + " | ".join(RULES) + "\n" + "\n".join(f'{r}: "a" {r} | "d"' for r in RULES),
)
"""Too much once two letters were drawn."""


def test_a_form_beyond_the_limits_is_refused_when_it_is_read() -> None:
    with pytest.raises(GrammarTooComplex) as caught:
        VOCABULARY.state(MONSTER)
    assert (caught.value.status, caught.value.field) == ("INVALID_ARGUMENT", "structured_output")
    assert "non-verbose" not in caught.value.message


@pytest.mark.parametrize("text", ["aéb", "é"])
def test_a_form_that_no_token_can_write_is_refused_rather_than_written_in_part(text: str) -> None:
    with pytest.raises(GrammarTooComplex):
        VOCABULARY.state(Grammar(GrammarKind.REGEX, text))


def test_a_place_behind_the_limit_cannot_be_read_and_places_before_it_can() -> None:
    state = VOCABULARY.state(LATER)
    params, stopping = SamplingParams(grammar=LATER), StoppingParams(9, stop_token_ids=frozenset({STOP}))
    history, logits = History((), (), state), np.zeros(VOCAB, dtype=np.float32)
    history.push(toy_id("x"))
    history.push(toy_id("x"))
    with pytest.raises(GrammarTooComplex):
        distribution(logits, params, stopping, history)
    history.pop()
    assert set(np.flatnonzero(distribution(logits, params, stopping, history))) == {*map(toy_id, "xbc"), STOP}
    history.push(toy_id("b"))
    assert set(np.flatnonzero(distribution(logits, params, stopping, history))) == {*map(toy_id, "bc"), STOP}


def test_limits_that_drafts_have_met_are_not_the_texts() -> None:
    state = VOCABULARY.state(Grammar(GrammarKind.REGEX, "[ab]{4}"))
    for char in "ab":
        state.push(toy_id(char))
    broken = _breaks(state)
    state.push(toy_id("a"))
    found = state.allowed([STOP])
    assert broken == [True]
    assert found is not None
    assert set(np.flatnonzero(found)) == {toy_id("a"), toy_id("b")}
    assert state.follows


def test_who_meets_limits_again_and_again_goes_on_while_a_new_matcher_can() -> None:
    state = VOCABULARY.state(Grammar(GrammarKind.REGEX, "[ab]{4}"))
    for _ in range(40):
        state.push(toy_id("a"))
        assert _breaks(state) == [True]
        state.pop()
        assert _breaks(state) == [True]
        assert state.allowed([STOP]) is not None
    state.push(toy_id("a"))
    _breaks(state)
    state._begin = _broken
    for _ in range(2):
        with pytest.raises(GrammarTooComplex):
            state.allowed([STOP])


def test_what_discarded_drafts_cost_is_not_the_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that plain decoding completes."""
    for name in ("LIMITS", "LIMITS_ANEW"):
        monkeypatch.setattr(grammars, name, LLParserLimits(max_lexer_states=200, verbose_errors=False))
    form, num_begun, rng = Grammar(GrammarKind.REGEX, "[a-d]*a[a-d]{20}"), 0, np.random.default_rng(0)
    plain, state = VOCABULARY.state(form), VOCABULARY.state(form)
    begin = state._begin

    def counted() -> LLMatcher:
        nonlocal num_begun
        num_begun += 1
        return begin()

    state._begin = counted
    for _ in range(150):
        expected = plain.allowed([STOP])
        assert expected is not None
        for _ in range(12):
            state.push(toy_id(rng.choice(list("abcd"))))
            assert state.allowed([STOP]) is not None
        state.pop(12)
        assert (state.allowed([STOP]) == expected).all()
        plain.push(token_id := toy_id(rng.choice(list("abcd"))))
        state.push(token_id)
    assert num_begun > 16, "INCONCLUSIVE"


def test_a_long_text_is_read_again_however_much_was_learnt_along_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a stream is taken up elsewhere."""
    monkeypatch.setattr(
        grammars, "LIMITS", LLParserLimits(initial_lexer_fuel=2_000, step_lexer_fuel=2_000, verbose_errors=False)
    )
    form = Grammar(GrammarKind.REGEX, "[a-d]*a[a-d]{12}")
    along, again, rng = VOCABULARY.state(form), VOCABULARY.state(form), np.random.default_rng(0)
    text = [toy_id(char) for char in rng.choice(list("abcd"), 1_500)]
    for token_id in text:
        assert along.allowed([STOP]) is not None
        along.push(token_id)
    for token_id in text:
        again.push(token_id)
    assert again.follows
    assert (again.allowed([STOP]) == along.allowed([STOP])).all()


def test_behind_a_token_that_the_mask_has_and_the_matcher_refuses_nothing_is_left_unmasked() -> None:
    """llguidance 1.9 has such: a byte that no text has, in a form for an alphabet that has it as its end only."""
    state = VOCABULARY.state(Grammar(GrammarKind.LARK, r'start: "ab" /\xff[a-c]/'))
    for char in "ab":
        state.push(toy_id(char))
    found = state.allowed([STOP])
    assert found is not None
    assert found[toy_id("a")], "INCONCLUSIVE"
    state.push(toy_id("a"))
    with pytest.raises(GrammarTooComplex, match="leads nowhere"):
        state.allowed([STOP])
    state.pop()
    assert (state.allowed([STOP]) == found).all()
    state.push(toy_id("z"))
    assert state.allowed([STOP]) is None


def test_a_session_begins_with_no_other_text_than_one_of_its_form() -> None:
    params = SamplingParams(acceptance=AcceptanceRule.TOKEN, grammar=Grammar(GrammarKind.REGEX, "ab*"))
    stopping = StoppingParams(9, stop_token_ids=frozenset({STOP}))

    def session(text: str) -> TargetSession:
        ids = tuple(map(toy_id, text))
        opening = TargetOpening(
            session_id=bytes(16), epoch=1, prompt_ids=(1,), committed_ids=ids, sampling=params, stopping=stopping
        )
        return TargetSession(opening, vocab_size=VOCAB, context_length=64, max_draft_tokens=8, grammars=VOCABULARY)

    assert session("abb").log.history.num_output_tokens == 3
    with pytest.raises(InvalidArgument) as caught:
        session("aab")
    assert caught.value.field == "open.committed_ids"


def _broken() -> LLMatcher:
    state = VOCABULARY.state(Grammar(GrammarKind.REGEX, "[ab]{4}"))
    _breaks(state)
    return state._working()


def _breaks(state: GrammarState) -> list[bool]:
    """Its matcher meets a limit, as after many drafts: it is in error from now on."""
    matcher = state._working()
    matcher.consume_token(toy_id("!"))
    return [matcher.is_error()]
