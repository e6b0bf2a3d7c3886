"""Trees across rounds: the joint law of the first tokens over the shipped draws and verifier, and noise reused."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from conftest import scaled
from law import FALSE_ALARM, NO_STOP, PROMPT, RoundLoop, TableModel, chi_square, fixed_gamma, joint_law, table_pair

from outrider.drafting import tree, tree_draw
from outrider.drafting.proposal import Proposal, check
from outrider.sampling import AcceptanceRule, History, Noise, SamplingParams, extend_hash, hash_ids
from target_worker import tree_acceptance

NUM_TOKENS = 3
RATIO_RULES = [AcceptanceRule.TOKEN, AcceptanceRule.BLOCK]
SHAPES = {
    "siblings": (-1, -1, -1),
    "binary": (-1, -1, 0, 0, 1, 1),
    "trunk_with_leaves": (-1, -1, 0, 0, 2, 2),
    "deep_and_lopsided": (-1, 0, 1, -1, 3, 0),
}


@dataclass
class TreeLoop:
    """Propose a tree, verify, commit, round after round; the shape changes with the committed length.

    one_hot: the children of the prefix are the draft's likeliest ids. extend: how a prefix hash grows.
    """

    target: TableModel
    draft: TableModel
    params: SamplingParams
    shapes: tuple[tuple[int, ...], ...]
    replacement: bool = False
    one_hot: bool = False
    max_entries: int = 64
    extend: Callable[[int, int], int] = extend_hash
    num_drafted: int = 0
    num_accepted: int = 0
    num_off_trunk: int = 0

    def text(self, noise: Noise, num_tokens: int) -> tuple[int, ...]:
        committed, history = list(PROMPT), History(PROMPT)
        prefix_hash = functools.reduce(self.extend, PROMPT, hash_ids(()))
        while history.num_output_tokens < num_tokens:
            shape = self.shapes[len(committed) % len(self.shapes)]
            proposal, rows = self.propose(committed, history, noise, prefix_hash, shape)
            check(proposal, vocab_size=self.target.vocab_size, max_draft_tokens=16)
            outcome = tree_acceptance.verify_tree(
                rows, proposal, self.params, NO_STOP, history, noise, prefix_hash, len(committed)
            )
            self.num_drafted += len(proposal)
            self.num_accepted += outcome.num_accepted
            self.num_off_trunk += outcome.path != tuple(range(outcome.num_accepted))
            for token_id in outcome.token_ids:
                committed.append(token_id)
                history.push(token_id)
                prefix_hash = self.extend(prefix_hash, token_id)
        return tuple(committed[len(PROMPT) :][:num_tokens])

    def propose(
        self, committed: list[int], history: History, noise: Noise, prefix_hash: int, shape: tuple[int, ...]
    ) -> tuple[Proposal, np.ndarray]:
        """A tree and the target's rows. Nodes that q has no more tokens for are left out with all that is below."""
        children = tree.children(shape)
        drawn: dict[int, tree_draw.Child] = {}
        rows = {}
        for node in range(-1, len(shape)):
            if node >= 0 and node not in drawn:
                continue
            path = [drawn[i].token_id for i in tree.path(shape, node)]
            ids = [*committed, *path]
            rows[node] = self.target.row(ids)
            for token_id in path:
                history.push(token_id)
            how = SamplingParams(temperature=0.0) if self.one_hot and node < 0 else self.params
            here = tree_draw.draw_children(
                self.draft.row(ids), how, NO_STOP, history, noise, functools.reduce(self.extend, path, prefix_hash),
                len(ids), len(children[node + 1]), max_entries=self.max_entries, replacement=self.replacement,
            )  # fmt: skip
            history.pop(len(path))
            drawn.update(zip(children[node + 1], here, strict=False))
        kept = sorted(drawn)
        places = {-1: -1, **{node: place for place, node in enumerate(kept)}}
        proposal = Proposal(
            tuple(drawn[node].token_id for node in kept),
            tuple(drawn[node].q for node in kept),
            parents=tuple(places[shape[node]] for node in kept),
        )
        return proposal, np.stack([rows[-1], *(rows[node] for node in kept)])

    def counts(self, num_seeds: int) -> Counter[tuple[int, ...]]:
        counts = Counter(self.text(Noise(seed), NUM_TOKENS) for seed in range(num_seeds))
        assert 0 < self.num_accepted < self.num_drafted, "INCONCLUSIVE: no draft was accepted, or none rejected"
        assert self.num_off_trunk > 0, "INCONCLUSIVE: no sibling was ever accepted"
        return counts


