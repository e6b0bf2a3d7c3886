"""What `outrider top` shows of a coordinator: two looks at it and what happened between them, as data and as tables.
Counts and times; prompts and texts are not asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.cli.timeline import COLOURS, totals
from outrider.cli.trace import bar
from outrider.results import Speculation, Step
from outrider.server_info import Activity, ServerInfo, StreamStatus

BAR_WIDTH, MAX_POSITIONS = 24, 8
PARTS = "parts"
FOLDED, FOLDED_WIDTH = ("state", "drafters", "why"), 24
"""Columns whose cells may take several lines, and what they need at least where they are long."""
PADDING = 2
"""Of a column of a table."""
Columns = dict[str, list[str | Text]]
_BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class Look:
    """At one moment, `time.monotonic` seconds. activity: None where the coordinator is too old to tell."""

    at_s: float
    info: ServerInfo
    activity: Activity | None


def summarise(address: str, before: Look | None, after: Look) -> dict[str, Any]:
    """For machines, and what the tables are made of. Rates are of the time between both looks; without `before`, or
    where the coordinator was started anew meanwhile, of the time since its start."""
    info, activity = after.info, after.activity
    if before is not None and before.info.uptime_s > info.uptime_s:
        before = None
    told: dict[str, Any] = {
        "address": address,
        "version": info.versions.get("outrider", ""),
        "uptime_s": info.uptime_s,
        "draining": info.draining,
        "num_requests_running": info.num_requests_running,
        "num_requests_waiting": info.num_requests_waiting,
        "workers": [_worker(worker) for worker in info.workers],
    }
    if activity is None:
        return told
    since = before.activity if before is not None else None
    seconds = after.at_s - before.at_s if before is not None and since is not None else activity.uptime_s
    told["interval_s"] = seconds
    told["models"] = {
        name: _counts(counts, since.models.get(name) if since else None, seconds)
        for name, counts in activity.models.items()
    }
    earlier = {(one.request_id, one.index, one.tenant): one for one in since.streams} if since else {}
    told["streams"] = [
        _stream(one, earlier.get((one.request_id, one.index, one.tenant)), seconds) for one in activity.streams
    ]
    told["num_left_out"], told["num_hidden"] = activity.num_left_out, activity.num_hidden
    return told


def _worker(worker: Any) -> dict[str, Any]:
    names = ("role", "address", "model", "healthy", "detail", "num_sessions", "network_ms", "clock_offset_ms")
    capacity = worker.capacity
    used = 1 - capacity.num_free_blocks / capacity.num_blocks if capacity.num_blocks else 0.0
    return {name: getattr(worker, name) for name in names} | {
        "drafters": worker.drafters,
        "cache_used": used,
        "num_waiting": capacity.num_waiting,
    }


def _counts(now: Speculation, before: Speculation | None, seconds: float) -> dict[str, Any]:
    def since(name: str) -> float:
        return float(getattr(now, name) - (getattr(before, name) if before is not None else 0))

    num_rounds, num_drafts = since("num_spec_steps"), since("num_draft_tokens")
    drafted = _less(now.num_draft_tokens_per_pos, before.num_draft_tokens_per_pos if before else ())
    accepted = _less(now.num_accepted_tokens_per_pos, before.num_accepted_tokens_per_pos if before else ())
    return {
        "num_tokens": now.num_tokens,
        "tokens_per_s": since("num_tokens") / seconds if seconds > 0 else 0.0,
        "tokens_per_step": _share(since("num_tokens"), since("num_steps")),
        "num_draft_tokens": num_drafts,
        "mean_gamma": _share(num_drafts, num_rounds),
        "acceptance_rate": _share(since("num_accepted_draft_tokens"), num_drafts),
        "acceptance_by_position": [_share(a, d) for a, d in zip(accepted, drafted, strict=False) if d],
    }


def _stream(now: StreamStatus, before: StreamStatus | None, seconds: float) -> dict[str, Any]:
    step = now.last_step
    counts = _counts(now.speculation, before.speculation if before else None, seconds if before else now.age_ms / 1000)
    return {
        "request_id": now.request_id,
        "index": now.index,
        "model": now.model,
        "tenant": now.tenant,
        "state": now.state,
        "age_ms": now.age_ms,
        "num_prompt_tokens": now.num_prompt_tokens,
        "max_tokens": now.max_tokens,
        **counts,
        "num_tokens": now.num_tokens,
        "timings": dataclasses.asdict(now.timings),
        "gamma": step.num_draft_tokens if step else None,
        "drafter": step.drafter if step else "",
        "reason": step.reason if step else "",
        "round_ms": step.round_ms if step else None,
        "round_parts_ms": totals([step]) if step else {},
    }


def _less(now: tuple[int, ...], before: tuple[int, ...]) -> list[int]:
    return [number - (before[place] if place < len(before) else 0) for place, number in enumerate(now)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def render(told: dict[str, Any], look: Look, width: int) -> Group:
    """Tables for a terminal of so many columns."""
    parts: list[Any] = [_header(told)]
    parts += [_model_line(name, counts) for name, counts in told.get("models", {}).items()]
    parts += [Text(), *_workers(told["workers"], width)]
    if look.activity is None:
        parts.append(Text("this coordinator is too old to tell of its streams", style="dim"))
        return Group(*parts)
    steps = [one.last_step for one in look.activity.streams]
    parts += [Text(), *_streams(told["streams"], steps, width)]
    more = [f"{told['num_left_out']} streams more"] if told["num_left_out"] else []
    more += [f"{told['num_hidden']} of other tenants (see operator_tenants)"] if told["num_hidden"] else []
    if more:
        parts.append(Text("and " + ", ".join(more), style="dim"))
    return Group(*parts)


def _header(told: dict[str, Any]) -> Text:
    text = Text.assemble(
        (f"outrider {told['version']}", "bold"),
        f"  {told['address']}  up {told['uptime_s']:.0f} s  "
        f"running {told['num_requests_running']}  waiting {told['num_requests_waiting']}",
    )
    return text.append("  DRAINING", "bold yellow") if told["draining"] else text


def _model_line(name: str, counts: dict[str, Any]) -> Text:
    return Text.assemble(
        (name, "bold"),
        f"  {counts['tokens_per_s']:.1f} tokens/s  {counts['tokens_per_step']:.2f} tokens a step  "
        f"γ {counts['mean_gamma']:.1f}  accepted {counts['acceptance_rate']:.0%}  by position ",
        (sparks(counts["acceptance_by_position"]), "green"),
    )


def sparks(shares: list[float]) -> str:
    """A bar for each share, from 0 to 1."""
    return "".join(_BLOCKS[round(share * (len(_BLOCKS) - 1))] for share in shares[:MAX_POSITIONS])


def _workers(workers: list[dict[str, Any]], width: int) -> Iterator[RenderableType]:
    columns: Columns = {
        "worker": [one["role"] for one in workers],
        "address": [one["address"] for one in workers],
        "model": [one["model"] for one in workers],
        "state": [_state(one) for one in workers],
        "streams": [str(one["num_sessions"]) for one in workers],
        "waiting": [str(one["num_waiting"]) for one in workers],
        "cache": [f"{one['cache_used']:.0%}" for one in workers],
        "round trip": [f"{one['network_ms']:.1f} ms" for one in workers],
        "drafters": [", ".join(one["drafters"]) for one in workers],
    }
    yield from _fitting(columns, ("drafters", "waiting", "model", "cache", "round trip", "streams"), width)


def _state(worker: dict[str, Any]) -> Text:
    """A healthy one may have something against it: a draft worker that is left alone for a while."""
    if not worker["healthy"]:
        return Text(worker["detail"] or "not healthy", "red")
    return Text(worker["detail"], "yellow") if worker["detail"] else Text("healthy", "green")


def _streams(streams: list[dict[str, Any]], steps: list[Step | None], width: int) -> Iterator[RenderableType]:
    longest_ms = max((step.round_ms for step in steps if step), default=1.0)
    columns: Columns = {
        "stream": [f"{one['request_id'][:16]}.{one['index']}" for one in streams],
        "tenant": [one["tenant"] for one in streams],
        "state": [str(one["state"]) for one in streams],
        "age": [f"{one['age_ms'] / 1000:.1f} s" for one in streams],
        "tokens": [f"{one['num_tokens']}/{one['max_tokens']}" for one in streams],
        "tokens/s": [f"{one['tokens_per_s']:.1f}" for one in streams],
        "γ": ["-" if one["gamma"] is None else str(one["gamma"]) for one in streams],
        "accepted": [f"{one['acceptance_rate']:.0%}" for one in streams],
        "by place": [Text(sparks(one["acceptance_by_position"]), "green") for one in streams],
        "round, ms": ["-" if step is None else f"{step.round_ms:.1f}" for step in steps],
        PARTS: [Text() if step is None else bar(step, longest_ms, BAR_WIDTH) for step in steps],
        "why": ["" if step is None else " ".join(filter(None, (step.drafter, step.reason))) for step in steps],
    }
    shown = list(_fitting(columns, ("by place", "why", "tenant", PARTS, "round, ms", "age", "accepted"), width))
    yield from shown
    if streams and PARTS in columns:
        yield Text("  ").join(Text(f"█ {kind}", style=style) for kind, style in COLOURS.items())


def _fitting(columns: Columns, dispensable: Sequence[str], width: int) -> Iterator[RenderableType]:
    """A table of the columns that fit beside one another, and a line that names the others; those are taken out of
    `columns`, in the order of `dispensable`."""
    left_out = []
    for name in dispensable:
        if sum(_width_of(name, cells) for name, cells in columns.items()) <= width:
            break
        del columns[name]
        left_out.append(name)
    table = Table(box=None)
    for name in columns:
        table.add_column(name, no_wrap=name not in FOLDED, overflow="fold", justify="right" if "ms" in name else "left")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    yield table
    if left_out and table.row_count:
        yield Text(f"a wider window shows more: {', '.join(left_out)}", style="dim")


def _width_of(name: str, cells: Sequence[str | Text]) -> int:
    widest = max((cell.cell_len if isinstance(cell, Text) else cell_len(cell) for cell in cells), default=0)
    return max(cell_len(name), min(widest, FOLDED_WIDTH) if name in FOLDED else widest) + PADDING
