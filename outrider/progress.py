"""What a client has of a request's texts, over as many connections as they take: ids, ends, and counts of rounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from outrider.errors import Internal
from outrider.results import Chunk, Complete, DrafterUse, Event, Logprobs, PromptLogprobs, Speculation, Started
from outrider.round_counts import RoundCounts
from outrider.sampling.params import Origin

BEFORE_RESUME = "before-resume"
"""Reason of the rounds that a coordinator ran which did not live to tell their drafters."""


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
            # a chunk is a round; one of a coordinator that does not tell its drafts has as many as were accepted
            num_drafts = max(event.num_draft_tokens, event.origins.count(Origin.ACCEPTED))
            self._rounds.count(num_drafts, event.origins)
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
        speculation = _with_earlier(self._earlier, event.speculation)
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


def _with_earlier(earlier: RoundCounts, later: Speculation) -> Speculation:
    """Both added up; what no chunk tells (drafters, bytes, branches) is that of `later`."""
    num_rounds = earlier.gammas.total()
    if not num_rounds:
        return later
    use = DrafterUse("", BEFORE_RESUME, num_rounds, earlier.num_draft_tokens, earlier.origins[Origin.ACCEPTED])
    whole = RoundCounts.of(later)
    whole.add(earlier)
    return dataclasses.replace(later, **whole.fields(), drafter_uses=(use, *later.drafter_uses))
