"""Everything at once, over a way to the target that takes time: rounds before their verdicts, branches, trees, guesses,
resumed texts, any cut. Text, usage, logprobs and statistics are those of plain decoding, and end at one token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from benchmarks.delay import delayed
from conftest import scaled
from stack import start
from test_one_end import VOCAB, check_identities, check_text, model, random_options

import coordinator.server
import draft_worker.server
import outrider
import target_worker.server
from outrider.settings import CoordinatorSettings, DraftWorkerSettings, TargetWorkerSettings

COMMON = {"port": 0, "drain_grace_s": 2.0, "log_level": "error"}
DRAFTERS = ({}, {"drafter": "model"}, {"drafter": "tree"}, {"drafter": "good"}, {"drafter": "good-tree"})
CHAIN = DRAFTERS[1]


@pytest.fixture
async def client() -> AsyncIterator[outrider.Client]:
    async with AsyncExitStack() as cleanup:
        settings = TargetWorkerSettings(model="given", heads=("good=toy:agreement=0.9",), **COMMON)
        target = await start(target_worker.server.serve, settings, loaded=model(1.0))
        cleanup.push_async_callback(target.close)
        address = await cleanup.enter_async_context(delayed(target.address, 4.0))
        draft_settings = DraftWorkerSettings(model="given", drafters=("model", "tree"), **COMMON)
        drafter = await start(draft_worker.server.serve, draft_settings, loaded=model(0.95))
        cleanup.push_async_callback(drafter.close)
        server = await start(
            coordinator.server.serve,
            CoordinatorSettings(
                target_workers=(address,), draft_workers=(drafter.address,), draft_ahead="on", peer_timeout_s=30.0,
                **COMMON,
            ),
        )  # fmt: skip
        cleanup.push_async_callback(server.close)
        yield await cleanup.enter_async_context(outrider.Client(server.address))


async def test_the_text_is_as_plain_decodings_whatever_is_on_its_way(client: outrider.Client) -> None:
    rng, counts = random.Random(5), Counter[str]()
    for number in range(scaled(60, at_least=5)):
        options = random_options(rng)
        options["min_p"] = rng.choice((0.0, 0.05))
        if rng.random() < 0.7:  # long enough for the way to be known as a long one
            options |= {"max_tokens": 60, "min_tokens": rng.choice((0, 40)), "stop": [], "ignore_eos": True}
            options.pop("stop_token_ids", None)
        prompt = [rng.randrange(VOCAB - 2) for _ in range(3)]
        plain = await client.complete(prompt, num_speculative_tokens=0, **options)
        cut = rng.randrange(len(plain.token_ids) + 1)
        for drafting in (CHAIN, rng.choice(DRAFTERS)):
            gamma = {"num_speculative_tokens": rng.choice((1, 2, 5))} if rng.random() < 0.7 else {}
            for resumed in ((), plain.token_ids[:cut]):
                answer = await client.complete(
                    prompt, resume_token_ids=resumed, prompt_hash=plain.started.prompt_hash,
                    acceptance="coupled", **gamma, **drafting, **options,
                )  # fmt: skip
                what = (number, len(resumed), drafting, gamma, options)
                assert answer.token_ids == plain.token_ids[len(resumed) :], what
                assert (answer.finish_reason, answer.matched_stop) == (plain.finish_reason, plain.matched_stop), what
                if answer.logprobs is not None:
                    assert plain.logprobs is not None
                    assert answer.logprobs.token_logprobs == plain.logprobs.token_logprobs[len(resumed) :], what
                if not resumed:
                    assert answer.text == plain.text, what
                    check_text(answer.text, answer.token_ids, answer, options)
                check_identities(answer, resumed, options)
                told = answer.speculation
                counts["drafted"] += told.num_draft_tokens
                counts["sent"] += told.num_pipelined_verifies
                counts["dropped"] += told.num_dropped_verifies
                counts["hits"] += told.num_branch_hits
                counts["failed"] += told.num_draft_failures
                counts.update(told.drafters)
    assert not counts["failed"], counts
    assert counts["drafted"] > 0
    assert counts["sent"] > counts["dropped"] > 0, f"INCONCLUSIVE: {counts}"
