"""With a seed the text is the same whatever was drafted, and however much."""

import asyncio
import os

import outrider


async def main() -> None:
    async with outrider.Client("localhost:50050", token=os.getenv("OUTRIDER_TOKEN")) as client:
        asked = {"temperature": 0.8, "seed": 7, "max_tokens": 24}
        gammas = (0, 2, 5)
        answers = await asyncio.gather(
            *(client.complete("Once upon a time", num_speculative_tokens=gamma, **asked) for gamma in gammas)
        )
    for gamma, answer in zip(gammas, answers, strict=True):
        print(f"{gamma} drafts a round, {answer.speculation.num_steps} steps: {answer.text!r}")
    print(f"{len({answer.token_ids for answer in answers})} different text")


asyncio.run(main())
