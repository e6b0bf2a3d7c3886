"""Several guesses of a tree in one run of a head: each as if its path alone had been guessed, step by step."""

import random
from pathlib import Path

import pytest
from conftest import scaled
from head_checkpoints import Eagle, eagle1_weights, llama_config, write_bin, write_specforge, write_speculators
from test_eagle_heads import close, eagle, text

from outrider.drafting import tree
from outrider.errors import Internal
from outrider.lm.heads import EagleHead

KINDS = ("eagle", "eagle3", "two layers, feeding back the norm's output")


def head_of(kind: str, folder: Path) -> EagleHead:
    if kind == "eagle":
        return eagle(write_bin(folder, llama_config(Eagle(num_layers=2)), eagle1_weights(Eagle(num_layers=2))))
    if kind == "eagle3":
        return eagle(write_specforge(folder, Eagle(head_norms=True, num_kv_heads=1), [1, 3, 4]))
    return eagle(write_speculators(folder, Eagle(num_layers=2, feeds_normed=True), [2, 4, 5]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_level_at_once_says_what_each_path_says_alone(tmp_path: Path, kind: str) -> None:
    head = head_of(kind, tmp_path)
    features, ids = text(160, head.feature_width)
    for seed in range(scaled(12, at_least=3)):
        rng = random.Random(seed)
        num_pairs = rng.choice([1, 3, 63, 140])  # with the branches, past the cache's first size and the table's page
        context = head.new_context()
        context.extend(features[:num_pairs], ids[:num_pairs])
        parents: list[int] = []
        drafts: list[int] = []
        for _ in range(4):
            more = [rng.randrange(-1, len(parents)) for _ in range(rng.choice([1, 2, 5]))]
            tokens = [rng.randrange(50) for _ in more]
            got = context.branch(tokens, more)
            parents += more
            drafts += tokens
            for row, node in enumerate(range(len(parents) - len(more), len(parents))):
                twin = head.new_context()
                twin.extend(features[:num_pairs], ids[:num_pairs])
                for token in (drafts[i] for i in tree.path(parents, node)):
                    expected = twin.step(token)
                close(got[row], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_branches_are_thrown_away(tmp_path: Path, kind: str) -> None:
    """Round after round nothing of them is kept, in numbers or in room."""
    head = head_of(kind, tmp_path)
    features, ids = text(60, head.feature_width)
    context = head.new_context()
    expected = head.new_context()
    for end in range(2, 60, 2):
        close(
            context.extend(features[end - 2 : end], ids[end - 2 : end]),
            expected.extend(features[end - 2 : end], ids[end - 2 : end]),
        )
        context.branch([1, 2, 3], [-1, -1, -1])
        context.branch([4, 5], [0, 2])
        assert context.length == end
        if end % 4:
            context.discard()
            close(context.step(7), expected.step(7))
        assert context._cache.length == end + (1 if end % 4 else 5)
        assert context._cache._tensors.shape[3] <= 128


def test_misuse_of_branches_is_told(tmp_path: Path) -> None:
    head = head_of("eagle3", tmp_path)
    features, ids = text(3, head.feature_width)
    context = head.new_context()
    with pytest.raises(Internal, match="pair"):
        context.branch([1], [-1])
    context.extend(features, ids)
    with pytest.raises(Internal, match="before them"):
        context.branch([1, 2], [-1, 0])
    context.step(1)
    with pytest.raises(Internal, match="no steps"):
        context.branch([1], [-1])
    context.discard()
    assert context.branch([1], [-1]).shape == (1, 96)
