"""Which workers belong together, by what they have told: targets of one model, and the draft workers that suit it."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.fleet.worker import WorkerRecord
from outrider.serving.worker_calls import DRAFT, TARGET


class Pairing:
    """Of the workers in `workers`, as they are when it is asked. What it gives has described itself."""

    def __init__(self, workers: Mapping[str, WorkerRecord], draft_models: Mapping[str, str]) -> None:
        """workers: by address. draft_models: by the model of targets, the only one that may draft for it."""
        self._workers = workers
        self._draft_models = draft_models

    def of_role(self, role: str) -> list[WorkerRecord]:
        """Those that are what they are listed as."""
        return [w for w in self._workers.values() if w.description is not None and w.description.role == role == w.role]

    def serving(self, model: str) -> list[WorkerRecord]:
        """Its target workers."""
        return [w for w in self.of_role(TARGET) if w.told.model.model == model]

    def reference(self, model: str) -> WorkerRecord:
        """The target whose description stands for a model that is served: a healthy one, if any, else the first. Of
        those with the same weights the one that takes the longest texts."""
        serving = self.serving(model)
        first = next((w for w in serving if not w.fault()), serving[0])
        fingerprint = first.told.model.model_fingerprint
        alike = (w for w in serving if not w.fault() and w.told.model.model_fingerprint == fingerprint)
        return max(alike, key=lambda w: w.told.model.context_length, default=first)

    def paired(self, model: str) -> list[WorkerRecord]:
        """Draft workers that may draft for its targets."""
        if not self.serving(model):
            return []
        target = self.reference(model).told.model
        return [
            w
            for w in self.of_role(DRAFT)
            if w.told.model.tokenizer_fingerprint == target.tokenizer_fingerprint
            and _reads_states_of(w, target.model_fingerprint)
            and self._may_draft_for(w, model)
        ]

    def usable(self, draft: WorkerRecord, model: str) -> tuple[str, ...]:
        """Drafters of a draft worker: those that read states of the target only where some target sends them."""
        reads, serving = draft.told.drafter_features, self.serving(model)
        return tuple(
            name
            for name in draft.told.drafters
            if not reads.get(name) or any(sends(target, reads[name]) for target in serving)
        )

    def inside_targets(self, model: str) -> tuple[str, ...]:
        """Drafters of its target workers."""
        return tuple(dict.fromkeys(name for w in self.serving(model) for name in target_drafters(w)))

    def mismatch(self, worker: WorkerRecord) -> str:
        """Why a worker that answers cannot work with the others."""
        if worker.description is None:
            return "not described yet"
        own = worker.description.model
        if worker.role == TARGET:
            if self.reference(own.model).told.model.model_fingerprint == own.model_fingerprint:
                return ""
            return f"FAILED_PRECONDITION MODEL_MISMATCH: other weights than the other workers of model {own.model!r}"
        targets = self.of_role(TARGET)
        meant = [t for t in targets if self._may_draft_for(worker, t.told.model.model)]
        if targets and not meant:
            return f"FAILED_PRECONDITION NOT_PAIRED: draft_models gives every target another draft than {own.model!r}"
        if targets and all(t.told.model.tokenizer_fingerprint != own.tokenizer_fingerprint for t in meant):
            return (
                f"FAILED_PRECONDITION VOCAB_MISMATCH: draft model {own.model!r} has {own.vocab_size} ids and another "
                "tokenizer than every target; give it a model of the target's family"
            )
        return self._unsent(worker, meant)

    def _unsent(self, draft: WorkerRecord, targets: list[WorkerRecord]) -> str:
        """Why a draft worker cannot have the states that its drafters read."""
        own = [t for t in targets if _reads_states_of(draft, t.told.model.model_fingerprint)]
        if targets and not own:
            return "FAILED_PRECONDITION WRONG_TARGET: its head was made for other weights than those of every target"
        if targets and not any(self.usable(draft, t.told.model.model) for t in own):
            states = next(iter(draft.told.drafter_features.values()), "")
            return (
                "FAILED_PRECONDITION NO_FEATURES: it reads states that no target worker sends: start one with "
                f"--features={states}"
            )
        return ""

    def _may_draft_for(self, draft: WorkerRecord, model: str) -> bool:
        """As far as the settings say; the tokenizer is another matter."""
        return self._draft_models.get(model) in (None, draft.told.model.model)


def target_drafters(target: WorkerRecord) -> tuple[str, ...]:
    """Names that requests may call drafters inside it."""
    return tuple(name for drafter in target.told.target_drafters for name in drafter.names)


def sends(target: WorkerRecord, states: str) -> bool:
    """Whether a target worker sends these states."""
    return set(states.split(",")) <= set(target.told.features.split(","))


def _reads_states_of(draft: WorkerRecord, fingerprint: str) -> bool:
    """Whether drafters of this worker may draft for a target of these weights; those that read no states always may."""
    return not draft.told.target_fingerprints or fingerprint in draft.told.target_fingerprints
