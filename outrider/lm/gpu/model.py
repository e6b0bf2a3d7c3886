"""A transformers model on a GPU: small passes are static steps, all others the eager ones of the adapter.

Same interface, same cache and same meaning as `TransformersModel`, which is the slow twin in tests; numbers differ in
their last bits, as they do between any two kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.errors import InvalidArgument
from outrider.lm.adapter import PLAN, TransformersModel
from outrider.lm.attention import AttentionPlan
from outrider.lm.batch import flatten
from outrider.lm.gpu.cache import PagedCache
from outrider.lm.gpu.choose import attention_factory
from outrider.lm.gpu.deciding import decide_batch
from outrider.lm.gpu.paged_attention import PagedAttention
from outrider.lm.gpu.static_step import Capture, CudaCapture, StaticStep
from outrider.lm.gpu.step_rows import StepRows, StepShape, fill, static_shape, wanted_rows
from outrider.lm.interface import PackedBatch, SegmentResult
from outrider.lm.rotary import RotaryTable

log = logging.getLogger(__name__)


class StaticPlan:
    """Stands for `AttentionPlan` in a static step."""

    def __init__(self, rows: StepRows, attention: PagedAttention, cache: PagedCache) -> None:
        self._cache = cache
        self._attention = attention
        self.slots = rows.slots(cache.block_size)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """key [1, K, N, D] and value [1, K, N, E]."""
        self._cache.write_rows(layer, self.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """query [K, G, N, D] -> [N, H, E]."""
        return self._attention.attend(layer, query.flatten(0, 1).transpose(0, 1), scaling, window, softcap)


class GpuModel(TransformersModel):
    """attention: a name of `choose.NAMES`. capture: how steps are captured; by default as CUDA graphs on a GPU, and
    not at all elsewhere. Other arguments as `TransformersModel` has them; never under exact numerics."""

    def __init__(
        self, model: PreTrainedModel, *, attention: str = "auto", capture: Capture | None = None, **options: Any
    ) -> None:
        super().__init__(model, **options)
        assert not self._exact, "static steps have the shape of their bucket: rows are not independent of it"
        self._wanted_attention = attention
        self._is_gpu = self.device.type == "cuda"
        self._capture = capture
        if capture is None and self._is_gpu:
            with self._on_device():
                self._capture = CudaCapture(self.device)
        self._steps: dict[StepShape, StaticStep] = {}
        self._has_failed_capture = False
        self.num_static_passes = self.num_eager_passes = self.num_decided = 0
        _look_up_nothing(model)

    def _set_routes(self, exit_layer: int, skipped: tuple[int, ...]) -> None:
        raise InvalidArgument(
            "early exit and skipping of layers are for models on a CPU: static steps run all layers", field="heads"
        )

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Takes the memory at once; steps captured on an earlier cache are forgotten."""
        self._block_size = block_size
        self._steps = {}
        self._cache = self._pages = PagedCache(
            self._head_shapes, num_blocks, block_size, self._cache_dtype, self.device, read_dtype=self._dtype
        )
        self._attention_for = attention_factory(self._pages, self.device, self._wanted_attention)
        if self._features is not None:
            self._features.allocate(self._pages.num_pages * block_size)

    def warm_up(self, shapes: list[StepShape]) -> None:
        """Prepares and captures these steps before somebody waits for them."""
        for shape in shapes:
            rows = np.full((shape.num_rows, 2 + shape.table_blocks), self._pages.scratch_block, np.int64)
            rows[:, :2] = 0
            with torch.inference_mode(), self._on_device():
                self._step(shape)(rows)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch) -> np.ndarray:
        """float32[num_logit_rows, vocab_size]. Rows that fill a static step up are counted in `num_rows_computed`."""
        with self._on_device():
            return self._device_logits(batch).cpu().numpy()

    @torch.inference_mode()
    def forward_deciding(self, batch: PackedBatch) -> list[SegmentResult]:
        """As `DecidingModel`."""
        with self._on_device():
            results = decide_batch(batch, self._device_logits(batch), self._device_logits)
        self.num_decided += sum(result.decided is not None for result in results)
        return results

    def _device_logits(self, batch: PackedBatch, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """float32[num_logit_rows, vocab_size] on the device; nobody has waited for it.

        token_ids: int64[num_rows] on the device, instead of the batch's own.
        """
        shape = static_shape(batch, self._block_size)
        if shape is None:
            return self._eager_logits(batch, token_ids)
        self.num_static_passes += 1
        self.num_rows_computed += shape.num_rows
        rows = fill(batch, shape, self._pages.scratch_block, self._block_size)
        logits = self._step(shape)(rows, token_ids)
        return logits.index_select(0, torch.from_numpy(wanted_rows(batch)).to(self.device, non_blocking=True))

    def _eager_logits(self, batch: PackedBatch, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        self.num_eager_passes += 1
        flat = flatten(batch, self._block_size)
        if token_ids is not None:  # more rows than any step has: then one wait more costs little
            flat = replace(flat, token_ids=token_ids.cpu().numpy())
        plan = AttentionPlan(flat, self._cache, self.device)
        logits = self._call(flat.token_ids, flat.positions, flat.logit_rows, plan)
        return logits[0, :, : self.vocab_size].float()

    def _step(self, shape: StepShape) -> StaticStep:
        step = self._steps.get(shape)
        if step is None:
            matrix = torch.zeros(shape.num_rows, 2 + shape.table_blocks, dtype=torch.int64, device=self.device)
            capture = None if self._has_failed_capture else self._capture
            step = StaticStep(matrix, self._attention_for(shape), self._compute, capture, self._give_up_capture)
            self._steps[shape] = step
        return step

    def _compute(self, rows: StepRows, attention: PagedAttention) -> torch.Tensor:
        """float32[N, vocab_size] of all rows of a step."""
        plan = StaticPlan(rows, attention, self._pages)
        if self._features is not None:
            self._features.begin(plan.slots)
        logits = self._model(
            input_ids=rows.token_ids[None], position_ids=rows.positions[None], use_cache=False, **{PLAN: plan}
        ).logits
        return logits[0, :, : self.vocab_size].float()

    def _give_up_capture(self, why: str) -> None:
        if not self._has_failed_capture:
            log.warning("steps are not captured as CUDA graphs and run eagerly: %s", why)
        self._has_failed_capture = True

    def _on_device(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.device) if self._is_gpu else nullcontext()


def adapt(model: PreTrainedModel, **options: Any) -> TransformersModel:
    """The adapter for where the model lies. On a GPU under exact numerics it is the eager one, for `numerics.prove` to
    judge: a static step's shape follows the company."""
    on_gpu: Callable[..., TransformersModel] = GpuModel
    is_static = model.device.type == "cuda" and not options.get("exact", False)
    return on_gpu(model, **options) if is_static else TransformersModel(model, **options)


def _look_up_nothing(model: torch.nn.Module) -> None:
    """Rotary angles are computed again: looking them up asks the host how far the rows reach."""
    for module in model.modules():
        rotary = getattr(module, "rotary_emb", None)
        if isinstance(rotary, RotaryTable):
            module.rotary_emb = rotary.rotary
