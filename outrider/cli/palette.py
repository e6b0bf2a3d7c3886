"""One colour for each origin of a token, wherever the terminal shows texts: accepted drafts, corrections, bonus, plain.

They are told apart by brightness too, and a plain token has the terminal's own colour. `NO_COLOR` (no-color.org) and
`--no-colour` leave all of them out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer
from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from rich.text import Text

from outrider.cli.console import err, out
from outrider.sampling.params import Origin

STYLES = {Origin.ACCEPTED: "green", Origin.CORRECTION: "bold red", Origin.BONUS: "cyan", Origin.PLAIN: "default"}
MEANINGS = {
    Origin.ACCEPTED: "accepted draft",
    Origin.CORRECTION: "correction",
    Origin.BONUS: "bonus",
    Origin.PLAIN: "plain",
}
_ESCAPE = {0x1B: "\u241b", 0x9B: "\u241b"}
"""What begins a command to the terminal is shown instead: a model's text gives none."""

Colour = Annotated[
    bool,
    typer.Option("--colour/--no-colour", help="Colour what is shown, in a terminal; NO_COLOR turns it off as well."),
]


def choose_colour(wanted: bool) -> None:
    """What `--no-colour` says, for all that the command prints from now on."""
    if not wanted:
        out.no_color = err.no_color = True


def system_of(console: Console) -> ColorSystem | None:
    """None where colours would not be seen, or are not wanted."""
    name = console.color_system
    return None if name is None or console.no_color or not console.is_terminal else COLOR_SYSTEMS[name]


def paint(pieces: Iterable[tuple[str, Origin]], system: ColorSystem) -> str:
    """Each piece in its origin's colour, as the terminal takes it, to the last space."""
    return "".join(
        Style.parse(STYLES[origin]).render(text.translate(_ESCAPE), color_system=system) for text, origin in pieces
    )


def legend() -> Text:
    """A line that names the colours."""
    return Text("  ").join(Text(MEANINGS[origin], style=style) for origin, style in STYLES.items())
