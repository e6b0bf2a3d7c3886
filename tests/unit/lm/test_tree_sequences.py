"""Trees through the engine, on toys: what a node sees, what keep_path leaves, what is refused."""

import pytest
from lm_programs import score, started, toy_engine

from outrider.errors import Internal
from outrider.lm.interface import Forward, PackedBatch, Segment
from outrider.lm.kv_cache import Sequence
from outrider.lm.toy import ToyModel, parse_toy
from outrider.lm.tree import Tree, are_ordered, branches, is_chain, path_to

PARENTS = (-1, 0, 0, -1, 1, 3)
PROMPT, NODES = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]


def text_of(node, parents=PARENTS, nodes=NODES):
    return [nodes[n] for n in path_to(parents, node)]


def test_what_a_node_sees():
    tree = Tree.of(7, PARENTS)
    assert tree.positions.tolist() == [7, 8, 8, 7, 9, 8]
    for node in range(6):
        assert [n for n in range(6) if tree.sees[node, n]] == path_to(PARENTS, node)
    assert (path_to(PARENTS, 4), path_to(PARENTS, -1)) == ([0, 1, 4], [])
    assert is_chain(())
    assert is_chain((-1, 0, 1))
    assert not is_chain((-1, -1))
    assert not is_chain((-1, 0, 0))
    assert are_ordered(PARENTS)
    assert not are_ordered((-1, 1))
    assert not are_ordered((-2,))
    assert are_ordered((7, 0), 1)


@pytest.mark.parametrize("first", range(7))
def test_every_node_from_the_first_on_is_one_branchs_own(first):
    own = []
    for path, num_own in branches(PARENTS, first):
        assert path == path_to(PARENTS, path[-1])
        own += path[len(path) - num_own :]
    assert sorted(own) == list(range(first, 6))


def test_a_toy_reads_a_nodes_own_path():
    model = ToyModel(parse_toy("toy:vocab=16,order=0,seed=2"))
    model.allocate_cache(8, 4)
    table = [5, 2, 7]
    logits = model.forward(PackedBatch((Segment(0, [*PROMPT, *NODES], table, 7, PARENTS),)))
    for row, node in enumerate(range(-1, 6)):
        assert (logits[row] == model.logits_for([*PROMPT, *text_of(node)])).all()
    model.move_slots([2 * 4 + 3, 7 * 4 + 1], [2 * 4 + 2, 2 * 4 + 3])  # nodes 2 and 4, to where 1 and 2 were
    assert (
        model.forward(PackedBatch((Segment(8, [12], table, 1),)))[0] == model.logits_for([*PROMPT, 6, 8, 10, 12])
    ).all()


async def test_a_kept_path_goes_on_as_a_plain_text():
    engine = toy_engine("toy:vocab=16,order=0,seed=2")

    def program(sequence):
        sequence.committed_length = 5
        result = yield Forward(sequence, [*PROMPT, *NODES], 7, PARENTS)
        for row, node in enumerate(range(-1, 6)):
            assert (result.logits[row] == engine.model.logits_for([*PROMPT, *text_of(node)])).all()
        assert (sequence.token_ids, sequence.parents) == ([*PROMPT, *NODES], PARENTS)
        sequence.keep_path([3, 5])
        assert (sequence.token_ids, sequence.parents, sequence.committed_length) == ([*PROMPT, 9, 11], (), 5)
        result = yield Forward(sequence, [12, 13], 2)
        assert (result.logits[1] == engine.model.logits_for([*PROMPT, 9, 11, 12, 13])).all()
        return sequence.token_ids

    with started(engine):
        sequence = await engine.open_sequence(20)
        assert await engine.run(program(sequence)) == [*PROMPT, 9, 11, 12, 13]
        engine.check_integrity([sequence])


async def test_what_is_evicted_before_it_moved_is_not_found_by_its_hash():
    engine = toy_engine("toy:vocab=16,order=0,seed=2")

    def program(sequence):
        yield Forward(sequence, [*PROMPT, *NODES], 7, PARENTS)
        sequence.keep_path([0, 1, 4])
        assert sequence.moves
        sequence.committed_length = 8  # two whole blocks, the second of which lies elsewhere in part
        engine._cache.evict(sequence)
        result = yield Forward(sequence, [12])
        return result.logits.copy()

    with started(engine):
        logits = await engine.run(program(await engine.open_sequence(20)))
    assert (logits[0] == engine.model.logits_for([*PROMPT, 6, 7, 10, 12])).all()
    assert engine.stats().num_rows == 11 + 8 - 4 + 1  # the first block was found again


async def test_nodes_are_neither_found_in_another_text_nor_by_another_text():
    engine = toy_engine("toy:vocab=16,order=0,seed=2")

    def tree(sequence):
        sequence.committed_length = 11  # too much: nodes never count
        result = yield Forward(sequence, [*PROMPT, *NODES], 1, PARENTS)
        return result.logits.copy(), result.num_cached_tokens

    def text(sequence):
        sequence.committed_length = 11
        result = yield Forward(sequence, [*PROMPT, *NODES], 1)
        return result.logits.copy(), result.num_cached_tokens

    with started(engine):
        for program, num_cached in ((tree, 0), (text, 4), (tree, 4), (text, 8)):
            logits, num_cached_tokens = await engine.run(program(await engine.open_sequence(20)))
            ids = [*PROMPT, *(text_of(5) if program is tree else NODES)]
            assert (logits[0] == engine.model.logits_for(ids)).all()
            assert num_cached_tokens == num_cached


