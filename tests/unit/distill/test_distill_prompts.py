"""Built-in prompts: varied, numbered, and split so that no held-out part was ever trained on; files with bad lines."""

import json

import pytest

from outrider.distill import prompt_code, prompt_templates, prompt_texts, prompt_topics
from outrider.distill.prompts import NEW_TEMPLATE, NEW_TOPIC, BuiltIn, PromptFile, is_held_out, part_of
from outrider.errors import InvalidArgument
from outrider.settings import DistillSettings

LISTS = {
    "topics": prompt_topics.TOPICS,
    "frames": prompt_templates.FRAMES,
    "manners": prompt_templates.MANNERS,
    "openings": prompt_templates.OPENINGS,
    "text frames": prompt_templates.TEXT_FRAMES,
    "follow-ups": prompt_templates.FOLLOW_UPS,
    "texts": prompt_texts.TEXTS,
    "code frames": prompt_code.FRAMES,
    "edits": prompt_code.EDITS,
    "snippets": prompt_code.SNIPPETS,
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_hold_nothing_twice_and_split_in_two(name):
    items = LISTS[name]
    assert len(set(items)) == len(items)
    train, held_out = (part_of(items, held_out) for held_out in (False, True))
    assert train
    assert held_out
    assert not set(train) & set(held_out)
    assert len(train) > len(held_out)


def test_held_out_prompts_share_no_topic_or_no_template_with_the_training():
    source = BuiltIn(seed=3, num_prompts=3000, num_held_out=200)
    train = [source.prompt(i).parts for i in range(3000)]
    topics, templates = ({parts[i] for parts in train} for i in (0, 1))
    new_topic, new_template = ([p.parts for p in source.held_out[name]] for name in (NEW_TOPIC, NEW_TEMPLATE))
    assert not topics & {parts[0] for parts in new_topic + new_template}
    assert not templates & {parts[1] for parts in new_template}
    assert {parts[1] for parts in new_topic} <= templates  # there only the topic is new
    assert len({p.messages[-1]["content"] for p in source.held_out[NEW_TEMPLATE]}) > 150


def test_prompts_are_numbered_seeded_and_varied():
    one, again, other = (BuiltIn(seed, 1000, 2) for seed in (0, 0, 1))
    assert [again.prompt(i) for i in (5, 2)] == [one.prompt(i) for i in (5, 2)]
    assert [other.prompt(i) for i in range(5)] != [one.prompt(i) for i in range(5)]
    prompts = [one.prompt(i) for i in range(1000)]
    texts = {p.messages[-1]["content"] for p in prompts}
    assert len(texts) > 950
    assert not any("[" + gap + "]" in text for text in texts for gap in prompt_texts.GAPS)
    assert not any(hole in text for text in texts for hole in ("{topic}", "{text}", "{task}", "{code}", "{name}"))
    assert len({p.parts[1] for p in prompts}) > 150  # templates
    assert any(p.follow_up for p in prompts)
    assert any(len(p.messages) > 2 for p in prompts)
    assert any("```" in text for text in texts)


def test_what_is_held_out_depends_on_nothing_else():
    names = [f"topic {i}" for i in range(2000)]
    share = sum(map(is_held_out, names)) / len(names)
    assert 0.07 < share < 0.13


def test_files_are_split_by_content(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"text {i % 40}"}) for i in range(80)]  # each twice
    lines.append(json.dumps({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}))
    path.write_text("\n".join([*lines, ""]))
    source = PromptFile(path, 0, 64)
    train = [source.prompt(i) for i in range(source.num_prompts)]
    held_out = source.held_out["held_out"]
    assert (len(train), len(held_out)) == (37, 4)
    assert not [p for p in held_out if p in train]
    path.write_text("\n".join(lines[:50]))
    assert PromptFile(path, 0, 64).name != source.name


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["{"], "line 1 of .* is no JSON"),
        (['{"prompt": "a"}', '{"text": "b"}'], "line 2 of .* is neither"),
        (['{"prompt": 3}'], "line 1"),
        (['{"messages": []}'], "line 1"),
        (['{"messages": [{"role": "user"}]}'], "line 1"),
        (['{"prompt": "a"}', '{"prompt": "a"}'], "holds 1 different prompts"),
        ([], "holds 0 different prompts"),
    ],
)
def test_bad_files_are_refused_with_the_line(tmp_path, lines, why):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(InvalidArgument, match=f"prompts: .*{why}"):
        PromptFile(path, 0, 8)


@pytest.mark.parametrize(("values", "field"), [({}, "out"), ({"out": "x", "min_temperature": 2.0}, "min_temperature")])
def test_settings_that_do_not_fit_together(values, field):
    with pytest.raises(InvalidArgument) as error:
        DistillSettings(**values)
    assert error.value.field == field
