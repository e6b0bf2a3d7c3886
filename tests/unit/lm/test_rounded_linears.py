"""A model whose linear layers are rounded to 8 or 4 bits: what is kept, what falls back, what is refused."""

import copy

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from tiny_models import tiny  # noqa: E402
from torch import nn  # noqa: E402

from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm.int4_linear import Int4Linear  # noqa: E402
from outrider.lm.int8_linear import Int8Linear  # noqa: E402
from outrider.lm.rounded_linears import round_linears, weight_bytes  # noqa: E402


@torch.inference_mode()
def test_a_whole_model_keeps_its_choices_and_gets_smaller():
    model = tiny("Llama", tie_word_embeddings=True)
    stock, num_bytes = copy.deepcopy(model), weight_bytes(model)
    num_linears = sum(isinstance(m, nn.Linear) for m in model.modules())
    embedding = model.get_input_embeddings().weight.clone()
    assert round_linears(model, "int8") == num_linears
    assert not any(isinstance(m, nn.Linear) for m in model.modules())
    assert torch.equal(model.get_input_embeddings().weight, embedding)
    # tied: the embedding stays as it was, the head is held beside it
    assert 0.2 * num_bytes < weight_bytes(model) < 0.6 * num_bytes
    ids = torch.randint(0, 97, (1, 60), generator=torch.Generator().manual_seed(1))
    expected, actual = stock(input_ids=ids).logits[0], model(input_ids=ids).logits[0]
    assert not torch.equal(actual, expected)
    least = 0.85 if torch.cpu._is_vnni_supported() else 0.75  # inputs have a bit less without it
    assert (actual.argmax(-1) == expected.argmax(-1)).float().mean() > least


def test_what_cannot_be_held_so_is_refused_by_the_setting_s_name():
    for model, why in (
        (nn.Sequential(nn.LayerNorm(4)), "no linear layers"),
        (nn.Sequential(nn.Linear(4, 4, device="meta")), "on a CPU only"),
        (nn.Sequential(nn.Linear(4, 4).half()), "float16"),
    ):
        with pytest.raises(InvalidArgument, match=f"weight_dtype int8.*{why}") as error:
            round_linears(model, "int8")
        assert error.value.field == "weight_dtype"


def test_a_build_without_the_kernel_is_refused(monkeypatch):
    def missing(*_):
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack")

    monkeypatch.setattr(Int8Linear, "__init__", missing)
    with pytest.raises(InvalidArgument, match="no such kernel"):
        round_linears(nn.Sequential(nn.Linear(4, 4)), "int8")


@torch.inference_mode()
def test_four_bits_where_they_fit_and_eight_for_the_head():
    model = tiny("Llama", tie_word_embeddings=True, hidden_size=64, intermediate_size=128)
    num_linears = sum(isinstance(m, nn.Linear) for m in model.modules())
    try:
        assert round_linears(model, "int4") == num_linears
    except InvalidArgument:
        pytest.skip("no int4 kernel on this machine")
    assert type(model.get_output_embeddings()) is Int8Linear
    kinds = [type(m) for m in model.modules() if isinstance(m, Int8Linear | Int4Linear)]
    assert kinds.count(Int8Linear) == 1
    assert kinds.count(Int4Linear) > 1
    assert torch.isfinite(model(input_ids=torch.arange(9)[None]).logits).all()


@torch.inference_mode()
def test_a_layer_that_the_four_bit_kernel_does_not_take_gets_eight():
    layers = nn.Sequential(nn.Linear(20, 16), nn.Linear(20, 16))
    assert round_linears(layers, "int4") == 2
    assert [type(layer) for layer in layers] == [Int8Linear, Int8Linear]
