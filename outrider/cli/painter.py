"""Texts in the terminal as they come, each token in the colour of its origin."""

from __future__ import annotations

import sys

from rich.color import ColorSystem

from outrider.cli.attribution import Attribution
from outrider.cli.console import err
from outrider.cli.palette import paint
from outrider.client import Client
from outrider.errors import Unimplemented
from outrider.results import Chunk


class Painter:
    """Of texts of one model, one after the other. What a token writes is asked once."""

    def __init__(self, client: Client, colours: ColorSystem | None, model: str = "") -> None:
        """colours: None for a text without any."""
        self._client = client
        self._colours = colours
        self._model = model
        self._written: dict[int, bytes] = {}
        self._attribution = Attribution()

    def begin(self) -> None:
        """A new text: nothing of one that was broken off is left."""
        self._attribution = Attribution()

    async def show(self, chunk: Chunk) -> None:
        """The next part of the text, on stdout."""
        text = chunk.text
        if self._colours is not None and len(chunk.origins) == len(chunk.token_ids):
            self._attribution.add(await self._bytes_of(chunk.token_ids), chunk.origins)
        if self._colours is not None:
            text = paint(self._attribution.pieces(text), self._colours)
        sys.stdout.write(text)
        sys.stdout.flush()

    async def _bytes_of(self, token_ids: tuple[int, ...]) -> list[bytes]:
        """What each writes; a service that cannot tell leaves the text without colours."""
        unknown = list(dict.fromkeys(token_id for token_id in token_ids if token_id not in self._written))
        if unknown:
            try:
                told = await self._client.token_bytes(unknown, model=self._model)
            except Unimplemented as error:
                self._colours = None
                err.print(f"no colours: {error.message}", style="dim", markup=False)
                return [b""] * len(token_ids)
            self._written.update(zip(unknown, told, strict=True))
        return [self._written[token_id] for token_id in token_ids]
