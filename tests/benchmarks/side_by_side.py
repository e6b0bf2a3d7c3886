"""Two stacks of real services side by side, over toys whose passes cost nothing, so that all time is ours.

Every prompt is run on both in turn, in changing order. Beside the speeds stands the processor time of the services,
which other work on the machine disturbs less. Variables: PAIRS, TOKENS, STREAMS, TOY.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Self

import psutil
from options import number, text

from outrider.cli.stack import Stack
from outrider.client import Client

WARM_UP = 10_000
"""Of the run before the first pair."""


@dataclass(frozen=True, slots=True)
class Size:
    """num_pairs: how often both are asked; num_streams: at once, each of num_tokens."""

    num_pairs: int
    num_streams: int
    num_tokens: int
    toy: str

    @classmethod
    def read(cls) -> Self:
        """From the environment. Raises InvalidArgument, naming the variable."""
        toy = text("TOY", "toy:vocab=512,seed=1")
        return cls(number("PAIRS", 40), number("STREAMS", 4), number("TOKENS", 200), toy)

    @property
    def draft(self) -> str:
        return f"{self.toy},agreement=0.8"

    def __str__(self) -> str:
        size = f"{self.num_streams} streams x {self.num_tokens} tokens, {self.num_pairs} pairs"
        return f"{size}, passes that cost nothing"


@dataclass(frozen=True, slots=True)
class Compared:
    """tokens_per_s: of each pair of runs. cpu_s: what the services of each stack took for all of them."""

    tokens_per_s: list[tuple[float, float]]
    cpu_s: tuple[float, float]

    @property
    def medians(self) -> tuple[float, float]:
        """tokens/s of each stack."""
        return median(first for first, _ in self.tokens_per_s), median(second for _, second in self.tokens_per_s)

    @property
    def ratios(self) -> list[float]:
        """Of the second stack's tokens/s to the first one's."""
        return [second / first for first, second in self.tokens_per_s]

    @property
    def cpu_overhead_percent(self) -> float:
        return 100 * (self.cpu_s[1] / self.cpu_s[0] - 1)


def quartiles(values: Iterable[float]) -> tuple[float, float, float]:
    """The lower one, the median, the upper one."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], median(ordered), ordered[3 * len(ordered) // 4]


async def compare(size: Size, stacks: tuple[Stack, Stack], clients: tuple[Client, Client]) -> Compared:
    """clients: of either stack."""
    for client in clients:
        await _tokens_per_s(client, size, WARM_UP)
    began_s = [_cpu_s(stack) for stack in stacks]
    speeds = []
    for pair in range(size.num_pairs):
        found = {}
        for which in random.Random(pair).sample((0, 1), 2):
            found[which] = await _tokens_per_s(clients[which], size, pair)
        speeds.append((found[0], found[1]))
    first_s, second_s = (_cpu_s(stack) - began for stack, began in zip(stacks, began_s, strict=True))
    return Compared(speeds, (first_s, second_s))


async def _tokens_per_s(client: Client, size: Size, seed: int) -> float:
    begun = time.perf_counter()
    answers = await asyncio.gather(
        *(
            client.complete(
                [1, 2, 3], seed=size.num_streams * seed + n, max_tokens=size.num_tokens, ignore_eos=True,
                num_speculative_tokens=3,
            )
            for n in range(size.num_streams)
        )
    )  # fmt: skip
    assert sum(answer.speculation.num_draft_tokens for answer in answers) > 0, "inconclusive: nothing was drafted"
    return sum(len(answer.token_ids) for answer in answers) / (time.perf_counter() - begun)


def _cpu_s(stack: Stack) -> float:
    """Of all its processes since they began."""
    times = [psutil.Process(child.pid).cpu_times() for child in stack.processes.values()]
    return sum(one.user + one.system for one in times)
