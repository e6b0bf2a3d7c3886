"""Int8 linear layers stay near the float ones, their slow twin, and give each row alone what it gets in company."""

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from outrider.lm.int8_linear import Int8Linear  # noqa: E402


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
