"""Grammar states: what may follow is what the language says, back and forth, and texts of every rule keep to it."""

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import DeadEnd
from outrider.lm.bundle import BUNDLES, bundle_folder
from outrider.sampling.distribution import distribution, processed_logits
from outrider.sampling.grammar import GrammarState, GrammarVocabulary, check_grammar
from outrider.sampling.history import History
from outrider.sampling.params import Grammar, GrammarKind, SamplingParams, StoppingParams
from outrider.toy_text import toy_char, toy_id

VOCAB, STOP = 128, 127
VOCABULARY = GrammarVocabulary(b"", VOCAB)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yz"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LANGUAGE = {f"{head}{middle}{end}" for head in ("ab", "ac", "b") for middle in ("", "d", "dd") for end in ("", "c")}
REGEX = Grammar(GrammarKind.REGEX, "(ab|ac|b)d{0,2}c?")


def ids(text: str) -> list[int]:
    return [toy_id(char) for char in text]


def following(prefix: str) -> set[int]:
    """The slow twin: by all texts of the language."""
    longer = [text for text in LANGUAGE if text.startswith(prefix)]
    ends = {STOP} if prefix in LANGUAGE else set()
    return {toy_id(text[len(prefix)]) for text in longer if len(text) > len(prefix)} | ends


def allowed(state: GrammarState) -> set[int]:
    found = state.allowed([STOP])
    assert found is not None
    assert found.shape == (VOCAB,)
    return set(np.nonzero(found)[0].tolist())


@pytest.mark.parametrize("prefix", sorted({text[:length] for text in LANGUAGE for length in range(5)}))
def test_what_may_follow_is_what_the_language_says(prefix: str) -> None:
    state = VOCABULARY.state(REGEX)
    for token_id in ids(prefix):
        state.push(token_id)
    assert allowed(state) == following(prefix)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.sampled_from("abcd!"), st.integers(1, 4)), max_size=24))
def test_back_and_forth_it_is_a_fresh_state_of_the_same_text(steps: list[str | int]) -> None:
    state, text = VOCABULARY.state(REGEX), ""
    for step in steps:
        if isinstance(step, str):
            state.push(toy_id(step))
            text += step
        else:
            n = min(step, len(text))
            state.pop(n)
            text = text[: len(text) - n]
        if any(whole.startswith(text) for whole in LANGUAGE):
            assert allowed(state) == following(text)
        else:
            assert state.allowed([STOP]) is None


FORMS = {
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
    "any JSON": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
    "regex": Grammar(GrammarKind.REGEX, "[a-c]+@[a-c]{2,5}( [0-9]{3})*"),
    "recursive": Grammar(GrammarKind.LARK, 'start: "(" start ")" | /[a-z]{1,4}/ | start "+" start'),
    "lazy": Grammar(GrammarKind.LARK, 'start: a "x" a\na[lazy]: /[a-c ]*q/'),
    "id": Grammar(GrammarKind.LARK, 'start: "a" <[100]> "b"'),
    "ids again": Grammar(GrammarKind.LARK, "start: (/[a-c]/ <[100]>){12}"),
    "id or text": Grammar(GrammarKind.LARK, 'start: (/[a-z]+/ (<[100]> | <[30-40]> | "x1")){8}'),
    "any id but": Grammar(GrammarKind.LARK, "start: (/[a-z]{1,9}/ <[^5-90]>){6}"),
}


@pytest.fixture(scope="module")
def real_vocabulary() -> GrammarVocabulary:
    def convert(gguf: Path, folder: Path) -> None:
        from outrider.lm.checkpoint import convert_gguf

        convert_gguf(gguf, folder)

    folder = bundle_folder(BUNDLES["smollm2-135m"], convert, lambda text, fraction: None)
    return GrammarVocabulary((folder / "tokenizer.json").read_bytes(), 49_152, (2,))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", ["toy", "real"])
