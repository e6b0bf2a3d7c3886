"""One batch of sequences from prompts to their ends, with the states of every token that was read.

A sequence's random numbers come from its own stream (seed, number of the sequence), so its text does not depend on who
shares its batch, beyond the rounding of the model's own arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.distill.batch_cache import BatchCache, DecodePlan, PrefillPlan
from outrider.distill.shards import Generated
from outrider.distill.target import Target

PREFILL_ROWS = 512


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to be answered. number: of the sequence among all, for its random numbers."""

    number: int
    prompt_ids: list[int]
    temperature: float
    messages: list[dict[str, str]] = field(default_factory=list)
    tag: str = ""


class _Running:
    """A sequence on its way: its ids so far, the states of those read, and the token to be read next."""

    def __init__(self, job: Job, uniforms: np.ndarray, states: torch.Tensor) -> None:
        self.job = job
        self.token_ids = list(job.prompt_ids)
        self.uniforms = uniforms
        self.states = states
        self.next_token = -1
        self.num_generated = 0

    def take(self, token_id: int) -> None:
        self.next_token = token_id
        self.num_generated += 1


def generate(
    target: Target,
    jobs: Sequence[Job],
    *,
    max_new_tokens: int,
    seed: int,
    on_step: Callable[[int], None] = lambda num_running: None,
) -> tuple[list[Generated], list[torch.Tensor]]:
    """Sequences in the order of `jobs`, and the states [n, S, H] of the tokens that were read of each."""
    max_length = max(len(job.prompt_ids) for job in jobs) + max_new_tokens
    cache = BatchCache(target.cache_shape(), len(jobs), max_length, target.dtype)
    sequences = [_start(target, job, max_new_tokens, seed) for job in jobs]
    _prefill(target, cache, sequences)
    running = list(sequences)
    while True:
        _drop_finished(running, cache, target.eos_token_ids, max_new_tokens)
        on_step(len(running))
        if not running:
            break
        _decode(target, cache, running)
    finished = [_finish(target, sequence) for sequence in sequences]
    return finished, [s.states[: len(s.token_ids)] for s in sequences]


def _start(target: Target, job: Job, max_new_tokens: int, seed: int) -> _Running:
    uniforms = np.random.default_rng([seed, job.number]).random(max_new_tokens)
    size = (len(job.prompt_ids) + max_new_tokens, target.num_states, target.hidden_size)
    return _Running(job, uniforms, torch.empty(size, dtype=target.dtype))


def _prefill(target: Target, cache: BatchCache, sequences: list[_Running]) -> None:
    start = 0
    while start < len(sequences):
        end, num_rows = start, 0
        while end < len(sequences) and (end == start or num_rows + len(sequences[end].token_ids) <= PREFILL_ROWS):
            num_rows += len(sequences[end].token_ids)
            end += 1
        part = sequences[start:end]
        lengths = [len(s.token_ids) for s in part]
        ids = torch.tensor([token_id for s in part for token_id in s.token_ids])
        positions = torch.cat([torch.arange(length) for length in lengths])
        last_rows = torch.tensor(lengths).cumsum(0) - 1
        logits, states = target.forward(ids, positions, last_rows, PrefillPlan(cache, range(start, end), lengths))
        for sequence, own in zip(part, states.split(lengths), strict=True):
            sequence.states[: len(own)] = own
        _choose(part, logits)
        start = end


def _decode(target: Target, cache: BatchCache, running: list[_Running]) -> None:
    lengths = torch.tensor([len(s.token_ids) for s in running])
    ids = torch.tensor([s.next_token for s in running])
    logits, states = target.forward(ids, lengths, torch.arange(len(running)), DecodePlan(cache, lengths))
    for sequence, own in zip(running, states, strict=True):
        sequence.states[len(sequence.token_ids)] = own
        sequence.token_ids.append(sequence.next_token)
    _choose(running, logits)


def _choose(sequences: list[_Running], logits: torch.Tensor) -> None:
    """Each sequence's next token: the likeliest at temperature 0, else by inverting the cumulated distribution."""
    greedy = logits.argmax(-1).tolist()
    warm = [row for row, s in enumerate(sequences) if s.job.temperature > 0]
    drawn: dict[int, int] = {}
    if warm:
        temperatures = torch.tensor([sequences[row].job.temperature for row in warm])
        cumulated = torch.softmax(logits[warm] / temperatures[:, None], -1).cumsum(-1)
        uniforms = torch.tensor([sequences[row].uniforms[sequences[row].num_generated] for row in warm])
        wanted = uniforms.float()[:, None] * cumulated[:, -1:]
        ids = torch.searchsorted(cumulated, wanted, right=True)[:, 0].clamp_max(logits.shape[1] - 1)
        drawn = dict(zip(warm, ids.tolist(), strict=True))
    for row, sequence in enumerate(sequences):
        sequence.take(drawn.get(row, greedy[row]))


def _drop_finished(
    running: list[_Running], cache: BatchCache, eos_token_ids: Sequence[int], max_new_tokens: int
) -> None:
    """The last running sequence takes a finished one's place, so those that run are the cache's first."""
    row = 0
    while row < len(running):
        sequence = running[row]
        if sequence.next_token not in eos_token_ids and sequence.num_generated < max_new_tokens:
            row += 1
            continue
        last = running.pop()
        if row < len(running):
            cache.move(len(running), row, len(last.token_ids))
            running[row] = last


def _finish(target: Target, sequence: _Running) -> Generated:
    job = sequence.job
    said = [*sequence.token_ids[len(job.prompt_ids) :], sequence.next_token]
    return Generated(
        token_ids=sequence.token_ids,
        prompt_length=len(job.prompt_ids),
        next_token=sequence.next_token,
        temperature=job.temperature,
        messages=job.messages,
        response=target.text(said),
        tag=job.tag,
    )
