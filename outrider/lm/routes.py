"""Passes over some of a model's layers: early exit, going on from there, and leaving layers out.

A batch in which some rows stop early, or have been computed that far before, becomes two passes: the first layers of
all rows that lack them, then the other layers of all rows that want them. Between the two every row's state is in the
feature store. Skipping sequences have a pass of their own: their keys and values are theirs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from outrider.errors import InvalidArgument
from outrider.lm.features import FeatureStore
from outrider.lm.interface import LAST_HIDDEN, PackedBatch, Segment


@dataclass(frozen=True, slots=True)
class Route:
    """Rows go from state `start` (0: their embedded ids; any other: from the store) through `layers` to state `end`.

    states: those on the way that are what they seem, for the store to keep.
    """

    layers: tuple[int, ...]
    start: int
    end: int
    states: frozenset[int]


class Routes:
    """Those of one model."""

    def __init__(self, num_layers: int, exit_layer: int = 0, skipped: Sequence[int] = ()) -> None:
        """exit_layer: rows may stop before this layer; 0: none may. skipped: layers that skipping sequences leave out.

        Raises InvalidArgument on layers that there are not."""
        if not 0 <= exit_layer < num_layers:
            raise InvalidArgument(
                f"an early exit after {exit_layer} layers: the model has {num_layers}, so 1 to {num_layers - 1} fit",
                field="heads",
            )
        if wrong := sorted({n for n in skipped if not 0 <= n < num_layers}):
            raise InvalidArgument(
                f"layers {wrong} cannot be skipped: the model has layers 0 to {num_layers - 1}", field="heads"
            )
        if len(set(skipped)) == num_layers:
            raise InvalidArgument("all layers are to be skipped: leave some", field="heads")
        self.whole = _route(range(num_layers), 0, LAST_HIDDEN)
        self.first = _route(range(exit_layer), 0, exit_layer)
        self.rest = _route(range(exit_layer, num_layers), exit_layer, LAST_HIDDEN)
        self.skipping = Route(tuple(n for n in range(num_layers) if n not in skipped), 0, LAST_HIDDEN, frozenset())


def _route(layers: range, start: int, end: int) -> Route:
    return Route(tuple(layers), start, end, frozenset({*layers, end} - {start} if start else {*layers, end}))


def is_plain(batch: PackedBatch) -> bool:
    """Whether all rows go through all layers."""
    return not any(s.skips or s.num_kept or s.num_early for s in batch.segments)


def run_routes(
    batch: PackedBatch, routes: Routes, run: Callable[[PackedBatch, Route], np.ndarray], vocab_size: int
) -> np.ndarray:
    """float32[num_logit_rows, vocab_size] of any batch. run(part, route): computes the part's rows along the route."""
    logits = [np.empty((0, vocab_size), np.float32)] * len(batch.segments)
    for route, segments in _parts(batch, routes):
        part = PackedBatch(tuple(segments.values()))
        rows = run(part, route).copy()
        ends = np.cumsum([s.num_logits for s in part.segments])
        for index, end in zip(segments, ends, strict=True):
            if route.end == LAST_HIDDEN:
                logits[index] = rows[end - segments[index].num_logits : end]
    return np.concatenate(logits)


def _parts(batch: PackedBatch, routes: Routes) -> Iterator[tuple[Route, dict[int, Segment]]]:
    """What runs along which route, in order; segments by their index."""
    whole = {i: s for i, s in enumerate(batch.segments) if not s.skips}
    skipping = {i: s for i, s in enumerate(batch.segments) if s.skips}
    is_split = any(s.num_kept or s.num_early for s in whole.values())
    first = ((i, _after_kept(s)) for i, s in whole.items()) if is_split else ()
    rest = ((i, _before_early(s)) for i, s in whole.items()) if is_split else ()
    for route, segments in (
        (routes.first, first),
        (routes.rest, rest),
        (routes.whole, whole.items() if not is_split else ()),
        (routes.skipping, skipping.items()),
    ):
        if filled := _with_rows(segments):
            yield route, filled


def _with_rows(segments: Iterable[tuple[int, Segment]]) -> dict[int, Segment]:
    return {index: segment for index, segment in segments if segment.token_ids}


def _after_kept(segment: Segment) -> Segment:
    """The rows that lack the first layers."""
    num_kept = segment.num_kept
    return replace(
        segment,
        num_cached_tokens=segment.num_cached_tokens + num_kept,
        token_ids=segment.token_ids[num_kept:],
        num_logits=0,
    )


def _before_early(segment: Segment) -> Segment:
    """The rows that want the other layers."""
    return replace(segment, token_ids=segment.token_ids[: len(segment.token_ids) - segment.num_early])


class LayerGate:
    """Makes a transformers model's own forward run along a route: layers that are not on it hand on what they get."""

    def __init__(self, layers: torch.nn.ModuleList) -> None:
        self._layers = layers

    @contextmanager
    def along(self, route: Route, store: FeatureStore | None) -> Iterator[None]:
        """store: has the state that the route starts from."""
        off = [layer for number, layer in enumerate(self._layers) if number not in route.layers]
        handle = None
        if route.start:
            assert store is not None
            # Before all others: those that write states to the store are to see what goes into the layer.
            handle = self._layers[route.start].register_forward_pre_hook(
                _starter(store, route.start), prepend=True, with_kwargs=True
            )
        try:
            for layer in off:
                layer.forward = _hand_on  # type: ignore[method-assign]
            yield
        finally:
            for layer in off:
                layer.__dict__.pop("forward", None)
            if handle is not None:
                handle.remove()


def _hand_on(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return hidden_states


def _starter(store: FeatureStore, state: int) -> Callable[..., tuple[Any, ...]]:
    def start(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        x = args[0] if args else kwargs.pop("hidden_states")
        return (store.kept(state, x.shape[1])[None], *args[1:]), kwargs

    return start
