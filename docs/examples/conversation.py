"""A conversation that keeps its turns."""

import asyncio
import os

import outrider


async def main() -> None:
    async with outrider.Client("localhost:50050", token=os.getenv("OUTRIDER_TOKEN")) as client:
        chat = outrider.Chat(client, system="Answer in one line.", temperature=0.7, max_tokens=24)
        async for chunk in chat.say("Name a river."):
            print(chunk.text, end="", flush=True)
        answer = await chat.ask("Where does it end?", temperature=0)
        print(f"\n{answer.text}\n{answer.usage.cached_tokens} prompt tokens were known from the turn before")
        print(f"{len(chat.messages)} messages so far")


asyncio.run(main())
