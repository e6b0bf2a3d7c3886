"""Real transformers models through the real services: greedy and COUPLED text never depends on how it was drafted."""

import asyncio

import pytest
from conftest import scaled
from stack import in_process_stack

import outrider
from outrider.cli.prompts import read_prompts
from outrider.lm.loading import load_model
from outrider.settings import TargetWorkerSettings

GAMMAS = (1, 2, 3, 5, 8, 16, None)
BUNDLE = "smollm2-135m"


@pytest.fixture(scope="module")
def smollm():
    """One copy in memory, for both workers of each stack: they each build their own engine and cache over it."""
    return lambda: load_model(TargetWorkerSettings(model=BUNDLE, dtype="float32", num_threads=1))


def options(gamma):
    return {} if gamma is None else {"num_speculative_tokens": gamma}


async def texts(client, prompts, **kwargs):
    answers = await asyncio.gather(*(client.complete(p, **kwargs) for p in prompts))
    return [a.token_ids for a in answers], sum(a.speculation.num_draft_tokens for a in answers)


@pytest.mark.slow
async def test_smollm_greedy_text_is_the_same_for_every_gamma(smollm):
    prompts = [[{"role": "user", "content": p}] for p in read_prompts()[: scaled(20, at_least=2)]]
    stack = in_process_stack(smollm(), smollm(), worker={"kv_cache_bytes": 1 << 30})
    async with stack as services, outrider.Client(services.address) as client:
        common = {"temperature": 0.0, "max_tokens": scaled(24, at_least=18), "repetition_penalty": 1.0}
        plain, drafted = await texts(client, prompts, num_speculative_tokens=0, **common)
        assert drafted == 0
        for gamma in GAMMAS:
            for drafter in ("model", "lookup") if gamma == 3 else ("model",):
                speculative, drafted = await texts(client, prompts, drafter=drafter, **options(gamma), **common)
                assert speculative == plain, f"γ={gamma}, {drafter}"
                if gamma is not None and drafter == "model":
                    assert drafted > 0, "INCONCLUSIVE"


@pytest.mark.slow
async def test_smollm_coupled_text_depends_on_the_seed_alone(smollm):
    prompts = ["The three largest rivers are", "def fibonacci(n):"][: scaled(20, at_least=2)]
    stack = in_process_stack(smollm(), smollm(), worker={"kv_cache_bytes": 1 << 30})
    async with stack as services, outrider.Client(services.address) as client:
        common = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": scaled(20, at_least=14)}
        plain, _ = await texts(client, prompts, num_speculative_tokens=0, **common)
        for gamma, drafter in ((2, "model"), (5, "model"), (4, "lookup"), (None, "auto")):
            speculative, drafted = await texts(client, prompts, drafter=drafter, **options(gamma), **common)
            assert speculative == plain, f"γ={gamma}, {drafter}"
            assert drafted > 0 or drafter != "model", "INCONCLUSIVE"


@pytest.mark.slow
async def test_self_draft_is_accepted_whole(smollm):
    """Temperature 0, float32: a model that drafts for itself is never wrong."""
    stack = in_process_stack(smollm(), smollm(), worker={"kv_cache_bytes": 1 << 30})
    async with stack as services, outrider.Client(services.address) as client:
        answer = await client.complete(
            "Once upon a time",
            temperature=0.0,
            max_tokens=scaled(40, at_least=20),
            num_speculative_tokens=4,
            drafter="model",
            ignore_eos=True,
        )
    stats = answer.speculation
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens
