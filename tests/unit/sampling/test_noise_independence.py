"""Draws under different keys are independent, bit by bit and jointly; Gumbel noise keeps its law in the tails."""

import itertools

import numpy as np
import pytest
from conftest import scaled
from scipy import stats

from outrider.sampling import ROOT_HASH, Noise, Role, extend_hash

FALSE_ALARM = 1e-5
"""Of one comparison. Keys are fixed: a test either always passes or never."""
NUM_KEYS = 20_000


def prefixes(count: int) -> list[int]:
    """A growing text of ever the same token, and its siblings: keys that differ as little as keys can."""
    hashes, trunk = [], ROOT_HASH
    while len(hashes) < count:
        hashes += [extend_hash(trunk, 1), extend_hash(trunk, 2)]
        trunk = hashes[-2]
    return hashes[:count]


def independent(a: np.ndarray, b: np.ndarray, num_bins: int = 8) -> float:
    """p-value that a and b, uniform on [0, 1), are independent: chi-square over num_bins^2 cells of known mass."""
    cells = (a * num_bins).astype(int) * num_bins + (b * num_bins).astype(int)
    return float(stats.chisquare(np.bincount(cells, minlength=num_bins**2)).pvalue)


def bits_differ_by_chance(a: np.ndarray, b: np.ndarray) -> float:
    """Smallest p-value over 53 bits that equal bits of a and b differ half of the time, times 53."""
    x = (a * 2.0**53).astype(np.uint64) ^ (b * 2.0**53).astype(np.uint64)
    ones = [int(((x >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(53)]
    return 53 * min(stats.binomtest(n, len(x)).pvalue for n in ones)


def uniforms(noise: Noise, hashes: list[int], role: Role, try_index: int = 0) -> np.ndarray:
    return np.array([noise.uniform(h, role, try_index) for h in hashes])


def test_roles_tries_choices_seeds_and_prefixes_share_nothing() -> None:
    hashes = prefixes(scaled(NUM_KEYS, at_least=5000))
    noise = Noise(7)
    columns = {role.name: uniforms(noise, hashes, role) for role in Role}
    columns["second try"] = uniforms(noise, hashes, Role.ACCEPT, 1)
    columns["next choice"] = uniforms(Noise(7, 1), hashes, Role.ACCEPT)
    columns["next seed"] = uniforms(Noise(8), hashes, Role.ACCEPT)
    columns["seed and choice swapped"] = uniforms(Noise(0, 7), hashes, Role.ACCEPT)
    columns["next prefix"] = np.roll(columns["ACCEPT"], 1)
    columns["parent prefix"] = np.roll(columns["ACCEPT"], 2)
    columns["drafted integers"] = np.array([noise.integer16(h, Role.DRAFT) for h in hashes]) / 65_536
    columns["integers of ACCEPT"] = np.array([noise.integer16(h, Role.ACCEPT) for h in hashes]) / 65_536
    for (name_a, a), (name_b, b) in itertools.combinations(columns.items(), 2):
        assert independent(a, b) > FALSE_ALARM, (name_a, name_b)
        if "integers" not in name_a + name_b:
            assert bits_differ_by_chance(a, b) > FALSE_ALARM, (name_a, name_b)


def test_equal_columns_would_be_seen() -> None:
    a = uniforms(Noise(7), prefixes(5000), Role.ACCEPT)
    assert independent(a, a) < FALSE_ALARM
    assert bits_differ_by_chance(a, a) < FALSE_ALARM
    assert independent(a, (a + 0.1) % 1.0) < FALSE_ALARM


def gumbel_table(seed: int, choice: int, num_positions: int, num_ids: int) -> np.ndarray:
    noise = Noise(seed, choice)
    return np.stack([noise.gumbel(position, num_ids) for position in range(num_positions)])


@pytest.mark.parametrize("threshold", [-2.6, -2.3, -1.5, 6.0, 9.0, 11.0, 13.0])
def test_gumbel_tails(threshold: float) -> None:
    """P(G > t) = 1 - exp(-exp(-t)): counted among millions, where tokens of small probability live."""
    num_positions, num_ids = scaled(300, at_least=60), 50_000
    if threshold == -2.6:
        num_ids *= 2
    noise = Noise(11)
    count = 0
    for position in range(num_positions):
        values = noise.gumbel(position, num_ids)
        count += int((values < threshold).sum() if threshold < 0 else (values > threshold).sum())
    below = float(np.exp(-np.exp(-threshold)))
    chance = below if threshold < 0 else -float(np.expm1(-np.exp(-threshold)))
    assert num_positions * num_ids * chance > 1, "INCONCLUSIVE: none is expected"
    assert stats.binomtest(count, num_positions * num_ids, chance).pvalue > FALSE_ALARM


def test_gumbel_neighbours_share_nothing() -> None:
    num_positions, num_ids = scaled(400, at_least=80), 1000
    to_uniform = lambda table: np.exp(-np.exp(-table))  # noqa: E731
    base = to_uniform(gumbel_table(3, 0, num_positions, num_ids))
    others = {
        "next id": np.roll(base, 1, axis=1),
        "next position": np.roll(base, 1, axis=0),
        "diagonal": np.roll(base, (1, 1), axis=(0, 1)),
        "next choice": to_uniform(gumbel_table(3, 1, num_positions, num_ids)),
        "next seed": to_uniform(gumbel_table(4, 0, num_positions, num_ids)),
    }
    for name, other in others.items():
        assert independent(base.ravel(), other.ravel(), 16) > FALSE_ALARM, name
        # maxima decide tokens: the ids that win at one position say nothing about those of the next
        if name == "next id":
            continue
        assert abs(np.corrcoef(base.argmax(axis=1), other.argmax(axis=1))[0, 1]) < 6 / np.sqrt(num_positions), name


def test_coupled_noise_is_not_the_noise_of_the_ratio_rules() -> None:
    """A stream that changes rule on resuming must not meet noise that has decided already."""
    hashes = prefixes(scaled(NUM_KEYS, at_least=5000))
    noise = Noise(5)
    coupled = np.array([float(noise.gumbel(i, np.array([i % 97]))[0]) for i in range(len(hashes))])
    for role in Role:
        assert independent(np.exp(-np.exp(-coupled)), uniforms(noise, hashes, role)) > FALSE_ALARM
