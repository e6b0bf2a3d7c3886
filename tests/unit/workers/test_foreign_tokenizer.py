"""Draft and target with different tokenizers: what is lost in translation costs acceptance and nothing else."""

import itertools
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from conftest import scaled
from hypothesis import given, settings
from hypothesis import strategies as st
from law import FALSE_ALARM, adaptive_gamma, chi_square, joint_law, table_pair
from round_law import RATIONAL, Tree, draft_q, law_of_round, shipped, target_law, total_variation
from session_loops import GREEDY, RULES, HandDriver, ListSequence, Rounds, target_session

from draft_worker.session import DraftSession
from outrider.drafting.proposal import Q_TOTAL, Proposal
from outrider.drafting.translation import DraftContext, TokenMap, Translator
from outrider.lm.vocabulary import Vocabulary
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from outrider.serving.messages import DraftOpening

TARGET_TOKENS = (b"a", b"b", b"ab", b"c", b"\n")
DRAFT_TOKENS = (b"\n", b"b", b"x", b"ba", b"a", b"c", b"bb")
MODEL_DRAFTERS = ("model", "text")


def vocabulary(tokens, special=()):
    return Vocabulary(dict(enumerate(tokens)), frozenset(special))


def longest_first(tokens):
    """An encoder: at each place the longest token that fits; what no token fits is left out."""

    def encode(text):
        data, ids = text.encode(), []
        while data:
            fitting = [i for i, token in enumerate(tokens) if token and data.startswith(token)]
            ids += (longest := sorted(fitting, key=lambda i: -len(tokens[i]))[:1])
            data = data[len(tokens[longest[0]]) if longest else 1 :]
        return ids

    return encode


def translator(draft=DRAFT_TOKENS, target=TARGET_TOKENS, **fields):
    return Translator(
        vocabulary(draft),
        vocabulary(target),
        longest_first(draft),
        longest_first(target),
        target_vocab_size=len(target),
        **fields,
    )


def draft_row(ids):
    """Logits over the draft vocabulary: a function of the last two draft ids and how many there are, modulo 3."""
    rng = np.random.default_rng([*ids[-2:], len(ids) % 3])
    return rng.normal(scale=1.5, size=len(DRAFT_TOKENS)).astype(np.float32)


def foreign_session(params, stopping, prompt_ids, drafters=MODEL_DRAFTERS):
    session = DraftSession(
        DraftOpening(epoch=1, prompt_ids=tuple(prompt_ids), sampling=params, stopping=stopping),
        vocab_size=len(TARGET_TOKENS),
        context_length=4096,
        drafters=drafters,
        translator=translator(),
    )
    session.sequence = ListSequence(session.reserved_length)
    return session


def propose(params, prompt_ids, gamma, drafter="model"):
    session = foreign_session(params, StoppingParams(max_tokens=20), prompt_ids)
    return HandDriver(draft_row).run(session.advance(session.log.header, (), gamma, drafter))


def test_the_map_is_one_to_one_over_equal_bytes() -> None:
    draft = vocabulary([b"a", b"b", b"", b"a", b"</s>", b"<x>", b"c"], special=[4, 5])
    target = vocabulary([b"c", b"</s>", b"b", b"</s>", b"a", b"a", b"<x>"], special=[3])
    token_map = TokenMap(draft, target)
    pairs = dict(zip(token_map.draft_ids.tolist(), token_map.target_ids.tolist(), strict=True))
    # 3 repeats 0; a special id and a plain one of the same text are not the same
    assert pairs == {0: 4, 1: 2, 4: 3, 6: 0}
    assert len(set(pairs.values())) == len(pairs)
    for own, other in pairs.items():
        assert token_map.to_target(own) == other
        assert token_map.to_draft(other) == own
    assert token_map.to_draft(5) is token_map.to_target(3) is None
    widened = token_map.widen(np.arange(7, dtype=np.float32), 7)
    assert widened.tolist() == [6, -np.inf, 1, 4, 0, -np.inf, -np.inf]


