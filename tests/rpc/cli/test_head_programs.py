"""A head on a draft worker, each service a process of its own as users start it; one of them is killed."""

from __future__ import annotations

import re
from contextlib import AsyncExitStack

from test_stack import command, read_until

from outrider import results
from outrider.client import Client

TARGET = "toy:vocab=48,seed=5,pass_ms=2"


async def test_a_stream_survives_its_draft_worker_and_its_text_does_not_change() -> None:
    async with AsyncExitStack() as cleanup:

        async def started(role: str, *flags: str):
            process = await cleanup.enter_async_context(command(role, "--port=0", "--log-level=warning", *flags))
            (address,) = re.findall(r"ready on (\S+)", await read_until(process.stdout, "ready on"))
            return process, address

        _, target = await started("target-worker", f"--model={TARGET}", "--features=2,-1")
        draft, address = await started("draft-worker", "--head=toy:agreement=0.9", f"--target={TARGET}")
        _, coordinator = await started("coordinator", f"--target-workers={target}", f"--draft-workers={address}")
        async with Client(coordinator) as client:
            request = {"temperature": 0, "max_tokens": 600, "num_speculative_tokens": 3}
            plain = await client.complete([1, 2, 3], **{**request, "num_speculative_tokens": 0})
            ids: list[int] = []
            async for event in client.generate([1, 2, 3], drafter="toy-head", **request):
                if isinstance(event, results.Chunk):
                    ids += event.token_ids
                    if len(ids) > 60 and draft.returncode is None:
                        draft.kill()
                        await draft.wait()
                if isinstance(event, results.Complete):
                    spec = event.speculation
            assert tuple(ids) == plain.token_ids
            assert spec.num_accepted_draft_tokens > 0, "INCONCLUSIVE"
            assert spec.num_draft_failures >= 1
            assert spec.num_feature_bytes > 0
