"""Int8 linear layers stay near the float ones, their slow twin, and give each row alone what it gets in company."""

import copy

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from tiny_models import tiny  # noqa: E402
from torch import nn  # noqa: E402

from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm.int8_linear import Int8Linear, quantize_linears, weight_bytes  # noqa: E402


def pair(in_features, out_features, bias, dtype):
    torch.manual_seed(in_features)
    linear = nn.Linear(in_features, out_features, bias=bias).to(dtype)
    try:
        return linear, Int8Linear(linear)
    except RuntimeError:
        pytest.skip("no int8 kernel on this machine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 33])
@torch.inference_mode()
def test_near_the_float_layer(dtype, bias, num_rows):
    linear, quantized = pair(96, 160, bias, dtype)
    x = torch.randn(1, num_rows, 96).to(dtype)
    expected, actual = linear.double()(x.double()), quantized(x)
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    error = (actual.double() - expected).norm() / expected.norm()
    assert 0 < error < 0.02  # two roundings to 8 bits give about 0.011


@torch.inference_mode()
def test_a_row_is_the_same_to_the_bit_whatever_its_neighbours():
    """An outlier of 10,000 times the size in another row included: a scale for all rows would round this one away."""
    linear, quantized = pair(64, 80, True, torch.float32)
    x = torch.randn(40, 64)
    x[7] *= 1e4
    together = quantized(x)
    for start in range(37):
        for num_rows in (1, 2, 3):
            rows = slice(start, start + num_rows)
            assert torch.equal(quantized(x[rows]), together[rows])
    assert (together[8] - linear(x[8])).norm() / linear(x[8]).norm() < 0.02


@torch.inference_mode()
def test_rows_of_zeros_and_weights_of_zeros():
    linear = nn.Linear(16, 8)
    linear.weight.zero_()
    quantized = Int8Linear(linear)
    assert torch.allclose(quantized(torch.randn(3, 16)), linear.bias.expand(3, -1), atol=1e-5)
    assert torch.allclose(quantized(torch.zeros(3, 16)), linear.bias.expand(3, -1), atol=1e-5)


@torch.inference_mode()
def test_a_whole_model_keeps_its_choices_and_gets_smaller():
    model = tiny("Llama", tie_word_embeddings=True)
    stock, num_bytes = copy.deepcopy(model), weight_bytes(model)
    num_linears = sum(isinstance(m, nn.Linear) for m in model.modules())
    embedding = model.get_input_embeddings().weight.clone()
    assert quantize_linears(model) == num_linears
    assert not any(isinstance(m, nn.Linear) for m in model.modules())
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    # tied: the embedding stays as it was, the head is held beside it
    assert 0.2 * num_bytes < weight_bytes(model) < 0.6 * num_bytes
    ids = torch.randint(0, 97, (1, 60), generator=torch.Generator().manual_seed(1))
    expected, actual = stock(input_ids=ids).logits[0], model(input_ids=ids).logits[0]
    assert not torch.equal(actual, expected)
    assert (actual.argmax(-1) == expected.argmax(-1)).float().mean() > 0.85


def test_what_cannot_be_held_so_is_refused_by_the_setting_s_name():
    for model, why in (
        (nn.Sequential(nn.LayerNorm(4)), "no linear layers"),
        (nn.Sequential(nn.Linear(4, 4, device="meta")), "on a CPU only"),
        (nn.Sequential(nn.Linear(4, 4).half()), "float16"),
    ):
        with pytest.raises(InvalidArgument, match=f"weight_dtype int8.*{why}") as error:
            quantize_linears(model)
        assert error.value.field == "weight_dtype"


def test_a_build_without_the_kernel_is_refused(monkeypatch):
    def missing(*_):
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack")

    monkeypatch.setattr(Int8Linear, "__init__", missing)
    with pytest.raises(InvalidArgument, match="no such kernel"):
        quantize_linears(nn.Sequential(nn.Linear(4, 4)))
