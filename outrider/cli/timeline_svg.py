"""A trace as a drawing: a row a round, along the clock."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from outrider.cli.timeline import COLOURS, segments
from outrider.results import Step, StreamTrace

FILLS = {"draft": "#17a2b8", "network": "#e0b400", "queue": "#d1495b", "verify": "#3c9d4e", "other": "#b8b8b8"}
assert FILLS.keys() == COLOURS.keys()
LEFT, CHART, ROW, TOP = 60, 890, 16, 44
CHARACTER = 6.7
"""Width of one, at most, in monospaced fonts of this size."""
MIN_WIDTH = 0.5
"""Of a segment: thinner ones would not be seen."""
NUM_TICKS, MIN_TOLD = 8, 10


def draw(traces: Sequence[StreamTrace]) -> str:
    """An SVG document, choices below one another."""
    steps = [step for trace in traces for step in trace.steps]
    end_ms = max((step.start_ms + step.round_ms for step in steps), default=1.0)
    scale = CHART / end_ms
    body, y = [_legend(), *_ticks(end_ms, scale, TOP + ROW * len(steps))], TOP
    for trace in traces:
        for number, step in enumerate(trace.steps):
            body += _row(f"{trace.index}.{number}" if len(traces) > 1 else str(number), step, scale, y)
            y += ROW
    num_left_out = sum(trace.num_left_out for trace in traces)
    if num_left_out or not steps:
        body.append(_text(LEFT, y + 11, f"{num_left_out} rounds more were not kept" if num_left_out else "no rounds"))
    longest = max(map(len, map(_told, steps)), default=MIN_TOLD)
    width, height = LEFT + CHART + 16 + math.ceil(CHARACTER * longest), y + 20
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="monospace" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(body)
        + "\n</svg>\n"
    )


def _row(name: str, step: Step, scale: float, y: float) -> list[str]:
    parts = [_text(LEFT - 6, y + 11, name, anchor="end")]
    at_ms = step.start_ms
    for kind, ms in segments(step):
        x, width = LEFT + at_ms * scale, max(MIN_WIDTH, ms * scale)
        parts.append(
            f'<rect x="{x:.2f}" y="{y + 2}" width="{width:.2f}" height="{ROW - 4}" fill="{FILLS[kind]}">'
            f"<title>{kind} {ms:.2f} ms</title></rect>"
        )
        at_ms += ms
    parts.append(_text(LEFT + CHART + 8, y + 11, _told(step)))
    return parts


def _told(step: Step) -> str:
    told = [step.reason, f"{step.round_ms:.1f} ms"]
    if step.ahead:
        told.insert(1, f"branch {step.ahead}")
    if step.num_draft_tokens:
        told.insert(0, f"{step.num_accepted_draft_tokens}/{step.num_draft_tokens} {step.drafter}")
    return " · ".join(told)


def _legend() -> str:
    parts, x = [], LEFT
    for kind, fill in FILLS.items():
        parts.append(f'<rect x="{x}" y="8" width="12" height="12" fill="{fill}"/>')
        parts.append(_text(x + 16, 18, kind))
        x += 90
    return "\n".join(parts)


def _ticks(end_ms: float, scale: float, bottom: float) -> list[str]:
    parts, decimals = [], 0 if end_ms >= 10 * NUM_TICKS else 2
    for number in range(NUM_TICKS + 1):
        ms = end_ms * number / NUM_TICKS
        x = LEFT + ms * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#e4e4e4"/>')
        parts.append(_text(x, TOP - 12, f"{ms:.{decimals}f} ms", anchor="middle"))
    return parts


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'
