"""Heads on a draft worker, through all services: the target's states go there by way of the coordinator."""

import asyncio
import dataclasses
from collections import Counter

import pytest
from stack import in_process_stack, start
from test_coordinator_faults import AT_ONCE, collect, completion, ids
from test_coordinator_generate import no_sessions
from waiting import wait_for_drafts

import draft_worker.server as draft_server
from coordinator import drafting, features
from outrider.client import Client
from outrider.errors import InvalidArgument
from outrider.lm.toy_head import STATES
from outrider.serving.channel import open_channel
from outrider.serving.worker_calls import describe
from outrider.settings import DraftWorkerSettings
from target_worker import sent_features

TARGET, HEAD = "toy:vocab=48,seed=5", "toy:agreement=0.9"
SENDS = {"features": ("2", "-1")}
PROMPT = [1 + i % 40 for i in range(50)]
RULES = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.9, "seed": 11, "repetition_penalty": 1.2},
}


def head_stack(target=TARGET, head=HEAD, *, draft_worker=None, target_worker=None, **values):
    about = {"head": head, "target": target, **(draft_worker or {})}
    return in_process_stack(target, "", draft_worker=about, target_worker={**SENDS, **(target_worker or {})}, **values)


async def complete(client, prompt=PROMPT, gamma=4, drafter="toy-head", **options):
    return await client.complete(prompt, num_speculative_tokens=gamma, drafter=drafter, **{"max_tokens": 60, **options})


@pytest.mark.parametrize("rule", RULES)
async def test_text_is_plain_text_and_drafts_are_those_of_a_model_of_the_same_table(
    rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several streams, the later ones with their prompt in the target's prefix cache."""
    wait_for_drafts(monkeypatch)
    async with head_stack() as stack, in_process_stack(TARGET, TARGET + ",agreement=0.9") as other:
        async with Client(stack.address) as client, Client(other.address) as reference:
            assert "toy-head" in (await client.model_info()).drafters
            plain = await complete(client, gamma=0, drafter="auto", **RULES[rule])
            model = await complete(reference, drafter="model", **RULES[rule])
            answers = [await complete(client, **RULES[rule])]
            answers += await asyncio.gather(*(complete(client, **RULES[rule]) for _ in range(3)))
            for answer in answers:
                spec = answer.speculation
                assert answer.token_ids == plain.token_ids == model.token_ids
                assert spec.num_accepted_draft_tokens > 0, "INCONCLUSIVE"
                assert spec.drafters == ("toy-head",)
                assert (spec.num_draft_failures, spec.num_dropped_proposals) == (0, 0)
                assert spec.gamma_histogram == model.speculation.gamma_histogram
                assert spec.acceptance_histogram == model.speculation.acceptance_histogram
                assert spec.num_feature_bytes >= 2 * (len(PROMPT) + 40) * 2 * 2 * 8
            assert answers[-1].usage.cached_tokens > 0, "INCONCLUSIVE: no prefix hit"
            assert plain.speculation.num_feature_bytes == model.speculation.num_feature_bytes == 0
            await no_sessions(client)


async def test_a_long_prompt_goes_in_parts_while_rounds_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "MAX_BESIDE_BYTES", 1000)
    monkeypatch.setattr(sent_features, "MAX_MESSAGE_BYTES", 700)
    prompt = [1 + i * i % 40 for i in range(600)]
    async with head_stack() as stack, Client(stack.address) as client:
        plain = await complete(client, prompt, 0, "auto", temperature=0)
        answer = await complete(client, prompt, temperature=0, report_steps=True)
        assert answer.token_ids == plain.token_ids
        assert answer.speculation.num_accepted_draft_tokens > 10, "INCONCLUSIVE"
        reasons = {chunk.step.reason for chunk in answer.chunks if chunk.step is not None}
        assert "draft-features-late" in reasons
        assert answer.speculation.num_draft_failures == 0


