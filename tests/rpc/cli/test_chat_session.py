"""`outrider chat` against running services: turns, colours by origin, the switch between drafts and plain decoding."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from fake_generation import FakeGeneration, serving
from rich.console import Console
from stack import Stack, in_process_stack
from test_stack import command

from outrider.cli import chat_session, palette
from outrider.cli.chat_session import Session
from outrider.client import Client, GenerateOptions
from outrider.errors import InvalidArgument
from outrider.lm.interface import LoadedModel
from outrider.lm.toy import load_toy
from outrider.sampling.params import Origin

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TARGET, DRAFT = "toy:vocab=32,seed=1", "toy:vocab=32,seed=1,agreement=0.7"
ANSI = re.compile(r"\x1b\[([0-9;]*)m")


def talkative(name: str) -> LoadedModel:
    loaded = load_toy(name)
    return dataclasses.replace(loaded, description=dataclasses.replace(loaded.description, chat_template=TEMPLATE))


@asynccontextmanager
async def chatting(options: GenerateOptions) -> AsyncIterator[tuple[Session, Stack]]:
    async with (
        in_process_stack(talkative(TARGET), talkative(DRAFT), coordinator={"num_speculative_tokens": 3}) as stack,
        Client(stack.address) as client,
    ):
        yield Session(client, {"max_tokens": 40, **options}, []), stack


def of_terminal(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    console = Console(force_terminal=True, color_system="standard", **values)  # type: ignore[arg-type]
    monkeypatch.setattr(chat_session, "out", console)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 4}], ids=["greedy", "coupled"])
async def test_the_switch_shows_equal_texts(options: GenerateOptions, capsys: pytest.CaptureFixture[str]) -> None:
    async with chatting(options) as (session, _):
        await session.say("!!")
        assert session._last is not None
        assert session._last.num_draft_tokens > 0
        told = await session.switch()
        assert session.plain
        assert re.search(r"EQUAL, as (greedy|coupled) text always is: 40 tokens, .* s with drafts, .* s without", told)
        first, second = capsys.readouterr().out.split()
        assert first == second
        await session.say("##")
        assert session._last.num_draft_tokens == 0
        assert "EQUAL" in await session.switch()
        assert not session.plain


async def test_what_the_switch_cannot_promise_it_does_not() -> None:
    async with chatting({"temperature": 1.0, "acceptance": "block"}) as (session, _):
        assert "no whole answer yet" in await session.switch()
        assert "no whole answer yet" in await session.switch()
        await session.say("!!")
        told = await session.switch()
        assert "as under rule block it may be" in told or "by chance: rule block does not promise it" in told
        assert "γ auto" in await session.gamma("auto")
        session.plain = False
        await session.gamma("0")
        await session.say("!!")
        assert "INCONCLUSIVE" in await session.switch()


async def test_a_broken_promise_is_told() -> None:
    async with serving(FakeGeneration(broken_greedy=True)) as address, Client(address) as client:
        session = Session(client, {"temperature": 0.0, "max_tokens": 8, "num_speculative_tokens": 2}, [])
        await session.say("!!")
        assert "DIFFERENT from token 8 on, though greedy" in await session.switch()


async def test_settings_of_a_conversation() -> None:
    async with chatting({}) as (session, _):
        assert await session.seed("7") == "seed 7, rule coupled"
        assert await session.seed("off") == "seed off: a new one each turn, rule block"
        assert await session.gamma("2") == "γ 2"
        await session.say("!!")
        assert session._last is not None
        assert session._last.started is not None
        assert session._last.started.num_speculative_tokens == 2
        assert [message["role"] for message in session._messages] == ["user", "assistant"]
        for wrong in (session.seed("-1"), session.seed(str(2**64)), session.gamma("many"), session.gamma("999")):
            with pytest.raises(InvalidArgument, match="takes a number from 0 to"):
                await wrong
        session.reset()
        assert session._messages == []


async def test_every_token_has_the_colour_of_its_origin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_terminal(monkeypatch)
    async with chatting({"temperature": 1.0, "seed": 4, "max_tokens": 80}) as (session, stack):
        await session.say("!!")
        shown = capsys.readouterr().out
        async with Client(stack.address) as client:
            prompt = [{"role": "user", "content": "!!"}]
            answer = await client.complete(prompt, temperature=1.0, seed=4, max_tokens=80)
    assert {Origin.ACCEPTED, Origin.CORRECTION, Origin.PLAIN} <= set(answer.origins)
    codes = {"32": Origin.ACCEPTED, "1;31": Origin.CORRECTION, "36": Origin.BONUS, "39": Origin.PLAIN}
    seen, origin = [], None
    for place, part in enumerate(ANSI.split(shown)):
        if place % 2:
            origin = codes.get(part)
        else:
            seen += [(character, origin) for character in part if character != "\n"]
    assert seen == list(zip(answer.text, answer.origins, strict=True)), "a toy's token is a character"


@pytest.mark.parametrize("values", [{"no_color": True}, {"color_system": None}, {"force_terminal": False}], ids=str)
async def test_no_colours_where_none_are_wanted(
    values: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(**{"force_terminal": True, "color_system": "standard", **values})  # type: ignore[arg-type]
    monkeypatch.setattr(chat_session, "out", console)
    async with chatting({"temperature": 0.0}) as (session, _):
        await session.say("!!")
    assert "\x1b" not in capsys.readouterr().out


async def test_an_older_service_leaves_the_text_without_colours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    of_terminal(monkeypatch)
    async with serving(FakeGeneration()) as address, Client(address) as client:
        await Session(client, {"max_tokens": 4}, []).say("!!")
    captured = capsys.readouterr()
    assert re.fullmatch(r"[a-p]{4}\n", captured.out)
    assert "runs an older release" in captured.err


async def test_the_command_names_its_colours_unless_none_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    async with chatting({}) as (_, stack):
        flags = [f"--address={stack.address}", "--temperature=0", "--max-tokens=20"]
        script = b"!!\n/plain\n/gamma 2\n/seed x\n/exit\n"
        async with command("chat", *flags) as chat:
            output, errors = await asyncio.wait_for(chat.communicate(script), 60)
        assert chat.returncode == 0
        plain = ANSI.sub("", errors.decode())
        assert "accepted draft  correction  bonus  plain" in plain
        assert "EQUAL, as greedy text always is: 20 tokens" in plain
        assert "γ 2; but /plain is on" in plain
        assert "/seed takes a number from 0 to" in plain
        assert ANSI.search(output.decode())
        async with command("chat", *flags, "--no-colour") as chat:
            output, errors = await asyncio.wait_for(chat.communicate(b"!!\n"), 60)
        assert b"\x1b" not in output
        assert b"accepted draft" not in errors


def test_what_a_text_holds_commands_no_terminal() -> None:
    system = palette.system_of(Console(force_terminal=True, color_system="standard"))
    assert system is not None
    painted = palette.paint([("a\x1b[2J", Origin.ACCEPTED), ("b ", Origin.PLAIN)], system)
    assert painted == "\x1b[32ma␛[2J\x1b[0m\x1b[39mb \x1b[0m"
