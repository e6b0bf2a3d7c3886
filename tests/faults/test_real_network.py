"""The services in network namespaces, with delay and loss between them: texts are equal, and what it took is printed.

`make bench-network` prints the figures. Where namespaces or netem cannot be had the tests say so and are skipped; that
the commands are right for a machine that has them is checked everywhere.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import namespaces
import pytest
from namespaces import HUB, CommandFailed, Network, Way

import outrider
from outrider.cli.flags import to_flags
from outrider.cli.process import Child
from outrider.results import Completion

TARGET, DRAFT = "toy:vocab=64,seed=3,pass_ms=10", "toy:vocab=64,seed=3,agreement=0.95,pass_ms=1"
SERVICES = {"draft": ("draft-worker", DRAFT), "target": ("target-worker", TARGET)}
PATIENCE_S = 60.0
SWEEP = [
    {"draft": Way(0.0)},
    {"draft": Way(5.0)},
    {"draft": Way(20.0)},
    {"draft": Way(80.0)},
    {"draft": Way(0.0, 0.01)},
    {"draft": Way(20.0, 0.01)},
    {"draft": Way(5.0), "target": Way(20.0, 0.01)},
]
TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"seed": 5, "acceptance": "coupled"},
    "greedy, γ chosen": {"temperature": 0.0, "num_speculative_tokens": None},
    "coupled, γ chosen": {"seed": 5, "acceptance": "coupled", "num_speculative_tokens": None},
}
FIXED = {"num_speculative_tokens": 4, "drafter": "model"}
NUM_TOKENS = 48


@asynccontextmanager
async def services(network: Network) -> AsyncIterator[outrider.Client]:
    """A draft worker and a target worker in namespaces of their own, the coordinator in the hub."""
    common = {"host": "0.0.0.0", "port": 0, "drain_grace_s": 2.0, "insecure": True}
    async with AsyncExitStack() as cleanup:

        async def start(place: str, role: str, **values: Any) -> str:
            command = [sys.executable, "-m", "outrider.cli", role, *to_flags({**common, **values})]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *network.inside(place), *command, "--exit-with-stdin",
                stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True,
            )  # fmt: skip
            child = Child(role, process, None)
            cleanup.push_async_callback(child.stop, 5.0)
            port = (await child.wait_ready(PATIENCE_S)).rpartition(":")[2]
            return f"{network.address(place)}:{port}"

        workers = {}
        for place, (role, model) in SERVICES.items():
            workers[f"{place}_workers"] = await start(place, role, model=model)
        coordinator = await start(
            HUB, "coordinator", draft_ahead="on", local_drafters=(), peer_timeout_s=PATIENCE_S, **workers
        )
        client = await cleanup.enter_async_context(outrider.Client(coordinator))
        async with asyncio.timeout(PATIENCE_S):
            while sum(worker.healthy for worker in (await client.server_info()).workers) < len(SERVICES):
                await asyncio.sleep(0.05)
        yield client


async def texts_of(client: outrider.Client, **fields: Any) -> dict[str, Completion]:
    return {
        name: await client.complete([1, 2, 3], max_tokens=NUM_TOKENS, **{**FIXED, **options, **fields})
        for name, options in TEXTS.items()
    }


async def sweep(ways: Sequence[dict[str, Way]]) -> None:
    """Texts over each of these ways are what the target writes alone; prints tokens/s."""
    with Network(list(SERVICES)) as network:
        async with services(network) as client:
            alone = await texts_of(client, num_speculative_tokens=0, drafter="")
            for way in ways:
                for place in SERVICES:
                    network.shape(place, way.get(place, Way()))
                found = await texts_of(client)
                told = ", ".join(f"{place} worker {where}" for place, where in way.items()) or "nothing held back"
                for name, answer in found.items():
                    speculation, timings = answer.speculation, answer.timings
                    ms = timings.total_ms - timings.time_to_first_token_ms
                    print(
                        f"{told}: {name}: {1000 * (NUM_TOKENS - 1) / ms:.1f} tokens/s, "
                        f"{speculation.num_draft_tokens} drafted, {speculation.num_accepted_draft_tokens} accepted, "
                        f"{speculation.num_branch_hits} hits, {speculation.num_branch_misses} misses, "
                        f"{speculation.num_dropped_proposals} late"
                    )
                    assert answer.token_ids == alone[name].token_ids, f"{told}: {name}"
                    if "chosen" not in name:
                        assert speculation.num_draft_tokens > 0, f"INCONCLUSIVE: {told}: {name}: nothing was drafted"


@pytest.mark.slow
async def test_texts_are_equal_between_namespaces() -> None:
    if reason := namespaces.missing(shaped=False):
        pytest.skip(reason)
    await sweep([{}])


@pytest.mark.slow
async def test_texts_are_equal_whatever_the_network_delays_and_loses() -> None:
    if reason := namespaces.missing(shaped=True):
        pytest.skip(reason)
    await sweep(SWEEP)


class Recorder:
    """Takes commands and runs none; the one that holds `fails` fails."""

    def __init__(self, fails: str = "\0") -> None:
        self.commands: list[str] = []
        self._fails = fails

    def __call__(self, command: Sequence[str]) -> None:
        self.commands.append(" ".join(command))
        if self._fails in self.commands[-1]:
            raise CommandFailed(self.commands[-1])


def test_every_end_has_an_address_and_is_up() -> None:
    recorder = Recorder()
    with Network(["draft", "target"], run=recorder, tag="t") as network:
        made = list(recorder.commands)
        assert network.inside("draft") == ["ip", "netns", "exec", "t-draft"]
        assert (network.address("draft"), network.address("target")) == ("198.18.0.2", "198.18.1.2")
        assert network.address(HUB) == "198.18.2.1", "from outside: its end of our own pair"
    assert [c for c in made if "netns add" in c] == [f"ip netns add t-{name}" for name in (HUB, "draft", "target")]
    assert [c for c in made if "link add" in c] == [
        "ip link add th0 netns t-hub type veth peer name ts0 netns t-draft",
        "ip link add th1 netns t-hub type veth peer name ts1 netns t-target",
        "ip link add th2 netns t-hub type veth peer name ts2",
    ]
    for number, inside in enumerate(["ip -n t-draft", "ip -n t-target", "ip"]):
        for ip, link, host in (("ip -n t-hub", f"th{number}", 1), (inside, f"ts{number}", 2)):
            address = made.index(f"{ip} address add 198.18.{number}.{host}/30 dev {link}")
            up = made.index(f"{ip} link set {link} up")
            assert made.index(next(c for c in made if f"link add th{number} " in c)) < address < up
    assert recorder.commands[len(made) :] == [
        "ip link del ts2", "ip netns del t-hub", "ip netns del t-draft", "ip netns del t-target"
    ]  # fmt: skip


def test_both_ends_of_a_way_hold_back_half_of_it_and_lose_their_share() -> None:
    recorder = Recorder()
    with Network(["draft", "target"], run=recorder, tag="t") as network:
        start = len(recorder.commands)
        network.shape("target", Way())
        assert len(recorder.commands) == start, "nothing to undo"
        network.shape("target", Way(5.0, 0.01))
        network.shape("target", Way(80.0))
        network.shape("target", Way(0.0, 0.01))
        network.shape("target", Way())
        network.shape("target", Way())
        shaped = recorder.commands[start:]
    ends = [("t-hub", "th1"), ("t-target", "ts1")]
    netem = ["delay 2.5ms loss 1%", "delay 40ms", "loss 1%"]
    assert shaped == [
        *(f"tc -n {ns} qdisc replace dev {link} root netem {n} limit 100000" for n in netem for ns, link in ends),
        *(f"tc -n {ns} qdisc del dev {link} root" for ns, link in ends),
    ]


def test_names_fit_an_interface() -> None:
    recorder = Recorder()
    with Network(["draft", "target"], run=recorder, tag="otr4194304n99"):
        links = {word for c in recorder.commands for word in c.split() if word.startswith("otr") and "-" not in word}
    assert len(links) == 6
    assert max(map(len, links)) <= 15


def test_what_was_made_is_gone_when_a_command_fails() -> None:
    recorder = Recorder(fails="link add th1")
    with pytest.raises(CommandFailed, match="link add th1"), Network(["draft", "target"], run=recorder, tag="t"):
        raise AssertionError("it was not made")
    made = {c.removeprefix("ip netns add ") for c in recorder.commands if "netns add" in c}
    gone = {c.removeprefix("ip netns del ") for c in recorder.commands if "netns del" in c}
    assert gone == made


def test_what_is_missing_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert "not root" in namespaces.missing(shaped=False)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else "/sbin/ip")
    assert namespaces.missing(shaped=True) == "tc is not installed"
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: f"/sbin/{tool}")

    def says(fails: str) -> str:
        recorder = Recorder(fails)
        monkeypatch.setattr(namespaces, "Network", lambda spokes: Network(spokes, run=recorder))
        return namespaces.missing(shaped=True)

    assert says("netem").startswith("no netem")
    assert says("netns add").startswith("no network namespaces")
    assert says("\0") == ""
