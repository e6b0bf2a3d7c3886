"""One conversation: its turns, and how the next one is drafted. What is said is printed as it comes, tokens in the
colours of their origins."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider.cli.console import err, out
from outrider.cli.generate import NO_DRAFT_WORKER, describe, why_nobody_drafts
from outrider.cli.painter import Painter
from outrider.cli.palette import system_of
from outrider.client import Client, GenerateOptions
from outrider.errors import InvalidArgument
from outrider.results import Chunk, Complete, Started
from outrider.sampling.params import AcceptanceRule

Messages = list[dict[str, str]]
MAX_SEED = 2**64 - 1


@dataclass(slots=True)
class Answer:
    """What was said to `messages`; without `complete` it was broken off."""

    messages: Messages
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    started: Started | None = None
    complete: Complete | None = None
    seconds: float = 0.0

    @property
    def num_draft_tokens(self) -> int:
        return self.complete.speculation.num_draft_tokens if self.complete is not None else 0


class Session:
    """What `outrider chat` does; the terminal's side is elsewhere. Raises outrider.errors."""

    def __init__(self, client: Client, options: GenerateOptions, opening: Messages, *, stats: bool = False) -> None:
        self.options = options
        self.plain = False
        self._client = client
        self._opening = opening
        self._messages = list(opening)
        self._stats = stats
        self._last: Answer | None = None
        self._painter = Painter(client, system_of(out), options.get("model", ""))

    def reset(self) -> None:
        """Forgets what was said."""
        self._messages, self._last = list(self._opening), None

    async def say(self, text: str) -> None:
        """A turn. What was spoken of the answer stays in the conversation, whatever ends it; a turn without an answer
        is taken back."""
        answer = Answer([*self._messages, {"role": "user", "content": text}])
        try:
            await self._stream(answer, {})
        finally:
            if answer.text:
                self._messages = [*answer.messages, {"role": "assistant", "content": answer.text}]
                self._last = answer if answer.complete is not None else None

    async def seed(self, value: str) -> str:
        """`/seed`: a number, or `off` for a new one each turn. What holds now."""
        if value == "off":
            self.options.pop("seed", None)
        elif value:
            self.options["seed"] = _number("seed", value, MAX_SEED, "or off")
        seed = self.options.get("seed")
        rule = self.options.get("acceptance") or ("coupled" if seed is not None else "block")
        return f"seed {'off: a new one each turn' if seed is None else seed}, rule {rule}"

    async def gamma(self, value: str) -> str:
        """`/gamma`: drafts of every round, or `auto`. What holds now."""
        most = (await self._client.model_info(self.options.get("model", ""))).max_speculative_tokens
        if value == "auto":
            self.options.pop("num_speculative_tokens", None)
        elif value:
            self.options["num_speculative_tokens"] = _number("gamma", value, most, "or auto")
        gamma = self.options.get("num_speculative_tokens")
        told = f"γ auto, up to {most}" if gamma is None else f"γ {gamma}"
        return f"{told}; but /plain is on, which drafts nothing" if self.plain and gamma != 0 else told

    async def switch(self) -> str:
        """`/plain`: from drafts to plain decoding or back. Says the last answer again in the new way, under its own
        seed and rule, and how both texts compare."""
        self.plain = not self.plain
        now = "plain decoding from now on" if self.plain else "drafts from now on"
        last = self._last
        if last is None or last.started is None:
            return f"{now}; there is no whole answer yet to compare with"
        again = Answer(last.messages)
        await self._stream(again, {"seed": last.started.seed, "acceptance": last.started.acceptance})
        return f"{now}. {await self._compare(last, again)}"

    async def _compare(self, before: Answer, after: Answer) -> str:
        assert before.started is not None
        rule = before.started.acceptance
        plain, drafted = (after, before) if self.plain else (before, after)
        promised = "greedy" if await self._is_greedy() else "coupled" if rule is AcceptanceRule.COUPLED else ""
        times = f"{drafted.seconds:.1f} s with drafts, {plain.seconds:.1f} s without"
        if not drafted.num_draft_tokens or plain.num_draft_tokens:
            return "INCONCLUSIVE: only one that drafts and one that does not can be compared"
        if before.token_ids == after.token_ids:
            because = f"as {promised} text always is" if promised else f"by chance: rule {rule} does not promise it"
            return f"EQUAL, {because}: {len(after.token_ids)} tokens, {times}"
        where = _first_difference(before.token_ids, after.token_ids)
        if promised:
            return (
                f"DIFFERENT from token {where} on, though {promised}: with numerics fast and 16-bit types near-ties "
                "may fall either way; else this is a fault, see `outrider verify`"
            )
        return (
            f"different from token {where} on, as under rule {rule} it may be: both follow the model's own "
            f"distribution; {times}. With /seed N or temperature 0 they are equal"
        )

    async def _is_greedy(self) -> bool:
        if "temperature" in self.options:
            return self.options["temperature"] == 0
        info = await self._client.model_info(self.options.get("model", ""))
        return info.generation_defaults.temperature == 0

    async def _stream(self, answer: Answer, more: GenerateOptions) -> None:
        options: GenerateOptions = {**self.options, **more}
        if self.plain:
            options["num_speculative_tokens"] = 0
        if self._stats:
            options["report_steps"] = True
        reasons: set[str] = set()
        self._painter.begin()
        begin = time.perf_counter()
        async for event in self._client.chat(answer.messages, **options):
            match event:
                case Started():
                    answer.started = event
                case Chunk():
                    reasons |= {event.step.reason} if event.step else set()
                    answer.text += event.text
                    answer.token_ids += event.token_ids
                    await self._painter.show(event)
                case Complete():
                    answer.complete, answer.seconds = event, time.perf_counter() - begin
                    out.print()
                    if self._stats:
                        why = await why_nobody_drafts(self._client) if NO_DRAFT_WORKER in reasons else ""
                        err.print(describe(event, why), style="dim", markup=False)


def _number(name: str, text: str, most: int, otherwise: str) -> int:
    if not text.isdecimal() or int(text) > most:
        raise InvalidArgument(f"/{name} takes a number from 0 to {most}, {otherwise}", field=name)
    return int(text)


def _first_difference(one: list[int], other: list[int]) -> int:
    """Counted from 1."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs, 1) if a != b), min(len(one), len(other)) + 1)
