"""Conversations that keep their turns.

    chat = outrider.Chat(client, system="Answer in one line.", temperature=0.7)
    async for chunk in chat.say("Name three rivers."):
        print(chunk.text, end="")
    answer = await chat.ask("And the longest of them?")

`SyncChat` is the same over `outrider.SyncClient`, without `async` and `await`. A turn counts once its answer is whole:
one that fails, or whose loop is left early, leaves the conversation as it was, so that the same may be said again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, contextmanager
from typing import TYPE_CHECKING, Unpack

from outrider.errors import InvalidArgument, OutriderError
from outrider.results import Chunk, Completion, Gathering

if TYPE_CHECKING:
    from outrider.client import Client
    from outrider.serving.write_request import GenerateOptions, Message
    from outrider.sync_client import SyncClient


class _Turns:
    """What was said, and by whom."""

    def __init__(
        self, *, system: str = "", messages: Sequence[Message] = (), **options: Unpack[GenerateOptions]
    ) -> None:
        """system: begins the conversation; messages: earlier turns, {"role", "content"} each. `options` are of every
        turn. Raises InvalidArgument where they ask for several choices."""
        self.messages: list[Mapping[str, str]] = [{"role": "system", "content": system}] if system else []
        """The conversation so far; yours to change between turns."""
        self.messages += messages
        self.last: Completion | None = None
        """The latest answer, with its statistics."""
        self._options = options
        _check_one_choice(options)

    @contextmanager
    def _turn(
        self, text: str, options: GenerateOptions
    ) -> Iterator[tuple[list[Mapping[str, str]], GenerateOptions, Gathering]]:
        """What to send, with which options, and what takes the answer's events."""
        _check_one_choice(options)
        before = list(self.messages)
        messages = [*before, {"role": "user", "content": text}]
        events = Gathering()
        yield messages, {**self._options, **options}, events
        answer = events.completion
        if answer is None:
            raise OutriderError("the stream ended without `started` and `complete`")
        if self.messages != before:
            raise RuntimeError("the conversation has changed while this turn was answered: one turn at a time")
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.last = answer


class Chat(_Turns):
    """A conversation over an `outrider.Client`, one turn at a time."""

    def __init__(
        self, client: Client, *, system: str = "", messages: Sequence[Message] = (), **options: Unpack[GenerateOptions]
    ) -> None:
        super().__init__(system=system, messages=messages, **options)
        self._client = client

    async def say(self, text: str, **options: Unpack[GenerateOptions]) -> AsyncGenerator[Chunk, None]:
        """The answer as it comes. `options` go before those of the conversation. Raises outrider.errors, and
        RuntimeError where another turn was answered meanwhile."""
        with self._turn(text, options) as (messages, of_turn, answer):
            async with aclosing(self._client.chat(messages, **of_turn)) as events:
                async for event in events:
                    answer.take(event)
                    if isinstance(event, Chunk):
                        yield event

    async def ask(self, text: str, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer."""
        async with aclosing(self.say(text, **options)) as chunks:
            async for _ in chunks:
                pass
        assert self.last is not None
        return self.last


class SyncChat(_Turns):
    """A conversation over an `outrider.SyncClient`, one turn at a time."""

    def __init__(
        self,
        client: SyncClient,
        *,
        system: str = "",
        messages: Sequence[Message] = (),
        **options: Unpack[GenerateOptions],
    ) -> None:
        super().__init__(system=system, messages=messages, **options)
        self._client = client

    def say(self, text: str, **options: Unpack[GenerateOptions]) -> Generator[Chunk, None, None]:
        """The answer as it comes. `options` go before those of the conversation. Raises outrider.errors, and
        RuntimeError where another turn was answered meanwhile."""
        with self._turn(text, options) as (messages, of_turn, answer):
            with closing(self._client.chat(messages, **of_turn)) as events:
                for event in events:
                    answer.take(event)
                    if isinstance(event, Chunk):
                        yield event

    def ask(self, text: str, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer."""
        with closing(self.say(text, **options)) as chunks:
            for _ in chunks:
                pass
        assert self.last is not None
        return self.last


def _check_one_choice(options: GenerateOptions) -> None:
    if options.get("n") not in (None, 1):
        raise InvalidArgument("a conversation goes on with one answer: leave out n", field="output.n")
