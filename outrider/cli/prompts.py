"""Prompts for verify, bench and demo: 24 of our own, a file's, or random ids where the model is a toy."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np

from outrider.client import Prompt
from outrider.errors import InvalidArgument
from outrider.results import ModelInfo

_TOY_PROMPT_TOKENS = 12


def read_prompts(path: Path | None = None, kind: str | None = None) -> list[str]:
    """The prompts of a JSONL file, one {"prompt": "..."} a line; None: those shipped. `kind` keeps only such lines.

    Raises InvalidArgument naming file and line of a bad one.
    """
    source = path or resources.files("outrider.cli") / "prompts.jsonl"
    try:
        text = source.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="prompts") from None
    prompts = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt = entry["prompt"]
        except (ValueError, KeyError, TypeError):
            raise InvalidArgument(
                f'{path}:{number} must be an object like {{"prompt": "..."}}', field="prompts"
            ) from None
        if not isinstance(prompt, str) or not prompt:
            raise InvalidArgument(f"{path}:{number}: prompt must be a text and not empty", field="prompts")
        if kind is None or entry.get("kind") == kind:
            prompts.append(prompt)
    if not prompts:
        raise InvalidArgument(f"{path} holds no prompt", field="prompts")
    return prompts


def spread(prompts: list[str], count: int) -> list[str]:
    """`count` of them, evenly over the list, so that few still cover all kinds; cycles when asked for more."""
    if count >= len(prompts):
        return [prompts[i % len(prompts)] for i in range(count)]
    return [prompts[i * len(prompts) // count] for i in range(count)]


def for_model(prompts: list[str], info: ModelInfo, seed: int = 1) -> list[Prompt]:
    """As the model takes them: chat messages, bare text, or, for a toy, random ids."""
    if info.simulated:
        rng = np.random.default_rng(seed)
        return [rng.integers(0, info.vocab_size, _TOY_PROMPT_TOKENS).tolist() for _ in prompts]
    if info.has_chat_template:
        return [[{"role": "user", "content": prompt}] for prompt in prompts]
    return list(prompts)
