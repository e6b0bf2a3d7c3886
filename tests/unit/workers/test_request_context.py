"""Ids of requests in metadata and in logs: read strictly, passed on, never a reason to refuse a call."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from outrider.serving.json_logs import FIELDS, JsonFormatter
from outrider.serving.request_context import CURRENT, RequestContext, TraceContext, read_traceparent, received, to_send

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_traceparent_is_read_as_w3c_has_it() -> None:
    assert read_traceparent(f"00-{TRACE}-{SPAN}-01") == TraceContext(TRACE, SPAN, is_sampled=True)
    assert read_traceparent(f"00-{TRACE}-{SPAN}-00") == TraceContext(TRACE, SPAN, is_sampled=False)
    assert read_traceparent(f"cc-{TRACE}-{SPAN}-09-what-will-be") == TraceContext(TRACE, SPAN, is_sampled=True)
    told = TraceContext(TRACE, SPAN, is_sampled=True)
    assert read_traceparent(told.traceparent) == told


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n",
        f"cc-{TRACE}-{SPAN}-01-{'x' * 600}",
        f"00-{TRACE[:-1]}\u0661-{SPAN}-01",
    ],
)
def test_what_is_no_traceparent_counts_as_none(value: str) -> None:
    assert read_traceparent(value) is None
    assert received([("traceparent", value)]) == RequestContext()


def test_metadata_is_read_and_passed_on() -> None:
    metadata = [("x-request-id", "own-1"), ("traceparent", f"00-{TRACE}-{SPAN}-01"), ("other", "x"), ("a-bin", b"x")]
    context = received(metadata)
    assert context == RequestContext("own-1", TraceContext(TRACE, SPAN, is_sampled=True))
    assert received(None) == received([("x-request-id", "no spaces"), ("traceparent", b"x")]) == RequestContext()
    token = CURRENT.set(context)
    try:
        assert to_send() == tuple(metadata[:2])
    finally:
        CURRENT.reset(token)
    assert to_send() == ()


async def test_a_line_has_the_ids_of_the_request_that_it_is_about() -> None:
    """Also of a thread and of a task that were begun for it."""
    lines = []
    handler = logging.Handler()
    handler.setFormatter(JsonFormatter())
    handler.emit = lambda record: lines.append(json.loads(handler.format(record)))  # type: ignore[method-assign]
    log = logging.getLogger("of-test-request-context")
    log.addHandler(handler)
    log.propagate = False

    async def work(request_id: str) -> None:
        CURRENT.set(RequestContext(request_id, TraceContext(TRACE, SPAN, is_sampled=False)))
        await asyncio.gather(asyncio.to_thread(log.warning, "thread %d", 1), asyncio.create_task(told()))

    async def told() -> None:
        log.error("task", extra={FIELDS: {"num_tokens": 3}})

    await asyncio.gather(*(asyncio.create_task(work(name)) for name in ("a", "b")))
    log.warning('nobody\'s \u00fc\n"quoted"')
    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("failed")
    assert len(lines) == 6
    assert {(line["message"], line["request_id"]) for line in lines[:4]} == {
        ("thread 1", "a"), ("thread 1", "b"), ("task", "a"), ("task", "b")
    }  # fmt: skip
    assert {line["trace_id"] for line in lines[:4]} == {TRACE}
    assert [line["num_tokens"] for line in lines[:4] if line["message"] == "task"] == [3, 3]
    assert "request_id" not in lines[4]
    assert lines[4]["message"] == 'nobody\'s \u00fc\n"quoted"'
    assert lines[5]["exception"].endswith("ValueError: bad")
    assert lines[5]["level"] == "error"
    assert all(line["time"].endswith("+00:00") for line in lines)
