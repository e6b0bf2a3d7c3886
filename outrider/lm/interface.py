"""The seams of the engine, free of torch: what a model does in a step, and what a session asks of the engine.

A session's work is a *program*: a generator that yields `Forward`s, receives a `ForwardResult` for each and returns its
answer. The engine runs all programs, packing what is ready into one model call a step; a test can drive one by hand.
Programs run on the engine's thread: what they do between yields must be short.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from outrider.server_info import Numerics

T = TypeVar("T")

LAST_HIDDEN = -1
"""The state that the output head reads, behind the last norm; others: states.py."""


class DecisionKind(Protocol):
    """Decisions that are made together, in one go over all their rows."""

    def decide(self, decisions: Sequence[Any], rows: Any, step: int) -> Any:
        """rows: torch float32[n, V], the wanted rows of each decision in order -> torch float64[len(decisions), w] on
        the same device, without waiting for it: a line of numbers per decision, which its maker reads. A line that
        begins with NaN is not decided. step: how many chained rows came before; see `Forward`."""


class Decision(Protocol):
    """What a program would do with its logits, told so that a model may do it where the logits are."""

    @property
    def kind(self) -> DecisionKind:
        """Compared by identity."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in a packed pass: `token_ids` go to places num_cached_tokens, +1, ... of its block table.

    A token's place is its position in the text too, unless it is a tree's.
    """

    num_cached_tokens: int
    token_ids: Sequence[int]
    block_table: Sequence[int]
    num_logits: int
    """Logits are wanted for the last this many rows; 0 for a prefill chunk that is not the last."""
    parents: Sequence[int] = ()
    """The last len(parents) tokens of the context, rows or cached ones, are a tree (tree.py); never a mere chain."""
    decision: Decision | None = None
    num_chained: int = 0
    """Both as in `Forward`."""
    num_kept: int = 0
    """Of the first this many rows the first layers, up to the model's exit layer, are computed already."""
    num_early: int = 0
    """The last this many rows want these first layers only, and no logits."""
    skips: bool = False
    """All rows leave out the layers that the model was told to skip."""


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """All segments of a step, back to back, no padding."""

    segments: tuple[Segment, ...]

    @property
    def num_rows(self) -> int:
        return sum(len(s.token_ids) for s in self.segments)

    @property
    def num_logit_rows(self) -> int:
        return sum(s.num_logits for s in self.segments)


class LanguageModel(Protocol):
    """A causal model with a block-table cache of its own. One call a step; called from one thread only."""

    vocab_size: int
    """Real ids only: padded rows of the vocabulary are cut off the logits."""
    context_length: int

    def bytes_per_block(self, block_size: int) -> int:
        """Cache bytes that one block of `block_size` tokens takes."""

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        """Called once, before the first forward."""

    def copy_block(self, source: int, destination: int) -> None:
        """Copies a block's keys and values, for two sequences that go separate ways from here. Between forwards."""

    def move_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Keys and values of slots (block * block_size + place in it) to others; all are read before one is written.
        Between forwards."""

    def forward(self, batch: PackedBatch) -> np.ndarray:
        """float32[num_logit_rows, vocab_size], in segment order. Writes the rows' keys and values to the cache."""


class FeatureModel(LanguageModel, Protocol):
    """A model that can keep states of its computed rows beside their keys and values (features.py)."""

    num_layers: int
    hidden_size: int

    def keep_features(self, states: Sequence[int]) -> None:
        """From the next `allocate_cache` on these states are kept, and no others: 0 to num_layers - 1, LAST_HIDDEN.

        Raises InvalidArgument on a state that the model has not, or when its layers cannot be watched.
        """

    def read_features(self, slots: Sequence[int], states: Sequence[int]) -> Any:
        """[len(slots), len(states) * hidden_size] of computed slots, in the model's number type (a toy: numpy
        float32), states in the order given. Between forwards."""


class PartialModel(FeatureModel, Protocol):
    """A model that can compute a row's first layers before the others, and rows that leave layers out (routes.py)."""

    exit_layer: int
    """0: none."""
    skipped_layers: tuple[int, ...]

    def exit_after(self, num_layers: int) -> None:
        """From the next `allocate_cache` on rows may stop after this many layers; their state there is kept.

        Raises InvalidArgument on a number that leaves no layer before or behind, or by name where this cannot be.
        """

    def skip_layers(self, layers: Sequence[int]) -> None:
        """Of the rows that skip these are left out. Before the first forward; raises as `exit_after`."""


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """What a model gives for one segment: logits float32[num_logits, V], or, where it made the segment's decision,
    decided float64[1 + chained rows, w]."""

    logits: np.ndarray | None
    decided: np.ndarray | None = None


