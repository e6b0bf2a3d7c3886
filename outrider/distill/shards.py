"""Generated sequences on disk: shards, written whole or not at all, whose states are mapped into memory.

A shard is `NAME.json` (ids, prompts, what made it) and `NAME.states` (raw states of all its tokens, back to back).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

_RAW = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}


@dataclass(frozen=True, slots=True)
class Generated:
    """A prompt and what the target said.

    token_ids: every token the target has read, prompt first. next_token: what it said last, and never read.
    messages, response: the same as text. tag: what the shard's maker wants to find again.
    """

    token_ids: list[int]
    prompt_length: int
    next_token: int
    temperature: float
    messages: list[dict[str, str]] = field(default_factory=list)
    response: str = ""
    tag: str = ""

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.prompt_length + 1


@dataclass(frozen=True, slots=True)
class Shard:
    """Its sequences, the states of their tokens [tokens, S, H] in order, the seconds it took to make, and what else its
    maker wrote of it."""

    sequences: list[Generated]
    states: torch.Tensor
    seconds: float
    about: dict[str, Any]

    def states_of(self, index: int) -> torch.Tensor:
        """[n, S, H] of sequence `index`, mapped."""
        start = sum(len(s.token_ids) for s in self.sequences[:index])
        return self.states[start : start + len(self.sequences[index].token_ids)]


def write_shard(
    folder: Path,
    name: str,
    sequences: Sequence[Generated],
    states: Sequence[torch.Tensor],
    seconds: float,
    about: Mapping[str, Any],
) -> None:
    """states: [n, S, H] of each sequence. The json file comes last, so a shard that has one is whole."""
    dtype = str(states[0].dtype).removeprefix("torch.")
    raw = folder / f"{name}.states"
    with _replacing(raw).open("wb") as file:
        for part in states:
            file.write(part.contiguous().view(_RAW[dtype]).numpy().tobytes())
    os.replace(_replacing(raw), raw)
    content = {
        "seconds": seconds,
        "dtype": dtype,
        "state_shape": list(states[0].shape[1:]),
        "about": dict(about),
        "sequences": [asdict(s) for s in sequences],
    }
    write_json(folder / f"{name}.json", content)


def has_shard(folder: Path, name: str) -> bool:
    """Whether it is there, whole."""
    return (folder / f"{name}.json").is_file()


def read_shard(folder: Path, name: str) -> Shard:
    """Maps the states; nothing of them is read yet."""
    content = json.loads((folder / f"{name}.json").read_text())
    sequences = [Generated(**values) for values in content["sequences"]]
    num_tokens = sum(len(s.token_ids) for s in sequences)
    kind = np.int16 if _RAW[content["dtype"]] is torch.int16 else np.int32
    # Copy on write: torch wants memory it may write to; nobody does.
    mapped = np.memmap(folder / f"{name}.states", kind, mode="c", shape=(num_tokens, *content["state_shape"]))
    states = torch.from_numpy(mapped).view(getattr(torch, content["dtype"]))
    return Shard(sequences, states, content["seconds"], content["about"])


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    _replacing(path).write_text(json.dumps(value) + "\n", encoding="utf-8")
    os.replace(_replacing(path), path)


def _replacing(path: Path) -> Path:
    return path.with_name(path.name + ".part")
