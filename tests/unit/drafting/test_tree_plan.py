"""The planner: the best of all trees by brute force, large ones only where rows are free, none where rows are dear."""

import itertools
import random

import pytest
from conftest import scaled

from outrider.drafting import tree
from outrider.drafting.tree_plan import RoundCost, choose, shape, shape_of_size

FREE_ROWS = RoundCost(verify_ms=30.0, row_ms=0.0, level_ms=1.0)
DEAR_ROWS = RoundCost(verify_ms=30.0, row_ms=15.0, level_ms=1.0)


def hazards(depth: int, try_index: int) -> float:
    """A draft that is right 6 times in 10, and its next guesses 1.5 times, 0.75 times ..."""
    return 0.6 if try_index == 0 else 0.3 * 0.5**try_index


def candidates(seed: int, num_nodes: int) -> tuple[list[int], list[float]]:
    rng = random.Random(seed)
    parents = [rng.randrange(-1, index) for index in range(num_nodes)]
    chances: list[float] = []
    for parent in parents:
        # many ties, at chance 1 and 0 too
        chances.append((1.0 if parent < 0 else chances[parent]) * rng.choice([1.0, 0.75, 0.5, 0.25, 0.0]))
    return parents, chances


@pytest.mark.parametrize("seed", range(scaled(200, at_least=20)))
def test_choose_is_the_best_of_all_trees(seed: int) -> None:
    parents, chances = candidates(seed, 8)
    cost = (FREE_ROWS, DEAR_ROWS, RoundCost(10, 1, 3), RoundCost(10, 0.2, 0), RoundCost(5, 2, 9))[seed % 5]
    plan = choose(parents, chances, cost, max_nodes=6, max_depth=4)
    depths, best = tree.depths(parents), 1.0 / cost.ms(0, 0)
    for size in range(1, 7):
        for nodes in itertools.combinations(range(8), size):
            if all(parents[n] == -1 or parents[n] in nodes for n in nodes) and max(depths[n] for n in nodes) <= 4:
                tokens = 1.0 + sum(chances[n] for n in nodes)
                best = max(best, tokens / cost.ms(size, max(depths[n] for n in nodes)))
    assert plan.tokens_per_ms == pytest.approx(best)
    assert plan.num_tokens == pytest.approx(1.0 + sum(chances[n] for n in plan.nodes))
    assert plan.ms == cost.ms(len(plan.nodes), max((depths[n] for n in plan.nodes), default=0))
    assert plan.parents == tuple(-1 if parents[n] == -1 else plan.nodes.index(parents[n]) for n in plan.nodes), (
        "a tree, in order"
    )


def test_a_node_likelier_than_its_parent_is_no_path_chance() -> None:
    with pytest.raises(ValueError, match="node 1 is likelier"):
        choose((-1, 0), (0.5, 0.6), FREE_ROWS, max_nodes=4)


def test_no_candidates_is_plain_decoding() -> None:
    plan = choose((), (), FREE_ROWS, max_nodes=4)
    assert (plan.nodes, plan.num_tokens, plan.ms) == ((), 1.0, 30.0)


@pytest.mark.parametrize("planned", ["chosen", "shaped"])
def test_sixty_nodes_only_where_rows_are_free(planned: str) -> None:
    whole = shape(hazards, RoundCost(1000.0, 0.0), max_nodes=200, max_depth=8)
    path_chances: list[float] = []
    for node, parent in enumerate(whole.parents):
        depth = len(tree.path(whole.parents, node))
        rank = whole.parents[:node].count(parent)
        path_chances.append((1.0 if parent == -1 else path_chances[parent]) * hazards(depth, rank))

    def best(cost: RoundCost) -> int:
        if planned == "chosen":
            return len(choose(whole.parents, path_chances, cost, max_nodes=60, max_depth=8).nodes)
        return len(shape(hazards, cost, max_nodes=60, max_depth=8).nodes)

    assert best(FREE_ROWS) == 60
    assert best(DEAR_ROWS) <= 3
    assert best(RoundCost(verify_ms=30.0, row_ms=45.0)) == 0
    sizes = [best(RoundCost(30.0, row_ms, 1.0)) for row_ms in (0.0, 0.3, 1.0, 3.0, 10.0, 30.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) > 3


def test_a_shape_is_a_chain_where_second_guesses_are_worthless_and_flat_where_levels_are_dear() -> None:
    chain = shape(lambda depth, try_index: 0.9 if try_index == 0 else 0.0, RoundCost(30, 1), max_nodes=16, max_depth=8)
    assert len(chain.parents) == 8
    assert tree.is_chain(chain.parents)
    fading = lambda depth, try_index: hazards(depth, try_index) * 0.3 ** (depth - 1)  # noqa: E731
    flat = shape(fading, RoundCost(30, 0.1, 15), max_nodes=16, max_depth=8)
    assert set(flat.parents) == {-1}
    assert len(flat.parents) > 1


@pytest.mark.parametrize("seed", range(10))
def test_a_shape_is_what_choose_would_take_of_all_that_can_be_drawn(seed: int) -> None:
    rng = random.Random(seed)
    table = {depth: sorted((rng.random() ** 2 for _ in range(3)), reverse=True) for depth in (1, 2, 3)}
    table = {depth: [x / max(1.0, sum(row)) for x in row] for depth, row in table.items()}
    parents, chances = [], []
    frontier = [(-1, 1.0)]
    for depth in (1, 2, 3):
        level = []
        for node, chance in frontier:
            for x in table[depth]:
                level.append((len(parents), chance * x))
                parents.append(node)
                chances.append(chance * x)
        frontier = level
    cost = RoundCost(rng.uniform(5, 40), rng.uniform(0, 3), rng.uniform(0, 5))
    everything = choose(parents, chances, cost, max_nodes=12)
    shaped = shape(lambda depth, try_index: table[depth][try_index], cost, max_nodes=12, max_depth=3, max_width=3)
    assert shaped.tokens_per_ms == pytest.approx(everything.tokens_per_ms)
    assert shaped.num_tokens == pytest.approx(everything.num_tokens)


@pytest.mark.parametrize("seed", range(10))
def test_a_shape_of_a_size_is_as_deep_as_pays(seed: int) -> None:
    rng = random.Random(seed)
    cost = RoundCost(rng.uniform(5, 40), rng.uniform(0, 3), rng.uniform(0, 9))
    for num_nodes in (1, 3, 8):
        parents = shape_of_size(hazards, cost, num_nodes, max_depth=5, max_width=3)
        assert len(parents) == num_nodes
        rates = {}
        for depth in range(1, 6):
            whole = shape(hazards, RoundCost(1e9, 0.0), max_nodes=num_nodes, max_depth=depth, max_width=3)
            if len(whole.parents) == num_nodes:
                rates[whole.parents] = whole.num_tokens / cost.ms(num_nodes, max(tree.depths(whole.parents)))
        assert rates[parents] == max(rates.values())
    assert len(shape_of_size(lambda depth, i: 0.0, cost, 9, max_depth=2, max_width=2)) == 6
