"""Trying out drafters that run the target's own layers before anybody is served: a few streams of real rounds, counted
and timed. They cannot do harm to a text, only cost more than they give, and that is told."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Sequence
from typing import Any

from outrider.errors import FailedPrecondition
from outrider.lm.engine import Engine
from outrider.lm.interface import LoadedModel
from outrider.sampling.params import Finish, SamplingParams, StoppingParams
from outrider.serving.messages import TargetOpening
from target_worker.drafters import HeldDrafter
from target_worker.session import TargetSession

NUM_TOKENS = 48
"""Of each stream."""
NUM_DRAFTS = 4
"""In every other round; one in those between, so that the first draft's time can be told from that of the others."""
WARNED_BELOW = 0.2
"""Of agreement."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class _Counts:
    num_right: int = 0
    num_rounds: int = 0
    first_us: list[int] = dataclasses.field(default_factory=list)
    several_us: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(us, drafts)."""


async def try_out(
    held: HeldDrafter, loaded: LoadedModel, engine: Engine, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """What is to be told of it: fields of `TargetDrafter`. Raises FailedPrecondition on one that fails to draft."""
    counts = _Counts()
    for prompt in prompts:
        await _stream(held, loaded, engine, prompt, counts)
    if not counts.num_rounds:
        raise FailedPrecondition(f"heads: {held.description.name} drafted nothing when tried out", reason="NO_DRAFTS")
    agreement = counts.num_right / counts.num_rounds
    first_ms = statistics.median(counts.first_us or [us for us, _ in counts.several_us]) / 1000
    further = [(us / 1000 - first_ms) / (num - 1) for us, num in counts.several_us if num > 1]
    next_ms = max(0.0, statistics.median(further)) if further else first_ms
    warning = ""
    if agreement < WARNED_BELOW:
        warning = f"{held.description.name} guesses {agreement:.0%} of the next tokens: it hardly pays"
        log.warning("heads: %s", warning)
    return {
        "agreement": agreement,
        "num_probe_tokens": counts.num_rounds,
        "first_draft_ms": first_ms,
        "next_draft_ms": next_ms,
        "warning": warning,
    }


async def _stream(
    held: HeldDrafter, loaded: LoadedModel, engine: Engine, prompt: Sequence[int], counts: _Counts
) -> None:
    """One greedy stream, alone on the engine."""
    about, name = loaded.description, held.description.name
    opening = TargetOpening(
        epoch=0,
        prompt_ids=prompt,
        max_draft_tokens=NUM_DRAFTS,
        sampling=SamplingParams(temperature=0.0),
        stopping=StoppingParams(max_tokens=NUM_TOKENS),
    )
    session = TargetSession(
        opening,
        vocab_size=about.vocab_size,
        context_length=about.context_length,
        max_draft_tokens=NUM_DRAFTS,
        drafters={name: held},
    )
    session.sequence = sequence = await engine.open_sequence(session.reserved_length)
    try:
        await engine.run(session.open())
        num_wanted = 1
        while session.finish is Finish.NONE:
            header = session.log.header
            verdict = await engine.run(session.verify(header, drafter=name, num_draft_tokens=num_wanted))
            assert verdict is not None
            if verdict.proposal_fault:
                raise FailedPrecondition(f"heads: {verdict.proposal_fault}", reason="DRAFTER_FAILED")
            if not verdict.drafted_ids:
                continue
            counts.num_rounds += 1
            counts.num_right += verdict.drafted_ids[0] == verdict.committed_ids[0]
            if num_wanted == 1:
                counts.first_us.append(verdict.draft_us)
            else:
                counts.several_us.append((verdict.draft_us, len(verdict.drafted_ids)))
            num_wanted = NUM_DRAFTS if num_wanted == 1 else 1
    finally:
        session.close()
        engine.close_sequence(sequence)
