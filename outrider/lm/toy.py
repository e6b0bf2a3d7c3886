"""Toy models: table language models with known p and q and slept pass costs. Simulated, and named so where they show.

A toy keeps nothing but ids, in a block cache like a real model's: it reads its context back through the block table, so
that a wrong block, slot or length changes its logits. Needs numpy only and starts in milliseconds.

Two toys of one `vocab`, `seed`, `order` and `scale` are a pair. With independent standard normal tables z and z' drawn
for each context, the target's logits are scale * z, those of a toy with agreement a scale * (a z + sqrt(1 - a^2) z').
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator, Philox

from outrider.errors import Internal, InvalidArgument
from outrider.lm.interface import LAST_HIDDEN, LoadedModel, ModelDescription, PackedBatch, Segment
from outrider.lm.states import check_states
from outrider.lm.tree import path_to

PREFIX = "toy:"
MAX_TABLE_BYTES = 64 << 20
NUM_LAYERS, HIDDEN_SIZE = 4, 8
"""Of a toy's states, which are numbers drawn for a state and the context that the logits depend on, too."""
SKIPPING_AGREEMENT = 0.8
"""Of the logits of a sequence that skips layers with those of the others."""
_TARGET, _NOISE, _SKIPPED, _FIRST_STATE = 1, 2, 3, 4
_SKIPS = 1 << 32
"""Added to the cached ids of a sequence that skips layers, which no other one may read."""


@dataclass(frozen=True, slots=True)
class ToySpec:
    """What stands in `toy:key=value,...`; every key is optional."""

    vocab: int = 64
    """Number of ids."""
    seed: int = 0
    """Which pair of tables."""
    agreement: float = 1.0
    """1: the target's own logits; 0: logits that know nothing of the target's."""
    order: int = 2
    """How many last tokens decide the next one; 0: all of them."""
    scale: float = 2.0
    """Standard deviation of the logits: larger is more certain."""
    context: int = 4096
    """Longest sequence."""
    pass_ms: float = 0.0
    """Slept per pass, whatever it holds."""
    token_ms: float = 0.0
    """Slept per row of a pass."""
    eos: int = -1
    """The end-of-text id; -1: none."""
    nan_after: int = 0
    """Fault injection: logits are NaN once the context is longer than this; 0: never."""
    blocks: int = 0
    """Cache blocks; 0: the default."""
    dies_on: int = -1
    """Fault injection: a pass over this id ends the process, as a fault of the machine would; -1: none does."""

    def text(self) -> str:
        """The canonical `toy:...` text: keys that differ from their defaults, in the order above."""
        values = [(f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self)]
        given = [f"{name}={value}" for name, value, default in values if value != default]
        return PREFIX + ",".join(given)


def parse_toy(text: str) -> ToySpec:
    """Reads `toy:key=value,...`. Raises InvalidArgument naming the bad key or value and what is allowed."""
    if not text.startswith(PREFIX):
        raise InvalidArgument(f"a toy model is written {PREFIX}key=value,..., not {text!r}", field="model")
    types = {f.name: float if f.type == "float" else int for f in dataclasses.fields(ToySpec)}
    values: dict[str, int | float] = {}
    for part in filter(None, (p.strip() for p in text[len(PREFIX) :].split(","))):
        key, _, value = part.partition("=")
        if key not in types:
            raise InvalidArgument(f"toy model has no key {key!r}; known keys: {', '.join(types)}", field="model")
        if key in values:
            raise InvalidArgument(f"toy model key {key!r} is given twice", field="model")
        try:
            values[key] = types[key](value)
        except ValueError:
            raise InvalidArgument(
                f"toy model key {key!r} needs {types[key].__name__}, not {value!r}", field="model"
            ) from None
    spec = ToySpec(**values)  # type: ignore[arg-type]
    _check(spec)
    return spec


def load_toy(text: str) -> LoadedModel:
    """A toy model and its description, from `toy:key=value,...`."""
    model = ToyModel(parse_toy(text))
    return LoadedModel(model, model.description)


