"""Stream the answer to a conversation, with what each piece is worth."""

import asyncio
import os

import outrider


async def main() -> None:
    async with outrider.Client("localhost:50050", token=os.getenv("OUTRIDER_TOKEN")) as client:
        messages = [{"role": "user", "content": "Name three rivers."}]
        async for event in client.chat(messages, temperature=0.7, max_tokens=24, seed=7):
            match event:
                case outrider.Chunk(text=text):
                    print(text, end="", flush=True)
                case outrider.Complete(finish_reason=reason, speculation=stats):
                    print(f"\n{reason}: {stats.tokens_per_step:.2f} tokens a step")


asyncio.run(main())
