"""The target as transformers itself runs it: rows that owe nothing to this engine."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from transformers import DynamicCache

from outrider.audit.rows import WindowedRows
from outrider.errors import InvalidArgument
from outrider.lm.checkpoint import weights_fingerprint
from outrider.lm.interface import ModelDescription
from outrider.lm.loading import locate
from outrider.lm.pretrained import check_code, load_tokenizer, load_weights, read_config
from outrider.settings import WorkerSettings


def load_stock(settings: WorkerSettings) -> tuple[Any, ModelDescription]:
    """The stock module on the CPU, and what is known of it. Raises InvalidArgument where there is none, as of a toy."""
    if settings.model.startswith("toy:"):
        raise InvalidArgument("a toy is no model of transformers: leave --independent away", field="model")
    transformers.utils.logging.disable_progress_bar()
    path, name = locate(settings, lambda text, fraction: None)
    config = read_config(path)
    check_code(path, config, settings.trust_remote_code)
    tokenizer = load_tokenizer(path, settings.trust_remote_code)
    module, _ = load_weights(path, config, settings.dtype, settings.trust_remote_code)
    dtype = str(module.dtype).removeprefix("torch.")
    vocab_size = min(max(tokenizer.get_vocab().values()) + 1, module.get_output_embeddings().weight.shape[0])
    description = ModelDescription(
        model=name,
        model_fingerprint=weights_fingerprint(module, path, dtype, settings.trust_remote_code),
        tokenizer_fingerprint="",
        vocab_size=vocab_size,
        context_length=0,
        tokenizer_json=tokenizer.backend_tokenizer.to_str().encode(),
        eos_token_ids=tuple({tokenizer.eos_token_id} - {None}),
        dtype=dtype,
        numerics_fingerprint=f"stock transformers module on cpu; weights {dtype}",
    )
    return module.eval(), description


class StockRows(WindowedRows):
    """`Rows` of a transformers module. What stands aside is computed with all that is before it: slow, and plain."""

    def __init__(self, module: Any, text_ids: Sequence[int], vocab_size: int) -> None:
        super().__init__(text_ids)
        self._module = module
        self._vocab_size = vocab_size
        parameters = inspect.signature(module.forward).parameters
        self._cache_parameter = "cache" if "cache" in parameters else "past_key_values"
        self._cache = DynamicCache(config=module.config)

    def aside(self, num_tokens: int, token_ids: Sequence[int]) -> np.ndarray:
        return self._forward([*self._ids[:num_tokens], *token_ids], len(token_ids), None)

    def _next(self, start: int, token_ids: Sequence[int]) -> np.ndarray:
        return self._forward(token_ids, len(token_ids), self._cache)

    @torch.inference_mode()
    def _forward(self, ids: Sequence[int], num_logits: int, cache: Any) -> np.ndarray:
        """float32[num_logits, V]."""
        # the name of the cache's parameter is about to change
        cached = {} if cache is None else {self._cache_parameter: cache}
        result = self._module(
            torch.tensor([list(ids)]), use_cache=cache is not None, logits_to_keep=num_logits, **cached
        )
        return np.asarray(result.logits[0, :, : self._vocab_size].float().numpy())
