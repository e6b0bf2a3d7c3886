"""What a client has of a request's texts, over as many connections as they take: ids, ends, and counts of rounds."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.errors import Internal
from outrider.results import Chunk, Complete, DrafterUse, Event, Logprobs, PromptLogprobs, Speculation, Started
from outrider.sampling.params import Origin

BEFORE_RESUME = "before-resume"
"""Reason of the rounds that a coordinator ran which did not live to tell their drafters."""


@dataclass(slots=True)
class RoundCounts:
    """What the chunks tell of their rounds."""

    gammas: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    origins: Counter[Origin] = field(default_factory=Counter)

    def count(self, chunk: Chunk) -> None:
        """A chunk is a round. One of a coordinator that does not tell its drafts has as many as were accepted."""
        num_accepted = chunk.origins.count(Origin.ACCEPTED)
        num_drafts = max(chunk.num_draft_tokens, num_accepted)
        self.gammas[num_drafts] += 1
        self.origins.update(chunk.origins)
        if num_drafts:
            self.accepted[num_accepted] += 1

    def add(self, other: RoundCounts) -> None:
        self.gammas.update(other.gammas)
        self.accepted.update(other.accepted)
        self.origins.update(other.origins)

    def before(self, later: Speculation) -> Speculation:
        """Both added up; what no chunk tells (drafters, bytes, branches) is that of `later`."""
        num_rounds = self.gammas.total()
        if not num_rounds:
            return later
        num_steps = self.accepted.total() + later.num_spec_steps
        num_drafts = sum(gamma * number for gamma, number in self.gammas.items())
        num_accepted = self.origins[Origin.ACCEPTED]
        use = DrafterUse("", BEFORE_RESUME, num_rounds, num_drafts, num_accepted)
        num_drafts, num_accepted = num_drafts + later.num_draft_tokens, num_accepted + later.num_accepted_draft_tokens
        return dataclasses.replace(
            later,
            num_spec_steps=num_steps,
            num_draft_tokens=num_drafts,
            num_accepted_draft_tokens=num_accepted,
            mean_acceptance_length=1 + num_accepted / num_steps if num_steps else 0.0,
            draft_acceptance_rate=num_accepted / num_drafts if num_drafts else 0.0,
            acceptance_histogram=_added(_histogram(self.accepted), later.acceptance_histogram),
            gamma_histogram=_added(_histogram(self.gammas), later.gamma_histogram),
            num_draft_tokens_per_pos=_added(_at_least(self.gammas), later.num_draft_tokens_per_pos),
            num_accepted_tokens_per_pos=_added(
                _at_least(self.accepted, max(self.gammas)), later.num_accepted_tokens_per_pos
            ),
            num_plain_tokens=self.origins[Origin.PLAIN] + later.num_plain_tokens,
            num_correction_tokens=self.origins[Origin.CORRECTION] + later.num_correction_tokens,
            num_bonus_tokens=self.origins[Origin.BONUS] + later.num_bonus_tokens,
            drafter_uses=(use, *later.drafter_uses),
        )


class ChoiceProgress:
    """What a client has of one choice; `token_ids` holds those that the request itself resumed with, too."""

    def __init__(self, index: int, given: Sequence[int] = (), clock: Callable[[], float] = time.perf_counter) -> None:
        self.index = index
        self.token_ids = list(given)
        self.has_end = False
        self.num_resumes = 0
        self._clock = clock
        self._began_at = clock()
        self._first_at: float | None = None
        self._rounds = RoundCounts()
        """Of the connection that is."""
        self._earlier = RoundCounts()

    def lost(self) -> None:
        """The connection broke; another one will go on with it, unless nothing is left to do."""
        if not self.has_end:
            self.num_resumes += 1
            self._earlier.add(self._rounds)
            self._rounds = RoundCounts()

    def take(self, event: Chunk | Complete) -> Chunk | Complete:
        """As the caller gets it: under its own index, and with the counts of all connections in its end."""
        if isinstance(event, Chunk):
            self._first_at = self._first_at or self._clock()
            self.token_ids += event.token_ids
            self._rounds.count(event)
            return dataclasses.replace(event, index=self.index)
        self.has_end = True
        if not self.num_resumes:
            return dataclasses.replace(event, index=self.index)
        now = self._clock()
        first_at = now if self._first_at is None else self._first_at
        timings = dataclasses.replace(
            event.timings,
            time_to_first_token_ms=1000 * (first_at - self._began_at),
            total_ms=1000 * (now - self._began_at),
        )
        speculation = self._earlier.before(event.speculation)
        return dataclasses.replace(
            event, index=self.index, timings=timings, speculation=speculation, num_resumes=self.num_resumes
        )


class Progress:
    """What a client has of the choices that one call is about, in the order of that call's own indices."""

    def __init__(self, choices: Sequence[ChoiceProgress], started: Started | None = None) -> None:
        self.choices = tuple(choices)
        self.started = started
        self.has_tokens = False
        """Whether a chunk has come."""
        self._num_prompt_logprobs = -1
        """Entries that have come; -1: not even an empty list."""

    @property
    def is_complete(self) -> bool:
        return all(choice.has_end for choice in self.choices)

    def lost(self) -> None:
        """The call's connection broke. Before a coordinator had begun with the request nothing is lost."""
        for choice in self.choices if self.started is not None else ():
            choice.lost()

    def alone(self) -> list[Progress]:
        """Of each choice that has no end yet: it will be resumed by a call of its own."""
        return [Progress([choice], self.started) for choice in self.choices if not choice.has_end]

    def take(self, event: Event) -> Event | None:
        """What the caller gets of it; None: nothing, it has that already. Raises Internal on an index of no choice."""
        match event:
            case Started():
                is_first, self.started = self.started is None, self.started or event
                return event if is_first else None
            case PromptLogprobs():
                return self._new_logprobs(event)
        if not 0 <= event.index < len(self.choices):
            raise Internal(f"the server sent choice {event.index} of {len(self.choices)}")
        self.has_tokens |= isinstance(event, Chunk)
        return self.choices[event.index].take(event)

    def _new_logprobs(self, told: PromptLogprobs) -> PromptLogprobs | None:
        """Those that an earlier call had not told."""
        values, had = told.logprobs.token_logprobs, self._num_prompt_logprobs
        num_old = max(0, min(len(values), had + 1 - told.first_position))
        self._num_prompt_logprobs = max(had, told.first_position - 1 + len(values))
        if num_old == len(values) and had >= 0:
            return None
        logprobs = Logprobs(values[num_old:], told.logprobs.top[num_old:])
        return PromptLogprobs(told.first_position + num_old, logprobs)


def _histogram(counts: Counter[int]) -> tuple[int, ...]:
    return tuple(counts[i] for i in range(max(counts, default=-1) + 1))


def _at_least(counts: Counter[int], num_positions: int | None = None) -> tuple[int, ...]:
    """Entry i: how often the number was above i."""
    length = max(counts, default=0) if num_positions is None else num_positions
    return tuple(sum(n for number, n in counts.items() if number > i) for i in range(length))


def _added(ours: Sequence[int], theirs: Sequence[int]) -> tuple[int, ...]:
    length = max(len(ours), len(theirs))
    return tuple(sum(part[i] for part in (ours, theirs) if i < len(part)) for i in range(length))
