"""What is simulated: how long workers and networks take."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.simulator.engine import Line, PassCost

TARGET = Line(30.0, 0.3)
DRAFT = Line(2.9, 0.1)


@dataclass(slots=True)
class World:
    """What workers and networks take, ms. It may be changed while a simulation runs.

    colocated: each target drafts on its own device, whose passes then take turns; `num_drafts` is not used.
    overhead_ms: of the coordinator, a round. jitter: passes and trips take that share more or less, at most.
    branch_survival: chance, for each draft of a round, that it leaves the outcome one of those drafted ahead for, where
    the policy wants that; a round of n drafts has a branch at hand with chance branch_survival ** n.
    """

    target: PassCost = TARGET
    draft: PassCost = DRAFT
    draft_rtt_ms: float = 0.5
    target_rtt_ms: float = 0.5
    overhead_ms: float = 0.2
    num_targets: int = 1
    num_drafts: int = 1
    colocated: bool = False
    jitter: float = 0.03
    context_tokens: int = 256
    branch_survival: float = 0.0
