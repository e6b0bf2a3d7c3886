"""Medusa heads from their public checkpoints. How many there are is told by the keys: configs are often wrong about it.

v0.1: `{i}.{j}.linear` and the output head `{i}.{layers}`; without output heads (TGI) all share the target's. v1.0: the
same under `medusa_head.` in a full model. vLLM: `blocks.{i}.layers.{j}`, `lm_heads.{i}` or one `lm_head`, `token_map`.
"""

from __future__ import annotations

import re

import torch

from outrider.lm.heads.checkpoint import IGNORABLE, Checkpoint, fault
from outrider.lm.heads.medusa import MedusaHead
from outrider.lm.heads.packing import Linear, Weights, pack
from outrider.lm.heads.target import HeadTarget, Projection
from outrider.lm.heads.vocabulary import DraftVocabulary, from_absolute

FULL_MODEL = "medusa_head."
"""Prefix of the heads' keys in a checkpoint that is a whole model with heads; vLLM's prefix has an s."""


def load_medusa(checkpoint: Checkpoint, target: HeadTarget, dtype: torch.dtype) -> MedusaHead:
    """Raises InvalidArgument naming file and key for whatever does not fit."""
    is_full = any(key.startswith(FULL_MODEL) for key in checkpoint.keys)
    if is_full:
        check_base(checkpoint, target)
    reader = _Reader(checkpoint, target, dtype)
    vocabulary = reader.vocabulary()
    first, *later = [reader.residual_layers(depth) for depth in range(reader.num_layers)]
    lm_heads = reader.lm_heads(vocabulary)
    head = MedusaHead(
        name=checkpoint.path.resolve().name,
        layout=f"medusa in a full model, {reader.layout}" if is_full else reader.layout,
        hidden_size=target.hidden_size,
        num_heads=reader.num_heads,
        dtype=dtype,
        device=target.device,
        first=reader.pack(first),
        later=tuple(tuple(reader.pack([layer[i]]) for layer in later) for i in range(reader.num_heads)),
        lm_heads=lm_heads,
        draft_ids=vocabulary.draft_ids,
        num_parameters=reader.num_parameters,
    )
    checkpoint.finish(*([rf"(?!{re.escape(FULL_MODEL)}).*"] if is_full else []))
    return head


