"""Prompts for verify, bench and demo: our own by kind of work, a file's, or random ids where the model is a toy."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import numpy as np

from outrider.client import Prompt
from outrider.errors import InvalidArgument
from outrider.server_info import ModelInfo

MIXED = ("chat", "code", "code-edit", "summarise")
"""Kinds that stand for everyday work: what `read_prompts` gives when no kind is asked for."""
LONG_CONTEXT = "long-context"
WORKLOADS = (*MIXED, "off-domain", LONG_CONTEXT)
"""chat and code as people ask; code-edit copies most of its prompt, summarise quotes from it; off-domain is what small
models were hardly trained on; long-context asks about a text of some 4,000 tokens."""

_QUESTIONS = (
    "Using only this handbook, explain in one paragraph how the generator is started and stopped.",
    "Quote, word for word, the three near misses of section 7, and say for each what was changed afterwards.",
    "From the log in section 10, list every entry of a Tuesday with its kilograms, and name the largest.",
    "Write a page for new keepers: ten rules, each with the number of the section that it comes from.",
)
_TOY_PROMPT_TOKENS = 12
_LONG_PROMPT_TOKENS = 4000


def read_prompts(path: Path | None = None, kind: str | None = None) -> list[str]:
    """The prompts of a JSONL file, one {"prompt": "..."} a line; None: those shipped, of the everyday kinds.

    `kind` keeps only lines with that "kind". Raises InvalidArgument naming file and line of a bad one, or
    the kind that is missing.
    """
    if path is None and kind == LONG_CONTEXT:
        return _long_prompts()
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
        if kind == entry.get("kind") or (kind is None and (path is not None or entry["kind"] in MIXED)):
            prompts.append(prompt)
    if not prompts:
        raise InvalidArgument(f"{path} holds no prompt" + (f" of kind {kind}" if kind else ""), field="prompts")
    return prompts


def _long_prompts() -> list[str]:
    text = (resources.files("outrider.cli") / "long_context.txt").read_text(encoding="utf-8")
    return [f"{text}\n{question}" for question in _QUESTIONS]


def spread(prompts: list[str], count: int) -> list[str]:
    """`count` of them, evenly over the list, so that few still cover all kinds; cycles when asked for more."""
    if count >= len(prompts):
        return [prompts[i % len(prompts)] for i in range(count)]
    return [prompts[i * len(prompts) // count] for i in range(count)]


def for_model(prompts: list[str], info: ModelInfo, seed: int = 1, kind: str | None = None) -> list[Prompt]:
    """As the model takes them: chat messages, bare text, or, for a toy, random ids."""
    if info.simulated:
        rng = np.random.default_rng(seed)
        num_tokens = _TOY_PROMPT_TOKENS
        if kind == LONG_CONTEXT:
            num_tokens = min(_LONG_PROMPT_TOKENS, info.context_length // 2)
        return [rng.integers(0, info.vocab_size, num_tokens).tolist() for _ in prompts]
    if info.has_chat_template:
        return [[{"role": "user", "content": prompt}] for prompt in prompts]
    return list(prompts)
