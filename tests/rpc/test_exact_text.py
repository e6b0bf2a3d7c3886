"""bfloat16 under numerics=exact: greedy and COUPLED text equals plain text token for token, alone and in company."""

import asyncio
from importlib.metadata import version

import pytest
from conftest import scaled
from stack import in_process_stack

import outrider
from outrider.cli.prompts import read_prompts
from outrider.lm.cpu_linear import packs
from outrider.lm.loading import load_model
from outrider.settings import TargetWorkerSettings

torch = pytest.importorskip("torch")

GAMMAS = (1, 3, 8, None)
CONCURRENCY = 4


@pytest.fixture(scope="module")
def target():
    if not packs(torch.bfloat16):
        pytest.skip("no bfloat16 in this processor: the proof takes minutes. Small ones: test_exact_numerics.py")
    settings = {"model": "smollm2-135m", "dtype": "bfloat16", "num_threads": 2}
    loaded = load_model(TargetWorkerSettings(**settings, numerics="exact"))
    assert (loaded.description.numerics.mode, loaded.description.numerics.proven) == ("exact", True)
    return loaded


@pytest.fixture(scope="module")
def draft():
    """Of the same model, but computed otherwise: now and then it is wrong."""
    return load_model(TargetWorkerSettings(model="smollm2-135m", dtype="bfloat16", num_threads=2))


async def texts(client, prompts, concurrency, **kwargs):
    turn = asyncio.Semaphore(concurrency)

    async def one(prompt):
        async with turn:
            return await client.complete(prompt, **kwargs)

    answers = await asyncio.gather(*(one(p) for p in prompts))
    return [a.token_ids for a in answers], sum(a.speculation.num_draft_tokens for a in answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "acceptance": "coupled"}],
    ids=["greedy", "coupled"],
)
async def test_bfloat16_text_is_the_same_for_every_gamma_and_company(target, draft, sampling):
    prompts = [[{"role": "user", "content": p}] for p in read_prompts()[: scaled(40, at_least=CONCURRENCY)]]
    stack = in_process_stack(target, draft, worker={"kv_cache_bytes": 256 << 20})
    async with stack as services, outrider.Client(services.address) as client:
        told = {worker.role: worker.numerics for worker in (await client.server_info()).workers}
        assert told["target"] == target.description.numerics
        assert told["target"].environment["torch"] == version("torch")
        assert (told["draft"].mode, told["draft"].proven) == ("fast", False)
        common = {"max_tokens": scaled(96, at_least=16), "ignore_eos": True, **sampling}
        plain, drafted = await texts(client, prompts, 1, num_speculative_tokens=0, **common)
        assert drafted == 0
        for gamma in GAMMAS:
            options = {} if gamma is None else {"num_speculative_tokens": gamma}
            for concurrency in (1, CONCURRENCY) if gamma == 3 else (CONCURRENCY,):
                speculative, drafted = await texts(client, prompts, concurrency, drafter="model", **options, **common)
                assert speculative == plain, f"γ={gamma}, {concurrency} at a time"
                assert drafted > 0 or gamma is None, "INCONCLUSIVE"
