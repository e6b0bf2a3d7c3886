"""Network namespaces of Linux in a star around one: a real network, with delay and loss, on one machine.

The hub and each spoke are namespaces of their own, joined by a veth pair; this process stays outside, on a pair of its
own. `shape` lets tc's netem hold back and lose packets on both ends of one spoke. Needs root, iproute2 and, for
`shape`, a kernel with sch_netem; `missing` says what is not there.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

Run = Callable[[Sequence[str]], None]
HUB, OUTSIDE = "hub", "outside"
PREFIX = "198.18"
"""Set aside for measurements of networks (RFC 2544): no machine has an address there."""
_NUMBERS = itertools.count()
"""No name twice: what has been deleted goes some time later."""
QUEUE_PACKETS = 100_000
"""Held back at once: more are lost, which no figure here means."""


class CommandFailed(Exception):
    """What was run, and what it said."""


def run_command(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")


@dataclass(frozen=True, slots=True)
class Way:
    """Of packets there and back. rtt_ms: half of it in each direction; loss: share of the packets, in each."""

    rtt_ms: float = 0.0
    loss: float = 0.0

    def __str__(self) -> str:
        return f"RTT {self.rtt_ms:g} ms" + (f", {100 * self.loss:g}% lost" if self.loss else "")

    @property
    def netem(self) -> list[str]:
        """Arguments of tc; empty: nothing is held back or lost."""
        delay = ["delay", f"{self.rtt_ms / 2:g}ms"] if self.rtt_ms else []
        loss = ["loss", f"{100 * self.loss:g}%"] if self.loss else []
        return ["netem", *delay, *loss, "limit", str(QUEUE_PACKETS)] if delay or loss else []


class Network:
    """A context manager: what it made is gone afterwards, whatever happened. What was there before is not touched."""

    def __init__(self, spokes: Sequence[str], *, run: Run = run_command, tag: str = "") -> None:
        """tag: begins the names of all that is made; by default one that nobody else has."""
        self._run = run
        self._tag = tag or f"otr{os.getpid()}n{next(_NUMBERS)}"
        self._spokes = (*spokes, OUTSIDE)
        self._shaped: set[str] = set()

    def __enter__(self) -> Network:
        try:
            for name in (HUB, *self._spokes[:-1]):
                self._run(["ip", "netns", "add", self._namespace(name)])
                self._run(["ip", "-n", self._namespace(name), "link", "set", "lo", "up"])
            for number, name in enumerate(self._spokes):
                self._join(number, name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """A namespace takes its links with it, and a pair goes with either end. What was never made is no matter."""
        ours = ["ip", "link", "del", self._link(OUTSIDE, OUTSIDE)]
        for command in (ours, *(["ip", "netns", "del", self._namespace(n)] for n in (HUB, *self._spokes[:-1]))):
            with suppress(CommandFailed):
                self._run(command)

    def inside(self, name: str) -> list[str]:
        """To be put before a command that shall run there."""
        return ["ip", "netns", "exec", self._namespace(name)]

    def address(self, name: str) -> str:
        """Of a spoke, as the hub reaches it; of the hub, as we do."""
        number = self._spokes.index(OUTSIDE if name == HUB else name)
        return f"{PREFIX}.{number}.{1 if name == HUB else 2}"

    def shape(self, name: str, way: Way) -> None:
        """From now on, between the hub and this spoke. Raises CommandFailed where the kernel has no netem."""
        for end in (HUB, name):
            device = ["tc", "-n", self._namespace(end), "qdisc"]
            if way.netem:
                self._run([*device, "replace", "dev", self._link(end, name), "root", *way.netem])
            elif name in self._shaped:
                self._run([*device, "del", "dev", self._link(end, name), "root"])
        (self._shaped.add if way.netem else self._shaped.discard)(name)

    def _join(self, number: int, name: str) -> None:
        ends = [(HUB, 1), (name, 2)]
        near, far = ([self._link(end, name), *self._in(end)] for end, _ in ends)
        self._run(["ip", "link", "add", *near, "type", "veth", "peer", "name", *far])
        for end, host in ends:
            ip = ["ip", "-n", self._namespace(end)] if end != OUTSIDE else ["ip"]
            self._run([*ip, "address", "add", f"{PREFIX}.{number}.{host}/30", "dev", self._link(end, name)])
            self._run([*ip, "link", "set", self._link(end, name), "up"])

    def _in(self, end: str) -> list[str]:
        return ["netns", self._namespace(end)] if end != OUTSIDE else []

    def _namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def _link(self, end: str, name: str) -> str:
        """At most 15 characters, as interfaces' names are."""
        return f"{self._tag}{'h' if end == HUB else 's'}{self._spokes.index(name)}"


def missing(*, shaped: bool) -> str:
    """What keeps a network from being made here, or shaped; empty: nothing."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "not root: network namespaces cannot be made"
    for tool in ("ip", "tc") if shaped else ("ip",):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with Network(["probe"]) as network:
            if shaped:
                network.shape("probe", Way(1.0, 0.01))
    except CommandFailed as failure:
        return f"no netem (sch_netem)? {failure}" if " netem " in str(failure) else f"no network namespaces: {failure}"
    return ""
