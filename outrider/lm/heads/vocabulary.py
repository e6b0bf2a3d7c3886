"""Which ids a head guesses, and whether its embedding is the target's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from outrider.lm.heads.checkpoint import Checkpoint, fault
from outrider.lm.heads.target import HeadTarget

COMPARED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """draft_ids: int64[dV], the id of each logit; None: all ids in order. num_rows: of the stored output matrix where
    ids are listed, and rows: those of them that are computed; None: the first `vocab_size` ones."""

    draft_ids: torch.Tensor | None = None
    num_rows: int = 0
    rows: torch.Tensor | None = None

    def cut(self, weight: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """The rows [V', H] of the stored [rows, H] that are computed."""
        return weight[:vocab_size] if self.rows is None else weight[self.rows]


def from_absolute(checkpoint: Checkpoint, key: str, ids: torch.Tensor, target: HeadTarget) -> DraftVocabulary:
    """Of the ids of the stored rows, as `key` leads to them: each once, all the target's. Padding is left out."""
    where = f"{checkpoint.where}: {key}"
    outside = ids[(ids < 0) | (ids >= target.padded_vocab_size)]
    if len(outside):
        raise fault(f"{where} leads to id {int(outside[0])}, the target has ids 0 to {target.padded_vocab_size - 1}")
    if len(ids.unique()) != len(ids):
        repeated = ids.sort().values
        raise fault(f"{where} leads to id {int(repeated[1:][repeated[1:] == repeated[:-1]][0])} more than once")
    rows = (ids < target.vocab_size).nonzero()[:, 0]
    return DraftVocabulary(ids[rows].to(target.device), len(ids), rows)


def read_d2t(checkpoint: Checkpoint, config: Mapping[str, Any], target: HeadTarget) -> DraftVocabulary:
    """EAGLE-3's: `d2t` int64[dV] holds offsets, logit i is of id i + d2t[i]; `t2d` bool[V] says which ids are there.

    Raises InvalidArgument where they contradict one another, the config or the target.
    """
    stated = config.get("draft_vocab_size")
    whole = (target.vocab_size, target.padded_vocab_size)
    if "d2t" not in checkpoint:
        if stated not in (None, *whole):
            raise fault(f"{checkpoint.where}: d2t [{stated}] is missing, config.json tells of {stated} draft ids")
        return _whole(checkpoint, whole)
    size = checkpoint.shape("d2t")[0] if stated is None else int(stated)
    d2t = checkpoint.take("d2t", (size,))
    if d2t.is_floating_point() or d2t.is_complex() or d2t.dtype == torch.bool:
        raise fault(f"{checkpoint.where}: d2t should be int64 and is {d2t.dtype}")
    d2t = d2t.long()
    ids = d2t + torch.arange(size)
    if "t2d" in checkpoint:
        t2d = checkpoint.take("t2d", *((rows,) for rows in whole)).bool()
        known = ids[(ids >= 0) & (ids < len(t2d))]
        if int(t2d.sum()) != size or len(known) != size or not bool(t2d[known].all()):
            absolute = d2t.unique().numel() == size and bool((d2t >= 0).all()) and bool((d2t < len(t2d)).all())
            hint = "; d2t seems to hold ids and not offsets" if absolute and bool(t2d[d2t].all()) else ""
            raise fault(
                f"{checkpoint.where}: d2t and t2d disagree: t2d marks {int(t2d.sum())} ids, the offsets of d2t lead to "
                f"{size}, not all of them marked{hint}"
            )
    return from_absolute(checkpoint, "d2t", ids, target)


def _whole(checkpoint: Checkpoint, sizes: tuple[int, int]) -> DraftVocabulary:
    """All ids; a t2d that says otherwise has lost its d2t."""
    if "t2d" in checkpoint and not bool(checkpoint.take("t2d", *((rows,) for rows in sizes)).all()):
        raise fault(f"{checkpoint.where}: d2t is missing, and t2d leaves ids out")
    return DraftVocabulary()


def matches_embedding(own: torch.Tensor, target: HeadTarget, dtype: torch.dtype) -> bool:
    """Whether a checkpoint's embedding [V, H] holds, in `dtype`, the target's own numbers, and need not be kept."""
    if own.shape[1] != target.hidden_size:
        return False
    for ids in torch.arange(min(len(own), target.vocab_size)).split(COMPARED_ROWS):
        theirs = target.embed(ids.to(target.device), dtype).cpu()
        if not torch.equal(own[ids].to(dtype), theirs):
            return False
    return True
