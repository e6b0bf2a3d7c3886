"""Heads of every kind inside a target worker, from checkpoint files to text, through the real services."""

import asyncio
import dataclasses
import importlib

import pytest
from session_clients import ask, decode_request, open_request, read, running_target, target_opening, verify_request
from stack import in_process_stack

torch = pytest.importorskip("torch")

import tiny_heads  # noqa: E402

from coordinator.gamma.plans import Objective  # noqa: E402
from outrider.client import Client  # noqa: E402
from outrider.errors import FailedPrecondition, InvalidArgument  # noqa: E402
from outrider.serving.channel import open_channel  # noqa: E402
from outrider.serving.worker_calls import describe  # noqa: E402

KINDS = ("eagle", "eagle3", "medusa")
PROMPT = [5, 6, 7]
RULES = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 0.9, "seed": 11},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny_heads.write_target(tmp_path_factory.mktemp("heads") / "target")


@pytest.fixture(scope="module")
def heads(target):
    folder = target.parent
    few_ids = [token_id for token_id in range(tiny_heads.VOCAB) if token_id % 7]
    return (
        str(tiny_heads.write_eagle(folder / "eagle")),
        str(tiny_heads.write_eagle3(folder / "eagle3", target, few_ids)),
        str(tiny_heads.write_medusa(folder / "medusa", target)),
    )


def worker_settings(target, heads, **changes):
    return {"model": str(target), "heads": heads, "num_threads": 1, **changes}


async def complete(client, prompt, drafter, gamma, **options):
    return await client.complete(
        prompt, max_tokens=40, ignore_eos=True, drafter=drafter, num_speculative_tokens=gamma, **options
    )


async def test_text_is_plain_text_and_the_description_tells_the_heads(target, heads):
    """A second request finds the prompt in the prefix cache, states included."""
    async with in_process_stack(str(target), None, target_worker=worker_settings(target, heads)) as stack:
        async with open_channel(stack.target[0].address) as channel:
            told = (await describe(channel, without_tokenizer=True, timeout_s=10)).target_drafters
        assert [drafter.name for drafter in told] == [drafter.kind for drafter in told] == list(KINDS)
        for drafter in told:
            assert (drafter.agreement or 0.0) > 0.4
            assert drafter.num_probe_tokens >= 200
            assert drafter.num_parameters > 0 < drafter.first_draft_ms
            assert drafter.warning == ""
            assert drafter.draws_trees
            assert len(drafter.depth_agreement) == 3
            assert drafter.depth_agreement[0] == drafter.agreement
            assert 0.2 < drafter.rank_agreement[0] < sum(drafter.rank_agreement) <= 1
        assert [drafter.max_draft_tokens for drafter in told] == [0, 0, 3]
        long_prompt = [5 + i % 40 for i in range(100)]
        async with Client(stack.address) as client:
            for rule, prompt in (("greedy", PROMPT), ("coupled", PROMPT), ("greedy", long_prompt)):
                plain = await complete(client, prompt, "auto", 0, **RULES[rule])
                assert plain.speculation.num_draft_tokens == 0
                for kind in KINDS:
                    answer = await complete(client, prompt, kind, 4, **RULES[rule])
                    assert answer.token_ids == plain.token_ids
                    spec = answer.speculation
                    assert spec.num_draft_tokens >= spec.num_accepted_draft_tokens > 0, "INCONCLUSIVE"
                    assert spec.drafters == (kind,)
                    if prompt is long_prompt:
                        assert answer.usage.cached_tokens > 0, "INCONCLUSIVE: no prefix hit"


async def test_text_is_plain_text_whatever_tree_they_draw(target, heads):
    """Of a fixed number of nodes and of those that pay; more is accepted a round than of chains of as many levels."""
    settings = worker_settings(target, heads)
    async with in_process_stack(str(target), None, target_worker=settings) as stack, Client(stack.address) as client:
        for rule in RULES:
            plain = await complete(client, PROMPT, "auto", 0, **RULES[rule])
            for kind in KINDS:
                for gamma in (7, None):
                    answer = await complete(client, PROMPT, f"{kind}-tree", gamma, report_steps=True, **RULES[rule])
                    assert answer.token_ids == plain.token_ids
                    spec = answer.speculation
                    assert spec.num_draft_tokens >= spec.num_accepted_draft_tokens
                    assert set(spec.drafters) <= {f"{kind}-tree"}
                    steps = [chunk.step for chunk in answer.chunks if chunk.step.num_draft_tokens]
                    assert all(step.num_draft_tokens <= step.num_draft_tokens_wanted for step in steps)
                    if gamma is None:
                        continue  # whether drafts pay is measured: on a busy machine none may
                    assert spec.num_accepted_draft_tokens > 0, "INCONCLUSIVE"
                    assert max(step.num_draft_tokens for step in steps) > gamma - 3, "INCONCLUSIVE: no wide tree"


