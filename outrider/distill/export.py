"""Drafts as checkpoints: EAGLE-3's public layout and a plain transformers model, which others read, and exit adapters.

All name their target under "outrider" in config.json: its name, its fingerprints by number type of its weights, and
its tokenizer's. Weights are bfloat16 safetensors.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from outrider.distill.eagle3 import Eagle3Head, rope_theta
from outrider.distill.exit import ExitAdapter
from outrider.distill.pruned import PrunedModel
from outrider.distill.target import Target, state_layers
from outrider.lm.draft_vocab import write_draft_vocab
from outrider.lm.exit_head import CONFIG_FILE, DRAFT_IDS, WEIGHTS_FILE

VOCAB_FILE = "draft_vocab.json"


def provenance(target: Target, kind: str, extra: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of its target."""
    return {
        "kind": kind,
        "target_model": target.name,
        "target_fingerprints": target.fingerprints,
        "tokenizer_fingerprint": target.tokenizer_fingerprint,
        **extra,
    }


def export_eagle3(
    folder: Path, head: Eagle3Head, draft_ids: torch.Tensor, target: Target, about: dict[str, Any]
) -> None:
    """`config.json` and `model.safetensors`: keys fc, fc_norm.N, midlayer.*, norm, lm_head, d2t (offsets) and t2d.

    The embedding is not among them: whoever loads the head shares the target's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = len(target.weights.embedding)
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, draft_ids, True)
    fingerprint = target.fingerprints[str(target.dtype).removeprefix("torch.")]
    save_file(tensors, folder / "model.safetensors", {"format": "pt", "target_fingerprint": fingerprint})
    config = _eagle3_config(head, len(draft_ids), target)
    config["outrider"] = about | {"state_layers": list(target.state_layers)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _eagle3_config(head: Eagle3Head, draft_vocab_size: int, target: Target) -> dict[str, Any]:
    config, attention = target.weights.config, head.midlayer.self_attn
    eagle: dict[str, Any] = {"use_aux_hidden_state": True, "norm_before_fc": False, "fc_norm": True}
    if target.num_layers < 6 or target.state_layers != state_layers(target.num_layers):
        # Elsewhere the readers' own default says the same. Written, the key means "inputs" to one and "outputs" to
        # another; this is the layout's own meaning: layers by their outputs.
        eagle["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in target.state_layers]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": head.norm.eps,
        "rope_theta": rope_theta(config),
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta(config)},
        "max_position_embeddings": target.context_length,
        "vocab_size": len(target.weights.embedding),
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "bos_token_id": getattr(config, "bos_token_id", None),
        "eos_token_id": getattr(config, "eos_token_id", None),
        "fc_norm": True,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "num_aux_hidden_states": 3,
        "eagle_config": eagle,
    }


def export_model(
    folder: Path, draft: PrunedModel, draft_ids: torch.Tensor, target: Target, about: dict[str, Any]
) -> None:
    """A transformers checkpoint with its tokenizer, and the list of the ids that were trained (`--draft-vocab`).

    Its head has all rows: those of other ids are the target's own, untrained.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(draft.base.config)
    config.tie_word_embeddings = False
    config.outrider = about
    model: Any = AutoModelForCausalLM.from_config(config)
    model.base_model.load_state_dict(draft.base.state_dict())
    head = target.weights.head.float().clone()
    head[draft_ids] = draft.lm_head.weight.detach()
    padded = model.get_output_embeddings().weight.data
    padded.zero_()
    padded[: len(head)] = head
    model.to(torch.bfloat16).save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    write_draft_vocab(folder / VOCAB_FILE, draft_ids.tolist(), target.tokenizer_fingerprint)


def export_exit(
    folder: Path, adapter: ExitAdapter, draft_ids: torch.Tensor, target: Target, about: dict[str, Any]
) -> None:
    """As `outrider.lm.exit_head` reads it. The rows of the head are the target's, and not written."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in adapter.base.state_dict().items()}
    tensors[DRAFT_IDS] = draft_ids
    fingerprint = target.fingerprints[str(target.dtype).removeprefix("torch.")]
    save_file(tensors, folder / WEIGHTS_FILE, {"format": "pt", "target_fingerprint": fingerprint})
    config = {
        "architectures": ["OutriderExitAdapter"],
        "dtype": "bfloat16",
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": len(draft_ids),
        "outrider": about | {"exit_layer": target.exit_layer},
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
