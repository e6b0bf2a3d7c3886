"""The only file that knows transformers' moving parts; tests/unit/lm/test_adapter.py holds its contract with them.

A transformers causal LM becomes a `LanguageModel` (interface.py): its attention is replaced by ours through
`AttentionInterface`, the rows of all sequences go through `model(...)` once, packed into one row of ids with explicit
positions and no mask, and the pass's plan reaches every attention layer as a keyword.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import psutil
import torch
from transformers import AttentionInterface, PreTrainedModel

from outrider.errors import Internal, InvalidArgument
from outrider.lm.attention import AttentionPlan, KVCache, paged_attention
from outrider.lm.batch import flatten, split
from outrider.lm.cpu_linear import fix_orders
from outrider.lm.decoder_loop import DecoderLoop, decoder_loop
from outrider.lm.exact_attention import TILE, ExactPlan
from outrider.lm.features import FeatureStore, StateHooks, layers_of
from outrider.lm.interface import PackedBatch
from outrider.lm.rotary import use_rotary_table
from outrider.lm.routes import LayerGate, Route, Routes, is_plain, run_routes
from outrider.lm.row_counts import pieces

ATTENTION_NAME = "outrider_paged"
PLAN = "outrider_plan"

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}
_HARMLESS = {
    "cache",
    "dropout",
    "is_causal",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "use_cache",
}


class TransformersModel:
    """A `LanguageModel` over a transformers causal LM. Raises InvalidArgument, naming why, if it cannot serve.

    vocab_size: real ids; logits beyond them are cut off. context_length: longest sequence. exact: a row's logits are
    the same to the bit whatever else is in its pass and however its context was computed; `numerics.prove` tells
    whether that holds here. cache_dtype: number type in which keys and values are kept; None: the model's own.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        context_length: int,
        exact: bool = False,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.num_rows_computed = 0
        self.num_doubled_rows = 0
        """Passes under exact numerics in which a lone row was computed twice; not in `num_rows_computed`."""
        self.device = model.device
        self._dtype = model.dtype
        self._cache_dtype = cache_dtype or model.dtype
        self._exact = exact
        self._num_threads = torch.get_num_threads()
        self._model = model.eval()
        self._loop: DecoderLoop | None = None
        self._block_size = 1
        self._cache = KVCache([], 0, self._dtype, self.device)
        self._routes: Routes | None = None
        self._gate: LayerGate | None = None
        self._wanted_states: tuple[int, ...] = ()
        self.exit_layer = 0
        self.skipped_layers: tuple[int, ...] = ()
        self.num_layer_rows = 0
        """Rows of passes, each times the layers that it ran through."""
        self._features: FeatureStore | None = None
        self._hooks: StateHooks | None = None
        _check_config(model)
        model.set_attn_implementation(ATTENTION_NAME)
        self._head_shapes = self._probe()
        self.num_layers = len(self._head_shapes)
        self._routes = Routes(self.num_layers)
        self.hidden_size: int = model.config.get_text_config().hidden_size
        use_rotary_table(model)
        if exact:
            _check_exact(model)
            fix_orders(model)
        self._loop = decoder_loop(model)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model that runs here: heads share its embedding and its output matrix."""
        return self._model

    def keep_features(self, states: Sequence[int]) -> None:
        """As `FeatureModel`."""
        all_states = (*states, self.exit_layer) if self.exit_layer else tuple(states)
        store = FeatureStore(all_states, self.num_layers, self.hidden_size, self._dtype, self.device)
        hooks = StateHooks(self._model, self.num_layers, store) if self._loop is None else None
        if self._hooks is not None:
            self._hooks.remove()
        self._features, self._hooks, self._wanted_states = store if store.states else None, hooks, tuple(states)

    def exit_after(self, num_layers: int) -> None:
        """As `PartialModel`."""
        self._set_routes(num_layers, self.skipped_layers)
        self.keep_features(self._wanted_states)

    def skip_layers(self, layers: Sequence[int]) -> None:
        """As `PartialModel`."""
        self._set_routes(self.exit_layer, tuple(sorted(set(layers))))

    def _set_routes(self, exit_layer: int, skipped: tuple[int, ...]) -> None:
        routes = Routes(self.num_layers, exit_layer, skipped)
        if self._loop is None:
            self._gate = LayerGate(layers_of(self._model, self.num_layers))
        self._routes, self.exit_layer, self.skipped_layers = routes, exit_layer, skipped

    @torch.inference_mode()
    def read_features(self, slots: Sequence[int], states: Sequence[int]) -> torch.Tensor:
        """As `FeatureModel`."""
        if self._features is None:
            raise Internal(f"states {list(states)} are not among those kept: none is")
        return self._features.read(torch.tensor(slots, dtype=torch.int64, device=self.device), states)

    def bytes_per_block(self, block_size: int) -> int:
        """Keys and values of all layers, and kept states."""
        num_numbers = sum(k * (d + e) for k, d, e in self._head_shapes)
        kept = 0 if self._features is None else self._features.bytes_per_slot
        return (num_numbers * self._cache_dtype.itemsize + kept) * block_size

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Takes the memory at once."""
        self._block_size = block_size
        # Exact attention reads beyond a context, at most one tile, and gives what it finds there no weight.
        num_slots = num_blocks * block_size + (TILE if self._exact else 0)
        self._cache = KVCache(
            self._head_shapes,
            num_slots,
            self._cache_dtype,
            self.device,
            zeroed=self._exact,
            read_dtype=self._dtype,
        )
        if self._features is not None:
            self._features.allocate(num_slots)

    @torch.inference_mode()
    def copy_block(self, source: int, destination: int) -> None:
        """Keys and values of all layers, and kept states."""
        size = self._block_size
        self._cache.copy(source * size, destination * size, size)
        if self._features is not None:
            self._features.copy(source * size, destination * size, size)

    @torch.inference_mode()
    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Keys and values of all layers, and kept states."""
        where = torch.tensor([list(sources), list(destinations)], device=self.device)
        self._cache.move(where[0], where[1])
        if self._features is not None:
            self._features.move(where[0], where[1])

    def free_bytes(self) -> int:
        """Memory free on the model's device."""
        if self.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.device)[0])
        return int(psutil.virtual_memory().available)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> np.ndarray:
        """float32[num_logit_rows, vocab_size]: one call of the transformers model over exactly the batch's rows.

        Under exact numerics several calls where one would have a row count that was not proved.
        """
        torch.set_num_threads(self._num_threads)  # This thread may be younger than the setting.
        assert self._routes is not None
        if is_plain(batch):
            return self._run(batch, self._routes.whole)
        num_before = self.num_rows_computed
        logits = run_routes(batch, self._routes, self._run, self.vocab_size)
        self.num_rows_computed = num_before + batch.num_rows  # some had two passes, each over some of the layers
        return logits

    def _run(self, batch: PackedBatch, route: Route) -> np.ndarray:
        if not self._exact:
            return self._forward(batch, route)
        parts = [self._forward(part, route) for part in split(batch, pieces(batch.num_rows))]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _forward(self, batch: PackedBatch, route: Route) -> np.ndarray:
        flat = flatten(batch, self._block_size)
        plan = (ExactPlan if self._exact else AttentionPlan)(flat, self._cache, self.device)
        token_ids, positions = flat.token_ids, flat.positions
        if self._exact and len(token_ids) == 1:
            # Kernels of every kind treat a lone row in another way. Its double is no row of the batch: no cache slot,
            # no logits.
            token_ids, positions = token_ids.repeat(2), positions.repeat(2)
            self.num_rows_computed -= 1
            self.num_doubled_rows += 1
        logits = self._call(token_ids, positions, flat.logit_rows, plan, route)
        return logits[0, :, : self.vocab_size].float().cpu().numpy()

    def _call(
        self,
        token_ids: np.ndarray,
        positions: np.ndarray,
        logit_rows: np.ndarray,
        plan: Any,
        route: Route | None = None,
    ) -> torch.Tensor:
        """route: None for all layers, through the modules."""
        ids = torch.from_numpy(token_ids).to(self.device)[None]
        self.num_rows_computed += ids.numel()
        places = torch.from_numpy(positions).to(self.device)[None]
        wanted = torch.from_numpy(logit_rows).to(self.device)
        if self._features is not None:
            self._features.begin(plan.slots, None if route is None else route.states)
        gate: AbstractContextManager[None] = nullcontext()
        if route is not None:
            self.num_layer_rows += ids.numel() * len(route.layers)
            if self._loop is not None:
                return self._loop(ids, places, wanted, plan, route, self._features)
            if self._gate is not None and len(route.layers) < self.num_layers:
                gate = self._gate.along(route, self._features)
        with gate:
            return self._model(
                input_ids=ids, position_ids=places, use_cache=False, logits_to_keep=wanted, **{PLAN: plan}
            ).logits

    @torch.inference_mode()
    def _probe(self) -> list[tuple[int, int, int]]:
        """(K, D, E) of each layer, learned from a pass over one row in which attention answers zeros."""
        plan = _ProbePlan()
        row = np.zeros(1, np.int64)
        try:
            self._call(row, row, row, plan)
        except (TypeError, KeyError) as error:
            raise _refusal(self._model, f"its forward does not follow the usual signature ({error})") from error
        self.num_rows_computed = 0
        num_layers = self._model.config.get_text_config().num_hidden_layers
        if sorted(plan.head_shapes) != list(range(num_layers)):
            raise _refusal(
                self._model,
                f"of its {num_layers} layers {len(plan.head_shapes)} have standard attention with their own cache",
            )
        return [plan.head_shapes[layer] for layer in range(num_layers)]


