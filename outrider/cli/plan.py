"""`outrider plan`: γ, speeds and numbers of workers for costs that were measured or are given, by simulation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from coordinator.gamma.ahead import PRIOR_DRAFTS, PRIOR_HIT_RATE
from coordinator.simulator.engine import Line, PassCost
from coordinator.simulator.measured import read_timings
from coordinator.simulator.planning import LOADS, MAX_STREAMS, Fleet, Planner
from coordinator.simulator.world import World
from outrider.cli.console import err, out, print_json, print_table, reporting_errors
from outrider.cli.options import Json
from outrider.cli.setting_names import flag_of
from outrider.errors import InvalidArgument
from outrider.settings import CoordinatorSettings

DEFAULT_MIN_SHARE = 0.5
"""Of the speed of one plain stream alone that each stream of a fleet shall have, unless told otherwise."""
MAX_PLANS = 32
MANY_STREAMS = 10_000
"""Whose simulation takes so long that somebody who waits should know."""
WAITS = 1.5
"""Passes a round: in some of them a stream is not."""
WHAT_AHEAD = (
    "Ahead: the draft worker goes on behind the likeliest outcomes while the target is at work; here {:.0%} of rounds "
    "of five drafts have theirs among them."
)
WHY_UNEVEN = (
    "Passes a round: of the target, from one verdict of a stream to its next. Above 1 others keep the target busy "
    "while the stream drafts, and drafts that are there before the next pass begins cost it no time: so the best γ is "
    "one that just fits, it may be larger under load than alone, and it jumps where a round takes one pass more."
)


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("plan", rich_help_panel="Prove and measure")(_command)


def _command(
    profile: Annotated[
        Path | None, typer.Option(help="What `outrider bench --profile` wrote: costs and acceptance as measured.")
    ] = None,
    pass_ms: Annotated[float | None, typer.Option(min=0.0, help="A target's pass over one row, ms.")] = None,
    row_ms: Annotated[float | None, typer.Option(min=0.0, help="Each further row of it, ms; absent: 1% of it.")] = None,
    draft_ms: Annotated[float | None, typer.Option(min=0.0, help="A drafted token, ms.")] = None,
    draft_row_ms: Annotated[
        float | None, typer.Option(min=0.0, help="Each further stream in a draft pass, ms; absent: 3% of it.")
    ] = None,
    draft_rtt_ms: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="Round trip to the draft worker, ms; several times for several. Absent: 0.5."),
    ] = None,
    target_rtt_ms: Annotated[float, typer.Option(min=0.0, help="Round trip to the target worker, ms.")] = 0.5,
    acceptance: Annotated[
        list[float] | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Chance that a draft is accepted once those before it were; several times for several. Absent: the "
            "profile's.",
        ),
    ] = None,
    branch_hits: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Share of rounds whose outcome has drafts made ahead of its verdict, after rounds of five drafts; 0: "
            f"none are made ahead. Absent: the profile's, or {PRIOR_HIT_RATE:g}.",
        ),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, max=MAX_STREAMS, help="Streams at once that the fleet is for.")] = 64,
    min_tokens_per_s: Annotated[
        float | None,
        typer.Option(min=0.0, help="What each of them shall get; absent: half of what one plain stream gets alone."),
    ] = None,
    context_tokens: Annotated[int, typer.Option(min=0, help="Cached tokens of a stream, where a profile knows.")] = 512,
    max_speculative_tokens: Annotated[
        int, typer.Option(min=1, max=64, help="Most drafts a round.")
    ] = CoordinatorSettings.model_fields["max_speculative_tokens"].default,
    as_json: Json = False,
) -> None:
    """Say which γ is best, what it gives, and how many workers so many streams need. SIMULATED on the costs given."""
    with reporting_errors():
        rtts, measured = draft_rtt_ms or [0.5], _read(profile)
        given = {"pass_ms": pass_ms, "row_ms": row_ms, "draft_ms": draft_ms, "draft_row_ms": draft_row_ms}
        numbers = {**given, "target_rtt_ms": target_rtt_ms, "min_tokens_per_s": min_tokens_per_s}
        _check_finite({**numbers, **{f"draft_rtt_ms[{i}]": rtt for i, rtt in enumerate(rtts)}})
        target, draft = _costs(given, measured)
        survival = _branch_survival(branch_hits, measured)
        chances = list(dict.fromkeys(acceptance or [_acceptance(measured)]))
        if len(rtts) * len(chances) > MAX_PLANS:
            raise InvalidArgument(
                f"--draft-rtt-ms and --acceptance make {len(rtts) * len(chances)} plans, at most {MAX_PLANS} at once",
                field="draft_rtt_ms",
            )
        plans = []
        for rtt in dict.fromkeys(rtts):
            for chance in chances:
                world = World(
                    target=target,
                    draft=draft,
                    draft_rtt_ms=rtt,
                    target_rtt_ms=target_rtt_ms,
                    context_tokens=context_tokens,
                    branch_survival=survival,
                )
                plans.append(_plan(world, chance, streams, min_tokens_per_s, max_speculative_tokens))
                if not as_json:
                    _print(plans[-1], streams)
        print_json({"simulated": True, "streams": streams, "plans": plans})


def _plan(
    world: World, acceptance: float, num_streams: int, min_tokens_per_s: float | None, max_draft_tokens: int
) -> dict[str, Any]:
    if not math.isfinite(acceptance):
        raise InvalidArgument(f"--acceptance is {acceptance}, must be from 0 to 1", field="acceptance")
    apart = Planner(world, acceptance, max_draft_tokens=max_draft_tokens)
    beside = apart.colocated()
    alone = apart.speed(1)
    least = min_tokens_per_s if min_tokens_per_s is not None else DEFAULT_MIN_SHARE * alone.plain_tokens_per_s
    loads = []
    for load in LOADS:
        here, there = apart.speed(load), beside.speed(load)
        loads.append(
            {**asdict(here), "gain": here.gain, "colocated_gamma": there.gamma,
             "colocated_tokens_per_s": there.tokens_per_s}
        )  # fmt: skip
    if num_streams >= MANY_STREAMS:
        err.print(f"[dim]simulating {num_streams} streams at once: some minutes for 100,000[/]")
    fleets = [planner.fleet(num_streams, least) for planner in (apart, beside)]
    if fleets[0] is None and fleets[1] is None:
        most = max(alone.tokens_per_s, beside.speed(1).tokens_per_s)
        raise InvalidArgument(
            f"--min-tokens-per-s is {least:g}, but with these costs a stream gets {most:.1f} at most, alone on a "
            "target",
            field="min_tokens_per_s",
        )
    return {
        "draft_rtt_ms": world.draft_rtt_ms,
        "target_rtt_ms": world.target_rtt_ms,
        "acceptance": acceptance,
        "branch_hits": world.branch_survival**PRIOR_DRAFTS,
        "best_gamma": alone.gamma,
        "drafts_ahead": alone.drafts_ahead,
        "tokens_per_s": alone.tokens_per_s,
        "plain_tokens_per_s": alone.plain_tokens_per_s,
        "loads": loads,
        "pays_up_to_streams": apart.pays_up_to(),
        "colocated_pays_up_to_streams": beside.pays_up_to(),
        "min_tokens_per_s": least,
        "fleet": asdict(fleets[0]) if fleets[0] else None,
        "colocated_fleet": asdict(fleets[1]) if fleets[1] else None,
    }


def _read(path: Path | None) -> Mapping[str, Any] | None:
    if path is None:
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(f"--profile: cannot read {path}: {error.strerror}", field="profile") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidArgument(f"--profile {path} is no JSON file: {error}", field="profile") from None
    if not isinstance(found, dict) or not isinstance(found.get("workers"), list):
        raise InvalidArgument(
            f"--profile {path} has no workers: write it with `outrider bench --profile`", field="profile"
        )
    return found


def _costs(given: Mapping[str, float | None], profile: Mapping[str, Any] | None) -> tuple[PassCost, PassCost]:
    """(target's, draft's). Flags outweigh the profile."""
    target = _cost(given, profile, "target", "pass_ms", "row_ms", 0.01)
    return target, _cost(given, profile, "draft", "draft_ms", "draft_row_ms", 0.03)


def _cost(
    given: Mapping[str, float | None],
    profile: Mapping[str, Any] | None,
    role: str,
    first: str,
    further: str,
    assumed_share: float,
) -> PassCost:
    one_ms, row_ms = given[first], given[further]
    if one_ms is not None:
        if not one_ms:
            raise InvalidArgument(f"{flag_of(first)} is 0, must be above 0", field=first)
        row_ms = assumed_share * one_ms if row_ms is None else row_ms
        if row_ms > one_ms:
            raise InvalidArgument(
                f"{flag_of(further)} is {row_ms:g}, above {flag_of(first)}, which is {one_ms:g}", field=further
            )
        return Line(one_ms - row_ms, row_ms)
    flag = flag_of(first)
    if row_ms is not None:
        raise InvalidArgument(f"{flag_of(further)} says nothing without {flag}: give that too", field=further)
    if profile is None:
        raise InvalidArgument(f"{flag} is missing: give it, or --profile", field=first)
    for index, worker in enumerate(profile["workers"]):
        if isinstance(worker, dict) and worker.get("role") == role:
            return read_timings(worker, f"workers[{index}]")
    why = ": it drafted beside its target, or not at all. Give " if role == "draft" else ": give "
    raise InvalidArgument(f"the profile has no {role} worker{why}{flag}", field=first)


def _acceptance(profile: Mapping[str, Any] | None) -> float:
    """Of a draft once those before it were accepted: the chance under which rounds of the profile's γ commit as many
    tokens in the mean as they did."""
    if profile is None:
        raise InvalidArgument("--acceptance is missing: give it, or --profile", field="acceptance")
    try:
        rounds = [
            (int(row["num_draft_tokens"]), int(row["num_rounds"]), float(row["mean_tokens"]))
            for cell in profile["cells"]
            for row in cell["speculative"]["by_gamma"]
        ]
    except (KeyError, TypeError, ValueError):
        raise InvalidArgument(
            "the profile has no cells[].speculative.by_gamma: give --acceptance", field="acceptance"
        ) from None
    rounds = [(gamma, count, tokens) for gamma, count, tokens in rounds if gamma]
    if not rounds:
        raise InvalidArgument("nothing was drafted in the profile: give --acceptance", field="acceptance")
    wanted = sum(count * tokens for _, count, tokens in rounds)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        expected = sum(count * sum(middle**i for i in range(gamma + 1)) for gamma, count, _ in rounds)
        low, high = (middle, high) if expected < wanted else (low, middle)
    return round(low, 4)


def _branch_survival(hits: float | None, profile: Mapping[str, Any] | None) -> float:
    """Chance of each draft of a round to leave it an outcome that was drafted for."""
    if hits is not None:
        return float(hits ** (1 / PRIOR_DRAFTS))
    try:
        found = [cell["speculative"].get("ahead") for cell in (profile or {}).get("cells", ()) if "speculative" in cell]
        rounds = [(int(a["num_rounds"]), float(a["hit_rate"]), float(a["mean_num_draft_tokens"])) for a in found if a]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise InvalidArgument(
            "the profile's cells[].speculative.ahead cannot be read: give --branch-hits", field="branch_hits"
        ) from None
    total = sum(count for count, _, _ in rounds)
    if not total:
        return float(PRIOR_HIT_RATE ** (1 / PRIOR_DRAFTS))
    rate, length = (sum(r[0] * r[i] for r in rounds) / total for i in (1, 2))
    return float(min(1.0, max(0.0, rate)) ** (1 / max(1.0, length)))


def _check_finite(values: Mapping[str, float | None]) -> None:
    for name, value in values.items():
        if value is not None and not math.isfinite(value):
            raise InvalidArgument(f"{flag_of(name)} is {value}, must be a finite number", field=name)


def _print(plan: dict[str, Any], num_streams: int) -> None:
    out.print(
        f"outrider plan: acceptance {plan['acceptance']:g}, round trips of {plan['draft_rtt_ms']:g} ms to the draft "
        f"worker and {plan['target_rtt_ms']:g} ms to the target; SIMULATED",
        markup=False,
    )
    names = (
        "streams a target", "plain", "best γ", "ahead", "passes a round", "tokens/s", "gain", "co-located: best γ",
        "tokens/s",
    )  # fmt: skip
    table = Table(*names, title="tokens/s of a stream", title_justify="left")
    for load in plan["loads"]:
        table.add_row(
            str(load["num_streams"]),
            f"{load['plain_tokens_per_s']:.1f}",
            str(load["gamma"]),
            "yes" if load["drafts_ahead"] else "",
            f"{load['passes_a_round']:.1f}",
            f"{load['tokens_per_s']:.1f}",
            f"{load['gain']:.2f}",
            str(load["colocated_gamma"]),
            f"{load['colocated_tokens_per_s']:.1f}",
        )
    print_table(table)
    if any(load["drafts_ahead"] for load in plan["loads"]):
        out.print(f"  {WHAT_AHEAD.format(plan['branch_hits'])}", markup=False)
    if any(load["gamma"] and load["passes_a_round"] > WAITS for load in plan["loads"]):
        out.print(f"  {WHY_UNEVEN}")
    for name, key in (("apart", "pays_up_to_streams"), ("co-located", "colocated_pays_up_to_streams")):
        where = {None: f"at all loads up to {LOADS[-1]} streams a target", 0: "at no load"}.get(
            plan[key], f"up to about {plan[key]} streams a target"
        )
        out.print(f"  drafting {name} pays {where}", markup=False)
    least = plan["min_tokens_per_s"]
    for name, key in (("apart", "fleet"), ("co-located", "colocated_fleet")):
        fleet = plan[key] and Fleet(**plan[key])
        text = f"no fleet gives a stream {least:.1f} tokens/s" if not fleet else _describe(fleet)
        out.print(f"  {num_streams} streams, drafting {name}: {text}", markup=False)


def _describe(fleet: Fleet) -> str:
    drafts = f", draft workers {fleet.num_drafts}" if fleet.num_drafts else ""
    ahead = " drafted ahead" if fleet.drafts_ahead else ""
    return (
        f"targets {fleet.num_targets}{drafts}, {fleet.streams_per_target} streams a target at γ {fleet.gamma}{ahead}: "
        f"{fleet.tokens_per_s:.1f} tokens/s a stream"
    )
