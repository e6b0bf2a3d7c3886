"""Prompts to distill on: built in, made of templates times topics, or a user's file. Some of both are held out.

Built-in prompts are numbered: number n is the same prompt for a seed whatever was asked for before. Every topic, text,
code task and snippet, and every template, is either for training or held out; a held-out set with new templates shares
neither with the training.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from outrider.distill import prompt_code, prompt_templates, prompt_texts, prompt_topics
from outrider.errors import InvalidArgument
from outrider.settings import DistillSettings

T = TypeVar("T")
Message = Mapping[str, str]

HELD_OUT_SHARE = 0.1
FOLLOW_UP_SHARE = 0.15
SYSTEM_SHARE = 0.1
OPENING_SHARE = 0.15
MANNER_SHARE = 0.65
CHAT_SHARE = 0.08
NEW_TOPIC, NEW_TEMPLATE = "new_topic", "new_topic_and_template"
KINDS: tuple[tuple[str, float], ...] = (("topic", 0.55), ("text", 0.2), ("code", 0.13), ("snippet", 0.12))
"""What a prompt is made of, and its share."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that the target is to continue. follow_up: what the user asks after its answer, or nothing.

    parts: the topic and the template it was made of, for those that hold some out. kind: one of KINDS, or nothing.
    """

    messages: tuple[Message, ...]
    follow_up: str = ""
    parts: tuple[str, ...] = ()
    kind: str = ""


class PromptSource(Protocol):
    """Where prompts come from. name: tells sources, and the content of files, apart."""

    name: str
    num_prompts: int
    held_out: dict[str, list[Prompt]]

    def prompt(self, index: int) -> Prompt:
        """Of the training prompts, 0 to num_prompts - 1."""


def read_prompts(settings: DistillSettings) -> PromptSource:
    """What `settings.prompts` names. Raises InvalidArgument for a number or file that will not do, with the line."""
    if settings.prompts.isdecimal():
        if int(settings.prompts) < 1:
            raise InvalidArgument("prompts: ask for at least 1, or give a JSONL file", field="prompts")
        return BuiltIn(settings.seed, int(settings.prompts), settings.held_out_prompts)
    return PromptFile(Path(settings.prompts).expanduser(), settings.seed, settings.held_out_prompts)


def is_held_out(name: str) -> bool:
    """Whether a topic or a template is kept from training: by its own text, so whatever else is in the lists."""
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


class BuiltIn:
    """Prompts written for this package."""

    def __init__(self, seed: int, num_prompts: int, num_held_out: int) -> None:
        self.name = "built-in"
        self.num_prompts = num_prompts
        self._seed = seed
        self.held_out = {
            NEW_TEMPLATE: [self._make([1, i], topic=True, template=True) for i in range(num_held_out)],
            NEW_TOPIC: [self._make([2, i], topic=True, template=False) for i in range(num_held_out)],
        }

    def prompt(self, index: int) -> Prompt:
        """Training prompt `index`."""
        return self._make([0, index], topic=False, template=False)

    def _make(self, key: list[int], *, topic: bool, template: bool) -> Prompt:
        """topic, template: whether those parts are held-out ones."""
        draw = _Draw(np.random.default_rng([self._seed, *key]), topic, template)
        kinds, shares = zip(*KINDS, strict=True)
        kind = kinds[int(draw.generator.choice(len(kinds), p=shares))]
        text, parts = _MAKERS[kind](draw)
        messages: list[Message] = []
        if draw.chance(SYSTEM_SHARE):
            messages.append({"role": "system", "content": draw.template(prompt_templates.SYSTEMS)})
        if draw.chance(CHAT_SHARE):
            asked, answered = draw.template(prompt_templates.SMALL_TALK)
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        messages.append({"role": "user", "content": text})
        is_trained = not (topic or template)
        follow_up = draw.template(prompt_templates.FOLLOW_UPS) if is_trained and draw.chance(FOLLOW_UP_SHARE) else ""
        return Prompt(tuple(messages), follow_up, parts, kind)


class PromptFile:
    """A JSONL file: {"prompt": "..."} or {"messages": [{"role": ..., "content": ...}, ...]} a line."""

    def __init__(self, path: Path, seed: int, num_held_out: int) -> None:
        try:
            content = path.read_bytes()
            lines = content.decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"prompts: cannot read {path} ({error})", field="prompts") from error
        prompts = [_parse(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
        different = list({_key(p): p for p in prompts}.values())
        if len(different) < 2:
            raise InvalidArgument(
                f"prompts: {path} holds {len(different)} different prompts; one to train on and one to measure on are "
                "the least",
                field="prompts",
            )
        order = np.random.default_rng(seed).permutation(len(different)).tolist()
        num_held_out = min(num_held_out, max(1, round(HELD_OUT_SHARE * len(different))))
        self.held_out = {"held_out": [different[i] for i in order[:num_held_out]]}
        self._train = [different[i] for i in order[num_held_out:]]
        self.num_prompts = len(self._train)
        self.name = f"file {hashlib.sha256(content).hexdigest()[:16]}"

    def prompt(self, index: int) -> Prompt:
        """Training prompt `index`, in an order that the seed fixes."""
        return self._train[index]


class _Draw:
    """Draws from the training or the held-out part of lists."""

    def __init__(self, generator: np.random.Generator, held_out_topic: bool, held_out_template: bool) -> None:
        self.generator = generator
        self._topic, self._template = held_out_topic, held_out_template

    def chance(self, share: float) -> bool:
        return bool(self.generator.random() < share)

    def topic(self, items: Sequence[T]) -> T:
        return self._among(items, self._topic)

    def template(self, items: Sequence[T]) -> T:
        return self._among(items, self._template)

    def any(self, items: Sequence[T]) -> T:
        return items[int(self.generator.integers(len(items)))]

    def _among(self, items: Sequence[T], held_out: bool) -> T:
        return self.any(part_of(items, held_out))


_PARTS: dict[tuple[int, bool], tuple[Any, list[Any]]] = {}


def part_of(items: Sequence[T], held_out: bool) -> Sequence[T]:
    """The held-out or the other items of a list; of a list so short that one part would be empty, half each."""
    key = (id(items), held_out)
    if key not in _PARTS:
        chosen = [item for item in items if is_held_out(str(item)) == held_out]
        if not chosen or len(chosen) == len(items):
            chosen = list(items[::2] if held_out else items[1::2])
        _PARTS[key] = (items, chosen)  # holds `items` too, so that its id stays its own
    return _PARTS[key][1]


def _from_topic(draw: _Draw) -> tuple[str, tuple[str, ...]]:
    template = draw.template(prompt_templates.FRAMES)
    topic = draw.topic(prompt_topics.TOPICS)
    text = template.format(topic=topic, other=draw.topic(prompt_topics.TOPICS), name=draw.any(prompt_texts.NAMES))
    manner = " " + draw.template(prompt_templates.MANNERS) if draw.chance(MANNER_SHARE) else ""
    opening = draw.template(prompt_templates.OPENINGS) if draw.chance(OPENING_SHARE) else ""
    return f"{opening}{text}{manner}", (topic, template)


def _from_text(draw: _Draw) -> tuple[str, tuple[str, ...]]:
    template = draw.template(prompt_templates.TEXT_FRAMES)
    source = draw.topic(prompt_texts.TEXTS)
    return template.format(text=_filled(draw, source)), (source, template)


def _from_code(draw: _Draw) -> tuple[str, tuple[str, ...]]:
    template = draw.template(prompt_code.FRAMES)
    language, tasks = draw.any(prompt_code.LANGUAGES)
    task = draw.topic(tasks)
    return template.format(language=language, task=task), (task, template)


def _from_snippet(draw: _Draw) -> tuple[str, tuple[str, ...]]:
    template = draw.template(prompt_code.EDITS)
    language, snippet = draw.topic(prompt_code.SNIPPETS)
    text = template.format(code=f"```{language}\n{snippet.strip()}\n```", new=draw.any(prompt_code.NEW_NAMES))
    return text, (snippet, template)


def _filled(draw: _Draw, source: str) -> str:
    """A text whose gaps, such as [name], are filled at random: many texts of one build."""
    for gap, values in prompt_texts.GAPS.items():
        while f"[{gap}]" in source:
            source = source.replace(f"[{gap}]", str(draw.any(values)), 1)
    return source


_MAKERS: dict[str, Callable[[_Draw], tuple[str, tuple[str, ...]]]] = {
    "topic": _from_topic,
    "text": _from_text,
    "code": _from_code,
    "snippet": _from_snippet,
}


def _parse(path: Path, number: int, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidArgument(f"prompts: line {number} of {path} is no JSON ({error})", field="prompts") from None
    if isinstance(value, dict) and isinstance(value.get("prompt"), str) and set(value) == {"prompt"}:
        messages = [{"role": "user", "content": value["prompt"]}]
    elif isinstance(value, dict) and isinstance(value.get("messages"), list) and set(value) == {"messages"}:
        messages = value["messages"]
    else:
        messages = []
    for message in messages:
        is_message = isinstance(message, dict) and set(message) == {"role", "content"}
        if not is_message or not all(isinstance(text, str) and text for text in message.values()):
            messages = []
            break
    if not messages:
        raise InvalidArgument(
            f'prompts: line {number} of {path} is neither {{"prompt": "..."}} nor {{"messages": [{{"role": "user", '
            f'"content": "..."}}, ...]}}',
            field="prompts",
        )
    return Prompt(tuple(messages))


def _key(prompt: Prompt) -> str:
    return json.dumps([dict(m) for m in prompt.messages], sort_keys=True)