@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK])
@pytest.mark.parametrize("prompt", [(0, 1), (2, 4), (3,)])
def test_the_exact_law_of_a_round_over_the_intersection(rule, prompt) -> None:
    """Every draft that can be drawn, its q as told, every coin: emitted tokens follow p to 1e-12, and exactly in
    fractions. q(x) is 0 for "ab", which the draft cannot say."""
    gamma, size = 2, len(TARGET_TOKENS)
    q: dict[tuple[int, ...], list[Fraction]] = {}
    for seed in range(600):
        proposal = propose(SamplingParams(acceptance=rule, seed=seed), prompt, gamma)
        for index in range(gamma):
            told = proposal.q[index]
            assert told is not None
            row = [Fraction(0)] * size
            for token_id, count in zip(told.ids, told.counts, strict=True):
                row[int(token_id)] = Fraction(int(count), Q_TOTAL)
            assert q.setdefault(proposal.token_ids[:index], row) == row, "q depends on more than the prefix"
    shared = [i for i in range(size) if TARGET_TOKENS[i] in DRAFT_TOKENS]
    assert all(row[2] == 0 and sum(row) == 1 for row in q.values())
    assert set(q) == {(), *((x,) for x in shared)}, "INCONCLUSIVE: some draft was never drawn"

    rng = random.Random(f"{rule} {prompt}")
    p = {}
    for length in range(gamma + 1):
        for text in itertools.product(range(size), repeat=length):
            weights = [rng.randint(0, 9) for _ in range(size)]
            p[text] = [Fraction(w + (not any(weights)), sum(weights) or size) for w in weights]
            q.setdefault(text, [Fraction(x == 0) for x in range(size)])  # never reached: q of the path to it is 0
    nodes = Tree(size, gamma, p, q)
    assert total_variation(law_of_round(nodes, RATIONAL[rule]), target_law(nodes)) == 0
    assert total_variation(law_of_round(nodes.floats(), shipped(rule)), target_law(nodes.floats())) <= 1e-12


def test_q_not_renormalised_over_the_intersection_would_be_caught() -> None:
    """The twin that tells q as the draft had it, with mass on tokens that the target lacks."""
    size, gamma = 3, 1
    p = {(): [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4)]}
    p |= {(x,): p[()] for x in range(size)}
    drawn = Tree(size, gamma, p, {(): [Fraction(1, 4), Fraction(3, 4), Fraction(0)]})
    told = Tree(size, gamma, p, {(): [Fraction(1, 6), Fraction(1, 2), Fraction(0)]})
    assert total_variation(law_of_round(drawn, RATIONAL[AcceptanceRule.TOKEN], told=told), target_law(drawn)) > 1e-2
    assert draft_q(np.array([0.25, 0.75, 0.0])).ids.tolist() == [0, 1]


@pytest.mark.parametrize("drafter", MODEL_DRAFTERS)
@pytest.mark.parametrize("name", ["greedy", "coupled"])
@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_text_is_that_of_plain_decoding(name: str, gamma: int, drafter: str) -> None:
    loop, plain = (foreign_rounds(RULES[name], 80, wanted, drafter) for wanted in (gamma, 0))
    assert loop.run() == plain.run()
    assert loop.num_drafted > 0, "INCONCLUSIVE"


@pytest.mark.parametrize("drafter", MODEL_DRAFTERS)
@pytest.mark.parametrize("rule", [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK, AcceptanceRule.COUPLED])
def test_joint_law_across_rounds_with_another_tokenizer(rule: AcceptanceRule, drafter: str) -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    num_drafted = num_accepted = 0
    target, _ = table_pair(len(TARGET_TOKENS), 3)
    for seed in range(scaled(12_000)):
        loop = foreign_rounds(SamplingParams(acceptance=rule, seed=seed), 8, 0, drafter, target)
        loop.num_draft_tokens = lambda _, loop=loop: adaptive_gamma(loop.verdicts[-1].soft_acceptances)
        counts[tuple(loop.run()[:3])] += 1
        num_drafted += loop.num_drafted
        num_accepted += loop.num_accepted
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE"
    assert chi_square(counts, joint_law(target, SamplingParams(acceptance=rule), 3)) > FALSE_ALARM


def foreign_rounds(params, num_tokens, gamma, drafter, target=None):
    target = target or table_pair(len(TARGET_TOKENS), 5)[0]
    stopping = StoppingParams(max_tokens=num_tokens)
    return Rounds(
        target_session(target, params, stopping, prompt_ids=(0, 1)),
        foreign_session(params, stopping, (0, 1)),
        HandDriver(target.row),
        HandDriver(draft_row),
        lambda _: gamma,
        drafter,
    )


