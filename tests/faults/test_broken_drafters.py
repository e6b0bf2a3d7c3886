"""A drafter that raises, stalls, drafts nonsense or loses its model costs speed only: whole texts, equal to plain ones,
and the loss is counted. Simulated faults in the shipped drafters, real gRPC around them."""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import scaled
from faults.rogue import TRUSTING
from stack import in_process_stack

import outrider
from coordinator.local_drafts import LocalDrafts
from draft_worker.model_drafter import ModelDrafter
from draft_worker.tree_drafter import TreeDrafter
from outrider.drafting.guess import Evidence, Guess
from outrider.drafting.proposal import Proposal, SparseQ
from target_worker.toy_drafter import ToyDrafter

TARGET, DRAFT = "toy:vocab=24,seed=5", "toy:vocab=24,seed=5,agreement=0.85"
OFFERED = {
    "draft_worker": {"drafters": ("model", "tree")},
    "target_worker": {"heads": ("toy:agreement=0.85",)},
}
WORKERS_DRAFTERS = {"model": ModelDrafter, "tree": TreeDrafter, "toy": ToyDrafter}
"""The last one drafts inside the target worker."""
LOCAL = ("lookup", "suffix")
NUM_TOKENS = 40
NUM_STREAMS = scaled(24, at_least=4)


def requests() -> list[tuple[list[int], dict[str, Any]]]:
    """Greedy and COUPLED by turns; every prompt repeats itself, so that there is something to look up."""
    kinds = ({"temperature": 0.0}, {"temperature": 1.0, "acceptance": "coupled"})
    return [([seed % 24, 3, 7] * 3, {"seed": seed, **kinds[seed % 2]}) for seed in range(NUM_STREAMS)]


async def answers(client: outrider.Client, **options: Any) -> list[Any]:
    asked = (
        client.complete(prompt, max_tokens=NUM_TOKENS, timeout_s=120, **own, **options) for prompt, own in requests()
    )
    return await asyncio.gather(*asked)


async def check(
    drafter: str, break_it: Callable[[], None], *, draft: str = DRAFT, counted: bool = True, gamma: int = 4
) -> None:
    """Texts with and without the fault. counted: every stream's statistics show it."""
    async with (
        in_process_stack(TARGET, draft, coordinator=TRUSTING, **OFFERED) as stack,
        outrider.Client(stack.address) as client,
    ):
        plain = await answers(client, num_speculative_tokens=0)
        sound = await answers(client, drafter=drafter, num_speculative_tokens=gamma)
        assert sum(a.speculation.num_draft_tokens for a in sound) > 0, "INCONCLUSIVE"
        break_it()
        broken = await answers(client, drafter=drafter, num_speculative_tokens=gamma)
        adaptive = await answers(client)
    for found in (sound, broken, adaptive):
        assert [a.token_ids for a in found] == [a.token_ids for a in plain]
        assert [a.text for a in found] == [a.text for a in plain]
    if counted:
        lost = [a.speculation.num_draft_failures + a.speculation.num_dropped_proposals for a in broken]
        assert min(lost) > 0


def one_hot(x: int) -> SparseQ:
    return SparseQ(np.array([x], np.uint32), np.array([65_536]))


NONSENSE = {
    "ids_out_of_range": Proposal((3, 10_000)),
    "too_many": Proposal((1,) * 60),
    "q_for_other_tokens": Proposal((1, 2), (one_hot(2), one_hot(1))),
    "q_that_does_not_sum": Proposal((1,), (SparseQ(np.array([1, 2], np.uint32), np.array([65_000, 1])),)),
    "fewer_q_than_tokens": Proposal((1, 2, 3), (one_hot(1),)),
    "parents_after_their_children": Proposal((1, 2), parents=(1, -1)),
    "too_few_parents": Proposal((1, 2, 3), parents=(-1, -1)),
    "siblings_twice": Proposal((1, 1), parents=(-1, -1)),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
@pytest.mark.parametrize("drafter", WORKERS_DRAFTERS)
async def test_nonsense_of_a_workers_drafter(drafter: str, nonsense: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(self: Any, num_draft_tokens: int) -> Any:
        return NONSENSE[nonsense]
        yield

    await check(drafter, lambda: monkeypatch.setattr(WORKERS_DRAFTERS[drafter], "propose", propose))


@pytest.mark.parametrize("drafter", WORKERS_DRAFTERS)
async def test_a_workers_drafter_raises(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def propose(self: Any, num_draft_tokens: int) -> Any:
        raise RuntimeError("a fault of the drafter")
        yield

    await check(drafter, lambda: monkeypatch.setattr(WORKERS_DRAFTERS[drafter], "propose", propose))


@pytest.mark.parametrize("drafter", WORKERS_DRAFTERS)
async def test_a_workers_drafter_stalls(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each proposal takes longer than is waited for, for a while; then the drafter is itself again."""
    calls, kept = itertools.count(), WORKERS_DRAFTERS[drafter].propose

    def propose(self: Any, num_draft_tokens: int) -> Any:
        if next(calls) < 2 * NUM_STREAMS:
            time.sleep(0.06)
        return (yield from kept(self, num_draft_tokens))

    def stall() -> None:
        monkeypatch.setattr("coordinator.drafting.FIRST_WAIT_S", 0.05)
        monkeypatch.setattr("coordinator.drafting.MIN_WAIT_S", 0.05)
        monkeypatch.setattr(WORKERS_DRAFTERS[drafter], "propose", propose)

    await check(drafter, stall, counted=False)
    assert next(calls) > 0, "INCONCLUSIVE"


@pytest.mark.parametrize("drafter", ["model", "tree"])
async def test_a_draft_worker_loses_its_model(drafter: str) -> None:
    """From the twentieth token on the draft model's logits are NaN."""
    await check(drafter, lambda: None, draft=f"{DRAFT},nan_after=20")


class Blind:
    """A head whose weights are gone: all that it says is NaN."""

    def logits_for(self, token_ids: Any) -> np.ndarray:
        return np.full(24, np.nan, np.float32)


async def test_a_head_loses_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = ToyDrafter.__init__

    def init(self: Any, name: str, model: Any, log: Any) -> None:
        kept(self, name, Blind(), log)  # type: ignore[arg-type]

    await check("toy", lambda: monkeypatch.setattr(ToyDrafter, "__init__", init))


class Missing:
    """What is left of a part of a drafter that is gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name} any more")


@pytest.mark.parametrize("part", ["_index", "_chances", "_memory"])
@pytest.mark.parametrize("drafter", LOCAL)
async def test_a_local_drafter_raises(drafter: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = LocalDrafts.__init__

    def init(self: Any, *args: Any) -> None:
        kept(self, *args)
        setattr(self, part, Missing())

    await check(drafter, lambda: monkeypatch.setattr(LocalDrafts, "__init__", init))


@pytest.mark.parametrize("token_id", [24, 2**31])
@pytest.mark.parametrize("drafter", LOCAL)
async def test_nonsense_of_a_local_drafter(drafter: str, token_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def guess(self: Any, name: str, places: Any, drafted_ids: Any, num_tokens: int) -> Guess:
        return Guess(name, (1, token_id), (Evidence(name, 2, 2),) * 2, (0.9, 0.9))

    await check(drafter, lambda: monkeypatch.setattr(LocalDrafts, "_guess", guess))
