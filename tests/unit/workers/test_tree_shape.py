"""Trees of drafts: their shape, what is kept of one, and what a verifier refuses to look at."""

import numpy as np
import pytest

from outrider.drafting import tree
from outrider.drafting.proposal import Proposal, ProposalFault, SparseQ, check

#        prefix
#       0      4
#     1   3    5
#     2
SHAPE = (-1, 0, 1, 0, -1, 4)


def q(*ids: int) -> SparseQ:
    counts = np.full(len(ids), 65_536 // len(ids))
    counts[0] += 65_536 - counts.sum()
    return SparseQ(np.array(ids, np.uint32), counts)


def test_depths_children_and_paths() -> None:
    assert tree.depths(SHAPE) == [1, 2, 3, 2, 1, 2]
    assert tree.children(SHAPE) == [[0, 4], [1, 3], [2], [], [], [5], []]
    assert [tree.path(SHAPE, index) for index in range(-1, 6)] == [
        (), (0,), (0, 1), (0, 1, 2), (0, 3), (4,), (4, 5),
    ]  # fmt: skip


def test_a_chain_is_a_tree_said_or_unsaid() -> None:
    assert tree.chain_parents(3) == (-1, 0, 1)
    assert tree.is_chain(())
    assert tree.is_chain((-1, 0, 1))
    assert not tree.is_chain((-1, 0, 0))
    assert Proposal((5, 6), parents=(-1, 0)).is_chain
    assert Proposal((5, 6)).shape == Proposal((5, 6), parents=(-1, 0)).shape == (-1, 0)


def test_what_is_kept_of_a_tree() -> None:
    drafts = Proposal((7, 8, 9, 7, 6, 5), (q(7), None, q(9), q(7), None, q(5)), (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
                      "x", parents=SHAPE)  # fmt: skip
    kept = drafts.kept([0, 3, 4, 5])
    assert (kept.token_ids, kept.parents, kept.drafter) == ((7, 7, 6, 5), (-1, 0, -1, 2), "x")
    assert kept.q == (drafts.q[0], drafts.q[3], None, drafts.q[5])
    assert kept.confidences == (0.1, 0.4, 0.5, 0.6)
    assert drafts.kept([0, 1, 2]).parents == (), "what is left is a chain"
    with pytest.raises(KeyError):
        drafts.kept([1, 2])


GOOD = {
    "chain": Proposal((1, 2), parents=(-1, 0)),
    "one_hot": Proposal((1, 2, 3, 1), parents=(-1, -1, 0, 0)),
    "with_replacement": Proposal((1, 1, 2), (q(1, 2), q(1, 2), q(1, 2)), parents=(-1, -1, -1)),
    "without_replacement": Proposal((1, 2, 3), (q(1, 2, 3), q(2, 3), q(3)), parents=(-1, -1, -1)),
    "sampled_repeats_one_hot": Proposal((1, 1), (None, q(1, 2)), parents=(-1, -1)),
    "one_hot_repeats_sampled": Proposal((1, 1), (q(1, 2), None), parents=(-1, -1)),
    "cousins": Proposal((1, 2, 3, 3), (None, None, q(3), q(3, 4)), parents=(-1, -1, 0, 1)),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_sound_tree_passes(name: str) -> None:
    check(GOOD[name], vocab_size=10, max_draft_tokens=4)


FAULTY = {
    "its_own_parent": (Proposal((1,), parents=(0,)), "parent 0, which is not before"),
    "a_later_parent": (Proposal((1, 2, 3), parents=(-1, 2, -1)), "draft 1 has parent 2"),
    "a_negative_parent": (Proposal((1, 2), parents=(-1, -2)), "parent -2"),
    "too_few_parents": (Proposal((1, 2), parents=(-1,)), "1 parents for 2 drafts"),
    "too_many_parents": (Proposal((1,), parents=(-1, -1)), "2 parents for 1 drafts"),
    "parents_alone": (Proposal((), parents=(-1,)), "1 parents for 0 drafts"),
    "one_hot_twice": (Proposal((3, 1, 1), parents=(-1, 0, 0)), "draft 2 repeats its one-hot sibling 1"),
    "removed_but_still_there": (
        Proposal((1, 2), (q(1, 2, 3), q(1, 2)), parents=(-1, -1)),
        "q of draft 1 is not that of a sibling",
    ),
    "third_forgets_the_first": (
        Proposal((1, 2, 3), (q(1, 2, 3), q(2, 3), q(1, 3)), parents=(-1, -1, -1)),
        "q of draft 2 is not that of a sibling",
    ),
    "too_many_nodes": (Proposal((1,) * 5, parents=(-1, 0, 1, 2, 3)), "5 drafts, at most 4"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_faulty_tree_is_refused_and_says_why(name: str) -> None:
    proposal, says = FAULTY[name]
    with pytest.raises(ProposalFault, match=says):
        check(proposal, vocab_size=10, max_draft_tokens=4)
