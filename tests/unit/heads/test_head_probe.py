"""The calibration: agreement is counted rightly, the right reading wins, and a head that guesses badly is refused.

Texts are made by the heads themselves: the "target" says what a head would guess, so that this head is right.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from head_checkpoints import (
    HIDDEN,
    VOCAB,
    Eagle,
    eagle1_weights,
    llama_config,
    random,
    tiny_target,
    write_bin,
    write_specforge,
    write_speculators,
)

from outrider.errors import FailedPrecondition, InvalidArgument
from outrider.lm.heads import (
    Convention,
    EagleHead,
    Head,
    ProbeText,
    choose_convention,
    feature_states,
    load_head,
    probe,
)
from outrider.lm.heads.probe import NUM_TOKENS, PROMPTS, STRIDE, _select

LENGTH = 90


def guess(head: EagleHead, logits: torch.Tensor) -> int:
    best = int(logits.argmax())
    return best if head.draft_ids is None else int(head.draft_ids[best])


def said_by(
    head: Head, features: torch.Tensor, length: int = LENGTH, is_wrong: Callable[[int], bool] = lambda place: False
) -> list[int]:
    """Token t + 2 is what the head guesses from pairs up to t, or the next id where it is to be wrong."""
    assert isinstance(head, EagleHead)
    ids, context = [3, 7], head.new_context()
    for place in range(length - 2):
        best = guess(head, context.extend(features[place : place + 1], torch.tensor(ids[-1:])))
        ids.append((best + 1) % VOCAB if is_wrong(place) else best)
    return ids


def loaded(folder: Path, **options: Any) -> EagleHead:
    head = load_head(folder, tiny_target(), **options)
    assert isinstance(head, EagleHead)
    return head


def text_for(head: EagleHead, seed: int = 0, num_prompt_tokens: int = 10, **how: Any) -> ProbeText:
    """By the head as it is read, with the states of all its ways of reading."""
    kept = feature_states(head)
    features = random(LENGTH, len(kept) * HIDDEN, seed=90 + seed, scale=1.0)
    return ProbeText(said_by(head, _select(features, kept, head.states), **how), num_prompt_tokens, features)


def test_agreement_is_counted_by_the_place_among_guesses(tmp_path: Path) -> None:
    """The text says the third guess wherever it may choose; of what is after it nothing is counted deeper."""
    head = loaded(write_specforge(tmp_path, Eagle(), [1, 3, 4]))
    features = random(LENGTH, head.feature_width, seed=1, scale=1.0)
    ids, context = [3, 7], head.new_context()
    for place in range(LENGTH - 2):
        logits = context.extend(features[place : place + 1], torch.tensor(ids[-1:]))
        assert head.draft_ids is not None
        ids.append(int(head.draft_ids[logits.topk(3).indices[2]]))
    report = probe(head, ids, features)
    assert report.num_right[0] == 0
    assert report.num_right_at[2] >= report.num_guesses[0] == LENGTH - 2
    assert report.rank_agreement[2] == report.num_right_at[2] / sum(report.num_guesses)
    twice = report + report
    assert twice.num_right_at[2] == 2 * report.num_right_at[2]
    assert twice.rank_agreement == report.rank_agreement


def test_agreement_is_counted_by_depth(tmp_path: Path) -> None:
    head = loaded(write_specforge(tmp_path, Eagle(), [1, 3, 4]))
    features = random(LENGTH, head.feature_width, seed=1, scale=1.0)
    ids = said_by(head, features, is_wrong=lambda place: place % 3 == 0)
    report = probe(head, ids, features, 20)
    assert report.num_guesses[0] == LENGTH - 20
    assert report.num_right[0] == sum(place % 3 != 0 for place in range(18, LENGTH - 2))
    assert report.num_right_at[0] == sum(report.num_right)
    assert sum(report.num_right_at) <= sum(report.num_guesses)
    deeper = range(18 + STRIDE - 1, LENGTH - 2, STRIDE)  # the last pair of every few
    right, total = [0, 0], [0, 0]
    for last in deeper:
        context = head.new_context()
        context.extend(features[: last + 1], torch.tensor(ids[1 : last + 2]))
        for depth in (1, 2):
            if last + 2 + depth < LENGTH:
                total[depth - 1] += 1
                right[depth - 1] += int(guess(head, context.step(ids[last + 1 + depth])) == ids[last + 2 + depth])
    assert report.num_guesses[1:] == tuple(total)
    assert report.num_right[1:] == tuple(right)


def test_medusa_agreement(tmp_path: Path) -> None:
    weights = {}
    for i in range(4):
        weights[f"{i}.0.linear.weight"] = torch.zeros(HIDDEN, HIDDEN)
        weights[f"{i}.0.linear.bias"] = torch.zeros(HIDDEN)
        weights[f"{i}.1.weight"] = torch.eye(256, HIDDEN)  # says the place of the largest number
    torch.save(weights, tmp_path / "medusa_lm_head.pt")
    head = load_head(tmp_path, tiny_target())
    ids = [int(i) for i in torch.randint(HIDDEN, (60,), generator=torch.Generator().manual_seed(0))]
    features = torch.zeros(60, HIDDEN)
    for place in range(58):
        features[place, ids[place + 2]] = 1.0  # head 0 is right everywhere, the others by chance
    report = probe(head, ids, features, 10)
    assert (report.num_right[0], report.num_guesses[0]) == (50, 50)
    assert report.agreement[0] == 1.0
    assert 10 <= report.num_guesses[1] <= 13
    chosen, report = choose_convention(head, [ProbeText(ids, 10, features)])
    assert chosen is head
    assert not report.warning
    assert feature_states(head) == (-1,)


@pytest.mark.parametrize("index", [0, 1])
def test_the_way_of_reading_that_agrees_wins(tmp_path: Path, index: int) -> None:
    head = loaded(write_specforge(tmp_path, Eagle(), [1, 3, 4]))
    truth = head.reading(head.conventions[index])
    texts = [text_for(truth, seed) for seed in range(2)]
    chosen, report = choose_convention(head, texts)
    assert chosen.states == truth.states == [(2, 4, 5), (1, 3, 4)][index]
    assert report.convention == chosen.convention
    assert report.agreement[0] == 1.0
    assert report.num_guesses[0] == 2 * (LENGTH - 10)


@pytest.mark.parametrize("norm_residual", [True, False])
def test_a_missing_flag_is_found_out(tmp_path: Path, norm_residual: bool) -> None:
    head = loaded(write_speculators(tmp_path, Eagle(), [2, 4, 5], norm_before_residual="absent"))
    assert len(head.conventions) == 4
    truth = head.reading(Convention((2, 4, 5), norm_residual=norm_residual))
    chosen, _ = choose_convention(head, [text_for(truth)])
    assert chosen.convention == truth.convention


def test_likeliest_way_among_equals(tmp_path: Path) -> None:
    """States that do not differ leave nothing to choose by."""
    head = loaded(write_specforge(tmp_path, Eagle(), [1, 3, 4]))
    one = random(LENGTH, HIDDEN, seed=3, scale=1.0)
    features = one.repeat(1, len(feature_states(head)))
    ids = said_by(head, one.repeat(1, 3))
    chosen, _ = choose_convention(head, [ProbeText(ids, 5, features)])
    assert chosen.convention == head.conventions[0]


def test_a_head_that_is_never_right_is_refused(tmp_path: Path) -> None:
    head = loaded(write_specforge(tmp_path, Eagle(), [1, 3, 4]))
    text = text_for(head, is_wrong=lambda place: place % 40 != 1)
    with pytest.raises(FailedPrecondition) as refusal:
        choose_convention(head, [text])
    assert refusal.value.reason == "HEAD_DISAGREES"
    assert refusal.value.field == "heads"
    assert "2.5 / " in refusal.value.message
    assert "over 80 tokens" in refusal.value.message
    assert "states 2,4,5" in refusal.value.message
    assert "states 1,3,4" in refusal.value.message
    assert "trained for another model" in refusal.value.message


def test_a_head_that_is_seldom_right_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = loaded(write_specforge(tmp_path, Eagle(), [1, 3, 4]))
    with caplog.at_level("WARNING", logger="outrider"):  # a server started before may have set another level
        _, report = choose_convention(head, [text_for(head, is_wrong=lambda place: place % 10 != 1)])
    assert report.agreement[0] == pytest.approx(0.1)
    assert "drafts will seldom be accepted" in report.warning
    assert report.warning in caplog.text
    _, report = choose_convention(head, [text_for(head, is_wrong=lambda place: place % 4 != 1)])
    assert report.agreement[0] == pytest.approx(0.25)
    assert not report.warning


def test_too_little_text_tells_nothing(tmp_path: Path) -> None:
    head = loaded(write_specforge(tmp_path, Eagle(), [1, 3, 4]))
    with pytest.raises(InvalidArgument, match="32 at least are needed"):
        choose_convention(head, [text_for(head, num_prompt_tokens=LENGTH - 20)])
    with pytest.raises(InvalidArgument, match="32 at least are needed"):
        choose_convention(head, [])


def test_eagle1_is_probed_too(tmp_path: Path) -> None:
    head = loaded(write_bin(tmp_path, llama_config(Eagle()), eagle1_weights(Eagle())))
    chosen, report = choose_convention(head, [text_for(head)])
    assert chosen.states == (-1,)
    assert report.agreement[0] == 1.0


def test_prompts_are_a_few_and_text_is_short() -> None:
    assert 2 <= len(PROMPTS) <= 8
    assert 150 <= NUM_TOKENS <= 300
