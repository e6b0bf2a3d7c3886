"""Noise keyed by the exact prefix gives exactly the target's law over rounds; noise used twice does not."""

import pytest
import round_law
from conftest import scaled
from noise_law import Key, RoundsLaw, by_position, by_prefix, one_for_all_roles

from outrider.sampling import AcceptanceRule

RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
TOLERANCE = 1e-12


def always_two(drafts: tuple[int, ...]) -> int:
    return 2


def follows_the_drafts(drafts: tuple[int, ...]) -> int:
    """Of the last one, which usually lies past the rejection: draft again, or decode plainly."""
    return 2 if not drafts or drafts[-1] == 0 else 0


def rounds(seed: int, rule: AcceptanceRule, key: Key, gamma_after=always_two, kind: str = "random") -> RoundsLaw:
    nodes = round_law.tree(seed, 4, vocab_size=3, kind=kind).floats()
    return RoundsLaw(nodes, rule, 4, key, gamma_after)


@pytest.mark.parametrize("gamma_after", [always_two, follows_the_drafts])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(scaled(12, at_least=2)))
def test_noise_keyed_by_the_prefix_is_exact(rule: AcceptanceRule, gamma_after, seed: int) -> None:
    for kind in ("random", "mixed"):
        assert rounds(seed, rule, by_prefix, gamma_after, kind).distance() <= TOLERANCE


@pytest.mark.parametrize(
    ("rule", "key", "gamma_after"),
    [
        (AcceptanceRule.BLOCK, by_position, always_two),
        (AcceptanceRule.BLOCK, by_position, follows_the_drafts),
        # TOKEN looks at nothing past a rejection, but whoever chooses γ does
        (AcceptanceRule.TOKEN, by_position, follows_the_drafts),
        (AcceptanceRule.TOKEN, one_for_all_roles, always_two),
        (AcceptanceRule.BLOCK, one_for_all_roles, always_two),
    ],
)
def test_noise_used_twice_is_caught(rule: AcceptanceRule, key: Key, gamma_after) -> None:
    distances = [rounds(seed, rule, key, gamma_after).distance() for seed in range(3)]
    assert min(distances) > 1e-3
