"""Guesses that disagree as one tree: its shape, its chances, and the part that its rows are worth."""

from __future__ import annotations

from outrider.drafting.guess import OWN, Evidence, Guess
from outrider.drafting.guess_tree import best_part, merged
from outrider.drafting.tree_plan import RoundCost

SURE = Evidence(OWN, 16, 3)


def guess(name: str, token_ids: tuple[int, ...], chance: float) -> Guess:
    return Guess(name, token_ids, (SURE,) * len(token_ids), (chance,) * len(token_ids))


LOOKUP, SUFFIX = guess("lookup", (1, 2, 3), 0.5), guess("suffix", (1, 5, 6), 0.25)


def test_what_guesses_share_is_drafted_once() -> None:
    tree = merged((SUFFIX, LOOKUP))
    assert tree is not None
    assert tree.token_ids == (1, 2, 3, 5, 6), "the likelier one first"
    assert tree.parents == (-1, 0, 1, 0, 3)
    assert tree.path_chances == (0.5, 0.25, 0.125, 0.125, 0.03125)
    assert tree.drafter == "suffix+lookup"


def test_siblings_share_what_can_be_accepted_at_all() -> None:
    tree = merged((guess("lookup", (1,), 0.9), guess("suffix", (2,), 0.8)))
    assert tree is not None
    assert tree.path_chances[0] == 0.9
    assert abs(sum(tree.path_chances) - 1) < 1e-12


def test_guesses_that_agree_are_no_tree() -> None:
    assert merged((LOOKUP, guess("suffix", (1, 2), 0.3))) is None
    assert merged((LOOKUP,)) is None


def test_rows_that_cost_leave_no_tree() -> None:
    tree = merged((LOOKUP, SUFFIX))
    assert tree is not None
    flat = best_part(tree, RoundCost(verify_ms=10, row_ms=0), 8)
    assert flat is not None
    assert len(flat) == 5
    capped = best_part(tree, RoundCost(verify_ms=10, row_ms=0), 4)
    assert capped is not None
    assert len(capped) == 4
    assert best_part(tree, RoundCost(verify_ms=10, row_ms=3), 8) is None
