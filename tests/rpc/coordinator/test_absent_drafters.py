"""A request may name a drafter that is not there now: what it costs is speed, never the text."""

import pytest
from ports import free_port
from stack import in_process_stack, start

import draft_worker.server
import outrider
from outrider.errors import InvalidArgument
from outrider.settings import DraftWorkerSettings

TARGET = "toy:vocab=24,seed=5"
DRAFT = "toy:vocab=24,seed=5,agreement=0.9"
OPTIONS = {"temperature": 0.0, "max_tokens": 60, "num_speculative_tokens": 3}


async def test_a_draft_worker_that_has_never_been_up_may_be_asked_for():
    port = free_port()
    listed = {"draft_workers": (f"127.0.0.1:{port}",)}
    async with in_process_stack(TARGET, None, coordinator=listed) as stack, outrider.Client(stack.address) as client:
        plain = await client.complete([1, 2], temperature=0.0, max_tokens=60, num_speculative_tokens=0)
        answer = await client.complete([1, 2], drafter="model", **OPTIONS)
        assert answer.token_ids == plain.token_ids
        assert answer.speculation.num_draft_tokens == 0
        assert answer.started.drafter == "model"
        worker = await start(draft_worker.server.serve, DraftWorkerSettings(model=DRAFT, port=port))
        try:
            num_drafted = 0
            while not num_drafted:  # as soon as the coordinator has found it
                answer = await client.complete([1, 2], drafter="model", **OPTIONS)
                assert answer.token_ids == plain.token_ids
                num_drafted = answer.speculation.num_draft_tokens
            with pytest.raises(InvalidArgument, match="one of auto, model"):
                await client.complete([1, 2], drafter="modle", **OPTIONS)
        finally:
            await worker.close()


async def test_a_text_goes_on_where_its_drafter_is_not_known():
    async with in_process_stack(TARGET, None) as stack, outrider.Client(stack.address) as client:
        whole = await client.complete([1, 2], **OPTIONS)
        with pytest.raises(InvalidArgument, match="no draft worker is connected"):
            await client.complete([1, 2], drafter="model", **OPTIONS)
        begun = {"prompt_hash": whole.started.prompt_hash, "seed": whole.started.seed}
        for num_tokens in (0, 1, 25):
            given = list(whole.token_ids[:num_tokens])
            rest = await client.complete([1, 2], drafter="model", resume_token_ids=given, **begun, **OPTIONS)
            assert (*given, *rest.token_ids) == whole.token_ids