@given(st.lists(st.integers(0, len(TARGET_TOKENS) - 1), max_size=400), st.data())
@settings(max_examples=scaled(400), deadline=None)
def test_the_context_depends_on_the_text_alone(ids, data) -> None:
    """Whatever rounds it grew in; its final ids stay; it spells the text."""
    foreign = translator(draft=(*DRAFT_TOKENS, b" "))
    at_once = DraftContext(foreign).follow(ids)
    growing, final = DraftContext(foreign), []
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    for cut in [*cuts, len(ids)]:
        draft_ids, num_final, is_whole = growing.follow(ids[:cut])
        assert draft_ids[: len(final)] == final
        assert is_whole
        final = draft_ids[:num_final]
    assert (draft_ids, num_final, is_whole) == at_once
    spelt = b"".join(DRAFT_TOKENS[i] for i in draft_ids)
    assert spelt == b"".join(TARGET_TOKENS[i] for i in ids)


def test_long_lines_are_cut_at_spaces_and_encoded_once() -> None:
    target = (b"word", b" ", b"\n")
    encoded: list[str] = []
    foreign = translator(draft=(b"word", b" ", b"\n"), target=target)
    encode = foreign.encode_draft
    foreign.encode_draft = lambda text: (encoded.append(text), encode(text))[1]
    context, ids = DraftContext(foreign), []
    for _ in range(400):
        ids += [0, 1]
        context.follow(ids)
    assert context.follow(ids)[0] == ids
    assert max(map(len, encoded)) < 300, "a long text is encoded again and again"


def test_a_text_that_ends_within_a_character_gets_no_drafts() -> None:
    target, draft = (b"\xc3", b"\xa9", b"a"), ("é".encode(), b"a")
    foreign = Translator(
        vocabulary(draft), vocabulary(target), longest_first(draft), longest_first(target), target_vocab_size=3
    )
    context = DraftContext(foreign)
    assert context.follow([2, 0]) == ([1], 0, False)
    assert context.follow([2, 0, 1]) == ([1, 0], 0, True)
    session = DraftSession(
        DraftOpening(epoch=1, prompt_ids=(2, 0), sampling=GREEDY, stopping=StoppingParams(max_tokens=9)),
        vocab_size=3,
        context_length=64,
        translator=foreign,
    )
    session.sequence = ListSequence(session.reserved_length)
    driver = HandDriver(lambda ids: np.array([0.0, 1.0], np.float32))
    assert driver.run(session.advance(session.log.header, (), 3)) == Proposal(drafter="model")
    assert driver.num_forwards == 0


def test_special_ids_go_with_special_ids_and_begin_the_text_once() -> None:
    draft = vocabulary([b"<s>", b"a", b"<end>", b"<pad>"], special=[0, 2, 3])
    target = vocabulary([b"a", b"<end>", b"<s>", b"<other>"], special=[1, 2, 3])
    letters = {"a": 1}
    foreign = Translator(
        draft,
        target,
        lambda text: [letters[c] for c in text],
        lambda text: [0 for _ in text],
        target_vocab_size=4,
        bos_id=0,
    )
    assert DraftContext(foreign).follow([2, 0, 1, 3, 0])[0] == [0, 1, 2, 1]
    assert DraftContext(foreign).follow([0])[0] == [0, 1]
    assert foreign.spell([0], [1, 2, 1]) == [0, 1, 0]
    assert foreign.spell([0], [1, 3, 1]) == [0], "the target has no such mark: the text ends before it"


def test_words_are_spelt_with_what_stands_before_them() -> None:
    foreign = translator()
    # "a" then "b": together they would be the target's "ab", which is not how the text before was spelt
    assert foreign.spell([0], [1]) == [1]
    assert foreign.spell([3], [4, 1]) == [2], "one token where nothing before is in the way"
    assert foreign.spell([3, 0], [5, 4, 1]) == [3, 2]


def test_a_fresh_session_proposes_what_an_old_one_does() -> None:
    """After rejections the cache is mended; a session opened on the same text must propose the same."""
    params = SamplingParams(acceptance=AcceptanceRule.TOKEN, seed=11)
    loop = foreign_rounds(params, 60, 4, "model")
    seen: list[tuple[list[int], Proposal]] = []
    loop.mangle = lambda proposal: (seen.append((list(loop.target.log.ids), proposal)), proposal)[1]
    loop.run()
    assert loop.num_drafted > loop.num_accepted > 0, "INCONCLUSIVE"
    for ids, proposal in seen:
        if len(proposal) < 4:  # the stream's end cut it
            continue
        fresh = propose(params, ids, 4)
        assert (fresh.token_ids, list(map(str, fresh.q))) == (proposal.token_ids, list(map(str, proposal.q)))
