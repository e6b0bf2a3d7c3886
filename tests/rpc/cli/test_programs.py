"""verify, bench, demo, generate and chat as processes of their own: their output, last line and exit code."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import scaled
from fake_generation import FakeGeneration, serving
from forked import outrider
from test_client import forever
from test_stack import DRAFT, TARGET, command, read_until

from outrider.cli.process import Child
from outrider.cli.stack import local_stack
from outrider.client import GenerateOptions
from outrider.errors import Internal

PAIR = [f"--target={TARGET}", f"--draft={DRAFT}"]


@dataclass(frozen=True)
class Drawing:
    """series: by name, how many points are marked."""

    series: dict[str, int]
    texts: set[str]


def drawn(path: Path) -> Drawing:
    """A plot as its own XML tells it."""
    series, texts = {}, set()
    for node in ElementTree.fromstring(path.read_text(encoding="utf-8")).iter():
        name = node.get("id", "")
        if name.startswith("series-"):
            series[name.removeprefix("series-")] = sum(part.tag.endswith("}use") for part in node.iter())
        if node.tag.endswith("}text"):
            texts.add("".join(node.itertext()).strip())
    return Drawing(series, texts)


async def test_verify_proves_a_real_pair_lossless() -> None:
    samples = scaled(600, 60)
    code, output, errors = await outrider("verify", *PAIR, f"--samples={samples}", "--prompts=3", "--seed=5")
    report = json.loads(output.splitlines()[-1])
    assert (code, report["verdict"]) == (0, "LOSSLESS"), errors + output
    assert "LOSSLESS" in output.splitlines()[-2]
    assert report["drafted"] > 0
    assert report["samples"] == sum(law["num_tokens"] for law in report["laws"])
    assert 0 < report["false_alarm_rate"] <= 1e-6
    assert all(part["num_drafted"] > 0 for part in report["equalities"] + report["laws"])
    # Some drafts must be rejected too, or the rules were hardly tried.
    assert all(0 < law["num_accepted"] < law["num_drafted"] for law in report["laws"])
    assert all(0 < law["detectable_shift"] < 1 for law in report["laws"])
    assert "total variation" in output


async def test_verify_against_running_services() -> None:
    async with local_stack(TARGET, None) as stack:
        flags = [f"--address={stack.address}", "--samples=20", "--prompts=2", "--json"]
        code, output, _ = await outrider("verify", f"--target={TARGET}", *flags)
        (line,) = output.splitlines()
        assert (code, json.loads(line)["verdict"]) == (3, "INCONCLUSIVE")
        code, output, errors = await outrider("verify", "--target=toy:vocab=32,seed=2", *flags)
        assert (code, output) == (4, ""), "1 is BROKEN"
        assert "serves another target" in errors


async def test_bench_ends_in_the_figures(tmp_path: Path) -> None:
    code, output, errors = await outrider(
        "bench", f"--target={TARGET},pass_ms=3", f"--draft={DRAFT},pass_ms=0.3", "--num-prompts=2", "--max-tokens=24",
        "--num-speculative-tokens=3", "--temperature=1", f"--profile={tmp_path / 'profile.json'}",
        "--heads=good=toy:agreement=0.9",
    )  # fmt: skip
    assert code == 0, errors
    assert "SIMULATED" in output
    assert " and head good, " in output
    assert "INCONCLUSIVE" not in output
    figures = json.loads(output.splitlines()[-1])
    assert figures["inconclusive"] == ""
    for name in (
        "plain_tokens_per_s", "speculative_tokens_per_s", "overhead_ms_p50", "bytes_per_draft_token", "gamma0_ratio",
        "tokens_per_step",
        "mean_acceptance_length", "draft_cost_ratio", "formula_speedup", "speedup", "plain_ttft_ms", "plain_tpot_ms",
    ):  # fmt: skip
        assert figures[name] > 0, name
    assert figures["num_draft_tokens"] > 0
    assert len(figures["acceptance_by_position"]) == 3
    assert figures["simulated"]
    # A pass is slept, so that no measured time can undercut it.
    assert figures["plain_verify_ms"] >= 3
    assert figures["plain_tokens_per_s"] <= 1000 / 3
    roles = {"coordinator", "draft-worker", "target-worker"}
    assert {role for role, sizes in figures["memory"].items() if sizes["resident_bytes"] > 0} == roles

    profile = json.loads((tmp_path / "profile.json").read_text())
    (cell,) = profile["cells"]
    assert cell["speculative"]["mean_ms"]["verify"] >= 3
    assert all(cell["speculative"]["mean_ms"][part] > 0 for part in ("draft", "network", "sampling", "emit"))
    assert cell["plain"]["mean_ms"]["draft"] == 0
    assert [row["num_draft_tokens"] for row in cell["plain"]["by_gamma"]] == [0]
    assert {worker["role"]: bool(worker["timings"]) for worker in profile["workers"]} == {"target": True, "draft": True}
    target = next(worker for worker in profile["workers"] if worker["role"] == "target")
    assert min(timing["min_rows"] for timing in target["timings"]) >= 1
    assert sum(timing["num_passes"] for timing in target["timings"]) >= 2 * 24


async def test_bench_by_workload_and_temperature() -> None:
    code, output, errors = await outrider(
        "bench", *PAIR, "--num-prompts=1", "--max-tokens=8", "--workload=code-edit", "--workload=off-domain",
        "--temperature=0", "--temperature=1.5", "--num-speculative-tokens=2", "--json",
    )  # fmt: skip
    assert code == 0, errors
    (line,) = output.splitlines()
    cells = json.loads(line)["cells"]
    assert all("plain rounds are too few for ratios" in cell["inconclusive"] for cell in cells)
    measured = [(cell["workload"], cell["temperature"]) for cell in cells]
    assert measured == [(kind, heat) for kind in ("code-edit", "off-domain") for heat in (0, 1.5)]
    assert all(cell["num_draft_tokens"] > 0 and cell["speedup"] > 0 for cell in cells)


async def test_bench_sweeps_gamma(tmp_path: Path) -> None:
    code, output, errors = await outrider(
        "bench", *PAIR, "--num-prompts=1", "--max-tokens=24", "--sweep=gamma", "--workload=long-context",
        f"--plot={tmp_path / 'gamma.svg'}",
    )  # fmt: skip
    assert code == 0, errors
    assert "drawn into" in errors
    drawing = drawn(tmp_path / "gamma.svg")
    assert drawing.series == {"fixed": 8, "plain": 0, "adaptive": 0}
    assert {"γ, drafts a round", "tokens/s", "plain", "fixed γ"} <= drawing.texts
    figures = json.loads(output.splitlines()[-1])
    title = "long-context, temperature 0" + (": INCONCLUSIVE" if figures["inconclusive"] else "")
    assert title in drawing.texts
    assert figures["inconclusive"] or "adaptive" in output.splitlines()[-3]
    points = {point["gamma"]: point for point in figures["points"]}
    assert list(points) == [0, 1, 2, 3, 4, 5, 6, 8, "adaptive"]
    assert points[0]["speedup"] == 1
    assert points[0]["num_draft_tokens"] == 0
    assert all(points[gamma]["num_draft_tokens"] > 0 for gamma in (1, 2, 3, 4, 5, 6, 8))
    # fewer drafts near the end, never more than asked for
    assert all(0 < points[gamma]["mean_gamma"] <= gamma for gamma in (1, 2, 3, 4, 5, 6, 8))
    assert figures["best_gamma"] in points
    assert figures["adaptive_vs_best"] > 0


async def test_bench_sweeps_concurrency(tmp_path: Path) -> None:
    code, output, errors = await outrider(
        "bench", *PAIR, "--num-prompts=1", "--max-tokens=8", "--sweep=concurrency", "--num-speculative-tokens=2",
        f"--plot={tmp_path / 'load.svg'}",
    )  # fmt: skip
    assert code == 0, errors
    assert "INCONCLUSIVE: " in output
    assert "gain reaches zero" not in output
    drawing = drawn(tmp_path / "load.svg")
    assert drawing.series == dict.fromkeys(("plain", "fixed", "adaptive"), 6)
    assert {"streams at once", "adaptive γ", "γ = 2", "1", "32"} <= drawing.texts
    assert any("SIMULATED" in text for text in drawing.texts)
    figures = json.loads(output.splitlines()[-1])
    assert [point["concurrency"] for point in figures["points"]] == [1, 2, 4, 8, 16, 32]
    assert [point["num_requests"] for point in figures["points"]] == [1, 2, 4, 8, 16, 32]
    assert figures["gamma"] == 2
    assert all(point["num_draft_tokens"] > 0 for point in figures["points"])
    assert all(point["fixed_gain"] > 0 and point["adaptive_gain"] > 0 for point in figures["points"])
    assert set(figures["zero_gain_concurrency"]) == {"fixed", "adaptive"}


async def test_bench_tells_what_exact_numerics_cost() -> None:
    pair = [f"--target={TARGET},pass_ms=1", f"--draft={DRAFT}"]
    flags = ["--num-prompts=2", "--max-tokens=16", "--num-speculative-tokens=3", "--sweep=numerics"]
    code, output, errors = await outrider("bench", *pair, *flags)
    assert code == 0, errors
    figures = json.loads(output.splitlines()[-1])
    assert (figures["sweep"], figures["gamma"], figures["num_prompts"]) == ("numerics", 3, 2)
    assert figures["num_draft_tokens"] > 0
    for mode in ("plain", "speculative"):
        assert min(figures[f"{mode}_{numerics}_pass_ms"] for numerics in ("fast", "exact")) >= 1
        assert min(figures[f"{mode}_{cost}_cost"] for cost in ("time", "pass")) > -1
    assert "what numerics=exact costs" in output


async def test_demo_runs_on_toys_and_says_so() -> None:
    code, output, errors = await outrider("demo", *PAIR, "--max-tokens=16")
    assert code == 0, errors + output
    assert "simulated toy" in output
    assert output.count("identical") == 3
    assert "acceptance by position" in output
    assert re.search(r"\(\d+ of \d+ drafts\)", output)
    assert "tokens a step" in output


async def test_demo_fails_when_texts_differ() -> None:
    from outrider.cli.demo import _compare
    from outrider.client import Client

    async with serving(FakeGeneration(broken_greedy=True)) as address, Client(address) as client:
        speculative = await client.complete([1], temperature=0.0, max_tokens=8, num_speculative_tokens=2)
        assert not await _compare(client, [1], speculative, {"temperature": 0.0, "max_tokens": 8}, "x")
    async with serving(FakeGeneration()) as address, Client(address) as client:
        speculative = await client.complete([1], temperature=0.0, max_tokens=8, num_speculative_tokens=2)
        assert await _compare(client, [1], speculative, {"temperature": 0.0, "max_tokens": 8}, "x")


async def test_demo_does_not_compare_plain_with_plain(capsys: pytest.CaptureFixture[str]) -> None:
    from outrider.cli.demo import _compare
    from outrider.client import Client

    options: GenerateOptions = {"temperature": 0.0, "max_tokens": 8, "report_steps": True}
    async with serving(FakeGeneration(drafts=0)) as address, Client(address) as client:
        speculative = await client.complete([1], **options, num_speculative_tokens=2)
        assert speculative.speculation.num_draft_tokens == 0
        assert await _compare(client, [1], speculative, options, "x")
    assert "INCONCLUSIVE: nothing was drafted, both are plain" in capsys.readouterr().out


async def test_generate_prints_text_or_json() -> None:
    service = FakeGeneration()
    async with serving(service) as address:
        flags = [f"--address={address}", "--temperature=0", "--max-tokens=4", "--stop=a", "--stop=b", "--chat"]
        code, text, _ = await outrider("generate", "Hello", *flags)
        assert (code, len(text.strip())) == (0, 4)
        code, output, _ = await outrider("generate", "Hello", *flags, "--json")
        assert (code, json.loads(output)["text"]) == (0, text.strip())
    request = service.requests[0]
    assert request.chat.messages[0].content == "Hello"
    assert list(request.stopping.stop) == ["a", "b"]
    assert request.sampling.HasField("temperature")


async def test_json_names_its_enums() -> None:
    async with serving(FakeGeneration()) as address:
        flags = [f"--address={address}", "--acceptance=coupled", "--num-speculative-tokens=2", "--max-tokens=4"]
        code, output, errors = await outrider("generate", "x", *flags, "--json")
    assert code == 0, errors
    answer = json.loads(output)
    assert answer["started"]["acceptance"] == "coupled"
    assert answer["origins"] == ["plain", "accepted", "accepted", "plain"]


async def test_an_error_after_text_starts_on_a_line_of_its_own() -> None:
    class Breaks(FakeGeneration):
        async def _answer(self, request: Any) -> AsyncIterator[Any]:
            async for response in super()._answer(request):
                yield response
                if response.WhichOneof("event") == "chunk":
                    raise Internal("the logits are NaN")

    async with serving(Breaks()) as address:
        code, output, errors = await outrider("generate", "x", f"--address={address}", "--max-tokens=4")
    assert (code, len(output.strip()), output[-1]) == (1, 1, "\n")
    assert "the logits are NaN" in errors


async def test_a_reader_that_has_enough_ends_generate_quietly() -> None:
    async with serving(FakeGeneration()) as address, command("generate", "x", f"--address={address}") as process:
        transport = process._transport.get_pipe_transport(1)  # type: ignore[attr-defined]
        transport.close()
        assert process.stderr is not None
        errors = (await asyncio.wait_for(process.stderr.read(), 60)).decode()
        assert await process.wait() == 141
    assert errors == ""


async def test_no_draft_worker_is_said_and_not_hidden() -> None:
    async with local_stack(TARGET, None) as stack:
        flags = [f"--address={stack.address}", "--max-tokens=6"]
        code, output, errors = await outrider("generate", "!!", *flags, "--num-speculative-tokens=4", "--stats")
        assert (code, len(output.strip())) == (0, 6)
        assert "no draft worker is connected" in errors
        assert "1.00 tokens a step" in errors
        code, output, errors = await outrider("generate", "!!", *flags, "--drafter=model")
        assert (code, output) == (2, "")
        assert "no draft worker is connected" in errors
        code, output, errors = await outrider("models", "info", "no-such-model", flags[0])
        assert code != 0
        assert TARGET in errors


async def test_a_coordinator_without_a_target_is_not_called_absent() -> None:
    child = await Child.start("coordinator", ["--port=0", "--target-workers=127.0.0.1:1"])
    try:
        address = await child.wait_ready(60)
        code, _, errors = await outrider("models", "info", f"--address={address}")
        assert code == 1
        assert "no target worker has answered yet (127.0.0.1:1: UNAVAILABLE" in errors
        assert "no coordinator" not in errors
    finally:
        await child.stop(5)


async def test_a_malformed_worker_address_ends_the_coordinator() -> None:
    code, _, errors = await outrider("coordinator", "--port=0", "--target-workers=here")
    assert code == 2
    assert "--target-workers (OUTRIDER_TARGET_WORKERS) has 'here'" in errors


async def test_chat_does_not_send_what_looks_like_a_command() -> None:
    service = FakeGeneration()
    async with serving(service) as address, command("chat", f"--address={address}") as chat:
        output, errors = await asyncio.wait_for(chat.communicate(b"/quti now\n/exit\n"), 60)
    assert (chat.returncode, output, service.requests) == (0, b"", [])
    assert b"/quti is no command and was not sent; " in errors
    assert errors.count(b"/exit") == 2


async def test_ctrl_c_stops_only_the_answer() -> None:
    class Endless(FakeGeneration):
        """The first answer never ends."""

        def _answer(self, request: Any) -> AsyncIterator[Any]:
            return forever(request) if len(self.requests) == 1 else super()._answer(request)

    service = Endless()
    async with serving(service) as address, command("chat", f"--address={address}", "--max-tokens=4") as chat:
        assert chat.stdin is not None
        assert chat.stdout is not None
        chat.stdin.write(b"first\n")
        while not service.requests:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)
        chat.send_signal(signal.SIGINT)
        await asyncio.wait_for(service.cancelled.wait(), 30)
        chat.stdin.write(b"second\n/exit\n")
        text = await read_until(chat.stdout, "(stopped)")
        rest = (await asyncio.wait_for(chat.stdout.read(), 30)).decode()
        assert len(rest.strip()) == 4, text + rest
        assert await asyncio.wait_for(chat.wait(), 30) == 0
    assert [message.content for message in service.requests[1].chat.messages][-1] == "second"
