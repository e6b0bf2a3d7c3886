"""The embedded bundle, for real: loads, continues a prompt as transformers does, and says what a pass costs."""

import time

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from lm_programs import greedy, started  # noqa: E402

from outrider.lm.build import build_engine  # noqa: E402
from outrider.lm.interface import Forward, PackedBatch, Segment  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.settings import WorkerSettings  # noqa: E402

pytestmark = pytest.mark.slow
PROMPT = "Explain in two sentences how rain forms."


@pytest.fixture(scope="module")
def settings():
    return WorkerSettings(model="smollm2-135m", num_threads=1, kv_cache_bytes=256 << 20)


@pytest.fixture(scope="module")
def loaded(settings):
    return load_model(settings)


@pytest.fixture(scope="module")
def stock():
    from transformers import AutoModelForCausalLM

    from outrider.lm.bundle import cache_folder

    return AutoModelForCausalLM.from_pretrained(cache_folder() / "smollm2-135m", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompt_ids(loaded):
    messages = [{"role": "user", "content": PROMPT}]
    return list(
        loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    )


def test_description(loaded):
    about = loaded.description
    assert (about.vocab_size, about.context_length, about.dtype) == (49152, 8192, "float32")
    assert about.eos_token_ids == (2,)
    assert about.bos_token_id is None
    assert "<|im_start|>" in about.chat_template
    assert 500e6 < about.weight_bytes < 600e6


async def test_greedy_equals_transformers_generate(loaded, settings, stock, prompt_ids):
    num_tokens = 16
    with torch.inference_mode():
        whole = stock.generate(torch.tensor([prompt_ids]), max_new_tokens=num_tokens, do_sample=False)
        expected = whole[0, len(prompt_ids) :].tolist()
    engine = build_engine(loaded, settings)
    with started(engine):
        sequence = await engine.open_sequence(len(prompt_ids) + num_tokens)
        actual = await engine.run(greedy(sequence, prompt_ids, num_tokens))
    assert actual == expected
    assert "warm air rises" in loaded.tokenizer.decode(actual)


async def test_verified_rows_equal_a_fresh_stock_forward(loaded, settings, stock, prompt_ids):
    engine = build_engine(loaded, settings)

    def program(sequence):
        yield Forward(sequence, prompt_ids)
        yield Forward(sequence, [5, 6, 7, 8, 9], 5)
        sequence.truncate(len(prompt_ids) + 2)
        return (yield Forward(sequence, [17, 18, 19], 3)).logits.copy()

    with started(engine):
        logits = await engine.run(program(await engine.open_sequence(len(prompt_ids) + 8)))
    with torch.inference_mode():
        expected = stock(torch.tensor([[*prompt_ids, 5, 6, 17, 18, 19]]), use_cache=False).logits[0, -3:].numpy()
    assert np.abs(logits - expected).max() < 1e-4


def test_what_a_pass_costs_is_printed(loaded, stock, capsys):
    """A figure, not a verdict: nothing timed may fail a test."""
    from transformers import DynamicCache

    loaded.model.allocate_cache(32, 16)
    table = list(range(32))

    def ours(num_rows):
        loaded.model.forward(PackedBatch((Segment(100, [5] * num_rows, table, num_rows),)))

    with torch.inference_mode():
        cache = DynamicCache(config=stock.config)
        stock(torch.full((1, 100), 5), cache=cache, use_cache=True)

        def theirs():
            stock(torch.full((1, 1), 5), cache=cache, use_cache=True)
            cache.crop(-1)

        costs = {"ours, 1 row": _median_ms(lambda: ours(1)), "ours, 5 rows": _median_ms(lambda: ours(5))}
        costs["transformers with its cache, 1 row"] = _median_ms(theirs)
    with capsys.disabled():
        print("\nSmolLM2-135M pass after 100 tokens: " + ", ".join(f"{k} {v:.1f} ms" for k, v in costs.items()))


def _median_ms(action, count=5):
    times = []
    for _ in range(count):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return 1000 * float(np.median(times))
