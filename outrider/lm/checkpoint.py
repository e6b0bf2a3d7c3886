"""A folder of safetensors or a GGUF file becomes a model that runs, and its description. Never unpickles anything."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoTokenizer, PreTrainedModel

from outrider.errors import InvalidArgument
from outrider.lm import threads
from outrider.lm.adapter import TransformersModel
from outrider.lm.cpu_linear import pack_linears
from outrider.lm.draft_vocab import TrimmedModel, drafted_ids, trim_head
from outrider.lm.embedding import map_embedding
from outrider.lm.fingerprint import cpu_name, model_fingerprint, tokenizer_fingerprint
from outrider.lm.gpu.model import adapt
from outrider.lm.interface import LoadedModel, ModelDescription
from outrider.lm.memory import give_back_freed
from outrider.lm.numerics import prove
from outrider.lm.pretrained import check_code, load_gguf, load_tokenizer, load_weights, read_config
from outrider.lm.rank_devices import rank_device
from outrider.lm.rounded_linears import round_linears, weight_bytes
from outrider.lm.tensor_parallel import shard_model
from outrider.server_info import Numerics
from outrider.settings import DraftWorkerSettings, TargetWorkerSettings, WorkerSettings

Progress = Callable[[str, float | None], None]
GENERATION_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Dequantises a GGUF file to float32 safetensors, tokenizer beside them."""
    transformers.utils.logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    load_gguf(gguf, torch.float32).save_pretrained(folder)


def load_checkpoint(
    path: Path,
    settings: WorkerSettings,
    context_length: Callable[[int, WorkerSettings], int],
    name: str,
    on_progress: Progress,
    revision: str = "",
) -> LoadedModel:
    """Loads a folder or a GGUF file onto the device that `settings` names, ready to run.

    revision: the hub's commit that the folder holds, to be told.

    Raises InvalidArgument naming the field when the checkpoint, its tokenizer or the device does not serve.
    """
    transformers.utils.logging.disable_progress_bar()
    num_ranks = settings.tensor_parallel if isinstance(settings, TargetWorkerSettings) else 1
    if num_ranks > 1:
        device = rank_device(settings.device, torch.distributed.get_rank(), num_ranks).device
    else:
        device = pick_device(settings.device)
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    cache_dtype = _cache_dtype(settings.kv_cache_dtype, device)
    config, trusted = read_config(path), settings.trust_remote_code
    check_code(path, config, trusted)
    on_progress(f"loading the tokenizer of {name}", 0.1)
    tokenizer = load_tokenizer(path, trusted)
    tokenizer_json = tokenizer.backend_tokenizer.to_str()
    on_progress(f"loading the weights of {name}", 0.2)
    model, quantization = load_weights(path, config, settings.dtype, trusted)
    vocab_size = min(max(tokenizer.get_vocab().values()) + 1, model.get_output_embeddings().weight.shape[0])
    eos_token_ids = _eos_token_ids(model, tokenizer, vocab_size)
    fingerprint = tokenizer_fingerprint(tokenizer_json)
    ids = drafted_ids(settings, vocab_size, fingerprint, {*eos_token_ids, *_special_ids(tokenizer)})
    if ids is not None:
        trim_head(model, ids)
    dtype = _name(model.dtype)
    on_progress(f"preparing {name} for {device}", 0.7)
    model = model.to(device)  # type: ignore[arg-type]
    if num_ranks > 1:
        shard_model(model)
    weights = dtype
    if isinstance(settings, DraftWorkerSettings) and settings.weight_dtype != "auto":
        round_linears(model, settings.weight_dtype)
        weights = f"{dtype} with {settings.weight_dtype} weights"
    num_bytes = weight_bytes(model)
    num_packed = pack_linears(model) if device.type == "cpu" else 0
    if device.type == "cpu":
        map_embedding(model, path)
    context = context_length(_own_context_length(model, settings), settings)
    is_exact = settings.numerics == "exact"
    num_logits = vocab_size if ids is None else len(ids)
    # Ranks run the eager passes: sums between them in a captured step were never tried.
    adapted = (adapt if num_ranks == 1 else TransformersModel)(
        model, vocab_size=num_logits, context_length=context, exact=is_exact, cache_dtype=cache_dtype
    )
    cache = _name(cache_dtype or model.dtype)
    environment = _numerics_environment(device, weights, cache, num_packed, settings.numerics)
    numerics = prove(adapted, on_progress) if is_exact else Numerics()
    description = ModelDescription(
        model=name,
        model_fingerprint=weights_fingerprint(model, path, weights, trusted),
        tokenizer_fingerprint=fingerprint,
        vocab_size=vocab_size,
        context_length=context,
        tokenizer_json=tokenizer_json.encode(),
        chat_template=_chat_template(tokenizer),
        special_tokens={k: v for k, v in tokenizer.special_tokens_map.items() if isinstance(v, str)},
        eos_token_ids=eos_token_ids,
        bos_token_id=_bos_token_id(tokenizer),
        generation_defaults=_generation_defaults(path),
        dtype=dtype,
        weight_bytes=num_bytes,
        numerics_fingerprint="; ".join(f"{name} {value}" for name, value in environment.items()),
        numerics=dataclasses.replace(numerics, environment=environment),
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            **({"revision": revision} if revision else {}),
            **({"quantization": f"{quantization}, dequantised to {dtype}"} if quantization else {}),
        },
    )
    give_back_freed()
    on_progress(f"{name} is loaded", 1.0)
    trimmed = adapted if ids is None else TrimmedModel(adapted, ids, vocab_size)
    return LoadedModel(trimmed, description, tokenizer)


