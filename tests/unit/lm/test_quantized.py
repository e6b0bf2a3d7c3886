"""Quantised checkpoints are what they stand for: logits equal those of a model with the rounded weights."""

import itertools
import json

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from tiny_checkpoints import change_config, read_tensors, save_tiny, write_tensors  # noqa: E402
from tiny_models import stock_logits  # noqa: E402

from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm.interface import PackedBatch, Segment  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.settings import WorkerSettings  # noqa: E402

IDS = [(7 * i * i + 3) % 90 for i in range(20)]
FP8_MAX = 448.0
GROUP = 16


def block_fp8(weight, block=(24, 20)):
    rows, columns = (-(-n // b) for n, b in zip(weight.shape, block, strict=True))
    scale = torch.empty(rows, columns)
    quantized, kept = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for r, c in itertools.product(range(rows), range(columns)):
        where = (slice(r * block[0], (r + 1) * block[0]), slice(c * block[1], (c + 1) * block[1]))
        scale[r, c] = weight[where].abs().max() / FP8_MAX
        quantized[where] = (weight[where] / scale[r, c]).to(torch.float8_e4m3fn)
        kept[where] = quantized[where].float() * scale[r, c]
    return {"weight": quantized, "weight_scale_inv": scale}, kept


def tensor_fp8(weight):
    scale = weight.abs().max() / FP8_MAX
    quantized = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": quantized, "weight_scale": scale[None], "input_scale": torch.ones(1)}, quantized.float() * scale


def row_fp8(weight):
    scale = weight.abs().amax(1, keepdim=True) / FP8_MAX
    quantized = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": quantized, "weight_scale": scale}, quantized.float() * scale


def row_int8(weight):
    scale = weight.abs().amax(1, keepdim=True) / 127
    quantized = (weight / scale).round().to(torch.int8)
    return {"weight": quantized, "weight_scale": scale}, quantized.float() * scale


def grouped(weight, bits):
    """Values [O, I], zero points and scales [O, I/g], and what they stand for."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(2), groups.amax(2)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zero = (-low / scale).round().clamp(0, 2**bits - 1)
    values = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 2**bits - 1)
    kept = ((values - zero[..., None]) * scale[..., None]).flatten(1)
    return values.flatten(1).int(), zero.int(), scale, kept


def pack(values, bits, dim):
    """Eight, or 32 / bits, successive entries along `dim` in one int32, the first in the lowest bits."""
    parts = values.movedim(dim, -1).unflatten(-1, (-1, 32 // bits)).numpy().astype(np.uint32)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for i in range(32 // bits):
        words |= parts[..., i] << np.uint32(bits * i)
    return torch.from_numpy(words.view(np.int32).copy()).movedim(-1, dim)


def packed_int4(weight, *, zero_points):
    values, zero, scale, kept = grouped(weight, 4)
    if not zero_points:
        scale = weight.unflatten(1, (-1, GROUP)).abs().amax(2) / 7
        wide = scale.repeat_interleave(GROUP, 1)
        values = (weight / wide).round().int().clamp(-8, 7)
        kept, values = values * wide, values + 8
    parts = {"weight_packed": pack(values, 4, 1), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}
    if zero_points:
        filled = torch.nn.functional.pad(zero, (0, 0, 0, -len(zero) % 8))
        parts["weight_zero_point"] = pack(filled, 4, 0)
    return parts, kept


def gptq(weight, bits, *, shuffled=False, version=1):
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1)) if shuffled else None
    source = weight if order is None else weight[:, order]
    values, zero, scale, kept = grouped(source, bits)
    groups = torch.arange(weight.shape[1]) // GROUP
    if order is not None:
        back = order.argsort()
        values, kept, groups = values[:, back], kept[:, back], groups[back]
    stored = zero if version == 2 else (zero - 1) % 2**bits
    parts = {
        "qweight": pack(values.T, bits, 0),
        "qzeros": pack(stored.T, bits, 1),
        "scales": scale.T.half(),
        "g_idx": groups.int(),
    }
    return parts, kept


def awq(weight):
    values, zero, scale, kept = grouped(weight, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(numbers):
        return pack(numbers.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4, 1)

    return {"qweight": packed(values.T), "qzeros": packed(zero.T), "scales": scale.T.half()}, kept


def compressed(layout, **weights):
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": {"weights": weights}}}


KINDS = {
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [24, 20]}, block_fp8, "fp8"),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, tensor_fp8, "fp8"),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, row_fp8, "fbgemm_fp8"),
    "ct fp8": (compressed("float-quantized", num_bits=8), row_fp8, "compressed-tensors (float-quantized)"),
    "ct int8": (compressed("int-quantized", num_bits=8), row_int8, "compressed-tensors (int-quantized)"),
    "ct int4": (
        compressed("pack-quantized", num_bits=4),
        lambda w: packed_int4(w, zero_points=False),
        "compressed-tensors (pack-quantized)",
    ),
    "ct int4 zero points": (
        compressed("pack-quantized", num_bits=4),
        lambda w: packed_int4(w, zero_points=True),
        "compressed-tensors (pack-quantized)",
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4}, lambda w: gptq(w, 4), "gptq 4-bit"),
    "gptq act order": (
        {"quant_method": "gptq", "bits": 4, "desc_act": True},
        lambda w: gptq(w, 4, shuffled=True),
        "gptq 4-bit",
    ),
    "gptq v2 8-bit": (
        {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, 8, version=2),
        "gptq 8-bit",
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq, "awq 4-bit"),
}


def quantize(folder, stated, quantizer):
    """Leaves a quantised checkpoint in `folder`; returns the stock model of the values that it stands for."""
    model = save_tiny(folder)
    tensors = {}
    for name, tensor in read_tensors(folder).items():
        layer, _, _ = name.rpartition(".")
        if layer.endswith("_proj"):
            parts, kept = quantizer(tensor)
            tensors |= {f"{layer}.{part}": value for part, value in parts.items()}
            model.get_submodule(layer).weight.data = kept
        else:
            tensors[name] = tensor
    write_tensors(folder, tensors)
    change_config(folder, quantization_config=stated)
    return model


def load(folder, **settings):
    return load_model(WorkerSettings(model=str(folder), num_threads=1, **settings))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_rounded_weights(kind, tmp_path):
    stated, quantizer, method = KINDS[kind]
    rounded = quantize(tmp_path, stated, quantizer)
    loaded = load(tmp_path, dtype="float32")
    loaded.model.allocate_cache(4, 16)
    logits = loaded.model.forward(PackedBatch((Segment(0, IDS, [2, 0], len(IDS)),)))
    expected = stock_logits(rounded, IDS)[:, :90]
    assert np.abs(logits - expected).max() < 2e-3
    assert loaded.description.versions["quantization"] == f"{method}, dequantised to float32"
    plain = stock_logits(save_tiny(tmp_path / "plain"), IDS)[:, :90]
    assert np.abs(plain - expected).max() > 1e-2, "nothing was rounded"


def test_fp8_blocks_are_read_as_transformers_reads_them(tmp_path):
    stated = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    quantize(tmp_path, stated, lambda weight: block_fp8(weight, (16, 16)))
    config = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=[16, 16])
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config, dtype=torch.float32)
    loaded = load(tmp_path, dtype="float32")
    loaded.model.allocate_cache(4, 16)
    logits = loaded.model.forward(PackedBatch((Segment(0, IDS, [2, 0], len(IDS)),)))
    assert np.abs(logits - stock_logits(stock.eval(), IDS)[:, :90]).max() < 2e-3


def test_a_folder_may_hold_the_weights_twice_or_in_several_files(tmp_path):
    rounded = quantize(tmp_path, *KINDS["awq"][:2])
    tensors = read_tensors(tmp_path)
    save_file({"layers.0.wrong.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name].contiguous() for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = load(tmp_path, dtype="float32")
    loaded.model.allocate_cache(4, 16)
    logits = loaded.model.forward(PackedBatch((Segment(0, IDS, [2, 0], len(IDS)),)))
    assert np.abs(logits - stock_logits(rounded, IDS)[:, :90]).max() < 2e-3


def test_the_number_type_follows_the_config_and_the_setting(tmp_path):
    quantize(tmp_path, *KINDS["gptq"][:2])
    change_config(tmp_path, dtype="bfloat16")
    about = load(tmp_path).description
    assert about.dtype == "bfloat16"
    assert about.versions["quantization"] == "gptq 4-bit, dequantised to bfloat16"
    assert load(tmp_path, dtype="float16").description.dtype == "float16"


@pytest.mark.parametrize(
    ("stated", "words"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ["bitsandbytes", "dequantize"]),
        ({"load_in_8bit": True}, ["bitsandbytes"]),
        ({"quant_method": "aqlm"}, ["aqlm", "own kernels", "bfloat16"]),
        ({"quant_method": "mxfp4"}, ["mxfp4"]),
        ({"bits": 4}, ["unnamed"]),
        ({"quant_method": "gptq", "bits": 3}, ["gptq with 3 bits"]),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, ["marlin"]),
        ({"quant_method": "awq", "version": "gemv"}, ["awq (gemv"]),
        (compressed("nvfp4-pack-quantized", num_bits=4), ["nvfp4-pack-quantized", "float-quantized"]),
        (compressed("pack-quantized", num_bits=4, actorder="group"), ["activation order group"]),
        ({"quant_method": "fp8"}, ["fp8", "no layer"]),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(stated, words, tmp_path):
    save_tiny(tmp_path)
    change_config(tmp_path, quantization_config=stated)
    with pytest.raises(InvalidArgument) as caught:
        load(tmp_path)
    assert caught.value.field == "model"
    for word in words:
        assert word in str(caught.value)


def test_a_config_that_hides_the_quantisation_is_no_random_model(tmp_path):
    quantize(tmp_path, *KINDS["gptq"][:2])
    change_config(tmp_path, quantization_config=None)
    with pytest.raises(InvalidArgument, match=r"lacks 21 weights .* quantised") as caught:
        load(tmp_path)
    assert caught.value.field == "model"


def test_layers_that_the_config_does_not_describe(tmp_path):
    quantize(tmp_path, *KINDS["fbgemm"][:2])
    tensors = read_tensors(tmp_path)
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    write_tensors(tmp_path, tensors)
    with pytest.raises(InvalidArgument, match=r"layers.0.mlp.up_proj is kept as torch.float8_e4m3fn without"):
        load(tmp_path)