@pytest.mark.parametrize("rule", RULES)
async def test_the_draft_worker_that_comes_back_gets_all_states_again(rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "REOPEN_AFTER_S", 0.05)
    monkeypatch.setattr(drafting, "MAX_REOPEN_AFTER_S", 0.1)
    target = TARGET + ",pass_ms=1"
    async with head_stack(target, draft_worker=AT_ONCE) as stack, Client(stack.address) as client:
        port = stack.draft[0].port

        async def restart() -> None:
            await stack.draft[0].close()
            settings = DraftWorkerSettings(
                model="", head=HEAD, target=target, port=port, log_level="warning", drain_grace_s=0
            )
            stack.draft[0] = await start(draft_server.serve, settings)

        request = {**RULES[rule], "max_tokens": 900, "num_speculative_tokens": 2, "drafter": "toy-head"}
        whole = await client.complete(PROMPT, **{**request, "num_speculative_tokens": 0})
        events = await collect(client.generate(PROMPT, report_steps=True, **request), 30, restart)
        assert ids(events) == whole.token_ids
        drafted = [event.step.num_draft_tokens > 0 for event in events if getattr(event, "step", None) is not None]
        lost = drafted.index(False, drafted.index(True))
        assert any(drafted[lost:]), "drafting must begin again"
        assert completion(events).speculation.num_draft_failures >= 1
        await stack.draft[0].close()


async def test_another_target_goes_on_from_where_the_first_one_ended() -> None:
    target = TARGET + ",pass_ms=2"
    async with head_stack(target, target_worker=AT_ONCE, num_targets=2) as stack, Client(stack.address) as client:
        request = {"temperature": 1.0, "seed": 9, "max_tokens": 500, "num_speculative_tokens": 3}
        whole = await client.complete(PROMPT, **{**request, "num_speculative_tokens": 0})

        async def kill_the_busy_one() -> None:
            workers = (await client.server_info()).workers
            busy = next(w.address for w in workers if w.role == "target" and w.num_sessions)
            await next(server for server in stack.target if server.address == busy).close()

        stream = client.generate(PROMPT, drafter="toy-head", report_steps=True, **request)
        events = await collect(stream, 40, kill_the_busy_one)
        assert ids(events) == whole.token_ids
        steps = [event.step for event in events if getattr(event, "step", None) is not None]
        assert all(any(step.num_draft_tokens for step in part) for part in (steps[:8], steps[-8:])), "INCONCLUSIVE"
        assert completion(events).speculation.num_draft_failures == 0


async def test_sessions_that_lose_their_states_to_others_get_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a stream and a half at the draft worker, and for few at the target."""
    wait_for_drafts(monkeypatch)
    draft_worker = {"kv_cache_bytes": 10 * 16 * (4096 + 32)}
    target_worker = {"kv_cache_bytes": 14 * 16 * 72, "cache_overcommit": 8.0}
    async with head_stack(draft_worker=draft_worker, target_worker=target_worker) as stack:
        async with Client(stack.address) as client:
            prompts = [[1 + i, *PROMPT] for i in range(4)]
            plain = [await complete(client, prompt, 0, "auto", temperature=0) for prompt in prompts]
            answers = await asyncio.gather(*(complete(client, prompt, temperature=0) for prompt in prompts))
            assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
            assert all(a.speculation.num_accepted_draft_tokens > 0 for a in answers), "INCONCLUSIVE"
            assert all(a.speculation.num_draft_failures == 0 for a in answers)
            for server in (*stack.draft, *stack.target):
                async with open_channel(server.address) as channel:
                    told = (await describe(channel, without_tokenizer=True, timeout_s=10)).cache_counters
                assert told.num_preemptions + told.num_idle_evictions > 0, "INCONCLUSIVE"


SPOILT = {
    "cut": lambda features: dataclasses.replace(features, rows=features.rows[:-1]),
    "gap": lambda features: dataclasses.replace(features, start=features.start + 1),
    "nan": lambda features: dataclasses.replace(features, rows=b"\xff\x7f" * (len(features.rows) // 2)),
    "none": lambda features: sent_features.NO_FEATURES,
    "too many": lambda features: dataclasses.replace(features, rows=100 * features.rows),
    "of others": lambda features: dataclasses.replace(features, rows=features.rows[::-1]),
}


@pytest.mark.parametrize("how", SPOILT)
async def test_spoilt_states_cost_speed_only(how, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fifth time, and every time."""
    taken, calls, every = sent_features.SentFeatures.take, Counter(), 1000

    def spoil(self, sequence, num_tokens):
        found = taken(self, sequence, num_tokens)
        calls[every] += bool(found.rows)
        return SPOILT[how](found) if found.rows and calls[every] % every == 0 else found

    monkeypatch.setattr(sent_features.SentFeatures, "take", spoil)
    monkeypatch.setattr(drafting, "REOPEN_AFTER_S", 0.01)
    async with head_stack() as stack, Client(stack.address) as client:
        plain = await complete(client, gamma=0, drafter="auto", temperature=0)
        for every in (5, 1):
            answer = await complete(client, temperature=0)
            assert answer.token_ids == plain.token_ids
            assert calls[every] > 0, "INCONCLUSIVE"
            assert (answer.speculation.num_accepted_draft_tokens > 0) == (every == 5)
        await no_sessions(client)


