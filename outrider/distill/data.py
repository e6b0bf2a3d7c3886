"""The data of a distillation: held-out text at temperatures 0 and 1, and training text at the serving mix, in shards.

Each shard is a batch. A killed run finds the shards that are whole and makes the next.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.distill.batches import Corpus
from outrider.distill.claim import claim
from outrider.distill.generation import Job, generate
from outrider.distill.prompts import Prompt, PromptSource
from outrider.distill.shards import Shard, has_shard, read_shard, write_shard
from outrider.distill.target import LAST, Target
from outrider.errors import InvalidArgument
from outrider.lm.loading import Progress
from outrider.settings import DistillSettings

HELD_OUT_NUMBERS = 1 << 40
"""Numbers of held-out sequences start here: no random number is shared with training text."""
TEMPERATURES = {"t0": 0.0, "t1": 1.0}
DECIDING = (
    "seed", "max_new_tokens", "max_prompt_tokens", "batch_size", "greedy_share", "min_temperature", "max_temperature",
    "held_out_prompts",
)  # fmt: skip
"""Settings that decide the data, besides the target and the prompts."""


@dataclass(frozen=True, slots=True)
class Data:
    """train: all training text. held_out: by set and then "t0" or "t1". seconds: that making it took, over all runs."""

    train: Corpus
    held_out: dict[str, dict[str, Corpus]]
    seconds: float
    num_too_long: int


def make_data(
    folder: Path, target: Target, source: PromptSource, settings: DistillSettings, on_progress: Progress
) -> Data:
    """What is missing of the data is generated; training text until the prompts or the share of the time are used up.

    Raises InvalidArgument where the folder holds data of other settings, prompts or another target.
    """
    about = {name: getattr(settings, name) for name in DECIDING} | {
        "target": target.fingerprints[str(target.dtype).removeprefix("torch.")],
        "prompts": source.name,
        # Where its input is a state of its own, which data of other drafts does not hold.
        "exit_layer": target.exit_layer if target.exit_state > LAST else None,
    }
    claim(folder, "data.json", about, "data")
    held_out = _held_out(folder, target, source, settings, on_progress)
    seconds = sum(shard.seconds for shards in held_out.values() for s in shards.values() for shard in s)
    budget = settings.minutes * 60 * settings.generation_share
    train: list[Shard] = []
    for shard in _train_shards(folder, target, source, settings, on_progress, seconds, budget):
        train.append(shard)
        seconds += shard.seconds
        if seconds >= budget:
            break
    if not train:
        raise InvalidArgument("prompts: none is short enough for max_prompt_tokens; raise it", field="prompts")
    corpora = {name: {t: Corpus(shards) for t, shards in by.items()} for name, by in held_out.items()}
    return Data(Corpus(train), corpora, seconds, int(train[-1].about["num_too_long"]))


def _held_out(
    folder: Path, target: Target, source: PromptSource, settings: DistillSettings, on_progress: Progress
) -> dict[str, dict[str, list[Shard]]]:
    numbers = itertools.count(HELD_OUT_NUMBERS)
    made: dict[str, dict[str, list[Shard]]] = {}
    for set_name, prompts in source.held_out.items():
        made[set_name] = {}
        for key, temperature in TEMPERATURES.items():
            jobs = [_job(target, p, next(numbers), temperature, p.kind) for p in prompts]
            jobs = [job for job in jobs if len(job.prompt_ids) <= settings.max_prompt_tokens]
            if not jobs:
                raise InvalidArgument(
                    f"max_prompt_tokens: every held-out prompt ({set_name}) is longer than "
                    f"{settings.max_prompt_tokens}; raise it",
                    field="max_prompt_tokens",
                )
            batches = [jobs[i : i + settings.batch_size] for i in range(0, len(jobs), settings.batch_size)]
            made[set_name][key] = [
                _shard(folder, f"{set_name}-{key}-{i:03}", target, batch, settings, {}, on_progress, None)
                for i, batch in enumerate(batches)
            ]
    return made


def _train_shards(
    folder: Path,
    target: Target,
    source: PromptSource,
    settings: DistillSettings,
    on_progress: Progress,
    seconds: float,
    budget: float,
) -> Iterator[Shard]:
    """One after the other, those on disk first. A follow-up question comes in the shard after its first answer."""
    position = number = num_too_long = 0
    follow_ups: list[Prompt] = []
    for index in itertools.count():
        name = f"train-{index:05}"
        if has_shard(folder, name):
            shard = read_shard(folder, name)
        else:
            jobs: list[Job] = []
            at = position
            while len(jobs) < settings.batch_size and (follow_ups or at < source.num_prompts):
                if follow_ups:
                    prompt = follow_ups.pop(0)
                else:
                    prompt, at = source.prompt(at), at + 1
                job = _job(target, prompt, number, _temperature(settings, number), prompt.follow_up)
                number += 1
                if len(job.prompt_ids) > settings.max_prompt_tokens:
                    num_too_long += 1
                    continue
                jobs.append(job)
            if not jobs:
                return
            about = {"position": at, "number": number, "num_too_long": num_too_long}
            done = max(at / source.num_prompts, seconds / budget)
            shard = _shard(folder, name, target, jobs, settings, about, on_progress, min(1.0, done))
        position, number = shard.about["position"], shard.about["number"]
        num_too_long = shard.about["num_too_long"]
        follow_ups = [_follow_up(s.messages, s.response, s.tag) for s in shard.sequences if s.tag]
        seconds += shard.seconds
        yield shard


def _shard(
    folder: Path,
    name: str,
    target: Target,
    jobs: list[Job],
    settings: DistillSettings,
    about: Mapping[str, Any],
    on_progress: Progress,
    done: float | None,
) -> Shard:
    if not has_shard(folder, name):
        started = time.monotonic()
        num_steps = 0

        def on_step(num_running: int) -> None:
            nonlocal num_steps
            num_steps += 1
            on_progress(f"generating {name}: {num_steps} tokens of {num_running} sequences", done)

        sequences, states = generate(
            target, jobs, max_new_tokens=settings.max_new_tokens, seed=settings.seed, on_step=on_step
        )
        write_shard(folder, name, sequences, states, time.monotonic() - started, about)
        on_progress(f"generated {name}", done)
    return read_shard(folder, name)


def _job(target: Target, prompt: Prompt, number: int, temperature: float, tag: str) -> Job:
    """tag: of training text the follow-up question, of held-out text the kind of prompt."""
    messages = [dict(m) for m in prompt.messages]
    ids = target.chat_ids(messages)
    if not ids:
        raise InvalidArgument(f"prompts: {messages[-1]['content']!r} has no tokens for this target", field="prompts")
    return Job(number, ids, temperature, messages, tag)


def _follow_up(messages: list[dict[str, str]], response: str, question: str) -> Prompt:
    turns = [*messages, {"role": "assistant", "content": response}, {"role": "user", "content": question}]
    return Prompt(tuple(turns))


def _temperature(settings: DistillSettings, number: int) -> float:
    generator = np.random.default_rng([settings.seed, number, 1])
    if generator.random() < settings.greedy_share:
        return 0.0
    return float(generator.uniform(settings.min_temperature, settings.max_temperature))
