"""What a program may ask of the engine and what a model must give: checked for one forward or pass alone, since in the
pass a fault would fail its neighbours."""

from __future__ import annotations

import itertools

import numpy as np

from outrider.errors import Internal
from outrider.lm.interface import Forward, PackedBatch, SegmentResult
from outrider.lm.kv_cache import Sequence
from outrider.lm.tree import are_ordered, is_chain


def split_logits(logits: np.ndarray, batch: PackedBatch, vocab_size: int) -> list[SegmentResult]:
    """Each segment's rows. Raises Internal unless these are the logits that the batch wants."""
    expected = (batch.num_logit_rows, vocab_size)
    if logits.shape != expected:
        raise Internal(f"the model gave logits of shape {logits.shape}, expected {expected}")
    ends = itertools.accumulate(s.num_logits for s in batch.segments)
    return [SegmentResult(logits[end - s.num_logits : end]) for end, s in zip(ends, batch.segments, strict=True)]


def fault_of(forward: Forward, vocab_size: int, exit_layer: int = 0) -> Internal | None:
    """What is impossible about a program's forward; checked alone, since in the pass it would fail its neighbours."""
    if not isinstance(forward, Forward) or not isinstance(forward.sequence, Sequence):
        return Internal(f"a program yielded {forward!r}, not a Forward of an open sequence")
    num_rows, length, max_length = len(forward.token_ids), forward.sequence.length, forward.sequence.max_length
    if forward.num_layers:
        if fault := _early_fault(forward, forward.sequence, exit_layer):
            return fault
        length += len(forward.sequence.early_ids)
    if num_rows < 1 or not 0 <= forward.num_logits <= num_rows:
        return Internal(f"a forward of {num_rows} tokens cannot give {forward.num_logits} rows of logits")
    if length + num_rows > max_length:
        return Internal(f"{num_rows} tokens after {length} exceed the {max_length} that the sequence was opened for")
    if forward.num_chained and (forward.parents or not 0 < forward.num_chained <= max_length - length - num_rows):
        return Internal(f"a forward with {forward.num_chained} chained rows has parents, or no room for them")
    if min(forward.token_ids) < 0 or max(forward.token_ids) >= vocab_size:
        return Internal(f"a forward holds a token id outside the vocabulary of {vocab_size}")
    return _tree_fault(forward.sequence.parents, forward) if forward.parents or forward.sequence.parents else None


def _early_fault(forward: Forward, sequence: Sequence, exit_layer: int) -> Internal | None:
    if forward.num_layers != exit_layer or sequence.skips:
        where = f"after {exit_layer}" if exit_layer and not sequence.skips else "nowhere"
        return Internal(f"a forward stops after {forward.num_layers} layers; rows of its sequence may stop {where}")
    if forward.num_logits or forward.parents or forward.decision or not is_chain(sequence.parents):
        return Internal("a forward of the first layers only has logits, a decision or a tree")
    return None


def _tree_fault(tree: tuple[int, ...], forward: Forward) -> Internal | None:
    num_rows, num_nodes = len(forward.token_ids), len(forward.parents)
    if not num_nodes:
        return None if is_chain(tree) else Internal("a sequence that ends with a tree had a forward without parents")
    if num_nodes > num_rows or (tree and num_nodes < num_rows):
        return Internal(f"{num_nodes} parents for {num_rows} tokens behind a tree of {len(tree)} nodes")
    if not are_ordered((*tree, *forward.parents), len(tree)):
        return Internal(f"a node of a tree has a parent that does not come before it: {list(forward.parents)}")
    return None
