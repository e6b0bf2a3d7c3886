"""States of a model kept beside its keys and values, for those who draft from them: one more tensor of the cache.

They are named as states.py tells. What holds for a block's keys and values - sharing, copying, moving, giving up - thus
holds for its states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.errors import Internal, InvalidArgument
from outrider.lm.interface import LAST_HIDDEN
from outrider.lm.states import check_states


class FeatureStore:
    """States of every computed row, [num_slots, len(states), H] in the model's number type."""

    def __init__(
        self, states: Sequence[int], num_layers: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """states: each once or more often, in any order. Raises InvalidArgument on one that the model has not."""
        self.states = check_states(states, num_layers)
        self.hidden_size = hidden_size
        self._dtype, self._device = dtype, device
        self._place_of = {state: place for place, state in enumerate(self.states)}
        self._rows: torch.Tensor | None = None
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._passed: frozenset[int] | None = None

    @property
    def bytes_per_slot(self) -> int:
        return len(self.states) * self.hidden_size * self._dtype.itemsize

    def allocate(self, num_slots: int) -> None:
        """Forgets everything. Memory is not touched before rows come."""
        self._rows = torch.empty(num_slots, len(self.states), self.hidden_size, dtype=self._dtype, device=self._device)

    def begin(self, slots: torch.Tensor, states: frozenset[int] | None = None) -> None:
        """Of the pass to come. slots: int64[n], where its first n rows belong. states: those that it has; None: all."""
        if self._rows is None:
            raise Internal("keep_features came after allocate_cache: allocate again")
        self._slots = slots
        self._passed = states

    def write(self, state: int, x: torch.Tensor) -> None:
        """x [N, H] of the pass's rows, those beyond its slots belong nowhere. Nothing if the pass has no such state."""
        assert self._rows is not None
        if self._passed is None or state in self._passed:
            self._rows[:, self._place_of[state]].index_copy_(0, self._slots, x[: len(self._slots)])

    def kept(self, state: int, num_rows: int) -> torch.Tensor:
        """[num_rows, H]: what was written before for the pass's rows; those beyond its slots get the first one's."""
        rows = self.read(self._slots, (state,))
        more = num_rows - len(rows)
        return torch.cat([rows, rows[:1].expand(more, -1)]) if more else rows

    def read(self, slots: torch.Tensor, states: Sequence[int]) -> torch.Tensor:
        """[n, len(states) * H] of int64[n] slots, a copy. Raises Internal on a state that is not kept."""
        unknown = [state for state in states if state not in self._place_of]
        if unknown or self._rows is None:
            raise Internal(f"states {unknown} are not among those kept, {list(self.states)}")
        rows = self._rows.index_select(0, slots)
        return torch.cat([rows[:, self._place_of[state]] for state in states], 1)

    def copy(self, source: int, destination: int, count: int) -> None:
        """As `KVCache.copy`."""
        if self._rows is not None:
            self._rows[destination : destination + count] = self._rows[source : source + count]

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """As `KVCache.move`."""
        if self._rows is not None:
            self._rows.index_copy_(0, destinations, self._rows.index_select(0, sources))


class StateHooks:
    """Hooks on a transformers model's modules that write states to a store."""

    def __init__(self, model: Any, num_layers: int, store: FeatureStore) -> None:
        """Raises InvalidArgument when the model's layers are not found."""
        base = model.base_model
        layers = layers_of(model, num_layers)
        self._handles = [
            layers[state].register_forward_pre_hook(_writer(store, state), with_kwargs=True)
            for state in store.states
            if state != LAST_HIDDEN
        ]
        if LAST_HIDDEN in store.states:
            self._handles.append(base.register_forward_hook(_last_writer(store)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def layers_of(model: Any, num_layers: int) -> torch.nn.ModuleList:
    """The one list of the model's decoder layers. Raises InvalidArgument, naming its type, when there is no such."""
    base = model.base_model
    found = [m for m in base.children() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    if base is model or len(found) != 1:
        raise InvalidArgument(
            f"the layers of {type(model).__name__} are not found, so its states cannot be kept", field="heads"
        )
    return found[0]


def _writer(store: FeatureStore, state: int) -> Callable[..., None]:
    def write(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        store.write(state, x[0])

    return write


def _last_writer(store: FeatureStore) -> Callable[..., None]:
    def write(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
        store.write(LAST_HIDDEN, output[0][0])  # of a model output, too, the first is the last layer's normed rows

    return write
