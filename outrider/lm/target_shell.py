"""A target without its layers: embedding, last norm and output head, which heads far from the target share with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.errors import InvalidArgument
from outrider.lm.cpu_linear import pack_linears
from outrider.lm.embedding import map_embedding
from outrider.lm.fingerprint import model_fingerprint
from outrider.lm.heads.target import HeadTarget
from outrider.lm.pretrained import check_code, read_config

DTYPES = ("float32", "bfloat16", "float16")
FIELD = "model"


@dataclass(frozen=True, slots=True)
class TargetShell:
    """target: as heads see it. fingerprints: what a target worker calls the model, by number type of its weights.
    context_length: 0 where the config tells none."""

    target: HeadTarget
    fingerprints: dict[str, str]
    context_length: int


def load_shell(
    folder: Path, *, name: str, vocab_size: int, dtype: str, device: torch.device, trust_remote_code: bool
) -> TargetShell:
    """Reads no layer's weights. vocab_size: real ids at most. dtype: auto is the checkpoint's own. Raises
    InvalidArgument, naming the setting, for a checkpoint that has no such parts or is of a kind that is not served."""
    config = read_config(folder)
    check_code(folder, config, trust_remote_code)
    if not list(folder.glob("*.safetensors")):
        raise InvalidArgument(f"{folder} holds no *.safetensors file", field=FIELD)
    whole = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    files = [*folder.glob("*.safetensors"), *(folder.glob("*.py") if trust_remote_code else ())]
    fingerprints = {dtype: model_fingerprint(whole.to_dict(), files, dtype) for dtype in DTYPES}
    text = whole.get_text_config()
    num_layers, context_length = text.num_hidden_layers, getattr(whole, "max_position_embeddings", None) or 0
    model = _without_layers(folder, whole, dtype, trust_remote_code).to(device)
    rows = model.get_output_embeddings().weight.shape[0]
    if device.type == "cpu":
        pack_linears(model)
        map_embedding(model, folder)
    target = HeadTarget(
        name=name,
        hidden_size=text.hidden_size,
        num_layers=num_layers,
        vocab_size=min(vocab_size, rows),
        padded_vocab_size=text.vocab_size,
        embedding=model.get_input_embeddings(),
        lm_head=model.get_output_embeddings(),
        dtype=model.dtype,
        device=device,
        fingerprint=fingerprints.get(str(model.dtype).removeprefix("torch."), ""),
        folder=folder,
    )
    return TargetShell(target, fingerprints, int(context_length))


def _without_layers(folder: Path, config: Any, dtype: str, trust_remote_code: bool) -> Any:
    text = config.get_text_config()
    text.num_hidden_layers = 0
    if getattr(text, "layer_types", None):
        text.layer_types = []
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # weights that are left unread are meant to be
    transformers.utils.logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise InvalidArgument(f"cannot read the embedding of {folder}: {error}", field=FIELD) from error
    finally:
        transformers.utils.logging.set_verbosity(verbosity)
    model, info = loaded
    missing = sorted(info["missing_keys"])
    if missing:
        raise InvalidArgument(
            f"{folder} lacks {', '.join(missing[:3])}, which a head shares with its target: it is incomplete, "
            "or quantised in a way that is not read here",
            field=FIELD,
        )
    return model.eval()
