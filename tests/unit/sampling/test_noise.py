"""Noise: pure functions of their keys, distinct where a key differs, with the laws they promise."""

import itertools

import numpy as np
import pytest
from conftest import scaled
from scipy import stats

from outrider.sampling import ROOT_HASH, Noise, Role, extend_hash, hash_ids
from outrider.sampling.noise import gumbel_of_bits

VOCAB = 151_936


def test_hash_is_chained_and_tells_prefixes_apart() -> None:
    assert hash_ids(()) == ROOT_HASH
    assert hash_ids((1, 2, 3)) == extend_hash(hash_ids((1, 2)), 3) == hash_ids((3,), hash_ids((1, 2)))
    texts = [text for length in range(6) for text in itertools.product(range(5), repeat=length)]
    hashes = {hash_ids(text) for text in texts}
    assert len(hashes) == len(texts)
    assert all(0 <= value < 2**64 for value in hashes)


def test_every_part_of_the_key_counts() -> None:
    keys = itertools.product([0, 1, 2**64 - 1], [0, 1, 2**32 - 1], [0, 1, ROOT_HASH], Role, [0, 1])
    draws = [(Noise(s, c).uniform(h, role, i), Noise(s, c).integer16(h, role, i) / 65_536) for s, c, h, role, i in keys]
    uniforms = {uniform for uniform, _ in draws}
    assert len(uniforms) == len(draws) == 270
    # Integer and uniform of one key share no bits.
    assert not any(int(uniform * 65_536) / 65_536 == integer for uniform, integer in draws[:100])
    perturbed = {Noise(s, c).gumbel(pos, 1)[0] for s in (0, 1) for c in (0, 1) for pos in (0, 1, 2**40)}
    assert len(perturbed) == 12


def test_a_draw_repeats() -> None:
    a, b = Noise(3, 1), Noise(3, 1)
    b.uniform(99, Role.PLAIN)
    assert a.uniform(5, Role.ACCEPT) == b.uniform(5, Role.ACCEPT)
    assert a.integer16(5, Role.DRAFT) == b.integer16(5, Role.DRAFT)
    np.testing.assert_array_equal(a.gumbel(4, 100), b.gumbel(4, 100))


def test_known_values() -> None:
    """Both ends of the wire and every later version must draw alike: these values may never change."""
    noise = Noise(42, 1)
    assert hash_ids((1, 2, 3)) == KNOWN_HASH
    assert noise.uniform(7, Role.ACCEPT) == KNOWN_UNIFORM
    assert noise.integer16(7, Role.DRAFT) == KNOWN_INTEGER
    np.testing.assert_allclose(noise.gumbel(9, np.array([0, 1, 151_935])), KNOWN_GUMBEL, rtol=1e-14)


KNOWN_HASH = 3688976725151936768
KNOWN_UNIFORM = 0.41125392703983454
KNOWN_INTEGER = 29582
KNOWN_GUMBEL = [-0.29350986048075656, 1.5071670437231726, 0.2640566007209327]


def test_gumbel_is_the_same_sparse_and_dense() -> None:
    rng = np.random.default_rng(0)
    for position in range(5):
        dense = Noise(1).gumbel(position, VOCAB)
        for size in (1, 2, 3, 5, 7, 50, 1000):
            for dtype in (np.int64, np.uint32):
                ids = rng.choice(VOCAB, size, replace=False).astype(dtype)
                np.testing.assert_array_equal(Noise(1).gumbel(position, ids), dense[ids])


def test_gumbel_does_not_change_its_input() -> None:
    ids = np.arange(4, dtype=np.uint64)
    Noise(0).gumbel(0, ids)
    np.testing.assert_array_equal(ids, np.arange(4))


def test_gumbel_law() -> None:
    """Over ids and over positions, for sparse seeds: finite, Gumbel by Kolmogorov-Smirnov, neighbours uncorrelated."""
    over_ids = Noise(0).gumbel(0, VOCAB)
    over_positions = np.array([Noise(0).gumbel(position, 1)[0] for position in range(scaled(50_000))])
    over_seeds = np.array([Noise(seed).gumbel(0, 1)[0] for seed in range(scaled(50_000))])
    for values in (over_ids, over_positions, over_seeds):
        assert values.dtype == np.float64
        assert np.isfinite(values).all()
        assert stats.kstest(values, "gumbel_r").pvalue > 1e-4
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(len(values))
    assert abs(np.corrcoef(over_ids, Noise(0).gumbel(1, VOCAB))[0, 1]) < 5 / np.sqrt(VOCAB)


def test_gumbel_is_finite_for_the_extreme_bits() -> None:
    got = gumbel_of_bits(np.array([0, 2**64 - 1], dtype=np.uint64))
    np.testing.assert_allclose(got, [-np.log(53 * np.log(2)), 53 * np.log(2)])


def test_uniforms_are_uniform() -> None:
    uniforms = np.array([Noise(0).uniform(extend_hash(ROOT_HASH, i), Role.ACCEPT) for i in range(scaled(100_000))])
    assert uniforms.min() >= 0.0
    assert uniforms.max() < 1.0
    assert stats.kstest(uniforms, "uniform").pvalue > 1e-4
    integers = [Noise(0).integer16(extend_hash(ROOT_HASH, i), Role.DRAFT) for i in range(scaled(100_000))]
    assert 0 <= min(integers) <= max(integers) < 65_536
    assert stats.chisquare(np.bincount(np.array(integers) >> 10, minlength=64)).pvalue > 1e-4


@pytest.mark.parametrize(("seed", "choice"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_keys_out_of_range_are_refused(seed: int, choice: int) -> None:
    with pytest.raises(ValueError, match="must be below"):
        Noise(seed, choice)
