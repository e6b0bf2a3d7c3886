"""4-bit linear layers stay near the float ones, their slow twin, and give each row alone what it gets in company."""

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from outrider.lm.int4_linear import Int4Linear, can_hold  # noqa: E402


def pair(in_features, out_features, bias, dtype):
    torch.manual_seed(in_features)
    linear = nn.Linear(in_features, out_features, bias=bias).to(dtype)
    assert can_hold(linear)
    try:
        return linear, Int4Linear(linear)
    except RuntimeError:
        pytest.skip("no int4 kernel on this machine")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 33])
@pytest.mark.parametrize("in_features", [96, 128])  # runs of 32 and of 64 weights
@torch.inference_mode()
def test_near_the_float_layer(dtype, bias, num_rows, in_features):
    linear, rounded = pair(in_features, 160, bias, dtype)
    x = torch.randn(1, num_rows, in_features).to(dtype)
    expected, actual = linear.double()(x.double()), rounded(x)
    assert (actual.shape, actual.dtype) == (expected.shape, dtype)
    error = (actual.double() - expected).norm() / expected.norm()
    assert 0.001 < error < 0.1  # uniform weights in 16 steps: about 1 / (16 sqrt 3) of a step's width


@torch.inference_mode()
def test_equals_the_layer_of_its_own_levels():
    """The slow twin: weights written out from levels, steps and middles as the kernel is told them."""
    linear, rounded = pair(64, 32, False, torch.bfloat16)
    weight = linear.weight.float()
    smallest, largest = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    step = (largest - smallest) / 15
    levels = ((weight - smallest) / step).round()
    middle = (smallest + 8 * step).bfloat16().float()
    twin = step.bfloat16().float() * (levels - 8) + middle
    x = torch.randn(7, 64).bfloat16()
    expected = x.double() @ twin.double().T
    assert ((rounded(x).double() - expected).norm() / expected.norm()) < 0.01


@torch.inference_mode()
def test_a_row_is_the_same_to_the_bit_whatever_its_neighbours():
    _, rounded = pair(64, 80, True, torch.bfloat16)
    x = torch.randn(40, 64).bfloat16()
    x[7] *= 1e4
    together = rounded(x)
    for start in range(37):
        for num_rows in (1, 2, 3):
            rows = slice(start, start + num_rows)
            assert torch.equal(rounded(x[rows]), together[rows])


@torch.inference_mode()
def test_rows_of_zeros_and_weights_of_zeros():
    linear = nn.Linear(32, 16)
    linear.weight.zero_()
    try:
        rounded = Int4Linear(linear)
    except RuntimeError:
        pytest.skip("no int4 kernel on this machine")
    for x in (torch.randn(3, 32), torch.zeros(3, 32)):
        assert torch.allclose(rounded(x), linear.bias.expand(3, -1), atol=2e-3)


@pytest.mark.parametrize(("in_features", "out_features"), [(33, 16), (32, 17), (16, 16)])
def test_shapes_that_the_kernel_does_not_take(in_features, out_features):
    assert not can_hold(nn.Linear(in_features, out_features))
