"""`outrider plan`: what it says agrees with arithmetic where there is one, and bad input is told by its field."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner

from coordinator.simulator import planning
from coordinator.simulator.engine import Line
from coordinator.simulator.planning import Planner
from coordinator.simulator.world import World
from outrider.cli import console
from outrider.cli import plan as plan_command
from outrider.cli.app import app

COSTS = ["--pass-ms", "30", "--row-ms", "0.3", "--draft-ms", "3"]
TIMING = {
    "prefill": False, "min_sequences": 1, "max_sequences": 1, "base_ms": 29.7, "ms_per_row": 0.3,
    "ms_per_context_token": 0.0, "spread_ms": 0.1, "min_rows": 1, "max_rows": 9, "num_passes": 100,
}  # fmt: skip


def plan(*flags: str, code: int = 0) -> Any:
    """The last line as JSON, or what was said of the failure."""
    done = CliRunner().invoke(app, ["plan", *flags])
    assert done.exit_code == code, done.output
    return done.output if code else json.loads(done.stdout.splitlines()[-1])


def profile(path: Path, **changes: Any) -> str:
    """A file as `outrider bench --profile` writes it."""
    draft = {**TIMING, "base_ms": 2.9, "ms_per_row": 0.1}
    written = {
        "cells": [{"speculative": {"by_gamma": [
            {"num_draft_tokens": 0, "num_rounds": 5, "mean_tokens": 1.0},
            {"num_draft_tokens": 4, "num_rounds": 50, "mean_tokens": sum(0.8**i for i in range(5))},
        ]}}],
        "workers": [{"role": "target", "timings": [TIMING]}, {"role": "draft", "timings": [draft]}],
        **changes,
    }  # fmt: skip
    path.write_text(json.dumps(written))
    return str(path)


def test_it_says_what_the_formula_says_of_one_stream() -> None:
    """E[tokens] / E[ms] = (1 - .7^(γ + 1)) / .3 / (5 + 3 γ + .5 + .2 + 30 + .3 γ), the best γ of all up to 6."""
    flags = ("--acceptance", "0.7", "--draft-rtt-ms", "5", "--streams", "40", "--max-speculative-tokens", "6",
             "--branch-hits", "0")  # fmt: skip
    found = plan(*COSTS, *flags, "--min-tokens-per-s", "35", "--json")
    (only,) = found["plans"]
    assert found["simulated"]
    rates = [(1 - 0.7 ** (g + 1)) / 0.3 / (35.7 + 3.3 * g) for g in range(7)]
    assert abs(only["best_gamma"] - max(range(1, 7), key=rates.__getitem__)) <= 1
    assert only["tokens_per_s"] == pytest.approx(1000 * max(rates[1:]), rel=0.03)
    assert only["plain_tokens_per_s"] == pytest.approx(1000 / 30, rel=0.02)
    gains = [load["gain"] for load in only["loads"]]
    assert gains[0] > gains[-1] > 0.99, "a full target gains less"
    assert only["loads"][0]["colocated_tokens_per_s"] > only["tokens_per_s"], "one stream alone is spared the network"
    fleet = only["fleet"]
    assert fleet["num_targets"] * fleet["streams_per_target"] >= 40
    assert fleet["tokens_per_s"] >= 0.97 * only["min_tokens_per_s"]
    assert fleet["num_drafts"] >= 1, "no plain stream is as fast as that"
    assert fleet["num_targets"] > 1
    assert only["colocated_fleet"]["num_drafts"] == 0


@pytest.fixture
def roughly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "NUM_TOKENS", 1500)


@pytest.fixture
def few_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (planning, plan_command):
        monkeypatch.setattr(module, "LOADS", (1, 2))


@pytest.mark.usefixtures("roughly")
def test_drafts_that_cannot_pay_need_no_draft_workers() -> None:
    flags = ("--acceptance", "0.2", "--draft-rtt-ms", "200", "--streams", "3", "--max-speculative-tokens", "2")
    (only,) = plan(*COSTS, *flags, "--json")["plans"]
    assert only["best_gamma"] == only["pays_up_to_streams"] == only["fleet"]["num_drafts"] == 0
    assert only["tokens_per_s"] == only["plain_tokens_per_s"]


@pytest.mark.usefixtures("roughly")
def test_a_profile_gives_costs_and_acceptance(tmp_path: Path) -> None:
    flags = ("--streams", "2", "--max-speculative-tokens", "2")
    done = CliRunner().invoke(app, ["plan", "--profile", profile(tmp_path / "p.json"), *flags])
    assert done.exit_code == 0, done.output
    assert "SIMULATED" in done.stdout
    assert "streams a target" in done.stdout
    (only,) = json.loads(done.stdout.splitlines()[-1])["plans"]
    assert only["acceptance"] == pytest.approx(0.8, abs=1e-3)
    (given,) = plan(*COSTS, "--draft-row-ms", "0.1", "--acceptance", "0.8", *flags, "--json")["plans"]
    assert only["tokens_per_s"] == pytest.approx(given["tokens_per_s"], rel=0.05)


@pytest.mark.usefixtures("roughly", "few_loads")
def test_far_away_it_is_drafted_ahead_and_the_hits_of_a_profile_say_how_well(tmp_path: Path) -> None:
    flags = ("--streams", "2", "--max-speculative-tokens", "4", "--draft-rtt-ms", "20")
    (never,) = plan(*COSTS, "--acceptance", "0.8", *flags, "--branch-hits", "0")["plans"]
    (often,) = plan(*COSTS, "--acceptance", "0.8", *flags, "--branch-hits", "0.95")["plans"]
    assert (never["drafts_ahead"], often["drafts_ahead"]) == (False, True)
    assert often["tokens_per_s"] > 1.2 * never["tokens_per_s"]
    by_gamma = [{"num_draft_tokens": 4, "num_rounds": 50, "mean_tokens": sum(0.8**i for i in range(5))}]
    ahead = {"num_rounds": 40, "hit_rate": 0.95**0.8, "mean_num_draft_tokens": 4.0}
    path = profile(tmp_path / "p.json", cells=[{"speculative": {"by_gamma": by_gamma, "ahead": ahead}}])
    (read,) = plan("--profile", path, *flags)["plans"]
    assert read["branch_hits"] == pytest.approx(0.95)
    assert read["tokens_per_s"] == pytest.approx(often["tokens_per_s"], rel=0.05)
    told = CliRunner().invoke(app, ["plan", "--profile", path, *flags]).stdout
    assert "95% of rounds of five drafts" in " ".join(told.split())


def test_where_speculation_stops_paying_lies_between_two_loads() -> None:
    planner = Planner(World(target=Line(20.0, 2.0)), 0.6, max_draft_tokens=3)
    most = planner.pays_up_to()
    assert most
    assert planner.speed(most).gamma > 0
    assert planner.speed(2 * most).gain < 1.02


@pytest.mark.usefixtures("roughly")
def test_streams_of_a_large_fleet_get_what_those_of_one_target_get() -> None:
    planner = Planner(World(target=Line(40.0, 1.0), draft=Line(1.0, 0.02)), 0.8, max_draft_tokens=3)
    fleet = planner.fleet(1000, planner.speed(8).tokens_per_s)
    assert fleet is not None
    assert fleet.gamma > 0
    assert fleet.num_targets > 100
    assert fleet.tokens_per_s == pytest.approx(planner.speed(fleet.streams_per_target).tokens_per_s, rel=0.05)


def test_a_full_draft_worker_gets_company() -> None:
    """Drafts that take longer than the passes of a target need more than one worker for it."""
    slow = Planner(World(target=Line(10.0), draft=Line(1.0, 1.0), draft_rtt_ms=0.0), 0.9, max_draft_tokens=4)
    fleet = slow.fleet(32, 1.1 * slow.speed(16).tokens_per_s)
    assert fleet is not None
    assert fleet.num_drafts > fleet.num_targets
    quick = Planner(World(target=Line(30.0, 0.5), draft=Line(0.5)), 0.8, max_draft_tokens=4)
    fleet = quick.fleet(64, 0.9 * quick.speed(8).tokens_per_s)
    assert fleet is not None
    assert 0 < fleet.num_drafts < fleet.num_targets
    assert quick.fleet(4, 1e6) is None


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ([], "--pass-ms is missing"),
        (["--pass-ms", "30"], "--draft-ms is missing"),
        (["--pass-ms", "30", "--draft-ms", "3"], "--acceptance is missing"),
        ([*COSTS, "--acceptance", "1.5"], "--acceptance"),
        ([*COSTS, "--acceptance", "nan"], "acceptance"),
        ([*COSTS, "--acceptance", "0.8", "--draft-rtt-ms", "inf"], "--draft-rtt-ms[0] is inf"),
        ([*COSTS, "--acceptance", "0.8", "--branch-hits", "nan"], "--branch-hits"),
        ([*COSTS, "--acceptance", "0.8", "--branch-hits", "1.1"], "--branch-hits"),
        ([*COSTS, "--acceptance", "0.8", "--target-rtt-ms", "-1"], "--target-rtt-ms"),
        (["--pass-ms", "0", "--draft-ms", "3", "--acceptance", "0.8"], "--pass-ms is 0"),
        (["--pass-ms", "1", "--row-ms", "2", "--draft-ms", "3", "--acceptance", "0.8"], "--row-ms is 2"),
        (["--row-ms", "2", "--draft-ms", "3", "--acceptance", "0.8"], "--row-ms says nothing"),
        ([*COSTS, "--acceptance", "0.8", "--streams", "0"], "--streams"),
        ([*COSTS, "--acceptance", "0.8", "--streams", "1000000"], "--streams"),
        ([*COSTS, "--acceptance", "0.8", "--max-speculative-tokens", "65"], "--max-speculative-tokens"),
        (
            [*COSTS, "--acceptance", "0.1", "--min-tokens-per-s", "5000", "--max-speculative-tokens", "1"],
            "--min-tokens-per-s is 5000",
        ),
        ([*COSTS, *(x for i in range(33) for x in ("--acceptance", f"0.{i + 10}"))], "33 plans"),
    ],
)
def test_bad_flags_are_told(flags: list[str], field: str) -> None:
    assert field in " ".join(plan(*flags, code=2).split())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"workers": None}, "has no workers"),
        ({"workers": []}, "no target worker"),
        ({"workers": [{"role": "target"}]}, "workers[0].timings is missing"),
        ({"workers": [{"role": "target", "timings": [TIMING]}]}, "drafted beside its target, or not at all. Give --dr"),
        ({"workers": [{"role": "target", "timings": [{"base_ms": 1}]}]}, "workers[0].timings[0] must have prefill"),
        ({"workers": [{"role": "target", "timings": [{**TIMING, "base_ms": "1"}]}]}, "timings[0].base_ms is '1'"),
        ({"workers": [{"role": "target", "timings": [{**TIMING, "prefill": True}]}]}, "no pass that decodes"),
        ({"cells": []}, "nothing was drafted"),
        ({"cells": [{}]}, "speculative.by_gamma"),
        ({"cells": [{"speculative": {"ahead": {"num_rounds": 1}}}]}, "speculative.ahead cannot be read"),
        ({"cells": 3}, "speculative.ahead cannot be read"),
    ],
)
def test_bad_profiles_are_told(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in " ".join(plan("--profile", profile(tmp_path / "p.json", **changes), code=2).split())


def test_a_file_that_is_no_profile_is_told(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("{")
    assert "is no JSON file" in " ".join(plan("--profile", str(tmp_path / "p"), code=2).split())
    for path in (tmp_path / "absent", tmp_path):
        assert f"profile: cannot read {path}" in plan("--profile", str(path), code=2)


@pytest.mark.usefixtures("roughly", "few_loads")
def test_into_a_pipe_no_header_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the console takes itself to be; in a terminal words are broken where they must."""
    monkeypatch.setenv("COLUMNS", "60")
    done = CliRunner().invoke(app, ["plan", *COSTS, "--acceptance", "0.8", "--max-speculative-tokens", "2"])
    (header,) = [line for line in done.stdout.splitlines() if "streams a target ┃" in line]
    assert "ahead ┃ passes a round ┃ tokens/s ┃ gain ┃ co-located: best γ ┃ tokens/s" in header
    assert "…" not in done.stdout
    assert len({len(line) for line in done.stdout.splitlines() if "│" in line or "┃" in line}) == 1
    table = Table("a header of several words", "another", *["unbreakable"] * 8)
    told = io.StringIO()
    monkeypatch.setattr(console, "out", Console(file=told, force_terminal=True, width=60, soft_wrap=True))
    console.print_table(table)
    assert "…" not in told.getvalue()
