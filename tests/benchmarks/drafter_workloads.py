"""What `make bench-drafters` asks: prompts that no distillation of ours has trained on."""

from __future__ import annotations

from outrider.cli.prompts import WORKLOADS, for_model, read_prompts, spread
from outrider.client import Prompt
from outrider.distill import prompts as distilled
from outrider.errors import InvalidArgument
from outrider.server_info import ModelInfo

HELD_OUT_KINDS = {"chat": ("topic", "text"), "code": ("code",)}
"""Workloads made of the built-in prompts that `outrider distill` holds out, by what those are made of."""
NUM_DRAWN = 200


def check_workloads(names: list[str]) -> None:
    """Raises InvalidArgument on one that does not exist."""
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown or not names:
        raise InvalidArgument(
            f"WORKLOADS {', '.join(unknown) or '(none)'}: choose from {', '.join(WORKLOADS)}", field="WORKLOADS"
        )


def prompts_of(workload: str, count: int, info: ModelInfo) -> list[Prompt]:
    """`count` prompts of a kind, as the model takes them.

    chat and code: topics, texts, tasks and templates that `outrider distill` keeps from training. The others are those
    of `outrider bench`, which it never sees. A toy gets random ids.
    """
    if workload not in HELD_OUT_KINDS or info.simulated:
        return for_model(spread(read_prompts(kind=workload), count), info, kind=workload)
    asked = held_out(HELD_OUT_KINDS[workload])
    if not info.has_chat_template:
        return ["\n\n".join(message["content"] for message in messages) for messages in asked[:count]]
    return list(asked[:count])


def held_out(kinds: tuple[str, ...]) -> list[list[dict[str, str]]]:
    """Different conversations, each with new topics and a new template."""
    source = distilled.BuiltIn(seed=0, num_prompts=1, num_held_out=NUM_DRAWN)
    asked = (
        [dict(message) for message in prompt.messages]
        for prompt in source.held_out[distilled.NEW_TEMPLATE]
        if prompt.kind in kinds
    )
    return list({str(messages): messages for messages in asked}.values())