@pytest.mark.parametrize("rule", ["token", "block"])
async def test_sampled_trees_are_drawn_anew_as_they_were(target, heads, rule, monkeypatch):
    """The same seed gives the same text: every draft and coin is a function of the prefix, whatever ran before. Of
    trees of one shape: which one pays follows from what passes take, and a sampled text from its tree."""
    shape = (-1, -1, -1, 0, 0, 1)
    monkeypatch.setattr(Objective, "fixed_shape", lambda self, candidate, num_draft_tokens: shape[:num_draft_tokens])
    settings = worker_settings(target, heads)
    async with in_process_stack(str(target), None, target_worker=settings) as stack, Client(stack.address) as client:
        for kind in KINDS:
            options = {"acceptance": rule, "temperature": 1.0, "seed": 5}
            first, again = [await complete(client, PROMPT, f"{kind}-tree", 6, **options) for _ in range(2)]
            assert first.token_ids == again.token_ids
            spec = first.speculation
            assert 0 < spec.num_accepted_draft_tokens < spec.num_draft_tokens, "INCONCLUSIVE"


async def test_preempted_streams_keep_their_text(target, heads):
    """Far fewer blocks than the streams fill: their states are lost and computed again with their keys and values."""
    settings = worker_settings(target, heads, block_size=4, kv_cache_bytes=400_000, cache_overcommit=8.0)
    async with in_process_stack(str(target), None, target_worker=settings) as stack, Client(stack.address) as client:
        prompts = [[5 + i, 6, 7] for i in range(6)]
        plain = [await complete(client, prompt, "auto", 0, **RULES["greedy"]) for prompt in prompts]
        answers = await asyncio.gather(
            *(
                complete(client, prompt, KINDS[i % 3] + "-tree" * (i // 3), 4, **RULES["greedy"])
                for i, prompt in enumerate(prompts)
            )
        )
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
        assert all(answer.speculation.num_accepted_draft_tokens > 0 for answer in answers), "INCONCLUSIVE"
        async with open_channel(stack.target[0].address) as channel:
            told = await describe(channel, without_tokenizer=True, timeout_s=10)
        counters = told.cache_counters
        assert counters.num_preemptions + counters.num_idle_evictions > 0, "INCONCLUSIVE: nothing was preempted"


@pytest.mark.parametrize("kind", KINDS)
async def test_credit_and_reopening(target, heads, kind):
    """A decode with drafts of the worker's own; then the session opens anew in the middle of its text."""
    settings = worker_settings(target, heads)
    async with running_target(**settings) as worker:
        call = worker.target.Session()
        opening = target_opening(PROMPT, max_tokens=40)
        ids = [*PROMPT, *(await ask(call, open_request(opening))).verdict.committed_ids]
        request = decode_request(ids, 20)
        request.decode.drafter, request.decode.num_draft_tokens = kind, 4
        await call.write(request)
        num_drafted = 0
        while True:
            verdict = (await read(call)).verdict
            ids += verdict.committed_ids
            num_drafted += len(verdict.drafted_ids)
            if verdict.decode_ended:
                break
        assert len(ids) == len(PROMPT) + 1 + 20
        assert num_drafted > 0, "INCONCLUSIVE"
        again = dataclasses.replace(opening, epoch=2, committed_ids=ids[3:])
        ids += (await ask(call, open_request(again))).verdict.committed_ids
        num_drafted = 0
        while len(ids) < len(PROMPT) + 40:
            request = verify_request(ids, epoch=2)
            request.verify.drafter, request.verify.num_draft_tokens = kind, 4
            verdict = (await ask(call, request)).verdict
            ids += verdict.committed_ids
            num_drafted += len(verdict.drafted_ids)
        assert num_drafted > 0, "INCONCLUSIVE"
        plain_call = worker.target.Session()
        plain = [*PROMPT, *(await ask(plain_call, open_request(opening))).verdict.committed_ids]
        while len(plain) < len(ids):
            plain += (await ask(plain_call, verify_request(plain))).verdict.committed_ids
        assert ids == plain


async def test_heads_that_do_not_fit_stop_the_start(target, heads, tmp_path, monkeypatch):
    stranger = str(tiny_heads.write_stranger(tmp_path / "stranger"))
    with pytest.raises(FailedPrecondition, match="trained for another model") as caught:
        async with running_target(**worker_settings(target, (stranger,))):
            pass
    assert caught.value.field == "heads"
    monkeypatch.setattr(importlib.import_module("outrider.lm.heads.probe"), "WARNED_BELOW", 1.0)
    async with running_target(**worker_settings(target, heads[:1])) as worker:
        (told,) = (await describe(worker.channel, without_tokenizer=True, timeout_s=10)).target_drafters
        assert "drafts will seldom be accepted" in told.warning
    for wrong, why in (((str(tmp_path / "nowhere"),), "no file or folder"), ((heads[0], heads[0]), "two are called")):
        with pytest.raises(InvalidArgument, match=why):
            async with running_target(**worker_settings(target, wrong)):
                pass
    with pytest.raises(InvalidArgument, match="whole model"):
        async with running_target("toy:vocab=16", heads=heads[:1]):
            pass
