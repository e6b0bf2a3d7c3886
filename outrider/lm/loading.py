"""What `model` in the settings may name, and how each becomes a model that runs. Imports torch only for real models."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.lm import toy
from outrider.lm.draft_vocab import TrimmedToy, drafted_ids
from outrider.lm.interface import LoadedModel
from outrider.server_info import Numerics
from outrider.settings import DraftWorkerSettings, TargetWorkerSettings, WorkerSettings

Progress = Callable[[str, float | None], None]
"""Told what is being done, and how far it is in 0 to 1 (None: not known)."""

HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


def load_model(settings: WorkerSettings, on_progress: Progress | None = None) -> LoadedModel:
    """Loads `settings.model`: a bundle name, hub id, local folder, GGUF file, or `toy:key=value,...`; or the head of a
    draft worker that has one.

    Raises InvalidArgument or FailedPrecondition, naming the field and the fix, when it cannot be loaded.
    """
    if isinstance(settings, DraftWorkerSettings) and settings.head:
        from outrider.lm.head_model import load_head_model

        return load_head_model(settings, on_progress or (lambda text, fraction: None))
    if settings.model.startswith(toy.PREFIX):
        return _load_toy(settings)
    on_progress = on_progress or (lambda text, fraction: None)
    on_progress("starting torch", None)
    path, name = locate(settings, on_progress)
    from outrider.lm.checkpoint import load_checkpoint

    revision = hub_commit(path)
    served_name = settings.model_name or name
    load = partial(load_checkpoint, path, settings, context_length, served_name, on_progress, revision)
    if isinstance(settings, TargetWorkerSettings) and settings.tensor_parallel > 1:
        from outrider.lm.ranks import load_on_ranks

        # Every rank finds the model for itself: the branch may move meanwhile, the commit does not.
        pinned = {"revision": revision} if is_hub_id(settings.model) else {}
        return load_on_ranks(settings.model_copy(update=pinned), load)
    loaded = load()
    if isinstance(settings, DraftWorkerSettings) and settings.target_tokenizer:
        from outrider.lm.foreign_tokenizer import speak_target_ids

        other = settings.model_copy(update={"model": settings.target_tokenizer, "revision": ""})
        is_file = settings.target_tokenizer.endswith(".json")
        return speak_target_ids(loaded, Path(other.model).expanduser() if is_file else locate(other, on_progress)[0])
    return loaded


def context_length(own: int, settings: WorkerSettings) -> int:
    """The longest sequence to serve. Raises InvalidArgument when more is asked for than the model's own length."""
    if settings.max_context_length > own:
        raise InvalidArgument(
            f"max_context_length is {settings.max_context_length}, the model reaches {own}: lower it, or give 0",
            field="max_context_length",
        )
    return settings.max_context_length or own


def _load_toy(settings: WorkerSettings) -> LoadedModel:
    spec = toy.parse_toy(settings.model)
    spec = dataclasses.replace(spec, context=context_length(spec.context, settings))
    model = toy.ToyModel(spec)
    if settings.kv_cache_dtype != "auto":
        raise InvalidArgument("kv_cache_dtype: a toy keeps ids only, leave it auto", field="kv_cache_dtype")
    if settings.revision:
        raise InvalidArgument("revision: a toy comes from no hub, leave it empty", field="revision")
    if isinstance(settings, DraftWorkerSettings) and settings.weight_dtype != "auto":
        raise InvalidArgument("weight_dtype: a toy has no weights to round, leave it auto", field="weight_dtype")
    if isinstance(settings, DraftWorkerSettings) and settings.target_tokenizer:
        raise InvalidArgument(
            "target_tokenizer: a toy speaks its target's ids already, leave it empty", field="target_tokenizer"
        )
    if isinstance(settings, TargetWorkerSettings) and settings.tensor_parallel > 1:
        raise InvalidArgument("tensor_parallel: a toy has nothing to split, leave it 1", field="tensor_parallel")
    about = model.description
    ids = drafted_ids(settings, about.vocab_size, about.tokenizer_fingerprint, about.eos_token_ids)
    if ids is not None:
        model = TrimmedToy(spec, ids)
    name = settings.model_name or settings.model
    numerics = Numerics(mode=settings.numerics, environment={"device": "simulated"})
    return LoadedModel(model, dataclasses.replace(model.description, model=name, numerics=numerics))


def locate(settings: WorkerSettings, on_progress: Progress) -> tuple[Path, str]:
    """The folder or GGUF file that `settings.model` names, fetched if need be, and a name for it."""
    from outrider.lm.bundle import BUNDLES, bundle_folder

    text = settings.model
    path = Path(text).expanduser()
    if settings.revision and not is_hub_id(text) and not hub_commit(path):
        raise InvalidArgument(
            f"revision {settings.revision!r} is of a hub id (owner/name), and model {text!r} is none: leave it empty",
            field="revision",
        )
    if text in BUNDLES:
        from outrider.lm.checkpoint import convert_gguf

        return bundle_folder(BUNDLES[text], convert_gguf, on_progress), text
    if path.is_dir():
        return path, path.resolve().name
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InvalidArgument(f"model: there is no file {text}", field="model")
        return path, path.stem
    if is_hub_id(text):
        return _from_hub(text, settings, on_progress), text
    raise InvalidArgument(
        f"model {text!r} is neither a bundle ({', '.join(BUNDLES)}), nor a folder or .gguf file here, nor a hub id "
        "(owner/name), nor toy:key=value,...",
        field="model",
    )


def is_hub_id(text: str) -> bool:
    """Whether `text` names a model of the hub: owner/name, and nothing of that name is here."""
    is_path = text.startswith((".", "~", "toy:")) or text.endswith(".gguf") or Path(text).is_dir()
    return re.fullmatch(r"[\w.-]+/[\w.-]+", text) is not None and not is_path


def hub_commit(path: Path) -> str:
    """The commit whose files a folder of the hub's cache holds; empty for any other path."""
    is_snapshot = path.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", path.name)
    return path.name if is_snapshot else ""


def _from_hub(hub_id: str, settings: WorkerSettings, on_progress: Progress) -> Path:
    """Downloads what is missing of a hub model. Without network, what is in the hub's own cache serves."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    on_progress(f"downloading {hub_id} from the hub", None)
    try:
        patterns = [*HUB_FILES, *(["*.py"] if settings.trust_remote_code else [])]
        folder = huggingface_hub.snapshot_download(hub_id, revision=settings.revision or None, allow_patterns=patterns)
    except Exception as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise FailedPrecondition(
            f"model {hub_id!r} is no folder here and could not be downloaded from the hub "
            f"({type(error).__name__}: {reason}). Check the name and the network, or download it elsewhere and give "
            "its folder as model.",
            reason="MODEL_MISSING",
            field="model",
        ) from error
    return Path(folder)
