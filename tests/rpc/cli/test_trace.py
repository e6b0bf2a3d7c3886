"""`outrider trace` over running services: what is kept of requests, and what is drawn of them."""

import asyncio
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from stack import in_process_stack
from typer.testing import CliRunner

import outrider
from coordinator.traces import CAUSES, MAX_REQUESTS, MAX_STEPS_A_STREAM, Traces
from outrider.cli.app import app
from outrider.cli.timeline import segments, totals
from outrider.cli.timeline_svg import draw
from outrider.errors import NotFound
from outrider.results import GammaCause, Step, StreamTrace
from outrider.v1 import generation_pb2

PROMPT = [1, 2, 3]


def step(round_ms: float = 20.0, **fields: object) -> Step:
    values = {
        "num_draft_tokens_wanted": 3, "num_draft_tokens": 2, "num_accepted_draft_tokens": 1, "drafter": "model",
        "draft_ms": 4.0, "draft_queue_ms": 1.0, "draft_network_ms": 2.0, "verify_ms": 8.0, "network_ms": 5.0,
        "queue_ms": 1.5, "round_ms": round_ms, "reason": "best", "soft_acceptances": b"\xff\x20", "start_ms": 3.0,
        "num_tokens": 2, **fields,
    }  # fmt: skip
    return Step(**values)  # type: ignore[arg-type]


async def test_rounds_are_kept_and_add_up() -> None:
    async with in_process_stack() as stack, outrider.Client(stack.address) as client:
        answer = await client.complete(PROMPT, seed=1, max_tokens=40, request_id="one", report_steps=True)
        await client.complete(PROMPT, max_tokens=4, request_id="two")
        (trace,) = await client.trace("one")
        assert trace.steps == tuple(chunk.step for chunk in answer.chunks if chunk.step is not None)
        assert sum(s.num_tokens for s in trace.steps) == 40
        assert trace.steps[0].cause is GammaCause.PREFILL
        assert all(s.cause is not GammaCause.UNSPECIFIED for s in trace.steps)
        for one, after in zip(trace.steps, trace.steps[1:], strict=False):
            assert one.start_ms < after.start_ms
            assert sum(ms for _, ms in segments(one)) == pytest.approx(one.round_ms)
        assert len(await client.trace("two")) == 1, "nobody asked for steps of it"
        with pytest.raises(NotFound, match=r"'three'.*no such request is kept"):
            await client.trace("three")


async def test_choices_and_tenants() -> None:
    async with in_process_stack() as stack:
        async with outrider.Client(stack.address) as client:
            events = [e async for e in client.generate(PROMPT, max_tokens=6, request_id="both", n=2)]
            assert events
            assert [trace.index for trace in await client.trace("both")] == [0, 1]
        async with outrider.Client(stack.address, metadata={"x-outrider-tenant": "other"}) as stranger:
            with pytest.raises(NotFound, match="no such request"):
                await stranger.trace("both")


async def test_the_command_shows_and_draws(tmp_path: Path) -> None:
    async with in_process_stack() as stack, outrider.Client(stack.address) as client:
        await client.complete(PROMPT, seed=1, max_tokens=30, request_id="one")
        drawing = tmp_path / "one.svg"

        def run(*arguments: str) -> tuple[int, str]:
            result = CliRunner().invoke(app, ["trace", *arguments, "--address", stack.address])
            return result.exit_code, result.output

        code, shown = await asyncio.to_thread(run, "one", "--svg", str(drawing))
        assert code == 0, shown
        assert "prefill" in shown
        assert "tokens/s" in shown
        assert ET.fromstring(drawing.read_text()).tag.endswith("svg")
        code, told = await asyncio.to_thread(run, "one", "--json")
        steps = json.loads(told.strip().splitlines()[-1])[0]["steps"]
        assert sum(s["num_tokens"] for s in steps) == 30
        assert steps[0]["cause"] == "prefill"
        told_chances = [chance for s in steps for chance in s["soft_acceptances"]]
        assert len(told_chances) == sum(s["num_draft_tokens"] for s in steps) > 0
        assert all(0 <= chance <= 255 for chance in told_chances)
        code, shown = await asyncio.to_thread(
            run, "--prompt", "!#", "--max-tokens", "5", "--num-speculative-tokens", "2"
        )
        assert code == 0, shown
        assert "fixed" in shown or "no-room" in shown
        for wrong in ((), ("one", "--prompt", "x"), ("one", "--max-tokens", "3"), ("nobody",)):
            assert (await asyncio.to_thread(run, *wrong))[0] != 0


