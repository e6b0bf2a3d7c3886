"""Drafting ahead of the verdict, through real processes on toy models with slept costs.

A target's pass takes 30 + 0.3 ms a row, a draft worker's 2.9 + 0.1 ms a row; the draft worker is `rtt_ms` away through
a relay (`delay.py`), the coordinator beside the target. Acceptance is set by the agreement of the toys, which is solved
for under each rule. γ is the controller's own but where hits are counted. Streams of all settings take turns; a rate is
the tokens of all its streams by their time from the first token to the last.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from delay import delayed

from outrider.cli.console import err, print_json
from outrider.cli.flags import to_flags
from outrider.cli.process import Child
from outrider.client import Client
from outrider.lm.toy import ToyModel, ToySpec
from outrider.results import Completion, Speculation
from outrider.sampling.noise import Noise

VOCAB, SCALE = 256, 6.0
"""As sure as language models are: the likeliest token has two thirds of the mass in the mean."""
TARGET = f"toy:vocab={VOCAB},seed=1,scale={SCALE},pass_ms=30,token_ms=0.3"
LOGIT_NOISE = 0.5
"""Of a good pair, whose drafts are accepted with .9 then."""
READY_S = 120.0
COUPLED, BLOCK = "coupled", "block"


def draft_of(agreement: float) -> str:
    return f"toy:vocab={VOCAB},seed=1,scale={SCALE},agreement={agreement:.4f},pass_ms=2.9,token_ms=0.1"


def acceptance(agreement: float, rule: str, num_contexts: int = 150) -> float:
    """Chance that a draft is accepted: p and q overlap so far, or, under COUPLED, say the same with the same noise."""
    target, draft = (ToyModel(ToySpec(vocab=VOCAB, seed=1, scale=SCALE, agreement=a)) for a in (1.0, agreement))
    noise, chances = Noise(3), []
    for place, context in enumerate(np.random.default_rng(0).integers(VOCAB, size=(num_contexts, 2)).tolist()):
        p, q = target.logits_for(context).astype(float), draft.logits_for(context).astype(float)
        if rule == COUPLED:
            matches = [np.argmax(p + g) == np.argmax(q + g) for g in (noise.gumbel(64 * place + i, VOCAB)
                       for i in range(16))]  # fmt: skip
            chances.append(float(np.mean(matches)))
        else:
            p, q = np.exp(p - p.max()), np.exp(q - q.max())
            chances.append(float(np.minimum(p / p.sum(), q / q.sum()).sum()))
    return float(np.mean(chances))


def agreement_for(chance: float, rule: str) -> float:
    """That drafts are accepted with this chance."""
    low, high = 0.5, 1.0
    for _ in range(14):
        middle = (low + high) / 2
        low, high = (middle, high) if acceptance(middle, rule) < chance else (low, middle)
    return (low + high) / 2


@dataclass
class Setting:
    """One way to run streams, and what they took."""

    name: str
    rtt_ms: float = 0.0
    draft_ahead: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    client: Any = None
    num_tokens: int = 0
    ms: float = 0.0
    speculations: list[Speculation] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens/s."""
        return 1000 * self.num_tokens / self.ms

    @property
    def hit_rate(self) -> float:
        hits = sum(s.num_branch_hits for s in self.speculations)
        return hits / max(1, hits + sum(s.num_branch_misses for s in self.speculations))

    @property
    def waste(self) -> float:
        """Tokens drafted ahead in vain, by those delivered."""
        return sum(s.num_wasted_draft_tokens for s in self.speculations) / max(1, self.num_tokens)

    def add(self, answer: Completion) -> None:
        self.num_tokens += len(answer.token_ids) - 1
        self.ms += answer.timings.total_ms - answer.timings.time_to_first_token_ms
        self.speculations.append(answer.speculation)


