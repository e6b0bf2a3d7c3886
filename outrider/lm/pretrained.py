"""Tokenizer and weights of a folder or a GGUF file, as transformers objects. What cannot be served is refused first.

Never unpickles anything, and runs code that comes with a checkpoint only when asked to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from outrider.errors import InvalidArgument
from outrider.lm.quantized import Quantization, dequantized_weights, read_quantization
from outrider.lm.recurrent import refuse_recurrent

_TRUST = "trust_remote_code"


def read_config(path: Path) -> dict[str, Any]:
    """What the folder's config.json holds; nothing of a GGUF file. Raises InvalidArgument for a model to refuse, and
    where there is none: nobody needs to know then what else is missing."""
    if path.is_file():
        return {}
    if not (path / "config.json").is_file():
        raise InvalidArgument(f"no config.json in {path}: it holds no model", field="model")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot read config.json of {path}: {error}", field="model") from error
    refuse_recurrent(config)
    return dict(config)


def check_code(path: Path, config: Mapping[str, Any], trust_remote_code: bool) -> None:
    """Raises InvalidArgument, naming the setting, when the checkpoint runs only with code of its own and may not."""
    files = config.get("auto_map") or {}
    if files and config.get("model_type") not in CONFIG_MAPPING_NAMES and not trust_remote_code:
        raise _untrusted(path, f"model type {config.get('model_type')!r} of")


def load_tokenizer(path: Path, trust_remote_code: bool) -> Any:
    """A fast tokenizer. Raises InvalidArgument where there is none."""
    try:
        if path.is_file():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if _TRUST in str(error) and not trust_remote_code:
            raise _untrusted(path, "the tokenizer of") from error
        raise InvalidArgument(f"cannot load the tokenizer of {path}: {error}", field="model") from error
    if not getattr(tokenizer, "is_fast", False):
        raise InvalidArgument(f"the tokenizer of {path} has no tokenizer.json, which is needed", field="model")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def load_weights(
    path: Path, config: Mapping[str, Any], dtype: str, trust_remote_code: bool
) -> tuple[PreTrainedModel, str]:
    """The model in `dtype` (auto: the checkpoint's own), and how its weights were quantised; "" if they were not.

    config: as `read_config` gives it. Raises InvalidArgument when files lack weights or are of a kind not served.
    """
    wanted = None if dtype == "auto" else getattr(torch, dtype)
    try:
        if path.is_file():
            return load_gguf(path, wanted or torch.float32), ""
        if not list(path.glob("*.safetensors")):
            raise InvalidArgument(
                f"{path} holds no *.safetensors file; other formats may run code and are not loaded: convert it",
                field="model",
            )
        quantization = read_quantization(config)
        if quantization is not None:
            model, info = _load_quantized(path, quantization, wanted, trust_remote_code)
        else:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=wanted or "auto",
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
            model, info = loaded
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidArgument(f"cannot load the weights of {path}: {error}", field="model") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InvalidArgument(
            f"{path} lacks {len(missing)} weights of {type(model).__name__}, {missing[0]} among them: it is "
            "incomplete, or quantised in a way that its config.json does not tell",
            field="model",
        )
    return model, "" if quantization is None else quantization.method


def load_gguf(gguf: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Dequantised."""
    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )


def _load_quantized(
    path: Path, quantization: Quantization, wanted: torch.dtype | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, dict[str, Any]]:
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    dtype = wanted or _float_dtype(config)
    with torch.device("meta"):
        model_class = type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code))
    weights = dequantized_weights(path, quantization, dtype)
    model, info = model_class.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model, info


def _float_dtype(config: Any) -> torch.dtype:
    """The config's, where a model can compute in it."""
    stated = getattr(config, "dtype", None)
    return stated if stated in (torch.float32, torch.bfloat16, torch.float16) else torch.bfloat16


def _untrusted(path: Path, what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what} {path} needs Python code that comes with the checkpoint, which is not run unless asked for: read the "
        f"*.py files there, then set {_TRUST}, or choose a model that transformers itself knows",
        field=_TRUST,
    )