def test_back_and_forth_over_any_form_it_is_a_fresh_state_of_the_same_tokens(
    tokens: str, form: str, real_vocabulary: GrammarVocabulary
) -> None:
    vocabulary, stop = (VOCABULARY, STOP) if tokens == "toy" else (real_vocabulary, 3)

    def same(found: np.ndarray | None, path: list[int]) -> bool:
        """The slow twin: another state, that has seen these tokens only."""
        fresh = vocabulary.state(FORMS[form])
        for token_id in path:
            fresh.push(token_id)
        expected = fresh.allowed([stop])
        return found is expected if expected is None or found is None else bool((found == expected).all())

    for seed in range(scaled(40)):
        rng, state, path = random.Random(seed), vocabulary.state(FORMS[form]), list[int]()
        for _ in range(12):
            for _ in range(rng.randrange(5)):
                found = state.allowed([stop]) if rng.random() < 0.8 else None
                likely = np.flatnonzero(found) if found is not None else ()
                path.append(int(rng.choice(likely)) if len(likely) and rng.random() < 0.9 else rng.randrange(100))
                state.push(path[-1])
            if path and rng.random() < 0.8:
                num_back = (
                    rng.randrange(1, len(path) + 1) if rng.random() < 0.2 else 1 + rng.randrange(min(3, len(path)))
                )
                state.pop(num_back)
                del path[-num_back:]
            assert same(state.allowed([stop]), path), (seed, path)


def test_far_back_behind_many_tokens_too() -> None:
    state = VOCABULARY.state(FORMS["id or text"])
    path = [toy_id("a")] * 300 + [100, toy_id("b"), 35]
    for token_id in path:
        state.push(token_id)
    for length in (302, 299, 130, 131, 3, 303):
        state.pop(state._num_pushed - min(length, state._num_pushed))
        for token_id in path[state._num_pushed : length]:
            state.push(token_id)
        fresh = VOCABULARY.state(FORMS["id or text"])
        for token_id in path[:length]:
            fresh.push(token_id)
        assert allowed(state) == allowed(fresh)


def test_stop_tokens_stand_where_the_text_may_end_and_nowhere_else() -> None:
    state = VOCABULARY.state(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)))
    text = '{"a":7,"b":"x"}'
    for char in text:
        assert STOP not in allowed(state)
        state.push(toy_id(char))
    assert allowed(state) == {STOP}


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        Grammar(GrammarKind.REGEX, "[a-c]{2,5}"),
        Grammar(GrammarKind.LARK, 'start: "(" start ")" | "x"'),
    ],
)
def test_a_walk_along_p_keeps_to_the_form(grammar: Grammar) -> None:
    rng = np.random.default_rng(0)
    params, stopping = SamplingParams(grammar=grammar), StoppingParams(200, stop_token_ids=frozenset({STOP}))
    for _ in range(20):
        history, text = History((), (), VOCABULARY.state(grammar)), ""
        while True:
            p = distribution(rng.normal(size=VOCAB).astype(np.float32), params, stopping, history)
            token_id = int(rng.choice(VOCAB, p=p))
            if token_id == STOP:
                break
            history.push(token_id)
            text += toy_char(token_id)
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif grammar.kind is GrammarKind.REGEX:
            assert 2 <= len(text) <= 5
            assert set(text) <= set("abc")
        else:
            depth = text.count("(")
            assert text == "(" * depth + "x" + ")" * depth


@pytest.mark.parametrize(
    ("grammar", "text", "field", "says"),
    [
        (Grammar(GrammarKind.REGEX, "[a-c]{2}&d"), "ab", "stopping.stop_token_ids", f"token {toy_id('&')}"),
        (Grammar(GrammarKind.LARK, f'start: "a" <[{STOP}]> "b"'), "a", "stopping.stop_token_ids", f"token {STOP}"),
        (Grammar(GrammarKind.LARK, f'start: "a" <[{VOCAB}]> "b"'), "a", "structured_output", "nothing that this model"),
    ],
)
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.0, logit_bias={3: 1.0})])
def test_where_a_form_cannot_go_on_the_client_is_told_which_field(
    params: SamplingParams, grammar: Grammar, text: str, field: str, says: str
) -> None:
    stopping = StoppingParams(200, stop_token_ids=frozenset({STOP, toy_id("&")}))
    history = History((), ids(text), VOCABULARY.state(grammar))
    with pytest.raises(DeadEnd, match=f"at output token {len(text)}: structured_output goes on with {says}") as caught:
        processed_logits(np.zeros(VOCAB, dtype=np.float32), params, stopping, history)
    error = caught.value
    assert (error.status, error.field, error.reason) == ("INVALID_ARGUMENT", field, "NO_TOKEN_LEFT")


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type": "objct"}'), "objct"),
        (Grammar(GrammarKind.JSON_SCHEMA, "[1"), "EOF"),
        (Grammar(GrammarKind.REGEX, "(("), "unclosed group"),
        (Grammar(GrammarKind.LARK, "start: foo"), "unknown name"),
    ],
)
def test_a_bad_grammar_is_told(grammar: Grammar, says: str) -> None:
    for refuse in (check_grammar, VOCABULARY.state):
        with pytest.raises(ValueError, match=says):
            refuse(grammar)
