"""References, the index by hash, and what is given up first: the books stay right under any history."""

import random

import pytest
from conftest import scaled

from outrider.errors import Internal
from outrider.lm.block_pool import BlockPool, block_hash, root_hash


@pytest.mark.parametrize("seed", range(scaled(30, at_least=3)))
def test_any_history_keeps_the_books(seed):
    rng = random.Random(seed)
    pool, tables, num_shared = BlockPool(16), [], 0
    digests = [bytes([i]) * 16 for i in range(40)]
    for _ in range(500):
        action = rng.random()
        if tables and action < 0.3:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif tables and action < 0.5:
            pool.publish(rng.choice(rng.choice(tables)), rng.choice(digests))
        elif action < 0.7:
            found = {pool.find(d) for d in rng.sample(digests, 8)} - {None}
            for block in found:
                pool.share(block)
            if found:
                tables.append(list(found))
                num_shared += 1
        elif tables and action < 0.75:
            block = rng.choice(rng.choice(tables))
            if not pool.is_shared(block):
                pool.withdraw(block)
        elif pool.num_available:
            tables.append(pool.take(rng.randint(1, min(6, pool.num_available))))
        pool.check_integrity(tables)
        some = rng.sample(tables, min(3, len(tables)))
        expected, before = pool.num_freed_by(some), pool.num_available
        if rng.random() < 0.1:
            for table in some:
                pool.release(table)
            tables = [table for table in tables if not any(table is t for t in some)]
            assert pool.num_available - before == expected
    assert num_shared > 0
    assert pool.num_evictions > 0
    for table in tables:
        pool.release(table)
    pool.check_integrity([])
    assert pool.num_available == 16
    assert pool.take(16) == list(range(16))
    assert not any(pool.find(d) is not None for d in digests)


def test_what_a_release_would_free_is_known_before():
    pool = BlockPool(8)
    a = pool.take(3)
    for block in a[:2]:
        pool.share(block)
    b = [*a[:2], *pool.take(2)]
    assert [pool.num_freed_by(t) for t in ([a], [b], [a, b])] == [1, 2, 5]


def test_the_integrity_check_sees_every_fault():
    def faults():
        pool = BlockPool(8)
        table = pool.take(4)
        pool.publish(table[0], b"a")
        yield pool, []
        yield pool, [table, table]
        yield pool, [[*table, table[0]]]
        yield pool, [[*table, 7]]
        pool.release(table)
        yield pool, [table]
        pool._hash_of[5] = b"b"
        yield pool, []

    for pool, tables in faults():
        with pytest.raises(Internal):
            pool.check_integrity(tables)


def test_what_nobody_holds_is_neither_shared_nor_released():
    pool = BlockPool(4)
    with pytest.raises(Internal):
        pool.share(0)
    with pytest.raises(Internal):
        pool.release([0])
    with pytest.raises(Internal):
        pool.take(5)


def test_a_hash_covers_parent_ids_namespace_and_tenant():
    root = root_hash("model", "tenant")
    assert block_hash(root, [1, 2]) == block_hash(root, (1, 2))
    others = [root_hash("model", "other"), root_hash("modelt", "enant"), root_hash("mode", "ltenant"), root]
    hashes = {block_hash(parent, [1, 2]) for parent in others} | {block_hash(root, [2, 1]), block_hash(root, [1, 2, 3])}
    assert len(hashes) == 6
