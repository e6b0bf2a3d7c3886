"""Heads: small networks that draft from the target's own hidden states, read from public checkpoints.

    head = load_head(path, HeadTarget.of(model, name=..., vocab_size=...), dtype=torch.bfloat16)
    states = feature_states(head)          # what the target is to keep for calibrating it
    head, report = choose_convention(head, [ProbeText(token_ids, num_prompt_tokens, features), ...])
    head.kind, head.states, head.draft_ids, head.feature_width, head.num_parameters

EAGLE kinds: `context = head.new_context()`, `context.extend(features, next_ids)`, `context.step(token_id)`,
`context.discard()`, `context.truncate(n)`, `context.length`. Medusa: `head.logits(feature)`.
"""

from outrider.lm.heads.conventions import Convention
from outrider.lm.heads.eagle import EagleContext, EagleHead
from outrider.lm.heads.loading import Head, load_head
from outrider.lm.heads.medusa import MedusaHead
from outrider.lm.heads.probe import (
    PROMPTS,
    ProbeReport,
    ProbeText,
    choose_convention,
    feature_states,
    probe,
)
from outrider.lm.heads.target import HeadTarget

HeadContext = EagleContext
"""What a session keeps of a head; Medusa heads have none."""

__all__ = [
    "PROMPTS",
    "Convention",
    "EagleContext",
    "EagleHead",
    "Head",
    "HeadContext",
    "HeadTarget",
    "MedusaHead",
    "ProbeReport",
    "ProbeText",
    "choose_convention",
    "feature_states",
    "load_head",
    "probe",
]
