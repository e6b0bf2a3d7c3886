"""Heads beside the target: they read its states from its cache, right after it computed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from outrider.drafting.drafter import Drafter
from outrider.drafting.heads import EagleDrafter, MedusaDrafter
from outrider.lm.heads import Head, ProbeReport, ProbeText, choose_convention, feature_states, load_head
from outrider.lm.heads.medusa import MedusaHead
from outrider.lm.heads.target import HeadTarget, cheapest_dtype
from outrider.lm.interface import SequenceHandle
from outrider.server_info import TargetDrafter
from outrider.serving.session_log import SessionLog


class CachedFeatures:
    """States in a sequence's cache. Where its blocks went to somebody else there are none until its next pass."""

    def __init__(self, sequence: SequenceHandle, states: Sequence[int]) -> None:
        self._sequence = sequence
        self._states = tuple(states)

    @property
    def num_rows(self) -> int:
        return self._sequence.num_computed

    def rows(self, start: int, end: int) -> Any:
        return self._sequence.features(start, end, self._states)


class HeldHead:
    """A head for all sessions. Raises InvalidArgument, naming file and key, where it does not fit the target."""

    def __init__(self, name: str, source: str, target: HeadTarget) -> None:
        dtype = cheapest_dtype(target)
        self._head: Head = load_head(source, target, dtype=dtype)
        head = self._head
        self.description = TargetDrafter(
            name or head.kind,
            head.kind,
            source=source,
            num_parameters=head.num_parameters,
            weight_bytes=head.num_parameters * dtype.itemsize,
            max_draft_tokens=head.num_heads if isinstance(head, MedusaHead) else 0,
            draws_trees=True,
        )

    @property
    def states(self) -> tuple[int, ...]:
        """Those that the target must keep: for every way of reading the head until it is `calibrated`."""
        return feature_states(self._head)

    def calibrate(self, texts: Sequence[ProbeText]) -> ProbeReport:
        """Reads the head in the way that agrees best with the target's own texts, features as in `states`. Raises
        FailedPrecondition where none does."""
        self._head, report = choose_convention(self._head, texts)
        self.description = dataclasses.replace(
            self.description,
            agreement=report.agreement[0],
            depth_agreement=report.agreement,
            rank_agreement=report.rank_agreement,
            num_probe_tokens=report.num_guesses[0],
            warning=report.warning,
        )
        return report

    def told(self, first_draft_ms: float, next_draft_ms: float) -> None:
        """What drafts were measured to take."""
        self.description = dataclasses.replace(
            self.description, first_draft_ms=first_draft_ms, next_draft_ms=next_draft_ms
        )

    def for_session(self, log: SessionLog, sequence: SequenceHandle) -> Drafter:
        features = CachedFeatures(sequence, self._head.states)
        if isinstance(self._head, MedusaHead):
            return MedusaDrafter(self.description.name, self._head, log, features)
        return EagleDrafter(self.description.name, self._head, log, features)
