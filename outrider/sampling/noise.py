"""Counter-based randomness: every draw is a pure function of its key; a retry repeats it, neighbours cannot shift it.

Draws of the p/q rules are keyed by the hash of the exact token prefix, never by position: a position comes back after a
rejection and would reuse the noise that decided it, which biases the text. Gumbel noise of COUPLED is keyed by position
on purpose: draft and target then perturb their logits alike.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Iterable

import numpy as np

ROOT_HASH = 0x6F75747269646572
"""Hash of the empty prefix."""

_PAIR = struct.Struct("<QQ")
_DECISION = struct.Struct("<QHI")
_TWO_POW_MINUS_52 = 2.0**-52
_TWO_POW_MINUS_53 = 2.0**-53

# splitmix64: increment and finalizer (Steele, Lea, Flood 2014; constants of Vigna's reference code).
_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


class Role(enum.IntEnum):
    """What a draw decides. Two draws after the same prefix differ by role (and by try index among siblings)."""

    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    BONUS = 4
    PLAIN = 5


def extend_hash(prefix_hash: int, token_id: int) -> int:
    """64-bit hash of the prefix with `token_id` (0 <= id < 2**64) appended: BLAKE2b chained over the ids."""
    digest = hashlib.blake2b(_PAIR.pack(prefix_hash, token_id), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def hash_ids(ids: Iterable[int], start: int = ROOT_HASH) -> int:
    """Hash of the prefix `start` with all `ids` appended in order."""
    for token_id in ids:
        start = extend_hash(start, token_id)
    return start


class Noise:
    """All randomness of one choice of one request.

    seed: [0, 2**64), choice: [0, 2**32); ValueError otherwise.
    """

    __slots__ = ("_integers", "_perturbations", "_uniforms", "choice", "seed")

    def __init__(self, seed: int, choice: int = 0) -> None:
        if not 0 <= seed < 2**64 or not 0 <= choice < 2**32:
            raise ValueError(f"seed {seed} must be below 2**64 and choice {choice} below 2**32, none negative")
        self.seed = seed
        self.choice = choice
        key = _PAIR.pack(seed, choice)
        # A key per domain: no draw of one kind shares bits with a draw of another.
        self._uniforms = hashlib.blake2b(key, person=b"uniform").digest()
        self._integers = hashlib.blake2b(key, person=b"integer").digest()
        self._perturbations = hashlib.blake2b(key, person=b"gumbel").digest()

    def uniform(self, prefix_hash: int, role: Role, try_index: int = 0) -> float:
        """Uniform on the 2**53 multiples of 2**-53 in [0, 1)."""
        message = _DECISION.pack(prefix_hash, role, try_index)
        digest = hashlib.blake2b(message, digest_size=8, key=self._uniforms).digest()
        return (int.from_bytes(digest, "little") >> 11) * _TWO_POW_MINUS_53

    def integer16(self, prefix_hash: int, role: Role, try_index: int = 0) -> int:
        """Uniform integer in [0, 65,536): draws from counts that sum to 65,536 without any rounding."""
        message = _DECISION.pack(prefix_hash, role, try_index)
        return int.from_bytes(hashlib.blake2b(message, digest_size=2, key=self._integers).digest(), "little")

    def gumbel_key(self, position: int) -> int:
        """64 bits that with an id decide its Gumbel noise at a position."""
        key = hashlib.blake2b(position.to_bytes(8, "little"), digest_size=8, key=self._perturbations).digest()
        return int.from_bytes(key, "little")

    def gumbel(self, position: int, ids: np.ndarray | int) -> np.ndarray:
        """Standard Gumbel noise float64[n] for `ids` (int[n], or n for all ids below n) at an absolute position.

        The value of an id does not depend on which other ids are asked for. Each comes from its own uniform on the
        2**52 odd multiples of 2**-53, so strictly inside (0, 1).
        """
        bits = np.arange(ids, dtype=np.uint64) if isinstance(ids, int) else np.asarray(ids).astype(np.uint64)
        bits *= _INCREMENT
        bits += np.uint64(self.gumbel_key(position))
        bits ^= bits >> np.uint64(30)
        bits *= _MULTIPLIER_1
        bits ^= bits >> np.uint64(27)
        bits *= _MULTIPLIER_2
        bits ^= bits >> np.uint64(31)
        return gumbel_of_bits(bits)


def gumbel_of_bits(bits: np.ndarray) -> np.ndarray:
    """-ln(-ln u) float64[n] of u = (top 52 of the 64 random bits + 1/2) / 2**52: never 0, never 1, so always finite."""
    values = (bits >> np.uint64(12)).astype(np.float64)
    values += 0.5
    values *= _TWO_POW_MINUS_52
    np.log(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    return np.negative(values, out=values)