def p_value(loop: TreeLoop, num_seeds: int) -> float:
    law = joint_law(loop.target, loop.params, NUM_TOKENS)
    return chi_square(loop.counts(num_seeds), law)


@pytest.mark.parametrize(
    ("shape", "replacement"), [(shape, index % 2 == 1) for index, shape in enumerate(SHAPES)] + [("binary", False)]
)
@pytest.mark.parametrize("rule", RATIO_RULES)
def test_joint_law(rule: AcceptanceRule, shape: str, replacement: bool) -> None:
    loop = TreeLoop(*table_pair(3, 3), SamplingParams(acceptance=rule), (SHAPES[shape],), replacement=replacement)
    assert p_value(loop, scaled(12_000)) > FALSE_ALARM


@pytest.mark.parametrize("rule", RATIO_RULES)
@pytest.mark.parametrize(
    "variation",
    [
        pytest.param({"one_hot": True}, id="one_hot_siblings_at_the_root"),
        pytest.param({"max_entries": 2}, id="q_truncated_to_two_entries"),
        pytest.param({"replacement": True, "one_hot": True}, id="one_hot_then_with_replacement"),
    ],
)
def test_joint_law_of_odd_trees_with_penalties_and_filters(rule: AcceptanceRule, variation: dict[str, bool]) -> None:
    params = SamplingParams(
        acceptance=rule, temperature=1.3, top_k=4, top_p=0.95, repetition_penalty=1.3, frequency_penalty=0.5,
        logit_bias={0: 0.7},
    )  # fmt: skip
    loop = TreeLoop(*table_pair(5, 4, num_zeros=1), params, tuple(SHAPES.values()), **variation)
    assert p_value(loop, scaled(8_000)) > FALSE_ALARM


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_coupled_and_greedy_text_is_plain_text(temperature: float) -> None:
    params = SamplingParams(acceptance=AcceptanceRule.COUPLED, temperature=temperature)
    num_off_trunk = 0
    for seed in range(scaled(400, at_least=40)):
        target, draft = table_pair(4, seed % 9)
        plain = RoundLoop(target, draft, params, fixed_gamma(0)).text(Noise(seed), 10)
        for name, shape in SHAPES.items():
            loop = TreeLoop(target, draft, params, (shape, (), (-1, 0)))
            assert loop.text(Noise(seed), 10) == plain, f"seed {seed}, {name}"
            num_off_trunk += loop.num_off_trunk
    assert num_off_trunk > 0, "INCONCLUSIVE"


def test_rounds_that_share_noise_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that only counts tokens: a node's noise comes back in the next round, at its position. What branches and
    siblings share is caught exactly, by enumeration."""

    def count(prefix_hash: int, token_id: int) -> int:
        return (prefix_hash + 1) % 2**64

    params, shapes = SamplingParams(acceptance=AcceptanceRule.BLOCK), (SHAPES["deep_and_lopsided"],)
    honest = TreeLoop(*table_pair(3, 0), params, shapes)
    assert p_value(honest, 3_000) > FALSE_ALARM
    monkeypatch.setattr(tree_acceptance, "extend_hash", count)
    forgetful = TreeLoop(*table_pair(3, 0), params, shapes, extend=count)
    assert p_value(forgetful, 3_000) < FALSE_ALARM / 100
