"""What `make bench-drafters` computes from answers, and how it shows it. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.cli.measure import Acceptance, Timed, formula_speedup, median, steps_of

AUTO = "auto"
LOCAL = ("lookup", "suffix")
"""They need neither a draft nor a head, so they alone make no pair."""
TREE = "tree"


@dataclass
class Row:
    """One drafter on one workload at one temperature. ratios: its tokens/s over plain ones, a prompt each."""

    workload: str
    temperature: float
    drafter: str
    runs: list[Timed] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def figures(self, plain_pass_ms: float) -> dict[str, Any]:
        """null where nothing was drafted. `formula_speedup` is that of a chain, so a tree has none."""
        completions = [run.completion for run in self.runs]
        acceptance = Acceptance.of(completions)
        rounds = [step for step in steps_of(completions) if step.num_draft_tokens]
        told: dict[str, Any] = {
            "workload": self.workload,
            "temperature": self.temperature,
            "drafter": self.drafter,
            "speedup": round(median(self.ratios), 3),
            "speedups": [round(ratio, 3) for ratio in self.ratios],
            "tokens_per_s": round(median(run.tokens_per_s for run in self.runs), 2),
            "tokens_per_step": round(acceptance.tokens_per_step, 3),
            "num_draft_tokens": acceptance.num_draft_tokens,
            "plain_pass_ms": round(plain_pass_ms, 3),
            "drafters_used": sorted({step.drafter for step in rounds}),
        }
        empty = ("mean_acceptance_length", "acceptance_by_position", "alpha", "mean_gamma", "draft_ms_per_token",
                 "verify_ms", "formula_speedup")  # fmt: skip
        told |= dict.fromkeys(empty)
        if not rounds:
            return told
        draft_ms = sum(step.draft_ms for step in rounds) / acceptance.num_draft_tokens
        alpha = acceptance.alpha((step.num_draft_tokens, step.num_accepted_draft_tokens) for step in rounds)
        told |= {
            "mean_acceptance_length": round(acceptance.mean_acceptance_length, 3),
            "acceptance_by_position": [round(share, 3) for share in acceptance.by_position],
            "mean_gamma": round(acceptance.mean_gamma, 2),
            "draft_ms_per_token": round(draft_ms, 3),
            "verify_ms": round(median(step.verify_ms for step in rounds), 3),
        }
        if not self.drafter.endswith(TREE) and plain_pass_ms:
            cost = draft_ms / plain_pass_ms
            told["alpha"] = round(alpha, 3)
            told["formula_speedup"] = round(formula_speedup(alpha, acceptance.mean_gamma, cost), 3)
        return told


def default_pair(rows: Sequence[dict[str, Any]]) -> dict[str, float | None] | None:
    """Of the drafter that a user gets who names none; a figure whose workload was not measured is None.

    None as a whole when nothing but local drafters drafted: they are no pair.
    """

    def of(workload: str, temperature: float, name: str) -> Any:
        found = [
            row[name]
            for row in rows
            if (row["workload"], row["temperature"], row["drafter"]) == (workload, temperature, AUTO)
        ]
        return found[0] if found else None

    if not any(set(row["drafters_used"]) - {*LOCAL} for row in rows):
        return None
    return {
        "mean_acceptance_length": of("chat", 0.0, "mean_acceptance_length"),
        "speedup_t0": of("chat", 0.0, "speedup"),
        "speedup_t1": of("chat", 1.0, "speedup"),
        "speedup_code_edit": of("code-edit", 0.0, "speedup"),
    }


COLUMNS = "  {:10} {:>8} {:>8} {:>7} {:>7} {:>8} {:>8} {:>8}  {}"
HEADER = COLUMNS.format(
    "drafter", "measured", "formula", "length", "a step", "drafts", "ms/draft", "verify", "acceptance by position"
)  # fmt: skip
LEGEND = """measured, formula: speedup against plain, the median over prompts, and by acceptance and draft cost
length: 1 + accepted drafts a drafted round; a step: tokens a pass, undrafted passes included
drafts: guessed a drafted round; verify: ms of a drafted round's pass"""


def lines(title: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """One for each drafter of one workload and temperature, below a header."""
    shown = [title, HEADER]
    for row in rows:
        numbers = ("speedup", "formula_speedup", "mean_acceptance_length", "tokens_per_step", "mean_gamma",
                   "draft_ms_per_token", "verify_ms")  # fmt: skip
        shares = row["acceptance_by_position"]
        positions = " ".join(f"{share:.2f}" for share in shares) if shares else "nothing was drafted"
        shown.append(COLUMNS.format(row["drafter"], *(_number(row[name]) for name in numbers), positions))
    return shown


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
