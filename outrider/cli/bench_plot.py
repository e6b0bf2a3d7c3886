"""The sweeps of `outrider bench` as a drawing: tokens/s against γ, or against streams at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.cli.console import require_writable
from outrider.errors import InvalidArgument

COLOURS = {"plain": "#555555", "fixed": "#0072b2", "adaptive": "#d55e00"}
"""Told apart by those who see few colours (Okabe and Ito's)."""
WIDTH_IN, HEIGHT_IN = 7.0, 4.0
"""Inches, of the drawing of one cell."""


def check_plot(path: Path, sweep: str | None) -> None:
    """Before anything is measured. Raises InvalidArgument or ModuleNotFoundError for what cannot be drawn."""
    if sweep not in ("gamma", "concurrency"):
        raise InvalidArgument("--plot draws a sweep: give --sweep gamma or --sweep concurrency too", field="plot")
    if path.suffix.lower() != ".svg":
        raise InvalidArgument(f"--plot is {str(path)!r}, must be a file named *.svg", field="plot")
    import matplotlib  # noqa: F401  its lack is told before the run

    require_writable(path, "plot")


def draw(path: Path, sweep: str, what: str, cells: Sequence[Mapping[str, Any]]) -> None:
    """Writes the SVG. what: of the models, above all. cells: results of the sweep, each with its workload, temperature
    and points; one below the other."""
    import matplotlib
    from matplotlib.figure import Figure

    # text stays text; ids of the file do not differ from run to run
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "outrider", "font.size": 9}):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN * len(cells)), layout="constrained")
        axes = figure.subplots(len(cells), 1, squeeze=False)[:, 0]
        for axis, cell in zip(axes, cells, strict=True):
            (_draw_gamma if sweep == "gamma" else _draw_concurrency)(axis, cell)
            title = f"{cell['workload']}, temperature {cell['temperature']:g}"
            axis.set_title(f"{title}: INCONCLUSIVE" if cell.get("inconclusive") else title, loc="left")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.25)
            axis.legend(frameon=False)
        figure.suptitle(what, x=0.01, ha="left", fontsize=10)
        figure.savefig(path, format="svg", metadata={"Date": None, "Title": what})


def _draw_gamma(axis: Any, cell: Mapping[str, Any]) -> None:
    points = cell["points"]
    fixed = [point for point in points if isinstance(point["gamma"], int)]
    _line(axis, "fixed", "fixed γ", [p["gamma"] for p in fixed], [p["tokens_per_s"] for p in fixed])
    _level(axis, "plain", "plain", fixed[0])
    _level(axis, "adaptive", f"adaptive γ, {points[-1]['mean_gamma']:.1f} in the mean", points[-1])
    axis.set_xlabel("γ, drafts a round")
    axis.set_xticks([point["gamma"] for point in fixed])
    axis.set_ylabel("tokens/s")


def _draw_concurrency(axis: Any, cell: Mapping[str, Any]) -> None:
    points = cell["points"]
    streams = [point["concurrency"] for point in points]
    names = {"plain": "plain", "fixed": f"γ = {cell['gamma']}", "adaptive": "adaptive γ"}
    for name, label in names.items():
        _line(axis, name, label, streams, [point[f"{name}_tokens_per_s"] for point in points])
    axis.set_xscale("log", base=2)
    axis.set_xticks(streams, [str(number) for number in streams])
    axis.set_xlabel("streams at once")
    axis.set_ylabel("tokens/s of all together")


def _line(axis: Any, name: str, label: str, x: Sequence[float], y: Sequence[float]) -> None:
    axis.plot(x, y, marker="o", color=COLOURS[name], label=label, gid=f"series-{name}")


def _level(axis: Any, name: str, label: str, point: Mapping[str, Any]) -> None:
    axis.axhline(point["tokens_per_s"], color=COLOURS[name], linestyle="--", label=label, gid=f"series-{name}")