class DecidingModel(LanguageModel, Protocol):
    """A model that can make decisions where its logits are."""

    def forward_deciding(self, batch: PackedBatch) -> list[SegmentResult]:
        """`forward`, one result per segment: decided where it has a decision, and all its chained rows computed; or
        neither."""


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """logits: float32[num_logits, vocab_size], valid until the next yield. Times in microseconds.

    num_cached_tokens: of the forward's tokens, those that had been computed before, for another sequence.
    decided: float64[1 + chained rows, w] where the model made the forward's decision, and logits are none; else None.
    The ids that chained rows computed then follow the forward's own in its sequence.
    """

    logits: np.ndarray
    queue_us: int
    compute_us: int
    num_batch_rows: int
    num_cached_tokens: int = 0
    decided: np.ndarray | None = None


class SequenceHandle(Protocol):
    """Tokens of a stream that are computed and kept, `max_length` at most.

    After a forward with `parents` the last of `token_ids` are the tree's nodes, in its order, and `parents` is theirs,
    until `keep_path` or `truncate`.

    `committed_length`: that many leading tokens, cached or in the next forward, are final; see `kv_cache.Sequence`.
    `num_computed`: that many leading tokens are in the cache now: all after a forward, fewer where blocks were taken.
    """

    token_ids: list[int]
    num_computed: int
    max_length: int
    committed_length: int
    parents: tuple[int, ...]
    early_ids: list[int]
    """Of early forwards (`Forward.num_layers`), behind `token_ids`."""

    def truncate(self, length: int) -> None:
        """Forgets cached tokens from `length` on, of a tree its last nodes. Only between this sequence's forwards."""

    def keep_path(self, indices: Sequence[int]) -> None:
        """Ends the tree: its nodes `indices`, a path from a root down (or none), follow the prefix as plain tokens, all
        other nodes are forgotten. Only between this sequence's forwards."""

    def features(self, start: int, end: int, states: Sequence[int]) -> Any:
        """[end - start, len(states) * H]: kept states of tokens `start` to `end`; see `kv_cache.Sequence`."""


@dataclass(slots=True)
class Forward:
    """Append `token_ids` to `sequence`'s cache and give the logits of the last `num_logits` of them.

    parents: of the last len(parents) tokens, which are a tree: index of each one's parent in the tree, smaller than its
    own, or -1 for the token before the tree. A token sees the prefix and its ancestors only, and its position is that
    of the token before the tree + its depth. Where the sequence ends with a tree already, these nodes join it: all
    tokens have parents then, and indices count from the tree's first node. Nodes take room of `max_length`, each one.

    decision: made from the logits by a model that can; all others give the logits. num_chained: so many more rows such
    a model computes at once, each the token that opens the line decided for the row before it, and decides for each as
    well. They take room of `max_length`; a forward with parents has none.

    num_layers: 0 for all of them. Otherwise the model's exit layer: an early forward, which computes that many first
    layers of tokens that follow `token_ids` and `early_ids`, and gives no logits. The tokens are then in `early_ids`,
    their states are read by `SequenceHandle.features`, and an ordinary forward that begins with the same ids goes on
    from there; all others are forgotten by it. Early rows come from no other sequence, so prompts are not for them.

    background: of use to nobody who waits; it is computed when no other forward is ready.
    """

    sequence: SequenceHandle
    token_ids: Sequence[int]
    num_logits: int = 1
    parents: Sequence[int] = ()
    decision: Decision | None = None
    num_chained: int = 0
    num_layers: int = 0
    background: bool = False


Program = Generator[Forward, ForwardResult, T]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a worker tells of its model (fields as in `DescribeWorkerResponse`)."""

    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_length: int
    tokenizer_json: bytes = b""
    chat_template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: dict[str, float] = field(default_factory=dict)
    dtype: str = "float32"
    weight_bytes: int = 0
    numerics_fingerprint: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    simulated: bool = False
    numerics: Numerics = field(default_factory=Numerics)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and its description."""

    model: LanguageModel
    description: ModelDescription
    tokenizer: Any = None
    translator: Any = None
    """`outrider.drafting.translation.Translator` of a draft model that does not share its target's tokenizer."""


def run_program(program: Program[T], forward: Any) -> T:
    """Drives a program to its end with `forward(Forward) -> ForwardResult`: the slow, obvious twin of the engine."""
    try:
        request = next(program)
        while True:
            request = program.send(forward(request))
    except StopIteration as stop:
        return stop.value
