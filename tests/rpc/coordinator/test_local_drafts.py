"""Local drafters through the real services: text and law unchanged, real gain, tenants apart, and no worker needed."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import numpy as np
import pytest
from conftest import scaled
from law import FALSE_ALARM, chi_square
from stack import Stack, in_process_stack

from outrider import results
from outrider.client import Client
from outrider.errors import InvalidArgument, Unavailable
from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling.params import Origin
from outrider.settings import CoordinatorSettings

TARGET, DRAFT = "toy:vocab=64,seed=5", "toy:vocab=64,seed=5,agreement=0.8"
GREEDY = {"temperature": 0.0}
COUPLED = {"temperature": 0.8, "seed": 3}
TENANT = "x-outrider-tenant"


@pytest.fixture(params=[None, DRAFT], ids=["alone", "beside-a-draft-worker"])
async def stack(request: pytest.FixtureRequest) -> AsyncIterator[Stack]:
    async with in_process_stack(TARGET, request.param) as running:
        yield running


def client_of(stack: Stack, tenant: str) -> Client:
    return Client(stack.address, metadata={TENANT: tenant})


@pytest.mark.parametrize("options", [GREEDY, COUPLED], ids=["greedy", "coupled"])
async def test_text_does_not_depend_on_local_drafters(stack: Stack, options: dict) -> None:
    num_drafted: Counter[str] = Counter()
    async with client_of(stack, "texts") as client:
        for prompt in ([1, 2, 3] * 4, [9, 8, 7, 6, 5]):
            plain = await client.complete(prompt, max_tokens=120, num_speculative_tokens=0, **options)
            for drafter in ("lookup", "suffix", "auto"):
                for gamma in (1, 4, None, 4):  # the last time the whole text is known from before
                    extra = {} if gamma is None else {"num_speculative_tokens": gamma}
                    answer = await client.complete(prompt, max_tokens=120, drafter=drafter, **options, **extra)
                    assert answer.token_ids == plain.token_ids
                    num_drafted[drafter] += answer.speculation.num_draft_tokens
    assert all(num_drafted[drafter] > 0 for drafter in ("lookup", "suffix", "auto")), f"INCONCLUSIVE: {num_drafted}"


@pytest.mark.parametrize("drafter", ["lookup", "suffix", "auto"])
async def test_a_copying_prompt_is_copied_several_tokens_a_round(drafter: str) -> None:
    async with in_process_stack(TARGET, None) as stack:
        async with client_of(stack, "writes") as client:
            text = (await client.complete([1, 2, 3], max_tokens=60, num_speculative_tokens=0, **GREEDY)).token_ids
        async with client_of(stack, "copies") as client:
            answer = await client.complete([1, 2, 3, *text, 9, 1, 2, 3], max_tokens=60, drafter=drafter, **GREEDY)
    assert answer.token_ids == text, "INCONCLUSIVE: the toy does not copy"
    assert answer.speculation.num_draft_tokens > 0, "INCONCLUSIVE: nothing was drafted"
    assert answer.speculation.mean_acceptance_length > 2


async def test_what_was_written_once_is_drafted_the_next_time_by_its_own_tenant_only(stack: Stack) -> None:
    prompt = [60, 61, 62, 63]
    options = {**GREEDY, "max_tokens": 12, "drafter": "suffix", "num_speculative_tokens": 6}

    async def num_accepted(tenant: str) -> int:
        async with client_of(stack, tenant) as client:
            answer = await client.complete(prompt, **options)
            assert len(set(answer.token_ids)) > 10, "INCONCLUSIVE: the text repeats itself"
            return answer.speculation.num_accepted_draft_tokens

    assert await num_accepted("one") == 0
    assert await num_accepted("one") > 4
    assert await num_accepted("two") == 0
    assert await num_accepted("two") > 4


async def test_tenants_share_only_where_the_settings_say_so() -> None:
    options = {**GREEDY, "max_tokens": 12, "drafter": "suffix", "num_speculative_tokens": 6}
    async with in_process_stack(TARGET, None, coordinator={"share_draft_cache": True}) as stack:
        async with client_of(stack, "one") as client:
            await client.complete([60, 61, 62, 63], **options)
        async with client_of(stack, "two") as client:
            assert (await client.complete([60, 61, 62, 63], **options)).speculation.num_accepted_draft_tokens > 4


@pytest.mark.parametrize(("rule", "reads"), [("token", False), ("block", False), ("coupled", True)])
async def test_a_stream_never_reads_what_its_own_coins_have_decided(stack: Stack, rule: str, reads: bool) -> None:
    """The same seed again, under a rule whose coins an earlier stream of that seed tells of."""
    options = {"seed": 11, "acceptance": rule, "max_tokens": 14, "drafter": "suffix", "num_speculative_tokens": 6}
    async with client_of(stack, f"seeds-{rule}") as client:
        first = await client.complete([50, 51, 52, 53], **options)
        again = await client.complete([50, 51, 52, 53], **options)
        assert len(set(first.token_ids)) > 10, "INCONCLUSIVE: the text repeats itself"
        assert (again.speculation.num_draft_tokens > first.speculation.num_draft_tokens) == reads
        # and with a seed of its own it may
        options.pop("seed")
        options["temperature"] = 0.01
        for _ in range(2):
            other = await client.complete([50, 51, 52, 53], **options)
        assert other.speculation.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["lookup", "suffix", "auto"])
@pytest.mark.parametrize("rule", ["token", "block"])
async def test_the_law_of_sampled_text(rule: str, drafter: str) -> None:
    """Joint law of the first tokens over many seeds, each stream reading what the ones before it have written."""
    vocab, num_tokens, prompt = 3, 4, [0, 0, 1, 1, 2, 2, 0, 2, 1, 0, 1, 2]
    target, draft = f"toy:vocab={vocab},seed=3", f"toy:vocab={vocab},seed=3,agreement=0.5"
    model = ToyModel(parse_toy(target))
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        law = {
            (*text, x): mass * float(p)
            for text, mass in law.items()
            for x, p in enumerate(softmax(model.logits_for([*prompt, *text])))
        }
    counts: Counter[tuple[int, ...]] = Counter()
    used: Counter[str] = Counter()
    num_accepted = num_drafted = 0
    async with in_process_stack(target, draft) as stack, Client(stack.address) as client:
        for batch in range(scaled(500)):
            gamma = {} if batch % 3 == 0 else {"num_speculative_tokens": 1 + batch % 4}
            options = {"acceptance": rule, "drafter": drafter, "temperature": 1.0, "max_tokens": num_tokens, **gamma}
            for answer in await asyncio.gather(*(begun(client, prompt, options) for _ in range(8))):
                counts[answer.token_ids] += 1
                used.update(answer.speculation.drafters)
                num_accepted += answer.speculation.num_accepted_draft_tokens
                num_drafted += answer.speculation.num_draft_tokens
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE: nothing was drafted, accepted or rejected"
    assert drafter == "auto" or set(used) == {drafter}
    assert chi_square(counts, law) > FALSE_ALARM


async def begun(client: Client, prompt: list[int], options: dict) -> results.Completion:
    """Tried again where a slow machine answered no health probe in time: refused before anything was drawn."""
    while True:
        try:
            return await client.complete(prompt, **options)
        except Unavailable as refused:
            if refused.reason != "NO_TARGET_WORKER":
                raise
            await asyncio.sleep(0.1)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(float) - logits.max())
    return weights / weights.sum()


async def test_a_stream_goes_on_with_guesses_when_its_draft_worker_dies() -> None:
    async with in_process_stack(TARGET + ",pass_ms=3", DRAFT, draft_worker={"drain_grace_s": 0.0}) as stack:
        async with Client(stack.address) as client:
            options = {**GREEDY, "max_tokens": 600, "num_speculative_tokens": 3}
            whole = await client.complete([1, 2, 3], **{**options, "num_speculative_tokens": 0})
            chunks: list[results.Chunk] = []
            async for event in client.generate([1, 2, 3], report_steps=True, **options):
                if isinstance(event, results.Chunk):
                    chunks.append(event)
                if len(chunks) == 10:
                    await stack.draft[0].close()
            assert tuple(i for chunk in chunks for i in chunk.token_ids) == whole.token_ids
            steps = [chunk.step for chunk in chunks if chunk.step is not None]
            assert any(step.drafter == "model" for step in steps[:12]), "INCONCLUSIVE: it died too soon"
            guessed = [step for step in steps if step.drafter in ("lookup", "suffix")]
            assert {step.reason for step in guessed} <= {"draft-lost", "draft-late", "no-draft-worker", "fixed"}
            assert any(step.num_accepted_draft_tokens for step in guessed)


async def test_what_the_target_said_past_a_rejection_is_guessed_later() -> None:
    """Rows that nobody reached tell what follows their tokens. Contexts that no text has had are looked at alone."""
    vocab, target = 6, "toy:vocab=6,seed=5,order=3"
    model = ToyModel(parse_toy(target))
    written: set[tuple[int, ...]] = set()
    num_guessed = num_right = 0
    async with in_process_stack(target, "toy:vocab=6,seed=9") as stack, Client(stack.address) as client:
        for first in range(vocab):
            prompt = [first, 1, 2]
            answer = await client.complete(prompt, max_tokens=12, drafter="model", num_speculative_tokens=8, **GREEDY)
            assert answer.speculation.num_accepted_draft_tokens < answer.speculation.num_draft_tokens, "INCONCLUSIVE"
            text = (*prompt, *answer.token_ids)
            written |= set(zip(text, text[1:], text[2:], strict=False))
        for prompt in np.ndindex(vocab, vocab, vocab):
            context = (*prompt[1:], int(model.logits_for(prompt).argmax()))
            if context in written or len({*prompt, *context}) < 4:
                continue
            answer = await client.complete(
                list(prompt), max_tokens=3, drafter="suffix", num_speculative_tokens=1, **GREEDY
            )
            num_guessed += answer.speculation.num_draft_tokens
            num_right += answer.speculation.num_accepted_draft_tokens
    assert num_guessed > 0, "INCONCLUSIVE: nothing was guessed"
    assert num_right == num_guessed, "this target says the same after the same three ids"


async def test_no_drafts_means_no_guesses_either(stack: Stack) -> None:
    async with client_of(stack, "plain") as client:
        for _ in range(2):
            answer = await client.complete([1, 2] * 5, max_tokens=20, num_speculative_tokens=0, **GREEDY)
            assert answer.speculation.num_draft_tokens == 0
            assert set(answer.origins) == {Origin.PLAIN}


async def test_without_local_drafters_nothing_is_guessed() -> None:
    async with in_process_stack(TARGET, None, coordinator={"local_drafters": ()}) as stack:
        async with Client(stack.address) as client:
            assert (await client.model_info()).drafters == ()
            answer = await client.complete([1, 2] * 5, max_tokens=20, **GREEDY)
            assert answer.speculation.num_draft_tokens == 0


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"local_drafters": ("lookup", "eagle")}, "local_drafters"),
        ({"lookup_min_ngram": 9}, "lookup_min_ngram"),
    ],
)
async def test_settings_that_cannot_be_are_refused_at_start(settings: dict, field: str) -> None:
    from coordinator.server import serve

    with pytest.raises(InvalidArgument) as bad:
        await serve(CoordinatorSettings(port=0, log_level="warning", **settings))
    assert bad.value.field == field
