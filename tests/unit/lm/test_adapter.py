"""The contract with transformers' moving parts, for the minor version that is pinned, and what is refused by name."""

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import transformers  # noqa: E402
from tiny_models import CONTEXT_LENGTH, VOCAB_SIZE, stock_logits, tiny  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm.adapter import ATTENTION_NAME, TransformersModel, attention_forward  # noqa: E402
from outrider.lm.interface import PackedBatch, Segment  # noqa: E402
from outrider.lm.rotary import RotaryTable  # noqa: E402

SPY = "outrider_test_spy"


def adapt(model):
    return TransformersModel(model, vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)


def test_the_pinned_minor_is_installed():
    assert transformers.__version__.split(".")[:2] == ["5", "24"]


def test_attention_is_ours_and_no_mask_is_built_for_it():
    assert ALL_ATTENTION_FUNCTIONS[ATTENTION_NAME] is attention_forward
    assert ATTENTION_NAME not in ALL_MASK_ATTENTION_FUNCTIONS


def test_what_reaches_the_attention_function():
    calls = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        calls.append((module.layer_idx, query.shape, key.shape, value.shape, attention_mask, kwargs))
        return query.transpose(1, 2), None

    transformers.AttentionInterface.register(SPY, spy)
    model = tiny("Llama")
    model.set_attn_implementation(SPY)
    token = object()
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with torch.inference_mode():
        out = model(
            input_ids=torch.ones(1, 5, dtype=torch.long),
            position_ids=positions,
            use_cache=False,
            logits_to_keep=torch.tensor([4, 1]),
            outrider_plan=token,
        )
    assert [c[0] for c in calls] == [0, 1, 2]
    for _, query, key, value, mask, kwargs in calls:
        assert (query, key, value) == ((1, 4, 5, 8), (1, 2, 5, 8), (1, 2, 5, 8))
        assert mask is None
        assert kwargs["outrider_plan"] is token
        assert kwargs["scaling"] == pytest.approx(8**-0.5)
    assert out.logits.shape == (1, 2, VOCAB_SIZE)


@pytest.mark.parametrize("rows", [[4, 1], [0], [], [0, 1, 2, 3, 4]])
def test_logits_to_keep_takes_row_numbers_in_order(rows):
    model = tiny("Llama")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.inference_mode():
        whole = model(input_ids=ids, use_cache=False).logits
        kept = model(input_ids=ids, use_cache=False, logits_to_keep=torch.tensor(rows, dtype=torch.long)).logits
    assert kept.shape == (1, len(rows), VOCAB_SIZE)
    assert torch.allclose(kept, whole[:, rows], atol=1e-5)


def test_logits_beyond_the_real_vocabulary_are_cut_off():
    adapted = TransformersModel(tiny("Llama"), vocab_size=90, context_length=CONTEXT_LENGTH)
    adapted.allocate_cache(4, 4)
    logits = adapted.forward(PackedBatch((Segment(0, [1, 2, 3], [2, 0], 2),)))
    assert (logits.shape, logits.dtype) == ((2, 90), np.float32)
    assert np.abs(logits - stock_logits(tiny("Llama"), [1, 2, 3])[1:, :90]).max() < 1e-4


def test_a_pass_without_logits_and_the_cost_of_a_block():
    adapted = adapt(tiny("Llama"))
    assert adapted.bytes_per_block(16) == 3 * 2 * 2 * 8 * 4 * 16
    adapted.allocate_cache(4, 4)
    assert adapted.forward(PackedBatch((Segment(0, [1, 2, 3], [1], 0),))).shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize(("kind", "num_tables"), [("Llama", 1), ("Gemma2", 1), ("Gemma3Text", 2)])
def test_rotary_angles_are_looked_up_per_layer_type(kind, num_tables):
    layers = {} if kind == "Llama" else {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    adapted = adapt(tiny(kind, head_dim=8, **layers))
    adapted.allocate_cache(4, 4)
    adapted.forward(PackedBatch((Segment(0, [1, 2, 3], [1], 3),)))
    rotary = adapted._model.base_model.rotary_emb
    assert isinstance(rotary, RotaryTable)
    assert len(rotary._tables) == num_tables


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        ("Mistral", {"sliding_window": 6}),
        ("Gemma", {"head_dim": 8}),
        ("Olmo2", {}),
        ("Phi3", {"pad_token_id": 0}),
        ("GPTNeoX", {}),
        ("Granite", {}),
        ("Qwen3Moe", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_further_families_with_standard_attention(kind, extra):
    adapted = adapt(tiny(kind, **extra))
    adapted.allocate_cache(16, 4)
    ids, table = [(7 * i) % VOCAB_SIZE for i in range(20)], [9, 3, 4, 0, 12]
    parts = [(0, 11), (11, 12), (12, 20)]
    logits = [adapted.forward(PackedBatch((Segment(a, ids[a:b], table, b - a),))) for a, b in parts]
    assert np.abs(np.concatenate(logits) - stock_logits(tiny(kind, **extra), ids)).max() < 1e-4


@pytest.mark.parametrize(
    ("kind", "extra", "words"),
    [
        ("Mamba", {}, "mamba"),
        ("Lfm2", {"full_attn_idxs": [1]}, "conv"),
        ("Qwen3Next", {"head_dim": 8}, "linear_attention"),
        ("GptOss", {"head_dim": 8, "num_local_experts": 2}, "s_aux"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
        ("Bloom", {}, "bloom"),
    ],
)
def test_attention_that_is_not_standard_is_refused_by_name(kind, extra, words):
    with pytest.raises(InvalidArgument) as caught:
        adapt(tiny(kind, **extra))
    assert words in str(caught.value)
    assert caught.value.field == "model"
