"""One static step: a pass whose shapes never change, so that a GPU can replay it without being told anything anew.

Captured as a CUDA graph at its first use; where that fails, or on a CPU, it runs eagerly, with the same result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from outrider.lm.gpu.paged_attention import PagedAttention
from outrider.lm.gpu.step_rows import StepRows

log = logging.getLogger(__name__)

NUM_WARM_UP_RUNS = 2
"""Runs before a capture: libraries choose kernels and take memory in their first ones."""


class Replayable(Protocol):
    """A captured run."""

    def replay(self) -> None:
        """The same kernels again, on the same memory."""


Capture = Callable[[Callable[[], torch.Tensor]], tuple[Replayable, torch.Tensor]]
"""Runs a function once while recording it; gives the record and the tensor that the function returned."""


class StaticStep:
    """matrix: int64[N, 2 + W] on the device, the step's input. run: computes logits [N, V] from it.

    capture: None where steps run eagerly. on_failure: told once why a capture failed; the step is eager from there on.
    """

    def __init__(
        self,
        matrix: torch.Tensor,
        attention: PagedAttention,
        run: Callable[[StepRows, PagedAttention], torch.Tensor],
        capture: Capture | None,
        on_failure: Callable[[str], None],
    ) -> None:
        self._matrix = matrix
        self._attention = attention
        self._run = run
        self._capture = capture
        self._on_failure = on_failure
        self._graph: Replayable | None = None
        self._output: torch.Tensor | None = None

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    @property
    def attention_name(self) -> str:
        """Which paged attention it has."""
        return self._attention.name

    def __call__(self, rows: np.ndarray, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        """rows: as the matrix, on the host. token_ids: int64[n] of the first n rows where only the device knows them.
        -> [N, V] on the device, valid until the next step of any shape."""
        self._attention.begin(rows)
        self._matrix.copy_(torch.from_numpy(rows), non_blocking=True)
        if token_ids is not None:
            self._matrix[: len(token_ids), 0] = token_ids
        if self._capture is not None and self._graph is None:
            self._record(self._capture)
        if self._graph is None:
            return self._compute()
        self._graph.replay()
        assert self._output is not None
        return self._output

    def _compute(self) -> torch.Tensor:
        rows = StepRows(self._matrix)
        self._attention.plan(rows)
        return self._run(rows, self._attention)

    def _record(self, capture: Capture) -> None:
        try:
            for _ in range(NUM_WARM_UP_RUNS):
                self._compute()
            self._graph, self._output = capture(self._compute)
        except Exception as error:
            self._capture = None
            first_line = (str(error).splitlines() or [""])[0]
            self._on_failure(f"{type(error).__name__}: {first_line}")


class CudaCapture:
    """Captures on one device; all graphs share one pool of memory, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Replayable, torch.Tensor]:
        """Raises RuntimeError when something in `run` cannot be captured."""
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        return graph, output
