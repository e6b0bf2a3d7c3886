"""The joint law of texts of a given form: the mask of every drafted place follows from the drafts before it."""

import dataclasses
import re
from collections.abc import Sequence

import pytest
from conftest import scaled
from law import FALSE_ALARM, RoundLoop, adaptive_gamma, chi_square, fixed_gamma, joint_law, table_pair

from outrider.sampling import AcceptanceRule, History, Noise, SamplingParams
from outrider.sampling.grammar import GrammarVocabulary
from outrider.sampling.params import Grammar, GrammarKind
from outrider.toy_text import toy_char

VOCAB, NUM_TOKENS, NUM_SEEDS = 4, 5, 4_000
WORDS = ((0, 1), (1, 2), (1, 3), (2, 0, 0), (3,))
"""A text is one after the other: what may come next depends on up to two tokens before."""
FORM = Grammar(GrammarKind.REGEX, f"({'|'.join(re.escape(''.join(map(toy_char, word))) for word in WORDS)}){{1,9}}")
BY_IDS = Grammar(GrammarKind.LARK, 'start: (<[0]> <[1]> | "#" <[3]> | <[3]>)+')
"""Tokens named, where the other form names what they spell."""
VOCABULARY = GrammarVocabulary(b"", VOCAB)
GAMMAS = {"1": fixed_gamma(1), "3": fixed_gamma(3), "adaptive": adaptive_gamma}


def begin(prompt: Sequence[int]) -> History:
    return History(prompt, (), VOCABULARY.state(FORM))


def may_begin_so(text: tuple[int, ...]) -> bool:
    """The slow twin."""
    return any(
        text == word[: len(text)] or (text[: len(word)] == word and may_begin_so(text[len(word) :])) for word in WORDS
    )


def params_of(rule: AcceptanceRule) -> SamplingParams:
    return SamplingParams(acceptance=rule, grammar=FORM, temperature=1.2)


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_joint_law(rule: AcceptanceRule, gamma: str) -> None:
    loop = RoundLoop(*table_pair(VOCAB, 5), params_of(rule), GAMMAS[gamma], begin=begin)
    law = joint_law(loop.target, loop.params, NUM_TOKENS, begin=begin)
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-9)
    assert 20 < len(law) < VOCAB**NUM_TOKENS / 4
    assert all(may_begin_so(text) for text in law)
    assert chi_square(loop.counts(scaled(NUM_SEEDS), NUM_TOKENS), law) > FALSE_ALARM


@pytest.mark.parametrize("form", [FORM, BY_IDS], ids=["by text", "by ids"])
def test_coupled_text_is_that_of_plain(form: Grammar) -> None:
    def begin(prompt: Sequence[int]) -> History:
        return History(prompt, (), VOCABULARY.state(form))

    target, draft = table_pair(VOCAB, 5)
    params = dataclasses.replace(params_of(AcceptanceRule.COUPLED), grammar=form)
    noises = [Noise(seed) for seed in range(scaled(NUM_SEEDS // 4))]
    plain = RoundLoop(target, draft, params, fixed_gamma(0), begin=begin)
    texts = [plain.text(noise, NUM_TOKENS) for noise in noises]
    for gamma in GAMMAS.values():
        loop = RoundLoop(target, draft, params, gamma, begin=begin)
        assert [loop.text(noise, NUM_TOKENS) for noise in noises] == texts
        assert 0 < loop.num_accepted < loop.num_drafted, "INCONCLUSIVE"


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
def test_a_state_that_does_not_follow_the_drafts_would_be_seen(rule: AcceptanceRule) -> None:
    """As if each place of a round had the mask of its first one."""

    class Stuck(History):
        def push(self, token_id: int) -> None:
            kept, self.grammar = self.grammar, None
            super().push(token_id)
            self.grammar = kept

        def pop(self, n: int = 1) -> None:
            kept, self.grammar = self.grammar, None
            super().pop(n)
            self.grammar = kept

    def stuck(prompt: Sequence[int]) -> History:
        return Stuck(prompt, (), VOCABULARY.state(FORM))

    loop = RoundLoop(*table_pair(VOCAB, 5), params_of(rule), fixed_gamma(3), begin=stuck)
    law = joint_law(loop.target, loop.params, NUM_TOKENS, begin=begin)
    assert chi_square(loop.counts(scaled(NUM_SEEDS // 4), NUM_TOKENS), law) == 0.0