def pick_device(text: str) -> torch.device:
    """The device that the setting means. Raises InvalidArgument where it is not there."""
    if text == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise InvalidArgument(f"device {text!r} is not cpu, cuda, cuda:N or auto", field="device") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidArgument(f"device {text!r} is not here: {torch.cuda.device_count()} GPUs are", field="device")
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device {text!r} is not cpu, cuda, cuda:N or auto", field="device")
    return device


def _own_context_length(model: PreTrainedModel, settings: WorkerSettings) -> int:
    own = getattr(model.config, "max_position_embeddings", None) or settings.max_context_length
    if not own:
        raise InvalidArgument("the model does not tell its context length: give max_context_length", field="model")
    return int(own)


def _cache_dtype(text: str, device: torch.device) -> torch.dtype | None:
    """None: the model's own."""
    if text == "fp8":
        raise InvalidArgument(
            f"kv_cache_dtype fp8 is not supported on {device.type}: no attention here reads it, and values beyond 448 "
            "would be lost. Use bfloat16 or float16",
            field="kv_cache_dtype",
        )
    return None if text == "auto" else getattr(torch, text)


def weights_fingerprint(model: PreTrainedModel, path: Path, weights: str, trusted: bool) -> str:
    """Of the files that decide a model's numbers. weights: the number type that they are held in."""
    return model_fingerprint(model.config.to_dict(), _files(path, trusted), weights)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _files(path: Path, trusted: bool) -> list[Path]:
    """What decides the model's numbers: its weights, and its code where that is run."""
    if path.is_file():
        return [path]
    return [*path.glob("*.safetensors"), *(path.glob("*.py") if trusted else ())]


def _chat_template(tokenizer: Any) -> str:
    template = tokenizer.chat_template or ""
    return template if isinstance(template, str) else template.get("default", "")


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Those of the generation config, else of the config, and the tokenizer's own: chat models use either."""
    stated = getattr(model.generation_config, "eos_token_id", None)
    if stated is None:
        stated = getattr(model.config, "eos_token_id", None)
    ids = {stated} if isinstance(stated, int) else set(stated or [])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(i for i in ids if 0 <= i < vocab_size))


def _special_ids(tokenizer: Any) -> set[int]:
    """Ids that mark text rather than spell it, turns of a chat among them."""
    marked = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return marked | set(tokenizer.all_special_ids)


def _bos_token_id(tokenizer: Any) -> int | None:
    """The id that begins every text, only where the tokenizer itself adds it."""
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id if ids[:1] == [tokenizer.bos_token_id] else None


def _generation_defaults(path: Path) -> dict[str, float]:
    """What generation_config.json states; a value it does not state is not a default of the model."""
    file = path / "generation_config.json"
    if not file.is_file():
        return {}
    stated = json.loads(file.read_text())
    return {key: float(stated[key]) for key in GENERATION_DEFAULTS if stated.get(key) is not None}


def _numerics_environment(
    device: torch.device, weights: str, cache: str, num_packed: int, numerics: str
) -> dict[str, str]:
    """Equal texts mean bit-equal logits for equal passes: whatever may change the order or kind of an addition."""
    return {
        "device": device.type,
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "weights": weights,
        "cache": cache,
        "numerics": numerics,
        "packed layers": str(num_packed),
        "threads": f"{torch.get_num_threads()} by {threads.RUNTIME}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": sys.platform,
    }