class _Reader:
    """Knows where the layout keeps what. num_layers: residual ones of each head."""

    def __init__(self, checkpoint: Checkpoint, target: HeadTarget, dtype: torch.dtype) -> None:
        self._checkpoint, self._target, self._dtype = checkpoint, target, dtype
        self.num_parameters = 0
        prefixes = (p for p in ("medusa_heads.", FULL_MODEL) if any(k.startswith(p) for k in checkpoint.keys))
        self._prefix = next(prefixes, "")
        is_vllm = any(key.startswith(f"{self._prefix}blocks.") for key in checkpoint.keys)
        self.layout = "medusa of vLLM" if is_vllm else "medusa v0.1"
        self._residual = "blocks.{}.layers.{}" if is_vllm else "{}.{}.linear"
        pattern = re.escape(self._prefix + self._residual).replace(r"\{\}", r"(\d+)") + r"\.(weight|bias)"
        found = [(int(m[1]), int(m[2])) for m in map(re.compile(pattern).fullmatch, checkpoint.keys) if m]
        if not found:
            raise fault(f"{checkpoint.where}: {self._prefix}{self._residual.format(0, 0)}.weight is missing")
        self.num_heads = 1 + max(head for head, _ in found)
        self.num_layers = 1 + max(layer for _, layer in found)

    def residual_layers(self, depth: int) -> list[Weights]:
        """Of all heads, their layer number `depth`."""
        size, layers = self._target.hidden_size, []
        for head in range(self.num_heads):
            name = self._prefix + self._residual.format(head, depth)
            weight = self._checkpoint.take(f"{name}.weight", (size, size))
            # In v0.1 every layer has a bias; in vLLM's layout those that were trained with one.
            has_bias = not self._residual.startswith("blocks") or self._checkpoint.config.get("medusa_fc_bias", False)
            layers.append((weight, self._checkpoint.take(f"{name}.bias", (size,)) if has_bias else None))
        return layers

    def vocabulary(self) -> DraftVocabulary:
        """`token_map`, int64 and absolute, where the output heads leave ids out."""
        key = next((k for k in (f"{self._prefix}token_map", "token_map") if k in self._checkpoint), "")
        if not key:
            return DraftVocabulary()
        shape = self._checkpoint.shape(key)
        stated = self._checkpoint.config.get("truncated_vocab_size")
        ids = self._checkpoint.take(key, (stated or shape[0],))
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise fault(f"{self._checkpoint.where}: {key} should be int64 and is {ids.dtype}")
        return from_absolute(self._checkpoint, key, ids.long(), self._target)

    def lm_heads(self, vocabulary: DraftVocabulary) -> tuple[Projection, ...]:
        """One of each head, or one for all: the file's, else the target's own."""
        checkpoint, target = self._checkpoint, self._target
        is_vllm = self._residual.startswith("blocks")
        own = "lm_heads.{}.weight" if is_vllm else f"{{}}.{self.num_layers}.weight"
        names = [self._prefix + own.format(i) for i in range(self.num_heads)]
        shared = f"{self._prefix}lm_head.weight"
        if is_vllm and shared in checkpoint:
            names = [shared]
        elif not any(name in checkpoint for name in names) and self._may_share():
            self.layout += ", output head of the target"
            ids = vocabulary.draft_ids
            return (target.project if ids is None else lambda hidden: target.project(hidden)[:, ids],)
        sizes = {target.vocab_size, target.padded_vocab_size}
        if vocabulary.draft_ids is not None:
            sizes = {vocabulary.num_rows}
        shapes = [(rows, target.hidden_size) for rows in sorted(sizes)]
        weights = [vocabulary.cut(checkpoint.take(name, *shapes), target.vocab_size) for name in names]
        return tuple(_as_float(self.pack([(weight, None)])) for weight in weights)

    def pack(self, parts: list[Weights]) -> Linear:
        """Counts them."""
        self.num_parameters += sum(w.numel() + (0 if b is None else b.numel()) for w, b in parts)
        return pack(parts, self._dtype, self._target.device)

    def _may_share(self) -> bool:
        """vLLM's layout says so; v0.1 without any output head was made for it."""
        return not self._residual.startswith("blocks") or bool(self._checkpoint.config.get("original_lm_head"))


def check_base(checkpoint: Checkpoint, target: HeadTarget) -> None:
    """Raises InvalidArgument unless what a full model holds besides its heads is the target, tensor for tensor.

    Heads of such a checkpoint guess for its own model, which may have been trained along with them.
    """
    where = f"{checkpoint.where} is a full model with Medusa heads for itself"
    if target.folder is None:
        raise fault(f"{where}, and the target {target.name} has no folder of safetensors to compare it with")
    if target.folder.resolve() == checkpoint.folder.resolve():
        return
    theirs = Checkpoint(target.folder)
    ours = {key for key in checkpoint.keys if not key.startswith(FULL_MODEL) and not re.fullmatch(IGNORABLE[0], key)}
    tied = {"lm_head.weight"}  # written or not where it is the embedding
    odd = sorted((ours ^ {key for key in theirs.keys if not key.startswith(FULL_MODEL)}) - tied)
    if not ours or odd:
        raise fault(f"{where}, and that is not the target {target.name}: only one of them has {odd[:1] or 'weights'}")
    for key in sorted(ours & set(theirs.keys)):
        mine, other = checkpoint.read(key), theirs.read(key)
        if mine.shape != other.shape or not torch.equal(mine.to(other.dtype), other):
            raise fault(
                f"{where}, and that is not the target {target.name}: {key} differs. Serve the full model as the "
                "target, or take heads that were trained for this one"
            )


def _as_float(linear: Linear) -> Projection:
    return lambda hidden: linear(hidden).float()