async def test_a_tree_grows_level_by_level():
    engine = toy_engine("toy:vocab=16,order=0,seed=2")

    def program(sequence):
        yield Forward(sequence, PROMPT)
        for ids, parents in (([6, 9], (-1, -1)), ([7, 8, 11], (0, 0, 1)), ([10], (2,))):
            before = len(sequence.parents)
            result = yield Forward(sequence, ids, len(ids), parents)
            tree, nodes = sequence.parents, sequence.token_ids[5:]
            for row, node in enumerate(range(before, len(tree))):
                text = text_of(node, tree, nodes)
                assert (result.logits[row] == engine.model.logits_for([*PROMPT, *text])).all()
        assert sequence.parents == (-1, -1, 0, 0, 1, 2)
        sequence.keep_path([0, 2, 5])
        assert sequence.token_ids == [*PROMPT, 6, 7, 10]

    with started(engine):
        await engine.run(program(await engine.open_sequence(20)))


def sequence_with_tree():
    sequence = Sequence(20)
    sequence.token_ids, sequence.parents, sequence.num_computed = [*PROMPT, *NODES], PARENTS, 11
    return sequence


@pytest.mark.parametrize("indices", [[1], [0, 3], [0, 0], [0, 1, 2], [6], [-1], [3, 5, 5], [0, 2, 4]])
def test_what_is_no_path_is_not_kept(indices):
    sequence = sequence_with_tree()
    with pytest.raises(Internal, match="no path"):
        sequence.keep_path(indices)
    assert (sequence.token_ids, sequence.parents, sequence.moves) == ([*PROMPT, *NODES], PARENTS, [])


def test_no_path_is_kept_of_a_sequence_that_is_being_computed():
    sequence = sequence_with_tree()
    sequence.pending = object()
    with pytest.raises(Internal, match="pending"):
        sequence.keep_path([0])


def test_nodes_are_never_final():
    sequence = sequence_with_tree()
    sequence.committed_length = 11
    assert sequence.num_final == 5


def test_truncation_leaves_the_first_nodes():
    sequence = sequence_with_tree()
    sequence.truncate(8)
    assert (sequence.token_ids, sequence.parents) == ([1, 2, 3, 4, 5, 6, 7, 8], (-1, 0, 0))
    sequence.truncate(4)
    assert (sequence.token_ids, sequence.parents) == ([1, 2, 3, 4], ())


def test_only_what_was_computed_moves_and_what_is_truncated_does_not():
    sequence = sequence_with_tree()
    sequence.num_computed = 9  # node 4 and 5 are not
    sequence.keep_path([0, 1, 4])
    assert (sequence.num_computed, sequence.length, sequence.moves) == (7, 8, [])
    sequence = sequence_with_tree()
    sequence.keep_path([3, 5])
    assert (sequence.num_computed, sequence.moves) == (7, [(8, 5), (10, 6)])
    sequence.committed_length = 7
    assert sequence.num_final == 5
    sequence.truncate(6)
    assert sequence.moves == [(8, 5)]
    sequence.keep_path([])
    assert sequence.moves == [(8, 5)]


@pytest.mark.parametrize(
    ("token_ids", "parents", "what"),
    [
        ([1, 2], (0, 0), "does not come before"),
        ([1, 2], (-2, 0), "does not come before"),
        ([1, 2], (-1, 5), "does not come before"),
        ([1], (-1, 0), "2 parents for 1 tokens"),
    ],
)
async def test_an_impossible_tree_is_refused(token_ids, parents, what):
    engine = toy_engine()

    def program(sequence):
        yield Forward(sequence, token_ids, 1, parents)

    with started(engine):
        with pytest.raises(Internal, match=what):
            await engine.run(program(await engine.open_sequence(20)))


async def test_behind_a_tree_comes_more_of_it_or_its_end():
    engine = toy_engine()
    with started(engine):
        sequence = await engine.open_sequence(20)

        def tree(ids, parents):
            yield Forward(sequence, ids, len(ids), parents)

        await engine.run(tree([1, 2, 3], (-1, -1)))
        with pytest.raises(Internal, match="without parents"):
            await engine.run(score(sequence, [4]))
        with pytest.raises(Internal, match="1 parents for 2 tokens behind a tree of 2"):
            await engine.run(tree([4, 5], (-1,)))
        sequence.keep_path([1])
        await engine.run(score(sequence, [4]))
        assert sequence.token_ids == [1, 3, 4]
        await engine.run(tree([5, 6], (-1, 0)))  # a mere chain, which a plain forward may follow
        await engine.run(score(sequence, [7]))
        assert (sequence.token_ids, sequence.parents) == ([1, 3, 4, 5, 6, 7], ())
