"""Which worker takes a stream: rules on plain data."""

from __future__ import annotations

import random

import pytest
from conftest import scaled

from coordinator.fleet.picking import (
    MIN_PREFIX,
    MIN_SLACK,
    Draft,
    PrefixMemory,
    Target,
    best_draft,
    best_target,
    prefix_keys,
)

NAMESPACE = ("weights", "tenant")


@pytest.mark.parametrize(
    ("targets", "best"),
    [
        ([], None),
        ([Target("a", 3), Target("b", 1), Target("c", 1)], "b"),
        ([Target("a", 0), Target("b", MIN_SLACK, cached=64)], "b"),
        ([Target("a", 0), Target("b", MIN_SLACK + 1, cached=64)], "a"),
        ([Target("a", 40), Target("b", 50, cached=64)], "b"),
        ([Target("a", 40), Target("b", 51, cached=64)], "a"),
        ([Target("a", 0, cached=32), Target("b", 1, cached=512), Target("c", 0)], "b"),
        ([Target("a", 1, cached=64), Target("b", 0, cached=64)], "b"),
        ([Target("a", 0, has_drafter=False), Target("b", 9)], "b"),
        ([Target("a", 0, has_drafter=False), Target("b", 9, has_drafter=False)], "a"),
        ([Target("a", 0, same_numerics=False), Target("b", 9)], "b"),
        ([Target("a", 0, cached=512, same_numerics=False), Target("b", 9)], "b"),
        ([Target("a", 0, has_drafter=False), Target("b", 9, same_numerics=False)], "a"),
        ([Target("a", 0, cached=512), Target("b", 9, has_drafter=False, is_standby=True)], "b"),
        ([Target("a", 0), Target("b", 0, is_standby=True, same_numerics=False)], "a"),
        ([Target("a", 0, cached=512), Target("b", 90, has_drafter=False, has_others=True)], "b"),
        ([Target("a", 0), Target("b", 0, has_others=True, same_numerics=False)], "a"),
    ],
)
def test_target_by_numerics_drafter_prefix_and_load(targets: list[Target[str]], best: str | None) -> None:
    assert best_target(targets) == best


@pytest.mark.parametrize(
    ("drafts", "best"),
    [
        ([], None),
        ([Draft("a", 0, 2.0), Draft("b", 0, 0.5)], "b"),
        ([Draft("a", 0, 2.0), Draft("b", 1, 0.5)], "b"),
        ([Draft("a", 0, 2.0), Draft("b", 2, 0.5)], "a"),
        ([Draft("a", 1, 0.5, proposal_ms=1.0), Draft("b", 1, 0.5, proposal_ms=4.0)], "a"),
        ([Draft("a", 0, 40.0, proposal_ms=4.0), Draft("b", 9, 0.5, proposal_ms=4.0)], "b"),
        ([Draft("a", 0, 40.0, proposal_ms=4.0), Draft("b", 10, 0.5, proposal_ms=4.0)], "a"),
    ],
)
def test_draft_by_round_trip_and_what_its_streams_take(drafts: list[Draft[str]], best: str | None) -> None:
    assert best_draft(drafts) == best


def test_a_beginning_is_known_where_it_went() -> None:
    memory = PrefixMemory()
    first = tuple(range(200))
    memory.remember(prefix_keys(NAMESPACE, first), "a")
    memory.remember(prefix_keys(NAMESPACE, (*first[:70], *range(500, 600))), "b")
    assert memory.cached(prefix_keys(NAMESPACE, (*first, 7, 7))) == {"a": 128, "b": 64}
    assert memory.cached(prefix_keys(NAMESPACE, first[:40])) == {"a": 32, "b": 32}
    assert memory.cached(prefix_keys(NAMESPACE, first[: MIN_PREFIX - 1])) == {}
    assert memory.cached(prefix_keys(("weights", "other tenant"), first)) == {}
    assert memory.cached(prefix_keys(NAMESPACE, (9, *first))) == {}


def test_memory_is_bounded_and_forgets_what_was_not_used() -> None:
    memory = PrefixMemory(max_entries=10)
    prompts = [tuple(range(n, n + MIN_PREFIX)) for n in range(20)]
    for prompt in prompts:
        memory.remember(prefix_keys(NAMESPACE, prompts[0]), "kept")
        memory.remember(prefix_keys(NAMESPACE, prompt), "a")
    assert "kept" in memory.cached(prefix_keys(NAMESPACE, prompts[0]))
    assert memory.cached(prefix_keys(NAMESPACE, prompts[1])) == {}
    assert memory.cached(prefix_keys(NAMESPACE, prompts[-1])) == {"a": MIN_PREFIX}
    for number in range(50):
        memory.remember(prefix_keys(NAMESPACE, prompts[0]), f"target-{number}")
    assert len(memory.cached(prefix_keys(NAMESPACE, prompts[0]))) == 8


def test_what_is_told_is_never_more_than_what_is_shared() -> None:
    """Against every prompt that went there, compared id by id."""
    rng = random.Random(3)
    for _ in range(scaled(200)):
        memory, went = PrefixMemory(), {}
        for _ in range(6):
            prompt = tuple(rng.randrange(2) if at > 40 else 0 for at in range(rng.randrange(20, 300)))
            address = rng.choice("abc")
            memory.remember(prefix_keys(NAMESPACE, prompt), address)
            went.setdefault(address, []).append(prompt)
        asked = tuple(rng.randrange(2) if at > 40 else 0 for at in range(200))
        for address, length in memory.cached(prefix_keys(NAMESPACE, asked)).items():
            assert any(prompt[:length] == asked[:length] for prompt in went[address])
            assert not any(
                2 * length <= 200 and prompt[: 2 * length] == asked[: 2 * length] for prompt in went[address]
            )
