"""`allowed_token_ids` and `bad_words` through the real services: text, law, and the parameters they meet."""

import asyncio
import itertools

import pytest
from conftest import scaled
from stack import in_process_stack
from test_law import DRAFT, FALSE_ALARM, MAX_TOKENS, PROMPT, RULES, TARGET, VOCAB, Uniforms, hash_of

import outrider
from outrider.errors import OutriderError
from outrider.sampling.params import AcceptanceRule, SamplingParams
from outrider.toy_text import toy_char

ALLOWED = [0, 1, 2, 4, 5, 7]
WORDS = [(3,), (1, 2), (5, 5), (4, 0, 4), (2, 7, 1, 5)]
MASKS = {
    "allowed": {"allowed_token_ids": ALLOWED},
    "bad_words": {"bad_words": WORDS},
    "all": {"allowed_token_ids": ALLOWED, "bad_words": WORDS, "top_p": 0.9, "presence_penalty": 0.5},
}


def on_the_wire(options: dict) -> dict:
    words = {"bad_words": ["".join(map(toy_char, word)) for word in WORDS]} if "bad_words" in options else {}
    return {**options, **words}


def check_masks(token_ids: tuple[int, ...], options: dict) -> None:
    for token_id in token_ids:
        assert token_id in options.get("allowed_token_ids", range(VOCAB))
    for word in options.get("bad_words", ()):
        assert word not in {token_ids[i : i + len(word)] for i in range(len(token_ids))}


@pytest.mark.slow
async def test_law_with_masks() -> None:
    """Masks x {temperature 0.7, 1.5} x rules; γ 1 to 5 and adaptive."""
    cases = list(itertools.product(RULES, (0.7, 1.5), MASKS))
    failures, num_accepted, num_drafted = [], 0, 0
    async with in_process_stack(TARGET, DRAFT) as stack, outrider.Client(stack.address) as client:
        for rule, temperature, name in cases:
            options = {"temperature": temperature, **MASKS[name]}
            uniforms = Uniforms(seed=hash_of(rule, temperature, name))

            async def one(seed: int, options: dict = options, rule: str = rule) -> outrider.Completion:
                gamma = {} if seed % 6 == 0 else {"num_speculative_tokens": seed % 6}
                return await client.complete(
                    PROMPT,
                    seed=seed,
                    max_tokens=MAX_TOKENS,
                    acceptance=rule,
                    drafter="model",
                    **gamma,
                    **on_the_wire(options),
                )

            answers = await asyncio.gather(*(one(seed) for seed in range(scaled(80))))
            num_drafted += sum(a.speculation.num_draft_tokens for a in answers)
            num_accepted += sum(a.speculation.num_accepted_draft_tokens for a in answers)
            params = SamplingParams(acceptance=AcceptanceRule[rule.upper()], **options)
            for answer in answers:
                check_masks(answer.token_ids, options)
                uniforms.add(answer.token_ids, params)
            if min(uniforms.p_values()) < FALSE_ALARM / (2 * len(cases)):
                failures.append((rule, options, uniforms.p_values()))
    assert not failures
    assert 0 < num_accepted < num_drafted


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("name", MASKS)
async def test_text_is_the_same_for_any_number_of_drafts(name: str, options: dict) -> None:
    masks = MASKS[name]
    async with in_process_stack(TARGET, DRAFT) as stack, outrider.Client(stack.address) as client:
        free = await client.complete(PROMPT, max_tokens=60, **options)
        with pytest.raises(AssertionError):
            check_masks(free.token_ids, masks)
        texts = set()
        for gamma, drafter in ((0, "auto"), (1, "model"), (3, "model"), (8, "model"), (4, "lookup"), (None, "auto")):
            answer = await client.complete(
                PROMPT,
                max_tokens=60,
                num_speculative_tokens=gamma,
                drafter=drafter,
                **options,
                **on_the_wire(masks),
            )
            assert (answer.speculation.num_draft_tokens > 0) or gamma in (0, None), "INCONCLUSIVE: nothing was drafted"
            check_masks(answer.token_ids, masks)
            texts.add(answer.token_ids)
        assert len(texts) == 1


async def test_a_single_word_may_be_given_bare_and_bad_values_are_refused() -> None:
    async with in_process_stack(TARGET, None) as stack, outrider.Client(stack.address) as client:
        answer = await client.complete(PROMPT, temperature=1.0, max_tokens=40, bad_words=toy_char(3))
        assert 3 not in answer.token_ids
        for options, field in (
            ({"allowed_token_ids": []}, "sampling.allowed_token_ids"),
            ({"allowed_token_ids": [VOCAB]}, "sampling.allowed_token_ids"),
            ({"allowed_token_ids": ["x"]}, "sampling.allowed_token_ids"),
            ({"bad_words": [toy_char(1), ""]}, "sampling.bad_words[1]"),
            ({"allowed_token_ids": [3], "bad_words": [toy_char(3)]}, "sampling.allowed_token_ids"),
        ):
            with pytest.raises(OutriderError) as refusal:
                await client.complete(PROMPT, **options)
            assert (refusal.value.status, refusal.value.field) == ("INVALID_ARGUMENT", field)
