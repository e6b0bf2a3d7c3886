"""Streams share passes: 16 at once need far fewer passes of the target per token than one alone."""

import asyncio
import time

import pytest
from stack import in_process_stack

import outrider
from outrider.lm.toy import load_toy

NUM_STREAMS, MAX_TOKENS = 16, 40


def counted(text):
    """A toy model that counts its passes."""
    loaded = load_toy(text)
    forward, passes = loaded.model.forward, []

    def counting_forward(batch):
        passes.append(batch.num_rows)
        return forward(batch)

    loaded.model.forward = counting_forward
    return loaded, passes


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0, 3])
async def test_sixteen_streams_share_passes(gamma):
    # long passes: on a busy machine streams would miss short ones that they could have shared
    target, passes = counted("toy:vocab=24,seed=5,pass_ms=30")
    draft, _ = counted("toy:vocab=24,seed=5,agreement=0.9,pass_ms=2")

    async def run(client, num_streams):
        passes.clear()
        start = time.perf_counter()
        answers = await asyncio.gather(
            *(
                client.complete(
                    [i, 3], temperature=0.0, max_tokens=MAX_TOKENS, num_speculative_tokens=gamma, drafter="model"
                )
                for i in range(num_streams)
            )
        )
        num_tokens = sum(len(a.token_ids) for a in answers)
        assert num_tokens == num_streams * MAX_TOKENS
        assert gamma == 0 or sum(a.speculation.num_draft_tokens for a in answers) > 0, "INCONCLUSIVE"
        return num_tokens / len(passes), num_tokens / (time.perf_counter() - start)

    async with in_process_stack(target, draft) as stack, outrider.Client(stack.address) as client:
        alone_per_pass, alone_rate = await run(client, 1)
        together_per_pass, together_rate = await run(client, NUM_STREAMS)
    print(f"γ={gamma}: tokens/s {alone_rate:.0f} alone, {together_rate:.0f} with {NUM_STREAMS} streams")
    assert together_per_pass > 3 * alone_per_pass
