"""Conversations that keep their turns, over a toy that has a chat template."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
from stack import Stack, in_process_stack

import outrider
from outrider.errors import InvalidArgument
from outrider.lm.loading import load_model
from outrider.settings import TargetWorkerSettings

TOY = "toy:vocab=128,seed=1"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<{% endif %}"
)


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    loaded = load_model(TargetWorkerSettings(model=TOY))
    target = dataclasses.replace(loaded, description=dataclasses.replace(loaded.description, chat_template=TEMPLATE))
    async with in_process_stack(target, f"{TOY},agreement=0.8") as stack:
        yield stack


async def test_turns_add_up_to_the_conversation_that_one_would_send_by_hand(stack: Stack) -> None:
    async with outrider.Client(stack.address) as client:
        chat = outrider.Chat(client, system="Be_brief.", temperature=0, max_tokens=9)
        first = "".join([chunk.text async for chunk in chat.say("Hello")])
        second = await chat.ask("And_now?", max_tokens=5, num_speculative_tokens=3)
        by_hand = [{"role": "system", "content": "Be_brief."}, {"role": "user", "content": "Hello"}]
        assert first == (await client.complete(by_hand, temperature=0, max_tokens=9)).text
        by_hand += [{"role": "assistant", "content": first}, {"role": "user", "content": "And_now?"}]
        assert second.token_ids == (await client.complete(by_hand, temperature=0, max_tokens=5)).token_ids
        assert second.usage.completion_tokens == 5
        assert chat.messages == [*by_hand, {"role": "assistant", "content": second.text}]
        assert chat.last == second
        assert second.speculation.num_draft_tokens > 0, "INCONCLUSIVE: nothing was drafted"


async def test_a_turn_that_fails_or_is_left_early_never_was(stack: Stack) -> None:
    async with outrider.Client(stack.address) as client:
        chat = outrider.Chat(client, temperature=0, max_tokens=9)
        await chat.ask("Hello")
        before = list(chat.messages)
        with pytest.raises(InvalidArgument):
            await chat.ask("Again", temperature=-1)
        async with aclosing(chat.say("Again", max_tokens=500, ignore_eos=True)) as chunks:
            async for _ in chunks:
                break
        assert chat.messages == before
        answer = await chat.ask("Again")
        assert chat.messages[len(before) :] == [
            {"role": "user", "content": "Again"},
            {"role": "assistant", "content": answer.text},
        ]


async def test_two_turns_at_once_are_refused(stack: Stack) -> None:
    async with outrider.Client(stack.address) as client:
        chat = outrider.Chat(client, temperature=0, max_tokens=9)
        answers = await asyncio.gather(chat.ask("Hello"), chat.ask("Hi"), return_exceptions=True)
        (refused,) = [answer for answer in answers if isinstance(answer, BaseException)]
        assert isinstance(refused, RuntimeError)
        assert "one turn at a time" in str(refused)
        assert [message["role"] for message in chat.messages] == ["user", "assistant"]


@pytest.mark.parametrize("options", [{"n": 2}, {"n": 0}])
async def test_several_choices_are_refused(stack: Stack, options: dict[str, int]) -> None:
    async with outrider.Client(stack.address) as client:
        with pytest.raises(InvalidArgument, match="leave out n"):
            outrider.Chat(client, **options)  # type: ignore[misc]
        with pytest.raises(InvalidArgument, match="leave out n"):
            await outrider.Chat(client).ask("Hello", **options)  # type: ignore[misc]


async def test_the_blocking_chat_says_the_same(stack: Stack) -> None:
    def talk() -> tuple[str, outrider.Completion, list[object]]:
        with outrider.SyncClient(stack.address) as client:
            chat = outrider.SyncChat(client, system="Be_brief.", temperature=0, max_tokens=9)
            first = "".join(chunk.text for chunk in chat.say("Hello"))
            return first, chat.ask("And_now?"), list(chat.messages)

    first, second, messages = await asyncio.to_thread(talk)
    async with outrider.Client(stack.address) as client:
        chat = outrider.Chat(client, system="Be_brief.", temperature=0, max_tokens=9)
        assert (await chat.ask("Hello")).text == first
        assert (await chat.ask("And_now?")).token_ids == second.token_ids
        assert chat.messages == messages