async def test_a_head_is_offered_only_where_the_target_sends_what_it_reads() -> None:
    for values in ({"target_worker": {"features": ("2",)}}, {"draft_worker": {"target": TARGET + ",scale=3"}}):
        async with head_stack(**values) as stack, Client(stack.address) as client:
            assert "toy-head" not in (await client.model_info()).drafters
            worker = next(w for w in (await client.server_info()).workers if w.role == "draft")
            assert not worker.healthy
            assert ("NO_FEATURES" if "target_worker" in values else "WRONG_TARGET") in worker.detail
            answer = await complete(client, drafter="auto", temperature=0)
            assert answer.speculation.num_feature_bytes == 0
            with pytest.raises(InvalidArgument, match="drafter"):
                await complete(client)


async def test_a_stream_that_drafts_otherwise_gets_no_states() -> None:
    async with head_stack() as stack, Client(stack.address) as client:
        answer = await complete(client, [1, 2, 3] * 20, drafter="lookup", temperature=0)
        assert answer.speculation.num_feature_bytes == 0
        assert {*STATES} == {2, -1}
    async with head_stack(target_worker={"heads": ("toy:agreement=0.8",)}) as stack, Client(stack.address) as client:
        plain = await complete(client, gamma=0, drafter="auto", temperature=0)
        answer = await complete(client, drafter="toy", temperature=0)
        assert answer.speculation.drafters == ("toy",)
        both = await complete(client, drafter="auto", gamma=None, temperature=0, max_tokens=300)
        assert plain.token_ids == answer.token_ids == both.token_ids[:60]
        assert both.speculation.num_draft_tokens > 0


async def test_beside_a_draft_model_only_streams_of_the_head_get_states() -> None:
    async with head_stack() as stack, Client(stack.address) as client:
        settings = DraftWorkerSettings(
            model=TARGET + ",agreement=0.9", port=0, coordinators=(stack.address,), log_level="warning", drain_grace_s=0
        )
        other = await start(draft_server.serve, settings)
        try:
            async with asyncio.timeout(20):
                while {"model", "toy-head"} - {*(await client.model_info()).drafters}:
                    await asyncio.sleep(0.02)
            for drafter in ("model", "toy-head"):
                answers = await asyncio.gather(
                    *(complete(client, drafter=drafter, temperature=0, max_tokens=200) for _ in range(2))
                )
                assert all(a.speculation.drafters == (drafter,) for a in answers), "INCONCLUSIVE"
                assert all((a.speculation.num_feature_bytes > 0) == (drafter == "toy-head") for a in answers)
        finally:
            await other.close()
