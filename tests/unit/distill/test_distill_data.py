"""Training text over several shards: follow-up questions get answers, budgets end it, nothing is made twice."""

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from distill_toys import LETTERS, quiet, toy_settings, write_target  # noqa: E402

from outrider.distill.data import make_data  # noqa: E402
from outrider.distill.prompts import Prompt  # noqa: E402
from outrider.distill.target import Target  # noqa: E402
from outrider.errors import InvalidArgument  # noqa: E402


class Source:
    """Prompts of one letter; every third has a follow-up question, every fifth is too long."""

    name = "letters"

    def __init__(self, num_prompts):
        self.num_prompts = num_prompts
        self.held_out = {"held_out": [Prompt(({"role": "user", "content": LETTERS[50] * 2},))]}

    def prompt(self, index):
        text = LETTERS[index] * (30 if index % 5 == 4 else 1)
        return Prompt(({"role": "user", "content": text},), LETTERS[51] if index % 3 == 0 else "")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return Target(toy_settings(model=str(write_target(tmp_path_factory.mktemp("t") / "tiny")), out="unused"), quiet)


def settings(**extra):
    return toy_settings(out="unused", batch_size=4, max_new_tokens=6, max_prompt_tokens=20, held_out_prompts=1, **extra)


def test_follow_ups_come_after_the_first_answer_also_when_killed_between(target, tmp_path):
    class Killed(BaseException):
        pass

    def kill(text, fraction):
        if text == "generated train-00001":
            raise Killed

    whole = make_data(tmp_path / "whole", target, Source(12), settings(), quiet)
    with pytest.raises(Killed):
        make_data(tmp_path / "broken", target, Source(12), settings(), kill)
    made = sorted(p.name for p in (tmp_path / "broken").glob("train-*.json"))
    assert made == ["train-00000.json", "train-00001.json"]
    broken = make_data(tmp_path / "broken", target, Source(12), settings(), quiet)
    sequences = whole.train.sequences
    assert broken.train.sequences == sequences
    firsts = [s for s in sequences if len(s.messages) == 1]
    seconds = [s for s in sequences if len(s.messages) == 3]
    assert [s.messages[0]["content"] for s in firsts] == [LETTERS[i] for i in range(12) if i % 5 != 4]
    assert whole.num_too_long == 2
    assert [s.messages[0] for s in seconds] == [s.messages[0] for s in firsts if s.tag]
    assert [s.messages[1]["content"] for s in seconds] == [s.response for s in firsts if s.tag]
    assert all(s.messages[2] == {"role": "user", "content": LETTERS[51]} and not s.tag for s in seconds)
    assert len({s.temperature for s in sequences}) > 2
    assert {s.temperature for s in whole.held_out["held_out"]["t1"].sequences} == {1.0}
    assert {s.temperature for s in whole.held_out["held_out"]["t0"].sequences} == {0.0}


def test_the_time_ends_it_after_a_whole_shard(target, tmp_path):
    little = make_data(tmp_path, target, Source(40), settings(minutes=1e-6), quiet)
    assert len(little.train.sequences) == 4
    more = make_data(tmp_path, target, Source(40), settings(), quiet)  # the same folder, with more time
    assert more.train.sequences[:4] == little.train.sequences
    assert len(more.train.sequences) > 30
    assert more.seconds > little.seconds


def test_prompts_that_are_all_too_long_are_refused(target, tmp_path):
    with pytest.raises(InvalidArgument, match="max_prompt_tokens"):
        make_data(tmp_path, target, Source(4), settings().model_copy(update={"max_prompt_tokens": 1}), quiet)


def test_a_prompt_without_tokens_is_named(target, tmp_path):
    source = Source(4)
    source.held_out = {"held_out": [Prompt(({"role": "user", "content": "\u4e2d"},))]}
    with pytest.raises(InvalidArgument, match=r"prompts: .*\u4e2d.* has no tokens"):
        make_data(tmp_path, target, source, settings(), quiet)
