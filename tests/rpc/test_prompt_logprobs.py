"""Logprobs of the prompt: those of a fresh pass, whatever is cached, before the first chunk, once for all choices."""

import asyncio
import dataclasses

import numpy as np
import pytest
from conftest import scaled
from stack import in_process_stack

import outrider
from outrider import results
from outrider.errors import Internal, OutriderError
from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling.logprobs import raw_logprobs

TOY = "toy:vocab=24,seed=9,order=3"
MODEL = ToyModel(parse_toy(TOY))


def expected(prompt: list[int], num_top: int) -> results.Logprobs:
    rows = [raw_logprobs(MODEL.logits_for(prompt[:i]), prompt[i], num_top) for i in range(1, len(prompt))]
    as_sent = np.float32  # the wire's number type
    return results.Logprobs(
        tuple(float(as_sent(value)) for value, _, _ in rows),
        tuple(
            tuple((int(i), float(as_sent(x))) for i, x in zip(ids, values, strict=True))
            for _, ids, values in rows
            if num_top
        ),
    )


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(24, size=length).tolist()


@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("length", [1, 2, 17, 700])
async def test_exact_on_toys_and_first_before_any_chunk(length: int, num_top: int) -> None:
    prompt = random_prompt(length)
    async with in_process_stack(TOY, TOY + ",agreement=0.8") as stack, outrider.Client(stack.address) as client:
        options = {"temperature": 0.7, "max_tokens": 12, "num_speculative_tokens": 3, "prompt_logprobs": num_top}
        kinds = [type(event) async for event in client.generate(prompt, **options)]
        first_chunk = kinds.index(results.Chunk)
        assert kinds[0] is results.Started
        assert set(kinds[1:first_chunk]) == {results.PromptLogprobs}
        assert results.PromptLogprobs not in kinds[first_chunk:]
        answer = await client.complete(prompt, **options)
        assert answer.speculation.num_draft_tokens > 0
        assert answer.prompt_logprobs == expected(prompt, num_top)


async def test_a_cached_prompt_is_computed_again() -> None:
    prompt = random_prompt(300)
    async with in_process_stack(TOY, None) as stack, outrider.Client(stack.address) as client:
        plain = [await client.complete(prompt, temperature=0, max_tokens=20) for _ in range(2)]
        assert plain[1].usage.cached_tokens > 0, "INCONCLUSIVE: nothing was cached"
        answer = await client.complete(prompt, temperature=0, max_tokens=20, prompt_logprobs=1)
        assert answer.usage.cached_tokens == 0
        assert answer.prompt_logprobs == expected(prompt, 1)
        assert answer.token_ids == plain[0].token_ids
        assert plain[0].prompt_logprobs is None


async def test_several_choices_get_them_once_and_none_starts_before() -> None:
    prompt = random_prompt(600)
    async with in_process_stack(TOY, TOY) as stack, outrider.Client(stack.address) as client:
        options = {"temperature": 1.0, "seed": 5, "max_tokens": 8}
        events = [event async for event in client.generate(prompt, n=3, prompt_logprobs=0, **options)]
        told = [i for i, event in enumerate(events) if isinstance(event, results.PromptLogprobs)]
        chunks = [i for i, event in enumerate(events) if isinstance(event, results.Chunk)]
        assert max(told) < min(chunks)
        values = [v for i in told for v in events[i].logprobs.token_logprobs]
        assert tuple(values) == expected(prompt, 0).token_logprobs
        assert {events[i].index for i in chunks} == {0, 1, 2}


async def test_they_change_no_text_and_hurt_no_neighbour() -> None:
    async with in_process_stack(TOY, TOY + ",agreement=0.8") as stack, outrider.Client(stack.address) as client:

        async def one(number: int, **options: object) -> outrider.Completion:
            return await client.complete(
                random_prompt(40 * number + 1, number), temperature=1.0, seed=number, max_tokens=30, **options
            )

        numbers = range(scaled(40, at_least=6))
        alone = [await one(number) for number in numbers]
        together = await asyncio.gather(*(one(n, prompt_logprobs=2 if n % 2 else None) for n in numbers))
        assert [a.token_ids for a in alone] == [t.token_ids for t in together]
        for number, answer in zip(numbers, together, strict=True):
            told = expected(random_prompt(40 * number + 1, number), 2) if number % 2 else None
            assert answer.prompt_logprobs == told


async def test_bad_prompt_rows_fail_their_request_alone() -> None:
    async with in_process_stack(TOY + ",nan_after=50", None) as stack, outrider.Client(stack.address) as client:
        with pytest.raises(Internal, match="prompt tokens 0 to"):
            await client.complete(random_prompt(60), max_tokens=3, prompt_logprobs=0)
        answer = await client.complete(random_prompt(20), max_tokens=3, prompt_logprobs=0)
        assert answer.prompt_logprobs == expected(random_prompt(20), 0)
        with pytest.raises(OutriderError) as refusal:
            await client.complete([1, 2], prompt_logprobs=21)
        assert (refusal.value.status, refusal.value.field) == ("INVALID_ARGUMENT", "output.prompt_logprobs")


@pytest.mark.slow
async def test_equal_to_a_fresh_forward_of_a_real_architecture(tmp_path) -> None:
    torch = pytest.importorskip("torch")
    from test_tiny_families import VOCAB, save_tiny

    from outrider.lm.loading import load_model
    from outrider.settings import TargetWorkerSettings

    stock = save_tiny(tmp_path, "qwen2", seed=1)
    loaded = load_model(TargetWorkerSettings(model=str(tmp_path), dtype="float32", num_threads=1))
    prompt = np.random.default_rng(1).integers(2, VOCAB, size=301).tolist()
    with torch.inference_mode():
        rows = torch.log_softmax(stock(torch.tensor([prompt])).logits[0].double(), -1).numpy()
    services = in_process_stack(dataclasses.replace(loaded), None, worker={"kv_cache_bytes": 1 << 24})
    async with services as stack, outrider.Client(stack.address) as client:
        for _ in range(2):
            answer = await client.complete(prompt, temperature=0, max_tokens=4, prompt_logprobs=2)
            told = answer.prompt_logprobs
            assert told is not None
            own = [rows[i - 1, prompt[i]] for i in range(1, len(prompt))]
            np.testing.assert_allclose(told.token_logprobs, own, atol=1e-4)
            best = np.sort(rows[:-1], axis=1)[:, :-3:-1]
            np.testing.assert_allclose([[x for _, x in row] for row in told.top], best, atol=1e-4)
