"""`make bench-drafters` ends in its JSON line, on prompts that nothing was trained on. No speed is judged here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import drafter_figures
import drafter_workloads
import forked
import pytest

from outrider.distill.prompts import BuiltIn
from outrider.errors import InvalidArgument

SCRIPT = Path(__file__).with_name("drafters.py")
TOY = "toy:vocab=64,seed=1,pass_ms=2"
PAIR_KEYS = ["mean_acceptance_length", "speedup_t0", "speedup_t1", "speedup_code_edit"]


def run(**variables: str) -> tuple[int | None, list[str], str]:
    """(exit code, lines of stdout, stderr)."""
    variables = {"TARGET": TOY, "NUM_PROMPTS": "1", "MAX_TOKENS": "12", **variables}
    code, output, errors = asyncio.run(forked.script(SCRIPT, variables))
    return code, output.splitlines(), errors


def test_a_pair_ends_in_its_figures() -> None:
    code, lines, errors = run(DRAFT="toy:vocab=64,seed=1,agreement=0.9", GAMMA="3")
    assert code == 0, errors
    figures = json.loads(lines[-1])
    assert list(figures["default_pair"]) == PAIR_KEYS
    assert min(figures["default_pair"].values()) > 0
    rows = figures["rows"]
    drafters = ("auto", "model", "tree", "lookup", "suffix")
    cells = {(workload, temperature) for workload in ("chat", "code", "code-edit") for temperature in (0, 1)}
    assert {(row["workload"], row["temperature"], row["drafter"]) for row in rows} == {
        (*cell, drafter) for cell in cells for drafter in drafters
    }
    drafted = [row for row in rows if row["drafter"] == "model"]
    assert all(row["num_draft_tokens"] > 0 and row["formula_speedup"] > 0 for row in drafted)
    assert all(len(row["acceptance_by_position"]) == 3 for row in drafted)
    assert all(row["formula_speedup"] is None for row in rows if row["drafter"] == "tree")
    assert sum(line.split()[:1] == ["tree"] for line in lines) == len(cells)
    assert figures["simulated"]


def test_without_draft_and_head_there_is_no_pair() -> None:
    code, lines, errors = run(WORKLOADS="chat", TEMPERATURES="0", DRAFTERS="auto,lookup")
    assert code == 0, errors
    figures = json.loads(lines[-1])
    assert figures["default_pair"] is None
    assert [row["drafter"] for row in figures["rows"]] == ["auto", "lookup"]
    assert any(line.startswith("default_pair is null: ") for line in lines)


def test_a_head_makes_a_pair_without_a_draft_worker() -> None:
    variables = {"HEADS": "toy:agreement=0.9", "GAMMA": "2", "WORKLOADS": "code-edit", "TEMPERATURES": "0"}
    code, lines, errors = run(**variables, DRAFTERS="auto,toy,toy-tree")
    assert code == 0, errors
    figures = json.loads(lines[-1])
    assert (figures["draft"], figures["heads"]) == (None, ["toy:agreement=0.9"])
    auto, toy, trees = figures["rows"]
    assert trees["drafters_used"] == ["toy-tree"]
    assert trees["mean_gamma"] > 1
    assert (trees["formula_speedup"], toy["formula_speedup"] > 0) == (None, True)
    assert toy["drafters_used"] == ["toy"]
    assert toy["num_draft_tokens"] > 0
    assert len(toy["acceptance_by_position"]) == 2
    pair = {"mean_acceptance_length": None, "speedup_t0": None, "speedup_t1": None}
    assert figures["default_pair"] == {**pair, "speedup_code_edit": auto["speedup"]}


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORKLOADS": "chess"}, "WORKLOADS chess: choose from chat, code"),
        ({"DRAFTERS": "medusa"}, "DRAFTERS medusa: these services offer auto, lookup, suffix"),
        ({"TEMPERATURES": "0,x"}, "TEMPERATURES is 'x'"),
        ({"GAMMA": "0"}, "GAMMA is '0'"),
    ],
)
def test_bad_variables_are_usage_errors(variables: dict[str, str], says: str) -> None:
    code, lines, errors = run(**variables)
    assert code == 2, errors
    assert says in errors
    assert not any(line.startswith("{") for line in lines)


def test_chat_and_code_share_no_topic_and_no_template_with_the_training() -> None:
    source = BuiltIn(seed=0, num_prompts=4000, num_held_out=drafter_workloads.NUM_DRAWN)
    trained = {part for i in range(4000) for part in source.prompt(i).parts}
    texts = {source.prompt(i).messages[-1]["content"] for i in range(4000)}
    of_prompt = {p.messages[-1]["content"]: p.parts for p in source.held_out["new_topic_and_template"]}
    for workload, kinds in drafter_workloads.HELD_OUT_KINDS.items():
        asked = drafter_workloads.held_out(kinds)
        assert len(asked) >= 12, workload
        for messages in asked:
            assert messages[-1]["content"] not in texts
            assert not trained & set(of_prompt[messages[-1]["content"]])


def row(drafter: str, workload: str, temperature: float, **values: Any) -> dict[str, Any]:
    told = {"drafter": drafter, "workload": workload, "temperature": temperature, "drafters_used": ["eagle3"]}
    return told | {"mean_acceptance_length": 2.2, "speedup": 1.5} | values


def test_the_default_pair_is_told_of_auto_alone() -> None:
    rows = [
        row("eagle3", "chat", 0.0, speedup=9.0),
        row("auto", "chat", 0.0),
        row("auto", "chat", 1.0, speedup=1.2),
        row("auto", "code", 0.0, speedup=9.0),
        row("auto", "code-edit", 0.0, speedup=2.4, drafters_used=["lookup"]),
    ]
    assert drafter_figures.default_pair(rows) == dict(zip(PAIR_KEYS, (2.2, 1.5, 1.2, 2.4), strict=True))
    assert drafter_figures.default_pair(rows[:2]) == dict(zip(PAIR_KEYS, (2.2, 1.5, None, None), strict=True))
    local = [row("auto", "chat", 0.0, drafters_used=["lookup", "suffix"])]
    assert drafter_figures.default_pair(local) is None


def test_unknown_workloads_are_named() -> None:
    with pytest.raises(InvalidArgument, match="chess"):
        drafter_workloads.check_workloads(["chat", "chess"])