@asynccontextmanager
async def services(
    draft: str,
    settings: Sequence[Setting],
    worker: Mapping[str, Any] | None = None,
    *,
    target_model: str = TARGET,
) -> AsyncIterator[tuple[str, str]]:
    """A target, a draft worker with these settings of its own, and a coordinator for each setting, whose client it
    gets. The workers' addresses."""
    common = {"host": "127.0.0.1", "port": 0, "drain_grace_s": 2.0, "log_level": "warning"}
    async with AsyncExitStack() as cleanup:

        async def start(role: str, **values: Any) -> str:
            child = await Child.start(role, to_flags({**common, **values}))
            cleanup.push_async_callback(child.stop, 5.0)
            return await child.wait_ready(READY_S)

        target, drafter = (
            await start("target-worker", model=target_model),
            await start("draft-worker", model=draft, **(worker or {})),
        )
        for setting in settings:
            address = drafter
            if setting.rtt_ms:
                address = await cleanup.enter_async_context(delayed(drafter, setting.rtt_ms))
            coordinator = await start(
                "coordinator", target_workers=target, draft_workers=address, draft_ahead=setting.draft_ahead,
                local_drafters=(),
            )  # fmt: skip
            setting.client = await cleanup.enter_async_context(Client(coordinator))
            await _see_both(setting.client)
        yield target, drafter


async def _see_both(client: Client) -> None:
    async with asyncio.timeout(READY_S):
        while sum(worker.healthy for worker in (await client.server_info()).workers) < 2:
            await asyncio.sleep(0.05)


async def compare(
    draft: str, rule: str, settings: Sequence[Setting], *, num_streams: int, num_tokens: int, **worker: Any
) -> None:
    """Runs streams of all settings in turn; the first of each is for the controller to learn from. worker: settings of
    the draft worker."""
    async with services(draft, settings, worker):
        for seed in range(num_streams + 1):
            for setting in settings:
                answer = await setting.client.complete(
                    [1, 2, 3 + seed], seed=seed, max_tokens=num_tokens, acceptance=rule, **setting.options
                )
                if seed:
                    setting.add(answer)


def row(value: float, bar: float) -> dict[str, Any]:
    return {"value": round(value, 3), "bar": bar, "reached": bool(value >= bar)}


async def figures(
    *, num_streams: int = 6, num_tokens: int = 192, rules: Sequence[str] = (COUPLED, BLOCK)
) -> dict[str, Any]:
    """Figures by row, each with its bar; ratios of rates within one run."""
    found: dict[str, Any] = {}
    size = {"num_streams": num_streams, "num_tokens": num_tokens}
    for rule in rules:
        together, sync, ahead, far = (
            Setting("co-located, synchronous", draft_ahead="off"),
            Setting("RTT 5 ms, synchronous", 5.0, "off"),
            Setting("RTT 5 ms, draft-ahead", 5.0),
            Setting("RTT 20 ms, draft-ahead", 20.0),
        )
        await compare(draft_of(agreement_for(0.8, rule)), rule, (together, sync, ahead, far), **size)
        _tell(rule, (together, sync, ahead, far))
        found[f"draft-ahead {rule}, acceptance .8, RTT 5 ms, by the synchronous round"] = row(
            ahead.rate / sync.rate, 1.35
        )
        found[f"draft-ahead {rule}, acceptance .8, RTT 5 ms, by co-located synchronous"] = row(
            ahead.rate / together.rate, 1.25
        )
        found[f"draft-ahead {rule}, acceptance .8, RTT 20 ms, by co-located synchronous"] = row(
            far.rate / together.rate, 0.95
        )
        plain, away = Setting("plain", options={"num_speculative_tokens": 0}), Setting("RTT 100 ms", 100.0)
        await compare(draft_of(agreement_for(0.9, rule)), rule, (plain, away), **size)
        _tell(rule, (plain, away))
        found[f"draft-ahead {rule}, acceptance .9, RTT 100 ms, by plain"] = row(away.rate / plain.rate, 0.98)
        good = Setting("good pair, 12 branches", draft_ahead="on", options={"num_speculative_tokens": 5})
        agreement = math.sqrt(1 - (LOGIT_NOISE / SCALE) ** 2)
        await compare(draft_of(agreement), rule, (good,), **size, ahead_branches=12)
        _tell(rule, (good,))
        found[f"branch hit rate {rule}, logit noise .5, 12 branches"] = row(
            good.hit_rate, 0.9 if rule == COUPLED else 0.6
        )
    return found


def _tell(rule: str, settings: Sequence[Setting]) -> None:
    for s in settings:
        err.print(
            f"{rule}: {s.name}: {s.rate:.1f} tokens/s, hits {s.hit_rate:.2f}, {s.waste:.1f} drafted in vain a token"
        )


if __name__ == "__main__":
    print_json(asyncio.run(figures()))
