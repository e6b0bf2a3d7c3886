"""Packed linear layers equal the stock ones, which are their slow twin."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from outrider.lm.cpu_linear import PackedLinear, can_pack, pack_linears  # noqa: E402


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 8, 33])
def test_packed_equals_stock(dtype, bias, num_rows):
    torch.manual_seed(num_rows)
    linear = nn.Linear(96, 160, bias=bias).to(dtype)
    if not can_pack(linear):
        pytest.skip("no packed form on this machine")
    x = torch.randn(1, num_rows, 96).to(dtype)
    expected = linear.double()(x.double())
    linear = linear.to(dtype)
    packed = PackedLinear(linear)
    with torch.inference_mode():
        actual = packed(x)
    assert actual.shape == expected.shape
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert (actual.double() - expected).abs().max() < tolerance


def test_pack_linears_replaces_all_and_keeps_the_output():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Sequential(nn.Linear(64, 48, bias=False)))
    x = torch.randn(4, 32)
    with torch.inference_mode():
        expected = model(x)
        num_packed = pack_linears(model)
        if num_packed == 0:
            pytest.skip("no packed form on this machine")
        assert num_packed == 2
        assert not any(isinstance(m, nn.Linear) for m in model.modules())
        assert torch.allclose(model(x), expected, atol=1e-5)


def test_other_devices_and_types_are_left_alone():
    assert not can_pack(nn.Linear(4, 4).double())
    assert not can_pack(nn.Linear(4, 4, device="meta"))
    model = nn.Sequential(nn.Linear(4, 4).double())
    assert pack_linears(model) == 0
    assert isinstance(model[0], nn.Linear)
