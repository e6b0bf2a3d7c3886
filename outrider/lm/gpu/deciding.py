"""Decisions of a batch where its logits are: a kind in one go, chained rows without waiting, one transfer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from outrider.lm.interface import Decision, DecisionKind, PackedBatch, Segment, SegmentResult

ChainedPass = Callable[[PackedBatch, torch.Tensor], torch.Tensor]
"""One row of each segment, whose ids are the int64[n] on the device -> float32[n, V], not waited for."""


def decide_batch(batch: PackedBatch, logits: torch.Tensor, chained_pass: ChainedPass) -> list[SegmentResult]:
    """logits: float32[num_logit_rows, V] on the device. A segment whose rows cannot be decided gets its logits."""
    ends = np.cumsum([s.num_logits for s in batch.segments])
    rows = [logits[end - s.num_logits : end] for end, s in zip(ends, batch.segments, strict=True)]
    deciding = [i for i, s in enumerate(batch.segments) if s.decision is not None]
    lines = _decide([_decision(batch.segments[i]) for i in deciding], [rows[i] for i in deciding], 0)
    steps = [dict(zip(deciding, lines, strict=True))]
    chaining = [i for i in deciding if batch.segments[i].num_chained]
    while chaining:
        num_before = len(steps)
        chained = PackedBatch(tuple(_chained(batch.segments[i], num_before) for i in chaining))
        token_ids = torch.stack([_token(steps[-1][i], logits.shape[1]) for i in chaining])
        chained_logits = chained_pass(chained, token_ids)
        decisions = [_decision(batch.segments[i]) for i in chaining]
        lines = _decide(decisions, list(chained_logits.split(1)), num_before)
        steps.append(dict(zip(chaining, lines, strict=True)))
        chaining = [i for i in chaining if batch.segments[i].num_chained > num_before]
    found = _to_host([step[i] for i in deciding for step in steps if i in step])
    decided: dict[int, np.ndarray] = {}
    for i in deciding:
        own = np.stack([next(found) for step in steps if i in step])
        if not np.isnan(own[0, 0]):
            decided[i] = own
    return [
        SegmentResult(None, decided[i]) if i in decided else SegmentResult(rows[i].cpu().numpy())
        for i in range(len(batch.segments))
    ]


def _decide(decisions: Sequence[Decision], rows: Sequence[torch.Tensor], step: int) -> list[torch.Tensor]:
    """float64[w] of each; w may differ from kind to kind."""
    kinds: dict[int, tuple[DecisionKind, list[int]]] = {}
    for index, decision in enumerate(decisions):
        kinds.setdefault(id(decision.kind), (decision.kind, []))[1].append(index)
    lines: list[torch.Tensor] = [torch.empty(0)] * len(decisions)
    for kind, own in kinds.values():
        decided = kind.decide([decisions[i] for i in own], torch.cat([rows[i] for i in own]), step)
        for i, line in zip(own, decided, strict=True):
            lines[i] = line
    return lines


def _to_host(lines: list[torch.Tensor]) -> Iterator[np.ndarray]:
    """An iterator over them as arrays, after a single transfer."""
    numbers = torch.cat(lines).cpu().numpy()
    return iter(np.split(numbers, np.cumsum([len(line) for line in lines])[:-1]))


def _chained(segment: Segment, num_before: int) -> Segment:
    """The segment's row number `num_before` after its own; its id is on the device."""
    cached = segment.num_cached_tokens + len(segment.token_ids) + num_before - 1
    return replace(segment, num_cached_tokens=cached, token_ids=[0], num_logits=1, num_chained=0)


def _token(line: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Of a line that is not decided some id: whatever follows from it is forgotten."""
    return line[0].nan_to_num(0.0).long().clamp(0, vocab_size - 1)


def _decision(segment: Segment) -> Decision:
    assert segment.decision is not None
    return segment.decision
