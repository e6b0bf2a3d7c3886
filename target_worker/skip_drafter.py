"""Self-speculation by leaving out layers: the target without some of its middle layers guesses what the whole will say.

Its keys and values differ from the target's, so a stream that drafts this way holds a second sequence. It takes room
for as many tokens again, and is opened when the stream first asks for such drafts.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from outrider.drafting.chain import drafting, length_in_step
from outrider.drafting.proposal import Proposal
from outrider.errors import InvalidArgument
from outrider.lm.engine import Engine
from outrider.lm.interface import Forward, LanguageModel, Program, SequenceHandle
from outrider.server_info import TargetDrafter
from outrider.serving.session_log import SessionLog

KIND = "skip"


class HeldSkip:
    """`skip:LAYER;LAYER;...`: the layers to leave out. Raises InvalidArgument for a model that cannot."""

    def __init__(self, name: str, layers: tuple[int, ...], model: LanguageModel) -> None:
        skip_layers: Any = getattr(model, "skip_layers", None)
        if skip_layers is None:
            raise InvalidArgument("heads: this model cannot leave out layers", field="heads")
        skip_layers(layers)
        self.layers = layers
        self.description = TargetDrafter(name, KIND, source=f"{KIND}:{';'.join(map(str, layers))}")
        self._engine: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, engine: Engine) -> None:
        """On the event loop, once the engine runs."""
        self._engine, self._loop = engine, asyncio.get_running_loop()

    def told(self, measured: dict[str, Any]) -> None:
        """Fields of the description."""
        self.description = dataclasses.replace(self.description, **measured)

    def for_session(self, log: SessionLog, sequence: SequenceHandle) -> SkipDrafter:
        assert self._engine is not None
        assert self._loop is not None
        opening = _Opening(self._engine, self._loop, sequence.max_length, log.tenant, getattr(sequence, "priority", 0))
        return SkipDrafter(self.description.name, log, opening)


class _Opening:
    """A sequence without the layers on its way, there, or given back. Everything but `sequence` and `error` is the
    event loop's."""

    def __init__(
        self, engine: Engine, loop: asyncio.AbstractEventLoop, max_length: int, tenant: str, priority: int
    ) -> None:
        self.sequence: Any = None
        self.error: BaseException | None = None
        self._engine, self._loop = engine, loop
        self._wanted = (max_length, tenant, priority)
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        loop.call_soon_threadsafe(self._start)

    def close(self) -> None:
        """Any thread, any number of times."""
        self._loop.call_soon_threadsafe(self._close)

    def _start(self) -> None:
        if not self._closed:
            self._task = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        try:
            self.sequence = await self._engine.open_sequence(*self._wanted, skips=True)
        except Exception as error:
            self.error = error

    def _close(self) -> None:
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        if self.sequence is not None:
            self._engine.close_sequence(self.sequence)


class SkipDrafter:
    """Keeps the second sequence in step with the committed ids, lazily: it is mended when drafts are wanted."""

    def __init__(self, name: str, log: SessionLog, opening: _Opening) -> None:
        self.name = name
        self._log, self._opening = log, opening
        self._num_in_step = 0
        """Leading tokens of the sequence that are known to be committed ones."""

    def propose(self, num_draft_tokens: int) -> Program[Proposal]:
        """Ends after a drafted stop token, and before a row that cannot be read; raises where that is the first one.
        Empty while the sequence waits for room."""
        log, sequence = self._log, self._opening.sequence
        if self._opening.error is not None:
            raise self._opening.error
        if sequence is None:
            return Proposal(drafter=self.name)
        self._fall_in_step(sequence)
        rows = log.ids[len(sequence.token_ids) :]
        num_ingested, queue_us = len(rows), 0
        with drafting(log) as chain:
            while len(chain.token_ids) < num_draft_tokens and not chain.ends_text:
                result = yield Forward(sequence, rows)
                queue_us += result.queue_us
                try:
                    rows = [chain.draw(result.logits[-1])]
                except Exception:
                    # What was drawn stands: to drop it for what comes after it would select among draws.
                    if not chain.token_ids:
                        raise
                    break
            return dataclasses.replace(chain.proposal(self.name), queue_us=queue_us, num_ingested_tokens=num_ingested)

    def ingest(self) -> Program[None]:
        """Nothing to prepare."""
        return
        yield

    def close(self) -> None:
        """Gives the sequence back. Any thread."""
        self._opening.close()

    def _fall_in_step(self, sequence: SequenceHandle) -> None:
        """Forgets drafts that were not committed, and the last committed id: only a pass over it gives its logits."""
        ids = self._log.ids
        self._num_in_step = length_in_step(sequence.token_ids, ids, self._num_in_step)
        sequence.truncate(self._num_in_step)
        sequence.committed_length = len(ids)


def parse_layers(text: str) -> tuple[int, ...]:
    """`LAYER;LAYER;...`; empty where none is given. Raises InvalidArgument."""
    try:
        layers = tuple(int(part) for part in text.split(";") if part.strip())
    except ValueError:
        layers = (-1,)
    if list(layers) != sorted(set(layers)) or (layers and layers[0] < 0):
        raise InvalidArgument(
            f"heads: {KIND}:{text} does not name layers in rising order, such as {KIND}:10;11;14", field="heads"
        )
    return layers
