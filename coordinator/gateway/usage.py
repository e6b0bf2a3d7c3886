"""What an answer took: OpenAI's usage, and vLLM's `metrics` with its object about speculation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from outrider.results import Chunk, Complete, Speculation, Timings
from outrider.sampling.params import Origin


def usage_of(prompts: Sequence[Sequence[Complete]]) -> dict[str, Any]:
    """`prompts`: for each prompt the ends of its choices. Choices share a prompt, which counts once; cached is what
    no choice had to compute."""
    prompt = sum(ends[0].usage.prompt_tokens for ends in prompts)
    completion = sum(end.usage.completion_tokens for ends in prompts for end in ends)
    cached = sum(min(end.usage.cached_tokens for end in ends) for ends in prompts)
    return usage(prompt, completion, cached)


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> dict[str, Any]:
    """OpenAI's object. cached_tokens: None: not known yet."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": None if cached_tokens is None else {"cached_tokens": cached_tokens},
    }


def metrics_of(ends: Sequence[Complete], chunks: Sequence[Chunk], num_spec_tokens: int) -> dict[str, Any]:
    """vLLM's object: counts of all choices together; times where there is one choice. `chunks`: for the arrays by step,
    which are there where steps were asked for."""
    told: dict[str, Any] = {}
    if len(ends) == 1:
        told |= _times(ends[0].timings, ends[0].usage.completion_tokens)
    speculation = _speculation([end.speculation for end in ends], num_spec_tokens)
    if chunks:
        speculation |= _by_step(chunks)
    return told | {"speculative_decoding": speculation}


def _times(timings: Timings, num_tokens: int) -> dict[str, Any]:
    generation_ms = max(0.0, timings.total_ms - timings.time_to_first_token_ms)
    return {
        "time_to_first_token_ms": timings.time_to_first_token_ms,
        "generation_time_ms": generation_ms,
        "queue_time_ms": timings.queue_ms,
        "mean_itl_ms": generation_ms / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": 1000 * num_tokens / timings.total_ms if timings.total_ms > 0 else None,
    }


def _speculation(told: Sequence[Speculation], num_spec_tokens: int) -> dict[str, Any]:
    """num_spec_tokens: drafts of a round at most. The histogram has an entry for each number up to it."""
    num_steps = sum(one.num_spec_steps for one in told)
    num_drafted = sum(one.num_draft_tokens for one in told)
    num_accepted = sum(one.num_accepted_draft_tokens for one in told)
    histogram = [sum(counts) for counts in zip_longest(*(one.acceptance_histogram for one in told), fillvalue=0)]
    return {
        "mean_acceptance_length": 1.0 + (num_accepted / num_steps if num_steps else 0.0),
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": histogram + [0] * (num_spec_tokens + 1 - len(histogram)),
        "num_spec_steps": num_steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": max(num_spec_tokens, len(histogram) - 1),
    }


def _by_step(chunks: Sequence[Chunk]) -> dict[str, Any]:
    drafted = [chunk for chunk in chunks if chunk.num_draft_tokens]
    return {
        "per_step_accepted": [chunk.origins.count(Origin.ACCEPTED) for chunk in drafted],
        "per_step_drafted": [chunk.num_draft_tokens for chunk in drafted],
    }
