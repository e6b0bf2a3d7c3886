"""Trees out of a head's rows: the likeliest paths by brute force, shapes node by node, and nothing beyond what was
asked for."""

import dataclasses
import itertools

import numpy as np
import pytest
from conftest import scaled

from outrider.drafting import tree
from outrider.drafting.grown_tree import GrownTree, likeliest, planned
from outrider.drafting.proposal import check
from outrider.drafting.tree_draw import draw_children
from outrider.errors import Internal
from outrider.lm.toy import ToyModel, parse_toy
from outrider.sampling.history import History
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import AcceptanceRule, SamplingParams, StoppingParams
from outrider.serving.messages import Opening
from outrider.serving.session_log import SessionLog

VOCAB = 6
PROMPT = (1, 2, 3)
SHAPES = [(-1, 0, 0, -1, 1, 3, -1), (-1, -1, -1), (-1, 0, 1, 1, 1, 4), (-1, -1, 1, 1, 3, 3, 0)]
GREEDY = SamplingParams(temperature=0.0)
COUPLED = SamplingParams(acceptance=AcceptanceRule.COUPLED, seed=3)
SAMPLED = [SamplingParams(acceptance=rule, seed=4) for rule in (AcceptanceRule.TOKEN, AcceptanceRule.BLOCK)]
BUSY = {"repetition_penalty": 1.5, "frequency_penalty": 0.4}


class Head:
    """Rows of a toy, counting what it is asked for; of one path none can be read, or the run itself fails."""

    def __init__(self, params, *, seed=1, max_tokens=20, stop=(), bad_path=None, fails_at_level=0):
        self.model = ToyModel(parse_toy(f"toy:vocab={VOCAB},seed={seed},order=3,scale=1.5"))
        opening = Opening(
            epoch=0, prompt_ids=PROMPT, sampling=params,
            stopping=StoppingParams(max_tokens=max_tokens, stop_token_ids=frozenset(stop)),
        )  # fmt: skip
        self.log = SessionLog(opening, vocab_size=VOCAB)
        self.grown = GrownTree(self.log, 64)
        self.levels: list[int] = []
        self._bad_path, self._fails_at_level = bad_path, fails_at_level

    def row(self, path):
        row = self.model.logits_for([*PROMPT, *path])
        return row * np.nan if self._bad_path is not None and len(path) == self._bad_path else row

    def rows(self, nodes):
        self.levels.append(len(nodes))
        if len(self.levels) == self._fails_at_level:
            raise RuntimeError("a run that fails")
        return [self.row(self.grown.path_ids(node)) for node in nodes]

    def likeliest(self, num_nodes, max_depth):
        return self._checked(likeliest(self.grown, num_nodes, max_depth, self.row(()), self.rows), num_nodes)

    def planned(self, shape):
        return self._checked(planned(self.grown, shape, self.row(()), self.rows, self.grown.drawn), len(shape))

    def _checked(self, order, num_nodes):
        assert self.log.history.num_output_tokens == 0, "the history is left as it was"
        proposal = self.grown.proposal(order, "head")
        check(proposal, vocab_size=VOCAB, max_draft_tokens=num_nodes)
        return proposal

    def children(self, path, count):
        """The slow twin: of a path of its own."""
        ids = [*PROMPT, *path]
        return draw_children(
            self.row(path), self.log.sampling, self.log.stopping, History(PROMPT, path), self.log.noise, hash_ids(ids),
            len(ids), count,
        )  # fmt: skip


def paths(proposal):
    return [
        tuple(proposal.token_ids[i] for i in tree.path(proposal.shape, node)) for node in range(len(proposal.token_ids))
    ]


@pytest.mark.parametrize("params", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize("busy", [{}, BUSY], ids=["bare", "penalties"])
def test_the_likeliest_paths_of_all(params, busy):
    for seed in range(scaled(20, at_least=3)):
        for num_nodes, max_depth in ((1, 1), (4, 2), (9, 3), (14, 3)):
            head = Head(dataclasses.replace(params, **busy), seed=seed)
            proposal = head.likeliest(num_nodes, max_depth)
            values = {(): 1.0}
            for depth in range(max_depth):
                for path in [p for p in values if len(p) == depth]:
                    values |= {
                        (*path, child.token_id): values[path] * child.chance for child in head.children(path, VOCAB)
                    }
            del values[()]
            best = sorted(values, key=lambda path: (-values[path], len(path)))[:num_nodes]
            assert set(paths(proposal)) == set(best)
            assert paths(proposal) == sorted(best, key=lambda path: (-values[path], len(path)))
            assert len(head.levels) <= max_depth - 1
            assert all(count <= num_nodes for count in head.levels)


def test_what_cannot_be_among_the_likeliest_is_not_run():
    """A flat head: its first level fills the tree, and the last of it can have no child that is likelier."""
    head = Head(GREEDY)
    head.row = lambda path: np.zeros(VOCAB, np.float32)
    proposal = head.likeliest(VOCAB, 5)
    assert set(proposal.parents) == {-1}
    assert head.levels == [VOCAB - 1]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("params", SAMPLED, ids=["token", "block"])
def test_a_shape_is_drawn_node_by_node_as_from_its_own_prefix(params, shape):
    for seed in range(scaled(20, at_least=3)):
        head = Head(dataclasses.replace(params, seed=seed, **BUSY), seed=seed)
        proposal = head.planned(shape)
        assert proposal.parents == shape
        assert len(head.levels) == max(tree.depths(shape)) - 1
        below, found = tree.children(shape), [(), *paths(proposal)]
        for path, children in zip(found, below, strict=True):
            twins = head.children(path, len(children))
            for node, twin in zip(children, twins, strict=True):
                assert (proposal.token_ids[node], proposal.q[node].ids.tolist(), proposal.q[node].counts.tolist()) == (
                    twin.token_id, twin.q.ids.tolist(), twin.q.counts.tolist()
                )  # fmt: skip


def test_as_many_children_as_there_are_tokens():
    for seed in range(10):
        head = Head(SamplingParams(seed=seed, top_k=2))
        proposal = head.planned((-1, -1, -1, 2, 0))
        assert proposal.parents == (-1, -1, 0), "the third child and what was to follow it are left out"


def test_nothing_follows_a_certain_stop_token_and_a_sampled_one_is_drawn_behind():
    every_id = range(VOCAB)
    assert set(Head(GREEDY, stop=every_id).likeliest(9, 4).parents) == {-1}
    head = Head(SAMPLED[0], stop=every_id)
    assert head.planned((-1, 0, 0)).parents == (-1, 0, 0)


@pytest.mark.parametrize("params", [GREEDY, *SAMPLED], ids=["greedy", "token", "block"])
def test_what_was_drawn_stands_when_a_later_row_or_run_fails(params):
    def draw(head):
        return head.likeliest(8, 4) if params.greedy else head.planned((-1, 0, -1, 1))

    whole = draw(Head(params))
    for fault in ({"bad_path": 1}, {"fails_at_level": 1}):
        proposal = draw(Head(params, **fault))
        assert 0 < len(proposal) < 8
        assert set(proposal.shape) == {-1}
        if not params.greedy:
            assert set(paths(proposal)) <= set(paths(whole))
    with pytest.raises(Internal, match="NaN"):
        draw(Head(params, bad_path=0))


def test_shapes_cut_to_a_depth():
    for size in range(1, 6):
        for parents in itertools.product(*(range(-1, index) for index in range(size))):
            for depth in (1, 2, 3):
                kept = tree.within(parents, depth)
                depths = [d for d in tree.depths(parents) if d <= depth]
                assert tree.depths(kept) == depths
