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


class Siblings(nn.Module):
    """Layers of one input, as in attention and gated layers."""

    def __init__(self, bias):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 48, bias=bias), nn.Linear(32, 16, bias=bias)
        self.v_proj = nn.Linear(32, 16, bias=bias)
        self.gate_proj, self.up_proj = nn.Linear(32, 24, bias=bias), nn.Linear(32, 24, bias=not bias)

    def forward(self, x, y):
        return torch.cat([self.k_proj(x), self.q_proj(x), self.v_proj(y), self.gate_proj(x), self.up_proj(x)], -1)


@pytest.mark.parametrize("bias", [False, True])
def test_siblings_share_one_weight_and_give_what_they_gave(bias):
    torch.manual_seed(0)
    model, x, y = Siblings(bias), torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    with torch.inference_mode():
        expected = [model(x, x), model(x, y), model(y, x)]
        if pack_linears(model) == 0:
            pytest.skip("no packed form on this machine")
        kinds = [type(getattr(model, f"{n}_proj")).__name__ for n in ("q", "k", "v", "gate", "up")]
        assert kinds == ["JointPart"] * 3 + ["PackedLinear"] * 2  # gate and up differ in their bias here
        for (a, b), wanted in zip([(x, x), (x, y), (y, x)], expected, strict=True):
            assert torch.allclose(model(a, b), wanted, atol=1e-5)
            assert torch.allclose(model(a, b), wanted, atol=1e-5), "the joint result of an earlier call was kept"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [96, 1536])
def test_a_fixed_order_gives_each_row_the_same_bits(dtype, in_features):
    torch.manual_seed(0)
    linear = nn.Linear(in_features, 576, bias=False).to(dtype)
    if not can_pack(linear):
        pytest.skip("no packed form on this machine")
    packed, x = PackedLinear(linear), torch.randn(200, in_features).to(dtype)
    with torch.inference_mode():
        packed.min_rows = packed.fix_order()
        whole = packed(x)
        for start, end in ((0, 1), (7, 8), (3, 5), (0, 5), (9, 26), (0, 19), (50, 183), (4, 4)):
            assert torch.equal(packed(x[start:end]), whole[start:end])
        assert packed(x[None, :3]).shape == (1, 3, 576)


def test_other_devices_and_types_are_left_alone():
    assert not can_pack(nn.Linear(4, 4).double())
    assert not can_pack(nn.Linear(4, 4, device="meta"))
    model = nn.Sequential(nn.Linear(4, 4).double())
    assert pack_linears(model) == 0
    assert isinstance(model[0], nn.Linear)
