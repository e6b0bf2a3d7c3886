"""A tiny target whose next token follows mostly from its last one, and heads that therefore guess it well."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB, HIDDEN, LAYERS = 64, 96, 6
STATES = (1, 3, 5)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def write_target(folder: Path) -> Path:
    """Layers add little to the embedding, so that a map of ids explains most of a greedy text, but not all."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        **SIZES,
        num_hidden_layers=LAYERS,
        initializer_range=0.4,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(0.25)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.002)
            layer.mlp.down_proj.weight.mul_(0.0002)
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


@torch.inference_mode()
def following(folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each id alone: last hidden [V, H], state 5 [V, H], and the greedy next id int64[V]."""
    model = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    out = model(input_ids=torch.arange(VOCAB)[:, None], output_hidden_states=True, use_cache=False)
    logits = out.logits[:, -1]
    logits[:, 1] = -torch.inf  # the end of text, which tests go on beyond
    return out.hidden_states[-1][:, 0], out.hidden_states[STATES[-1]][:, 0], logits.argmax(-1)


def write_eagle(folder: Path) -> Path:
    """EAGLE-1: its output is the embedding of the last id."""
    tensors = _layer("layers.0", HIDDEN, zero=True)
    tensors["fc.weight"] = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    return _write(folder, {"bias": False}, tensors)


def write_eagle3(folder: Path, target: Path, draft_ids: list[int] | None = None) -> Path:
    """Its first guess is what follows what follows the state's token; later ones repeat it."""
    _, state, following_id = following(target)
    ids = torch.tensor(draft_ids if draft_ids is not None else range(VOCAB))
    zeros = torch.zeros(HIDDEN, HIDDEN)
    tensors = _layer("midlayer", 2 * HIDDEN, zero=True)
    tensors |= {
        "fc.weight": torch.cat([zeros, zeros, torch.eye(HIDDEN)], 1),
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "midlayer.input_layernorm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _guessing(torch.nn.functional.rms_norm(state, (HIDDEN,)), following_id[following_id])[ids],
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True),
    }
    config = {"draft_vocab_size": len(ids), "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(STATES)}}
    return _write(folder, config, tensors)


def write_medusa(folder: Path, target: Path, num_heads: int = 3) -> Path:
    last, _, following_id = following(target)
    tensors, reached = {}, following_id
    for number in range(num_heads):
        reached = following_id[reached]
        tensors[f"{number}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        tensors[f"{number}.0.linear.bias"] = torch.zeros(HIDDEN)
        tensors[f"{number}.1.weight"] = _guessing(last, reached)
    return _write(folder, {}, tensors, "medusa_lm_head.safetensors")


def write_stranger(folder: Path) -> Path:
    """An EAGLE-1 head of the right shape and another model's weights."""
    torch.manual_seed(5)
    tensors = _layer("layers.0", HIDDEN, zero=False)
    tensors["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN)
    return _write(folder, {"bias": False}, tensors)


def _guessing(states: torch.Tensor, guessed: torch.Tensor) -> torch.Tensor:
    """[V, H]: a matrix that gives state [H] of row i its highest logit at id guessed[i]."""
    return 6 * torch.linalg.lstsq(states, torch.nn.functional.one_hot(guessed, VOCAB).float()).solution.T


def _layer(name: str, width: int, *, zero: bool) -> dict[str, torch.Tensor]:
    """zero: adds nothing."""
    last = torch.zeros if zero else torch.randn
    inner, kv = SIZES["intermediate_size"], HIDDEN // 2
    return {
        f"{name}.self_attn.q_proj.weight": torch.randn(HIDDEN, width),
        f"{name}.self_attn.k_proj.weight": torch.randn(kv, width),
        f"{name}.self_attn.v_proj.weight": torch.randn(kv, width),
        f"{name}.self_attn.o_proj.weight": last(HIDDEN, HIDDEN),
        f"{name}.mlp.gate_proj.weight": torch.randn(inner, HIDDEN),
        f"{name}.mlp.up_proj.weight": torch.randn(inner, HIDDEN),
        f"{name}.mlp.down_proj.weight": last(HIDDEN, inner),
        f"{name}.post_attention_layernorm.weight": torch.ones(HIDDEN),
    }


def _write(folder: Path, config: dict, tensors: dict[str, torch.Tensor], name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / name)
    (folder / "config.json").write_text(json.dumps(SIZES | {"num_hidden_layers": 1} | config))
    return folder


def _byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [c for c in alphabet if c.isascii() or c == "Ġ"][: VOCAB - 2]
    tokenizer = Tokenizer(
        models.BPE(vocab={"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(letters)}}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