def test_a_round_in_its_parts() -> None:
    asked = [("network", 1.0), ("queue", 1.0), ("draft", 3.0), ("network", 2.5)]
    verified = [("queue", 1.5), ("verify", 8.0), ("network", 1.5), ("other", 1.5)]
    assert list(segments(step())) == asked + verified
    assert totals([step(), step()])["network"] == 10.0
    assert sum(ms for _, ms in segments(step(round_ms=9.0))) == 9.0, "clocks of two processes need not agree"


def test_a_drawing_holds_every_round_and_escapes_names() -> None:
    trace = StreamTrace(0, (step(), step(start_ms=23.0, drafter="<a&b>")))
    root = ET.fromstring(draw([trace, StreamTrace(1, (step(),))]))
    texts = [node.text or "" for node in root.iter() if node.tag.endswith("text")]
    assert {"0.0", "0.1", "1.0"} <= set(texts)
    assert any("<a&b>" in text for text in texts)
    assert ET.fromstring(draw([])).tag.endswith("svg")


def test_a_drawing_has_room_for_its_words_and_says_what_it_lacks() -> None:
    long = step(2.0, start_ms=0.0, drafter="a-head-with-a-long-name-tree", reason="draft-context-full", ahead="late")
    root = ET.fromstring(draw([StreamTrace(0, (long,), num_left_out=3)]))
    texts = {node.text or "": float(node.get("x", "")) for node in root.iter() if node.tag.endswith("text")}
    (told,) = (text for text in texts if "branch late" in text)
    assert texts[told] + 6.6 * len(told) <= float(root.get("width", ""))
    assert "3 rounds more were not kept" in texts
    assert len([text for text in texts if text.endswith(" ms")]) == 1 + 9, "ticks of a short request differ"


def test_the_oldest_go_first_and_a_long_stream_is_cut() -> None:
    traces = Traces(max_steps=10)
    for name in ("a", "b", "c"):
        keep = traces.begin("t", name, 1)
        for _ in range(4):
            keep(0, step())
    with pytest.raises(NotFound, match="the last 10 rounds"):
        traces.of("t", "a")
    assert len(traces.of("t", "c")[0].steps) == 4
    with pytest.raises(NotFound):
        traces.of("another tenant", "c")
    traces.begin("another tenant", "c", 1)
    assert len(traces.of("t", "c")[0].steps) == 4, "names are a tenant's own"
    of_two = traces.begin("t", "c", 2)
    assert traces.of("t", "c")[0].steps == (), "a name that is used again begins anew"
    of_one = traces.begin("t", "c", 1)
    of_two(1, step())  # the first of the two still runs
    of_one(0, step())
    assert [len(stream.steps) for stream in traces.of("t", "c")] == [1], "neither is told as the other's"
    long = Traces(max_steps=10 * MAX_STEPS_A_STREAM)
    keep = long.begin("t", "x", 1)
    for _ in range(MAX_STEPS_A_STREAM + 3):
        keep(0, step())
    assert long.of("t", "x")[0].num_left_out == 3
    for number in range(MAX_REQUESTS):  # that never began a round
        long.begin("t", str(number), 1)
    with pytest.raises(NotFound):
        long.of("t", "x")
    off = Traces(max_steps=0)
    off.begin("t", "x", 1)(0, step())
    with pytest.raises(NotFound, match="trace_steps is 0"):
        off.of("t", "x")


def test_causes_are_those_of_the_wire() -> None:
    names = {name.removeprefix("GAMMA_CAUSE_") for name in generation_pb2.GammaCause.keys()}  # noqa: SIM118
    assert names == {cause.name for cause in GammaCause}
    assert all(generation_pb2.GammaCause.Value(f"GAMMA_CAUSE_{cause.name}") == cause.value for cause in GammaCause)
    assert set(CAUSES.values()) == set(GammaCause) - {GammaCause.UNSPECIFIED}


def test_help_explains_what_stands_in_the_columns() -> None:
    told = CliRunner().invoke(app, ["trace", "--help"]).output
    assert all(sign in told for sign in ("0/4", "●", "○", "◐", "price:", "docs/tuning.md"))


def test_a_drawing_that_cannot_be_written_is_told_before_anybody_is_asked() -> None:
    done = CliRunner().invoke(app, ["trace", "--prompt", "!", "--svg", "no-such-folder/a.svg", "-a", "localhost:1"])
    assert (done.exit_code, "--svg: cannot write no-such-folder/a.svg" in done.stderr) == (2, True)
