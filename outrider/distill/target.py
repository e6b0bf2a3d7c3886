"""The target as distillation sees it: its logits, the hidden states a draft learns from, and the weights it borrows.

Four states are taken of each token that is read: three of the residual stream (the inputs of three layers, as EAGLE-3
reads them) and the last one after the final norm, from which the output head makes logits. For an exit adapter the
input of its layer is a fifth, unless it is among the three.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from outrider.distill.batch_cache import PLAN, Plan, PrefillPlan, use_batch_attention
from outrider.errors import InvalidArgument
from outrider.lm.cpu_linear import can_pack, pack_linears
from outrider.lm.fingerprint import model_fingerprint
from outrider.lm.loading import Progress, load_model, locate
from outrider.lm.rotary import use_rotary_table
from outrider.lm.toy import PREFIX as TOY
from outrider.settings import DistillSettings, TargetWorkerSettings, WorkerSettings

LAST = 3
"""Index of the state after the final norm."""
DTYPES = ("float32", "bfloat16", "float16")
HEAD_TOLERANCE = 0.05
"""Of the largest logit: what rounding may make of a head that is a plain product."""


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """What drafts borrow. embedding [V, H] and head [V, H] (rows of real ids only), norm [H], state dicts of the
    layers that were asked for."""

    config: PretrainedConfig
    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    layers: dict[int, dict[str, torch.Tensor]]


class Target:
    """The target, ready to run packed passes. `name`, `tokenizer`, `eos_token_ids`, `vocab_size` as loaded.

    fingerprints: what a target worker calls this model, by number type of its weights.
    state_layers: the three layers whose inputs are taken; 0 is the embedding.
    exit_layer, exit_state: for an exit adapter its layer and the index of that layer's input among the states; else 0.
    num_states: of each token.
    """

    def __init__(self, settings: DistillSettings, on_progress: Progress) -> None:
        """Raises InvalidArgument, naming the field, for a model that cannot be distilled."""
        if settings.model.startswith(TOY):
            raise InvalidArgument("model: a toy has no hidden states to learn from; give a real model", field="model")
        path, self.name = locate(WorkerSettings(model=settings.model, revision=settings.revision), on_progress)
        if path.is_file():
            raise InvalidArgument(f"model: {path} is a GGUF file; convert it to a folder of safetensors", field="model")
        worker = TargetWorkerSettings(
            model=str(path), dtype=settings.dtype, num_threads=settings.num_threads, device="cpu"
        )
        if settings.dtype == "auto":
            worker = worker.model_copy(update={"dtype": _fast_dtype()})
        self.dtype = getattr(torch, worker.dtype)
        loaded = load_model(worker, on_progress)  # as a target worker loads it: it refuses what cannot be served
        about, self.tokenizer = loaded.description, loaded.tokenizer
        self.eos_token_ids, self.vocab_size = about.eos_token_ids, about.vocab_size
        self.context_length = about.context_length
        self.tokenizer_fingerprint = about.tokenizer_fingerprint
        del loaded
        self._network: Any = _stock(path, self.dtype)
        num_layers = self._network.config.num_hidden_layers
        self.exit_layer = chosen_exit(settings.exit_layer, num_layers) if settings.kind == "exit" else 0
        kept: tuple[int, ...] = (self.exit_layer,) if self.exit_layer else ()
        if settings.kind == "model":
            kept = chosen_layers(settings.draft_layers, num_layers)
        self.weights = _weights(self._network, self.vocab_size, kept)
        self.fingerprints = fingerprints(path, self.weights.config)
        self.state_layers = state_layers(self.num_layers)
        taken: list[int | None] = [*self.state_layers, None]  # the last state is the input of no layer
        if self.exit_layer and self.exit_layer not in taken:
            taken.append(self.exit_layer)
        self.num_states = len(taken)
        self.exit_state = taken.index(self.exit_layer) if self.exit_layer else 0
        pack_linears(self._network)
        use_rotary_table(self._network)
        use_batch_attention(self._network)
        self._taken: dict[int, torch.Tensor] = {}
        self._take_states(self._network.base_model)
        self._check_head()

    @property
    def hidden_size(self) -> int:
        return int(self.weights.embedding.shape[1])

    @property
    def num_layers(self) -> int:
        return int(self.weights.config.num_hidden_layers)

    def cache_shape(self) -> tuple[int, int, int]:
        """Layers, key-value heads and their width."""
        config = self.weights.config
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        return self.num_layers, getattr(config, "num_key_value_heads", None) or num_heads, head_dim

    @torch.inference_mode()
    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, plan: Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over N rows, token_ids and positions int64[N].

        Gives the logits of `logit_rows`, float32[L, V], and every row's states [N, S, H] in the model's number type.
        """
        logits = self._network(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            **{PLAN: plan},
        ).logits
        states = torch.stack([self._taken[index][0] for index in range(self.num_states)], 1)
        self._taken.clear()
        return logits[0, :, : self.vocab_size].float(), states

    def chat_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids that a request with these messages starts with: by the chat template, else the bare text.

        Raises InvalidArgument where the template refuses them.
        """
        if self.tokenizer.chat_template:
            try:
                text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except (TemplateError, TypeError, KeyError) as error:
                raise InvalidArgument(
                    f"prompts: the chat template of {self.name} does not take {messages} ({error})", field="prompts"
                ) from error
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return list(self.tokenizer("\n".join(m["content"] for m in messages))["input_ids"])

    def text(self, token_ids: list[int]) -> str:
        """The text of a response, without its special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def _take_states(self, base: Any) -> None:
        def before(index: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._taken[index] = args[0] if args else kwargs["hidden_states"]

            return hook

        def after(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self._taken[LAST] = output

        layers = dict(enumerate(self.state_layers)) | ({self.exit_state: self.exit_layer} if self.exit_layer else {})
        for index, layer in layers.items():
            base.layers[layer].register_forward_pre_hook(before(index), with_kwargs=True)
        base.norm.register_forward_hook(after)

    def _check_head(self) -> None:
        """Logits must be the product of the head and the last state: drafts are trained on that."""
        ids = torch.arange(min(8, self.vocab_size))
        plan = PrefillPlan.alone(self, len(ids))
        logits, states = self.forward(ids, torch.arange(len(ids)), ids, plan)
        product = states[:, LAST].float() @ self.weights.head.float().T
        if float((product - logits).abs().max()) > HEAD_TOLERANCE * float(logits.abs().max()):
            raise InvalidArgument(
                f"model: {self.name} does more to its logits than one product with its head, which drafts do not learn",
                field="model",
            )


def chosen_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Layer numbers from a list such as "0,29"; the first and the last of an empty one.

    Raises InvalidArgument for what is no list of layers of this model.
    """
    if not text:
        return (0, num_layers - 1) if num_layers > 1 else (0,)
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= num_layers:
        raise InvalidArgument(
            f"draft_layers: {text!r} is no rising list of layers of 0 to {num_layers - 1}, such as 0,{num_layers - 1}",
            field="draft_layers",
        )
    return layers


def chosen_exit(layer: int, num_layers: int) -> int:
    """The exit layer E: a fifth of the layers run before it where none is given. Raises InvalidArgument."""
    if num_layers < 2:
        raise InvalidArgument("kind: a target of one layer has none to leave out; use kind=model", field="kind")
    if layer >= num_layers:
        raise InvalidArgument(
            f"exit_layer: {layer} is no layer to leave before, give 1 to {num_layers - 1}", field="exit_layer"
        )
    return layer or max(1, num_layers // 5)


def state_layers(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's choice: a low, a middle and a high layer, counted by their inputs; some of those there are in toys."""
    if num_layers >= 6:
        return 2, num_layers // 2, num_layers - 3
    return min(1, num_layers - 1), num_layers // 2, num_layers - 1


def fingerprints(path: Path, config: PretrainedConfig) -> dict[str, str]:
    """`model_fingerprint` of the model in this folder under each number type that it can be served in."""
    files = list(path.glob("*.safetensors"))
    return {dtype: model_fingerprint(config.to_dict(), files, dtype) for dtype in DTYPES}


def _fast_dtype() -> str:
    """bfloat16 where this machine multiplies it directly: half the bytes a pass reads."""
    try:
        packs = can_pack(nn.Linear(8, 8, bias=False, dtype=torch.bfloat16))
    except RuntimeError:
        packs = False
    return "bfloat16" if packs else "float32"


def _stock(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        stock: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidArgument(f"model: cannot load the weights of {path}: {error}", field="model") from error
    base: Any = stock.base_model
    head = stock.get_output_embeddings()
    if not (hasattr(base, "layers") and hasattr(base, "norm") and type(head) is nn.Linear and head.bias is None):
        raise InvalidArgument(
            f"model: {type(stock).__name__} is not built as drafts expect: layers, a final norm, a head without bias",
            field="model",
        )
    return stock.requires_grad_(False).eval()


def _weights(stock: PreTrainedModel, vocab_size: int, kept_layers: Sequence[int]) -> TargetWeights:
    """Taken before the layers give their own to the packed layout."""
    base: Any = stock.base_model
    head: Any = stock.get_output_embeddings()
    embedding: Any = stock.get_input_embeddings()
    layers = {
        index: {name: value.clone() for name, value in base.layers[index].state_dict().items()} for index in kept_layers
    }
    return TargetWeights(
        copy.deepcopy(stock.config),
        embedding.weight.data,
        head.weight.data[:vocab_size],
        base.norm.weight.data,
        layers,
    )