class ToyModel:
    """A `LanguageModel` (interface.py) over a seeded table of logits."""

    def __init__(self, spec: ToySpec) -> None:
        self.spec = spec
        self.vocab_size = spec.vocab
        self.context_length = spec.context
        self.num_rows_computed = 0
        self._rows: OrderedDict[tuple[int, ...], np.ndarray] = OrderedDict()
        self._max_rows = max(1, MAX_TABLE_BYTES // (4 * spec.vocab))
        self._cache = np.empty(0, np.int64)
        self._block_size = 1
        self.num_layers, self.hidden_size = NUM_LAYERS, HIDDEN_SIZE
        self.exit_layer, self.num_layer_rows = 0, 0
        self.skipped_layers: tuple[int, ...] = ()
        self._states: tuple[int, ...] = ()
        self._features = np.empty((0, 0, HIDDEN_SIZE), np.float32)

    @property
    def description(self) -> ModelDescription:
        """Says that it is simulated. Toys of one vocabulary share a tokenizer fingerprint, so that they pair."""
        spec = self.spec
        return ModelDescription(
            model=spec.text(),
            model_fingerprint=hashlib.sha256(spec.text().encode()).hexdigest(),
            tokenizer_fingerprint=hashlib.sha256(f"toy vocabulary {spec.vocab}".encode()).hexdigest(),
            vocab_size=spec.vocab,
            context_length=spec.context,
            eos_token_ids=(spec.eos,) if spec.eos >= 0 else (),
            dtype="float32",
            numerics_fingerprint="toy",
            versions={"numpy": np.__version__},
            simulated=True,
        )

    def bytes_per_block(self, block_size: int) -> int:
        """One int64 id a token, and its kept states."""
        return (8 + 4 * len(self._states) * self.hidden_size) * block_size

    def keep_features(self, states: Sequence[int]) -> None:
        """As `FeatureModel`: standard normal numbers, keyed by the state and the last `order` ids."""
        self._states = check_states((*states, *((self.exit_layer,) * (self.exit_layer > 0))), self.num_layers)

    def exit_after(self, num_layers: int) -> None:
        """As `PartialModel`. A token is cached in another form until all layers have seen it."""
        _check_partial(self.num_layers, num_layers, self.skipped_layers)
        self.exit_layer = num_layers
        self.keep_features(self._states)

    def skip_layers(self, layers: Sequence[int]) -> None:
        """As `PartialModel`. Whichever they are, the logits agree by SKIPPING_AGREEMENT."""
        _check_partial(self.num_layers, self.exit_layer, layers)
        self.skipped_layers = tuple(sorted(set(layers)))

    def read_features(self, slots: Sequence[int], states: Sequence[int]) -> np.ndarray:
        """float32[len(slots), len(states) * hidden_size]."""
        if unknown := [state for state in states if state not in self._states]:
            raise Internal(f"states {unknown} are not among those kept, {list(self._states)}")
        rows = self._features[list(slots)]
        return np.concatenate([rows[:, self._states.index(state)] for state in states], 1)

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """All slots start at -1, which no context of real ids contains."""
        self._cache = np.full(num_blocks * block_size, -1, np.int64)
        self._features = np.full((num_blocks * block_size, len(self._states), self.hidden_size), np.nan, np.float32)
        self._block_size = block_size

    def copy_block(self, source: int, destination: int) -> None:
        """Its ids and kept states."""
        size = self._block_size
        for cached in (self._cache, self._features):
            cached[destination * size : (destination + 1) * size] = cached[source * size : (source + 1) * size]

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Their ids and kept states."""
        for cached in (self._cache, self._features):
            cached[list(destinations)] = cached[list(sources)]

    def forward(self, batch: PackedBatch) -> np.ndarray:
        """float32[num_logit_rows, vocab]; sleeps pass_ms + token_ms * rows."""
        if self.spec.dies_on >= 0 and any(self.spec.dies_on in segment.token_ids for segment in batch.segments):
            os.kill(os.getpid(), signal.SIGKILL)
        logits = np.empty((batch.num_logit_rows, self.vocab_size), np.float32)
        out = 0
        for segment in batch.segments:
            end = segment.num_cached_tokens + len(segment.token_ids)
            slots = self._slots(segment.block_table, range(segment.num_cached_tokens, end))
            self._write(segment, slots)
            for place in range(end - segment.num_logits, end):
                logits[out] = self._logits(*self._read(segment, place))
                out += 1
        self.num_rows_computed += batch.num_rows
        cost_s = (self.spec.pass_ms + self.spec.token_ms * batch.num_rows) / 1000
        if cost_s > 0:
            time.sleep(cost_s)
        return logits

    def logits_for(self, prefix_ids: Sequence[int], *, skips: bool = False) -> np.ndarray:
        """The exact logits after `prefix_ids` (float32[vocab]), without any cache: what tests compare with."""
        ids = [id_ + _SKIPS * skips for id_ in prefix_ids]
        return self._logits(tuple(ids[-self.spec.order :] if self.spec.order else ids), len(ids)).copy()

    def features_for(self, prefix_ids: Sequence[int], states: Sequence[int]) -> np.ndarray:
        """float32[len(states) * hidden_size] of the last of `prefix_ids`, without any cache."""
        ids = list(prefix_ids)
        context = tuple(ids[-self.spec.order :] if self.spec.order else ids)
        return np.concatenate([self._state(state, context) for state in states])

    def _write(self, segment: Segment, slots: list[int]) -> None:
        """The rows' ids and states; of rows that lack layers the ids are cached in a form of their own."""
        num_rows, exit_layer = len(slots), self.exit_layer
        num_kept, num_whole = segment.num_kept, num_rows - segment.num_early
        num_skipped = len(self.skipped_layers) if segment.skips else 0
        self.num_layer_rows += (num_rows - num_kept) * exit_layer + num_whole * (self.num_layers - exit_layer)
        self.num_layer_rows -= num_rows * num_skipped
        self._cache[slots[num_kept:]] = (
            _half(np.asarray(segment.token_ids[num_kept:], np.int64)) - _SKIPS * segment.skips
        )
        if self._states and not segment.skips:
            self._write_states(segment, range(num_kept, num_rows), range(exit_layer + 1))
        self._cache[slots[:num_whole]] = _half(self._cache[slots[:num_whole]])
        if self._states and not segment.skips:
            self._write_states(segment, range(num_whole), (*range(exit_layer + 1, self.num_layers), LAST_HIDDEN))

    def _write_states(self, segment: Segment, rows: range, states: Iterable[int]) -> None:
        kept = [(index, state) for index, state in enumerate(self._states) if state in states]
        for row in rows if kept else ():
            place = segment.num_cached_tokens + row
            context, _ = self._read(segment, place)
            whole = tuple(-2 - id_ if id_ < -1 else id_ for id_ in context)
            for index, state in kept:
                slot = self._slots(segment.block_table, [place])[0]
                self._features[slot, index] = self._state(state, whole)

    def _state(self, state: int, context: tuple[int, ...]) -> np.ndarray:
        table = _FIRST_STATE + state % (self.num_layers + 1)
        return self._normals(table, context, self.hidden_size).astype(np.float32)

    def _read(self, segment: Segment, place: int) -> tuple[tuple[int, ...], int]:
        """What the cache holds of the last `order` tokens that the one at `place` sees, and how many it sees."""
        context = _context(place, segment.num_cached_tokens + len(segment.token_ids), segment.parents)
        read = context[-self.spec.order :] if self.spec.order else context
        return tuple(self._cache[self._slots(segment.block_table, read)].tolist()), len(context)

    def _logits(self, context: tuple[int, ...], length: int) -> np.ndarray:
        if self.spec.nan_after and length > self.spec.nan_after:
            return np.full(self.vocab_size, np.nan, np.float32)
        row = self._rows.get(context)
        if row is None:
            row = self._rows[context] = self._draw_row(context)
            if len(self._rows) > self._max_rows:
                self._rows.popitem(last=False)
        return row

    def _draw_row(self, context: tuple[int, ...]) -> np.ndarray:
        spec = self.spec
        if min(context, default=0) >= _SKIPS:
            own = tuple(id_ - _SKIPS for id_ in context)
            noise = math.sqrt(1 - SKIPPING_AGREEMENT**2) * self._normals(_SKIPPED, own, spec.vocab)
            return (SKIPPING_AGREEMENT * self._draw_row(own) + spec.scale * noise).astype(np.float32)
        row = spec.agreement * self._normals(_TARGET, context, spec.vocab)
        if spec.agreement < 1:
            row = row + math.sqrt(1 - spec.agreement**2) * self._normals(_NOISE, context, spec.vocab)
        return (spec.scale * row).astype(np.float32)

    def _normals(self, table: int, context: tuple[int, ...], count: int) -> np.ndarray:
        text = f"{self.spec.seed}/{table}/{self.spec.order}/{','.join(map(str, context))}"
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
        return Generator(Philox(key=key)).standard_normal(count)

    def _slots(self, block_table: Sequence[int], places: Sequence[int]) -> list[int]:
        size = self._block_size
        return [block_table[i // size] * size + i % size for i in places]


def _half(ids: np.ndarray) -> np.ndarray:
    """Ids as they are cached until all layers have seen them, and back again."""
    return -2 - ids


def _context(place: int, end: int, parents: Sequence[int]) -> Sequence[int]:
    """Places of what the token at `place` sees, itself included, where the tokens up to `end` end with a tree."""
    start = end - len(parents)
    if place < start:
        return range(place + 1)
    return [*range(start), *(start + node for node in path_to(parents, place - start))]


def _check_partial(num_layers: int, exit_layer: int, skipped: Sequence[int]) -> None:
    if not 0 <= exit_layer < num_layers or not set(skipped) < set(range(num_layers)):
        raise InvalidArgument(
            f"a toy has {num_layers} layers: it cannot stop after {exit_layer} of them, or skip {list(skipped)}",
            field="heads",
        )


def _check(spec: ToySpec) -> None:
    wrong = {
        "vocab must be at least 2": spec.vocab < 2,
        "agreement must lie in 0 to 1": not 0 <= spec.agreement <= 1,
        "order must be at least 0": spec.order < 0,
        "scale must be positive and finite": not 0 < spec.scale < math.inf,
        "context must be at least 2": spec.context < 2,
        "pass_ms and token_ms must be at least 0": not (0 <= spec.pass_ms < math.inf and 0 <= spec.token_ms < math.inf),
        "eos must be an id of the vocabulary, or -1 for none": not -1 <= spec.eos < spec.vocab,
        "nan_after and blocks must be at least 0": spec.nan_after < 0 or spec.blocks < 0,
        "dies_on must be an id of the vocabulary, or -1 for none": not -1 <= spec.dies_on < spec.vocab,
    }
    faults = [text for text, is_wrong in wrong.items() if is_wrong]
    if faults:
        raise InvalidArgument(f"toy model: {'; '.join(faults)}", field="model")
