"""Keys and values kept in another number type than the model's: rounded once, and nothing else changes."""

import itertools

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import transformers  # noqa: E402
from tiny_models import CONTEXT_LENGTH, FAMILIES, VOCAB_SIZE, stock_logits, tiny  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402

from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.cpu_linear import pack_linears  # noqa: E402
from outrider.lm.interface import PackedBatch, Segment  # noqa: E402
from outrider.lm.numerics import prove  # noqa: E402

IDS = [(7 * i * i + 3) % VOCAB_SIZE for i in range(90)]
TABLE = [9, 3, 4, 0, 12, 1]


def adapt(family, dtype, cache_dtype, exact=False):
    kind, extra = FAMILIES[family]
    model = tiny(kind, **extra).to(dtype)
    if exact and pack_linears(model) == 0:
        pytest.skip("no packed linear layers on this machine, and without them there are no exact numerics")
    options = {"vocab_size": VOCAB_SIZE, "context_length": CONTEXT_LENGTH}
    return TransformersModel(model, **options, cache_dtype=cache_dtype, exact=exact)


def logits_of(adapted, bounds):
    adapted.allocate_cache(16, 16)
    parts = itertools.pairwise(bounds)
    return np.concatenate([adapted.forward(PackedBatch((Segment(a, IDS[a:b], TABLE, b - a),))) for a, b in parts])


@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "mistral_sliding"])
def test_rounded_keys_and_values_are_all_that_differs(family):
    def rounding(module, query, key, value, attention_mask, **kwargs):
        key, value = key.bfloat16().float(), value.bfloat16().float()
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    transformers.AttentionInterface.register("outrider_test_rounding", rounding)
    transformers.AttentionMaskInterface.register(
        "outrider_test_rounding", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    )
    kind, extra = FAMILIES[family]
    stock = tiny(kind, **extra)
    plain = stock_logits(stock, IDS)
    stock.set_attn_implementation("outrider_test_rounding")
    expected = stock_logits(stock, IDS)
    adapted = adapt(family, torch.float32, torch.bfloat16)
    assert adapted.bytes_per_block(16) * 2 == adapt(family, torch.float32, None).bytes_per_block(16)
    for bounds in ([0, 90], [0, 1, 2, 13, 80, 81, 90]):
        assert np.abs(logits_of(adapted, bounds) - expected).max() < 1e-3
    assert np.abs(plain - expected).max() > 1e-2


def test_a_wider_cache_changes_nothing():
    bounds = [0, 1, 2, 13, 80, 81, 90]
    same, wide = (logits_of(adapt("llama", torch.bfloat16, dtype), bounds) for dtype in (None, torch.float32))
    assert (same == wide).all()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3"])
@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float16"), ("bfloat16", "float32")])
def test_exact_numerics_hold(family, dtypes):
    dtype, cache_dtype = (getattr(torch, name) for name in dtypes)
    prove(adapt(family, dtype, cache_dtype, exact=True))  # raises where two bits differ
