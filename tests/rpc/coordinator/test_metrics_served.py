"""`/metrics` of all three services: names, labels, and counts that agree with what clients were given."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import socket
import textwrap
from contextlib import aclosing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from scraping import by_label, get, scrape, total
from stack import in_process_stack, start

import coordinator.server
from coordinator.drafting import LATE_DRAFT, LOST_DRAFT, NO_DRAFT_WORKER, RESTING, DraftSide
from coordinator.features import FeatureFeed
from coordinator.fleet.standing import CIRCUIT_OPEN, QUARANTINED
from coordinator.metric_families import FALLBACKS
from coordinator.round_parts import PARTS
from coordinator.traces import CAUSES
from outrider import Chunk, Client, Complete
from outrider.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from outrider.serving.json_logs import FIELDS
from outrider.settings import CoordinatorSettings

TOY = "toy:vocab=16,seed=1"
PROMPT = [1, 2, 3]
LABELS = {
    "role", "model_name", "worker", "origin", "position", "drafter", "reason", "cause", "status", "finished_reason",
    "event", "le", "version", "python", "part",
}  # fmt: skip


async def run(client: Client, prompt: list[int], **options: Any) -> tuple[int, list[Complete]]:
    """(ids that were delivered, the ends of the texts)."""
    num_ids, ends = 0, []
    async for event in client.generate(prompt, **options):
        if isinstance(event, Chunk):
            num_ids += len(event.token_ids)
        elif isinstance(event, Complete):
            ends.append(event)
    return num_ids, ends


async def test_counts_are_those_of_the_texts() -> None:
    """Fixed and adaptive drafts, several choices, a resumed text and a stop id, all at once."""
    port = free_port()
    greedy = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    async with in_process_stack(TOY, f"{TOY},agreement=0.8", coordinator={"metrics_port": port}) as services:
        async with Client(services.address, timeout_s=30) as client:
            first = await client.complete(PROMPT, **greedy)
            resumed = first.token_ids[:10]
            asked: list[tuple[list[int], dict[str, Any]]] = [
                *((PROMPT, {"max_tokens": 30, "seed": n, "num_speculative_tokens": n % 3 + 1}) for n in range(6)),
                (PROMPT, {**greedy, "resume_token_ids": resumed}),
                ([5, 6], {"n": 3, "seed": 9, "max_tokens": 20, "ignore_eos": True}),
                ([5, 6], {**greedy, "stop_token_ids": [first.token_ids[20]]}),
            ]
            done = await asyncio.gather(*(run(client, prompt, **options) for prompt, options in asked))
            samples = await scrape(port)
    ends = [Complete(0, first.finish_reason, None, first.usage, first.timings, first.speculation)]
    ends += [end for _, several in done for end in several]
    told = [end.speculation for end in ends]
    delivered = len(first.token_ids) + sum(num_ids for num_ids, _ in done)

    assert delivered == sum(end.usage.completion_tokens for end in ends) - len(resumed)
    assert total(samples, "generation_tokens_total") == delivered
    by_origin = by_label(samples, "generation_tokens_by_origin_total", "origin")
    assert sum(by_origin.values()) == delivered
    assert by_origin["accepted"] == total(samples, "spec_decode_num_accepted_tokens_total")
    assert by_origin["plain"] == sum(one.num_plain_tokens for one in told)
    assert total(samples, "prompt_tokens_total") == sum(end.usage.prompt_tokens for end in ends)

    num_drafts = total(samples, "spec_decode_num_drafts_total")
    assert num_drafts == sum(one.num_spec_steps for one in told) > 0, "inconclusive: nothing was drafted"
    for name in ("num_draft_tokens", "num_accepted_draft_tokens"):
        exported = total(samples, f"spec_decode_{name.replace('accepted_draft', 'accepted')}_total")
        assert exported == sum(getattr(one, name) for one in told)
    accepted_at = by_label(samples, "spec_decode_num_accepted_tokens_per_pos_total", "position")
    assert sum(accepted_at.values()) == by_origin["accepted"]
    drafted_at = by_label(samples, "spec_decode_num_draft_tokens_per_pos_total", "position")
    assert sum(drafted_at.values()) == total(samples, "spec_decode_num_draft_tokens_total")
    assert all(accepted_at[position] <= drafted_at[position] for position in drafted_at)

    # histograms: one entry a step, one a round; their sums are the tokens
    assert total(samples, "spec_decode_accepted_tokens_per_draft_count") == num_drafts
    assert total(samples, "spec_decode_accepted_tokens_per_draft_sum") == by_origin["accepted"]
    num_rounds = total(samples, "spec_decode_draft_tokens_per_round_count")
    assert num_rounds == sum(sum(one.gamma_histogram) for one in told)
    uses = [use for one in told for use in one.drafter_uses]
    assert total(samples, "spec_decode_num_rounds_total") == sum(use.num_rounds for use in uses)

    # what was drafted ahead, and where the time went: no part of it twice
    for name in ("num_branches", "num_branch_hits", "num_branch_misses", "num_wasted_draft_tokens"):
        assert total(samples, f"spec_decode_{name}_total") == sum(getattr(one, name) for one in told)
    assert total(samples, "spec_decode_num_branch_hits_total") <= num_drafts
    assert set(by_label(samples, "round_seconds_total", "part")) == set(PARTS)
    assert 0 < total(samples, "round_seconds_total") <= total(samples, "e2e_request_latency_seconds_sum") + 1e-6

    assert 0 <= by_origin["accepted"] <= total(samples, "spec_decode_num_draft_tokens_total")
    assert total(samples, "request_success_total") == len(ends)
    for name in ("time_to_first_token", "request_queue_time", "e2e_request_latency"):
        assert total(samples, f"{name}_seconds_count") == len(ends)
    assert total(samples, "inter_token_latency_seconds_count") == num_rounds - len(ends)
    assert total(samples, "request_failure_total") == 0


async def test_every_role_has_its_numbers_and_no_label_is_a_clients() -> None:
    ports = [free_port() for _ in range(3)]
    coordinator, draft, target = ({"metrics_port": port} for port in ports)
    async with in_process_stack(
        TOY, TOY, coordinator=coordinator, draft_worker=draft, target_worker=target
    ) as services:
        async with Client(services.address, timeout_s=30) as client:
            await client.complete(
                "#$%&#", request_id="very-own", max_tokens=20, num_speculative_tokens=2, ignore_eos=True
            )
            scraped = dict(zip(("coordinator", "draft-worker", "target-worker"), map(scrape, ports), strict=True))
            roles = {role: await samples for role, samples in scraped.items()}
    for role, samples in roles.items():
        assert total(samples, "build_info", role=role) == 1
        assert total(samples, "num_requests_waiting", role=role) == 0
        assert ("outrider_num_requests_running", frozenset({("role", role)})) in samples or role != "coordinator"
        assert {label for _, labels in samples for label, _ in labels} <= LABELS
        assert not [v for _, labels in samples for _, v in labels if "#$%&#" in v or "very-own" in v]
        assert samples["process_resident_memory_bytes", frozenset()] > 0
    assert total(roles["coordinator"], "worker_healthy") == 2
    assert total(roles["target-worker"], "session_events_total", event="verifies") > 0
    assert total(roles["draft-worker"], "session_events_total", event="proposals") > 0
    for role in ("draft-worker", "target-worker"):
        assert total(roles[role], "engine_rows_total") > 0
        assert 0 <= total(roles[role], "kv_cache_usage_perc") <= 1
        assert len([name for name, _ in roles[role] if name == "outrider_num_sessions"]) == 1


async def test_gauges_follow_who_runs_and_who_waits() -> None:
    port = free_port()
    settings = {"metrics_port": port, "max_running_requests": 1, "max_waiting_requests": 1}
    slow = f"{TOY},pass_ms=20"
    async with in_process_stack(slow, None, coordinator=settings) as services:
        async with Client(services.address, timeout_s=30) as client:
            running, waiting = (
                asyncio.create_task(client.complete(PROMPT, max_tokens=2000, ignore_eos=True)) for _ in range(2)
            )
            async with asyncio.timeout(20):
                while total(await scrape(port), "num_requests_waiting") != 1:
                    await asyncio.sleep(0.02)
            assert total(await scrape(port), "num_requests_running") == 1
            with pytest.raises(ResourceExhausted):
                await client.complete(PROMPT)
            with pytest.raises(NotFound):
                await client.complete(PROMPT, model="one-of-many-made-up-names")
            for task in (running, waiting):
                task.cancel()
            await asyncio.gather(running, waiting, return_exceptions=True)
            async with asyncio.timeout(20):
                while total(samples := await scrape(port), "num_requests_running") or (
                    total(samples, "request_failure_total") < 4
                ):
                    await asyncio.sleep(0.02)
    assert total(samples, "num_requests_waiting") == 0
    failures = {(dict(own)["status"], dict(own)["model_name"]): value for (name, own), value in samples.items()
                if name == "outrider_request_failure_total"}  # fmt: skip
    assert failures == {("RESOURCE_EXHAUSTED", slow): 1, ("NOT_FOUND", ""): 1, ("CANCELLED", slow): 2}


async def test_a_request_that_is_broken_off_is_logged_with_the_tokens_that_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="coordinator.journal")
    port, prefix = free_port(), 4
    async with in_process_stack(f"{TOY},pass_ms=5", None, coordinator={"metrics_port": port}) as services:
        async with Client(services.address, timeout_s=30) as client:
            whole = await client.complete(PROMPT, max_tokens=prefix, ignore_eos=True, temperature=0.0)
            resumed = {"resume_token_ids": whole.token_ids, "temperature": 0.0, "request_id": "broken"}
            async with aclosing(client.generate(PROMPT, max_tokens=2000, ignore_eos=True, **resumed)) as events:
                async for event in events:
                    if isinstance(event, Chunk):
                        break
            async with asyncio.timeout(20):
                while total(samples := await scrape(port), "request_failure_total") < 1:
                    await asyncio.sleep(0.02)
    (logged,) = (record for record in caplog.records if record.getMessage().startswith("request broken: CANCELLED"))
    number = getattr(logged, FIELDS)["num_completion_tokens"]
    assert number == total(samples, "generation_tokens_total") - prefix > 0
    assert f", {number} tokens" in logged.getMessage()


async def test_rounds_without_a_draft_worker_are_counted_by_cause() -> None:
    port = free_port()
    async with in_process_stack(TOY, None, coordinator={"metrics_port": port, "local_drafters": ()}) as services:
        async with Client(services.address, timeout_s=30) as client:
            answer = await client.complete(PROMPT, max_tokens=30, ignore_eos=True)
            samples = await scrape(port)
    reasons = {use.reason: use.num_rounds for use in answer.speculation.drafter_uses}
    assert reasons["no-draft-worker"] > 0
    fallbacks = by_label(samples, "spec_decode_num_fallbacks_total", "cause")
    assert {cause: n for cause, n in fallbacks.items() if n} == {"no-draft-worker": reasons["no-draft-worker"]}


def test_causes_are_the_reasons_that_the_draft_side_gives() -> None:
    returned = set()
    for function in (DraftSide._why_not, FeatureFeed.why_not):
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant | ast.IfExp):
                returned |= {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
    words = {word for word in returned if isinstance(word, str)} - {""}
    assert words | {CIRCUIT_OPEN, LATE_DRAFT, LOST_DRAFT, NO_DRAFT_WORKER, QUARANTINED, RESTING} == set(FALLBACKS)


def test_every_reason_is_explained() -> None:
    text = (Path(__file__).parents[3] / "docs/tuning.md").read_text()
    assert [reason for reason in CAUSES if f"`{reason}`" not in text] == []


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET /metrics?name[]=x HTTP/1.1\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n", b"200 OK"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"200 OK"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET /metrics HTTP/1.1\r\nAccept: text/plain; version=x.y\r\n\r\n", b"500 Internal Server Error"),
        (b"\x16\x03\x01\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET /metrics HTTP/1.1\r\n" + b"x" * 40_000, b""),
    ],
)
async def test_endpoint_answers_what_it_is_asked(request_: bytes, status: bytes) -> None:
    port = free_port()
    server = await start(coordinator.server.serve, CoordinatorSettings(port=0, metrics_port=port, drain_grace_s=0))
    try:
        try:
            answer = await get(port, request_)
        except ConnectionError:
            answer = b""  # what was not read any more
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split(b"\r\n")[0].removeprefix(b"HTTP/1.1 ") == status
        if status == b"200 OK":
            assert (b"outrider_build_info" in body) is not request_.startswith(b"HEAD")
        assert total(await scrape(port), "build_info") == 1
    finally:
        await server.close()


@pytest.mark.parametrize("metrics_host", ["", "0.0.0.0"])
async def test_metrics_leave_this_machine_only_where_that_is_asked_for(
    metrics_host: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="outrider")
    port = free_port()
    settings = CoordinatorSettings(
        host="0.0.0.0", port=0, insecure=True, metrics_port=port, metrics_host=metrics_host, drain_grace_s=0
    )
    server = await start(coordinator.server.serve, settings)
    try:
        assert total(await scrape(port), "build_info") == 1
        with nullcontext() if metrics_host else pytest.raises(ConnectionRefusedError):
            _, writer = await asyncio.open_connection("127.0.0.2", port)
            writer.close()
    finally:
        await server.close()
    assert ("for this machine alone: --metrics-host" in caplog.text) is not bool(metrics_host)


async def test_an_address_of_metrics_without_a_port_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"metrics_host is '::'.*give --metrics-port"):
        await start(coordinator.server.serve, CoordinatorSettings(port=0, metrics_host="::"))


async def test_no_endpoint_unless_asked_for_and_a_taken_port_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="outrider")
    server = await start(coordinator.server.serve, CoordinatorSettings(port=0, drain_grace_s=0))
    await server.close()
    assert "metrics at" not in caplog.text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = CoordinatorSettings(port=0, metrics_port=taken.getsockname()[1], drain_grace_s=0)
        with pytest.raises(Unavailable, match=f"metrics on 127.0.0.1:{settings.metrics_port}.*--metrics-port"):
            await start(coordinator.server.serve, settings)
    server = await start(coordinator.server.serve, CoordinatorSettings(port=0, metrics_port=0, drain_grace_s=0))
    port = int(caplog.text.partition("metrics at http://127.0.0.1:")[2].partition("/")[0])
    assert total(await scrape(port), "build_info") == 1
    await server.close()
    with pytest.raises(ConnectionError):
        await scrape(port)
