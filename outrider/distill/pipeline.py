"""The whole of a distillation, stage by stage. Each stage leaves a file; a killed run finds it and goes on after it."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from outrider.distill.acceptance import Acceptance, Judge
from outrider.distill.claim import claim
from outrider.distill.data import Data, make_data
from outrider.distill.eagle3 import Eagle3Head
from outrider.distill.exit import ExitAdapter
from outrider.distill.export import export_eagle3, export_exit, export_model, provenance
from outrider.distill.prompts import read_prompts
from outrider.distill.pruned import PrunedModel
from outrider.distill.shards import write_json
from outrider.distill.target import Target
from outrider.distill.training import Trainer, TrainingPlan, TrainingState
from outrider.distill.vocabulary import choose_ids, coverage
from outrider.errors import FailedPrecondition
from outrider.lm.loading import Progress
from outrider.settings import DistillSettings

CHANGEABLE = {"out", "data", "minutes", "num_threads", "checkpoint_interval_s"}
"""Settings that a run may be resumed with other values of."""
MATRIX_RATES = {"eagle3": 1e-2, "model": 5e-3, "exit": 5e-3}
EXPORTS: dict[str, Any] = {"eagle3": export_eagle3, "model": export_model, "exit": export_exit}
MIN_TRAINING_SHARE = 0.2
"""Of the minutes, whatever the stages before have taken."""
SAVING_S = 5.0

Measured = dict[str, dict[str, Acceptance]]


def distill(settings: DistillSettings, on_progress: Progress) -> dict[str, Any]:
    """Runs what is left to do and gives the report, also `report.json` in the folder.

    Raises InvalidArgument for a bad setting, FailedPrecondition when another process works in the folder.
    """
    out = Path(settings.out)
    source = read_prompts(settings)
    unused = set() if settings.kind == "exit" else {"exit_layer"}
    claim(out, "settings.json", settings.model_dump(exclude=CHANGEABLE | unused) | {"source": source.name}, "out")
    try:
        with FileLock(out / ".lock", timeout=0):
            report_file = out / "report.json"
            if report_file.is_file():
                report: dict[str, Any] = json.loads(report_file.read_text())
                return report
            target = Target(settings, on_progress)
            data = make_data(
                Path(settings.data) if settings.data else out / "data", target, source, settings, on_progress
            )
            report = _Run(settings, out, target, data, on_progress).finish()
            write_json(report_file, report)
            return report
    except Timeout:
        raise FailedPrecondition(f"another process distills into {out}: wait for it, or give another out") from None


class _Run:
    """What comes after the data."""

    def __init__(self, settings: DistillSettings, out: Path, target: Target, data: Data, on_progress: Progress) -> None:
        self.settings, self.out, self.target, self.data, self.on_progress = settings, out, target, data, on_progress
        self.compute_dtype = torch.float32 if target.dtype == torch.float32 else torch.bfloat16
        self.judges = {
            name: {key: Judge(corpus, target.weights.head, greedy=key == "t0") for key, corpus in by.items()}
            for name, by in data.held_out.items()
        }

    def finish(self) -> dict[str, Any]:
        """Vocabulary, start, training, measurement, checkpoint; the report."""
        draft_ids, covered = self._vocabulary()
        draft = self._new_draft(draft_ids)
        start, start_s = self._start(draft, draft_ids)
        trainer = self._train(draft, draft_ids, 2 * start_s + SAVING_S)
        trained = self._measure(draft, draft_ids, "measuring the draft")
        about = {"seed": self.settings.seed, "trained_steps": trainer.state.step}
        self._export(draft, draft_ids, about)
        return self._report(draft, draft_ids, covered, start, trained, trainer.state)

    def _vocabulary(self) -> tuple[torch.Tensor, dict[str, Any]]:
        file = self.out / "vocabulary.json"
        if not file.is_file():
            self.on_progress("choosing the draft vocabulary", None)
            head = self.target.weights.head
            ids = choose_ids(self.data.train, head, self.settings.draft_vocab_size, self.target.eos_token_ids)
            covered = {
                name: {key: dataclasses.asdict(coverage(corpus, head, ids)) for key, corpus in by.items()}
                for name, by in self.data.held_out.items()
            }
            write_json(file, {"ids": ids.tolist(), "coverage": covered})
        content = json.loads(file.read_text())
        return torch.tensor(content["ids"]), content["coverage"]

    def _new_draft(self, draft_ids: torch.Tensor) -> Any:
        torch.manual_seed(self.settings.seed)
        weights = self.target.weights
        if self.settings.kind == "eagle3":
            return Eagle3Head(weights, draft_ids)
        if self.settings.kind == "exit":
            return ExitAdapter(weights, draft_ids, self.target.exit_layer, self.target.exit_state)
        return PrunedModel(weights, draft_ids, tuple(weights.layers))

    def _start(self, draft: Any, draft_ids: torch.Tensor) -> tuple[dict[str, Any], float]:
        file = self.out / "start.json"
        if not file.is_file():
            started = time.monotonic()
            measured = self._measure(draft, draft_ids, "measuring the undistilled start")
            write_json(file, {"acceptance": _plain(measured), "seconds": time.monotonic() - started})
        content = json.loads(file.read_text())
        return content["acceptance"], content["seconds"]

    def _measure(self, draft: Any, draft_ids: torch.Tensor, doing: str) -> Measured:
        draft.eval()
        measured: Measured = {}
        for name, judges in self.judges.items():
            measured[name] = {}
            for key, judge in judges.items():
                self.on_progress(f"{doing} ({name}, {key})", None)
                measured[name][key] = judge.measure(draft, draft_ids, self.compute_dtype)
        return measured

    def _train(self, draft: Any, draft_ids: torch.Tensor, reserved_s: float) -> Trainer:
        settings = self.settings
        seconds = settings.minutes * 60
        plan = TrainingPlan(
            num_steps=settings.num_steps,
            seconds=max(seconds - self.data.seconds - reserved_s, MIN_TRAINING_SHARE * seconds),
            matrix_rate=settings.learning_rate or MATRIX_RATES[settings.kind],
            num_unrolled_steps=settings.num_unrolled_steps if settings.kind == "eagle3" else 1,
            batch_tokens=settings.train_batch_tokens,
            acceptance_share=settings.acceptance_share,
            seed=settings.seed,
            checkpoint_s=settings.checkpoint_interval_s,
            compute_dtype=self.compute_dtype,
        )
        trainer = Trainer(draft, self.data.train, self.target.weights.head, draft_ids, plan, self.out / "checkpoint.pt")

        def on_step(state: TrainingState, fraction: float) -> None:
            last = state.curve[-1] if state.curve else None
            shown = f", cross entropy {last['cross_entropy']:.2f}, acceptance {last['acceptance']:.3f}" if last else ""
            self.on_progress(f"training: step {state.step}{shown}", fraction)

        trainer.run(on_step)
        return trainer

    def _export(self, draft: Any, draft_ids: torch.Tensor, about: dict[str, Any]) -> None:
        self.on_progress("writing the checkpoint", None)
        about = provenance(self.target, self.settings.kind, about)
        EXPORTS[self.settings.kind](self.out / "draft", draft, draft_ids, self.target, about)

    def _report(
        self,
        draft: Any,
        draft_ids: torch.Tensor,
        covered: dict[str, Any],
        start: dict[str, Any],
        trained: Measured,
        state: TrainingState,
    ) -> dict[str, Any]:
        data = self.data
        return {
            "kind": self.settings.kind,
            "target": self.target.name,
            "target_fingerprints": self.target.fingerprints,
            "draft": str(self.out / "draft"),
            "num_parameters": sum(p.numel() for p in draft.parameters() if p.requires_grad),
            "settings": self.settings.model_dump(exclude={"out", "data"}),
            "data": {
                "sequences": len(data.train.sequences),
                "generated_tokens": data.train.num_generated,
                "seconds": data.seconds,
                "prompts_too_long": data.num_too_long,
            },
            "vocabulary": {"size": len(draft_ids), "coverage": covered},
            "training": dataclasses.asdict(state),
            "acceptance": {
                name: {key: {"start": start[name][key], "trained": value} for key, value in by.items()}
                for name, by in _plain(trained).items()
            },
        }


def _plain(measured: Measured) -> dict[str, dict[str, Any]]:
    return {name: {key: dataclasses.asdict(a) for key, a in by.items()} for name, by in measured.items()}
