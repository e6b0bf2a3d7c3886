"""What counts must agree on after any run: every drafter, rule and γ, texts that are stopped or left, a target lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest
from accounting import num_accounted
from conftest import scaled
from ports import free_port
from scraping import by_label, scrape, total
from stack import in_process_stack
from waiting import until

from outrider import Chunk, Client, Complete

TOY = "toy:vocab=16,seed=1"
DRAFTERS = ("auto", "model", "tree", "lookup", "suffix", "good", "good-tree")


def asked(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Requests of all kinds."""
    for number in range(count):
        options: dict[str, Any] = {
            "max_tokens": rng.randrange(1, 40),
            "drafter": DRAFTERS[number % len(DRAFTERS)],
            "num_speculative_tokens": rng.choice((None, 0, 1, 3, 6)),
            "ignore_eos": True,
        }
        options |= rng.choice(({"temperature": 0.0}, *({"acceptance": rule} for rule in ("token", "block", "coupled"))))
        options |= rng.choice(({}, {"n": 2}, {"stop_token_ids": [3]}, {"seed": 1}, {"regex": "[!-*]{2,30}"}))
        yield options | ({"stop_token_ids": [15]} if "regex" in options else {})


async def one(client: Client, options: dict[str, Any], leave_after: int | None) -> tuple[int, list[Complete]]:
    """How many ids came, and the ends. leave_after: so many chunks."""
    num_ids, num_chunks, ends = 0, 0, []
    async with aclosing(client.generate([1, 2, 3, 1, 2], **options)) as events:
        async for event in events:
            if isinstance(event, Complete):
                ends.append(event)
            elif isinstance(event, Chunk):
                num_ids += len(event.token_ids)
                num_chunks += 1
                if num_chunks == leave_after:
                    break
    return num_ids, ends


@pytest.mark.parametrize("loses_a_target", [False, True])
async def test_they_agree_after_any_run(loses_a_target: bool) -> None:
    rng, port = random.Random(loses_a_target), free_port()
    to_leave = list(asked(rng, 7))
    more = {"draft_worker": {"drafters": ("model", "tree")}, "target_worker": {"heads": ("good=toy:agreement=0.9",)}}
    target = f"{TOY},pass_ms=5" if loses_a_target else TOY
    async with in_process_stack(
        target, f"{TOY},agreement=0.8", coordinator={"metrics_port": port}, num_targets=2,
        worker={"drain_grace_s": 0.0}, **more,
    ) as stack, Client(stack.address, timeout_s=120) as client:  # fmt: skip
        whole = [one(client, options, None) for options in asked(rng, scaled(280, 28))]
        left = [one(client, {**options, "max_tokens": 400}, 2) for options in to_leave]
        running = asyncio.gather(*whole, *left)
        if loses_a_target:
            lost = stack.target[0]
            while not any(w.address == lost.address and w.num_sessions for w in (await client.server_info()).workers):
                await asyncio.sleep(0.005)
            await lost.close()
        done = await running

        async def is_over() -> bool:
            return total(await scrape(port), "num_requests_running") == 0

        await until(is_over)
        samples = await scrape(port)
    ends = [end for _, several in done for end in several]
    for num_ids, several in done[: len(whole)]:
        assert num_ids == sum(end.usage.completion_tokens for end in several), "usage is what was delivered"
    for end in ends:
        told = end.speculation
        assert num_accounted(told) == end.usage.completion_tokens
        assert 0.0 <= told.draft_acceptance_rate <= 1.0
        assert sum(told.acceptance_histogram) == told.num_spec_steps

    by_origin = by_label(samples, "generation_tokens_by_origin_total", "origin")
    emitted = total(samples, "generation_tokens_total")
    assert emitted == sum(by_origin.values()) >= sum(num_ids for num_ids, _ in done)
    num_drafted = total(samples, "spec_decode_num_draft_tokens_total")
    assert 0 < by_origin["accepted"] <= num_drafted, "INCONCLUSIVE"
    assert by_origin["accepted"] == total(samples, "spec_decode_num_accepted_tokens_total")
    accepted_at = by_label(samples, "spec_decode_num_accepted_tokens_per_pos_total", "position")
    drafted_at = by_label(samples, "spec_decode_num_draft_tokens_per_pos_total", "position")
    assert sum(accepted_at.values()) == by_origin["accepted"]
    assert sum(drafted_at.values()) == num_drafted
    assert all(accepted_at[position] <= drafted_at[position] for position in drafted_at)
    num_steps = total(samples, "spec_decode_num_drafts_total")
    assert total(samples, "spec_decode_accepted_tokens_per_draft_count") == num_steps
    assert total(samples, "spec_decode_accepted_tokens_per_draft_sum") == by_origin["accepted"]
    assert total(samples, "spec_decode_draft_tokens_per_round_sum") == num_drafted
    # one that was left may have been complete by then
    assert len(ends) <= total(samples, "request_success_total") <= len(ends) + sum(o.get("n", 1) for o in to_leave)
    if loses_a_target:
        assert total(samples, "target_recoveries_total") > 0, "INCONCLUSIVE"