class _ProbePlan:
    def __init__(self) -> None:
        self.head_shapes: dict[int, tuple[int, int, int]] = {}


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every attention layer: shapes as in `paged_attention`."""
    plan = kwargs.pop(PLAN)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if isinstance(plan, _ProbePlan):
        _check_call(module, attention_mask, kwargs)
        plan.head_shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    return paged_attention(plan, layer, query, key, value, scaling, sliding_window, softcap), None


# No mask function is registered under this name: transformers then builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, attention_forward)


def _check_config(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or []) - _LAYER_TYPES
    if others:
        raise _refusal(model, f"it has layers of type {', '.join(sorted(others))}")
    if not getattr(model, "_supports_attention_backend", False):
        raise _refusal(model, "transformers cannot exchange its attention")
    if config is not model.config:
        raise _refusal(model, "it has more parts than a text model")
    ropes = _rope_types(getattr(config, "rope_parameters", None) or {})
    if ropes & _BATCH_DEPENDENT_ROPE:
        # Its angles follow the longest sequence of a pass, so one stream would change another's text.
        raise _refusal(model, f"its rotary embedding is of type {', '.join(sorted(ropes & _BATCH_DEPENDENT_ROPE))}")


def _check_exact(model: PreTrainedModel) -> None:
    """Experts take the rows that choose them, so the shape of their problem follows the company: no proof covers it."""
    if any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules()):
        raise InvalidArgument(
            f"numerics=exact is not for mixtures of experts such as {type(model).__name__}: use numerics=fast",
            field="numerics",
        )


def _check_call(module: torch.nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise InvalidArgument(f"{name} builds an attention mask of its own, which is not supported", field="model")
    if not getattr(module, "is_causal", True):
        raise InvalidArgument(f"{name} is not causal", field="model")
    others = sorted(k for k, v in kwargs.items() if v is not None and k not in _HARMLESS)
    if others:
        raise InvalidArgument(f"{name} has attention with {', '.join(others)}, which is not supported", field="model")


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    """Parameters are one set, or one set per layer type."""
    sets = [parameters, *(v for v in parameters.values() if isinstance(v, dict))]
    return {str(s["rope_type"]) for s in sets if s.get("rope_type")}


def _refusal(model: PreTrainedModel, why: str) -> InvalidArgument:
    return InvalidArgument(
        f"model type {model.config.model_type!r} ({type(model).__name__}) cannot be served: {why}", field="model"
    )
