"""Over real gRPC: a worker does not compute twice what it has; a draft worker turns nobody away for want of blocks."""

import asyncio

from session_clients import (
    advance_request,
    ask,
    decode_request,
    draft_opening,
    open_request,
    read,
    running_draft,
    running_target,
    target_opening,
)

from outrider.sampling.params import AcceptanceRule, SamplingParams

PROMPT = [(5 * i + i // 3) % 16 for i in range(40)]


async def decoded_ids(call, ids, count):
    await call.write(decode_request(ids, count))
    return [(await read(call)).verdict.committed_ids[0] for _ in range(count)]


async def test_a_reopened_session_and_a_next_turn_find_what_was_committed():
    async with running_target(block_size=8) as worker:
        call = worker.target.Session()
        verdict = (await ask(call, open_request(target_opening(PROMPT)))).verdict
        assert verdict.num_cached_tokens == 0
        ids = [*PROMPT, *verdict.committed_ids]
        ids += await decoded_ids(call, ids, 12)

        again = (await ask(call, open_request(target_opening(PROMPT, epoch=2, committed_ids=ids[40:])))).verdict
        assert again.num_cached_tokens == 40  # of the prompt; the answer so far was found as well
        call.cancel()

        turn = [*ids, 1, 2, 3]
        other = worker.target.Session()
        verdict = (await ask(other, open_request(target_opening(turn)))).verdict
        assert verdict.num_cached_tokens == 48  # 52 of the 56 ids are in the cache, 6 blocks of them whole
        stranger = worker.target.Session()
        fresh = (await ask(stranger, open_request(target_opening(turn, tenant="other")))).verdict
        assert fresh.num_cached_tokens == 0
        assert fresh.committed_ids == verdict.committed_ids
        for session in (other, stranger):
            session.cancel()
        await worker.wait_idle()


async def test_more_draft_sessions_than_blocks_all_draft_the_same_as_with_room():
    """8 sessions of 5 blocks each on 6 blocks: a session loses its blocks while it is idle, and computes them again."""

    async def texts(blocks):
        async with running_draft(f"toy:vocab=16,order=0,seed=1,blocks={blocks}", block_size=16) as worker:
            calls = [worker.draft.Session() for _ in range(8)]
            prompts = [[index, *PROMPT] for index in range(8)]
            for call, prompt in zip(calls, prompts, strict=True):
                await ask(call, open_request(draft_opening(prompt)))
            drafted = [[] for _ in calls]
            for _ in range(3):
                assert (await worker.describe()).capacity.num_waiting == 0

                async def advance(index):
                    ids, new = prompts[index], drafted[index][-1] if drafted[index] else []
                    proposal = (await ask(calls[index], advance_request(ids, new, 4))).proposal.proposal
                    drafted[index].append(list(proposal.token_ids))
                    prompts[index] = [*ids, *proposal.token_ids]

                await asyncio.gather(*(advance(index) for index in range(8)))
            assert all(len(tokens) == 4 for rounds in drafted for tokens in rounds)
            for call in calls:
                call.cancel()
            await worker.wait_idle()
            return drafted

    assert await texts(6) == await texts(100)


async def test_preempted_streams_give_the_text_they_give_alone():
    """6 streams that grow to 5 blocks each, on 12: whoever came last loses its blocks and is computed again."""
    params = SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=3)

    async def texts(blocks, at_once):
        model = f"toy:vocab=16,order=0,seed=1,blocks={blocks}"
        async with running_target(model, block_size=16, cache_overcommit=4) as worker:

            async def opened(index):
                call, prompt = worker.target.Session(), [index, *PROMPT[:20]]
                opening = target_opening(prompt, max_tokens=58, sampling=params)
                return call, [*prompt, *(await ask(call, open_request(opening))).verdict.committed_ids]

            async def text(call, ids):
                answer = [*ids, *(await decoded_ids(call, ids, 57))]
                call.cancel()
                return answer

            if at_once:
                streams = [await opened(index) for index in range(6)]  # all blocks are taken, all streams go on
                answers = await asyncio.gather(*(text(*stream) for stream in streams))
            else:
                answers = [await text(*(await opened(index))) for index in range(6)]
            await worker.wait_idle()
            return answers

    assert await texts(12, at_once=True) == await texts(100, at_once=False)
