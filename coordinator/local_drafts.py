"""Drafters that run here, beside the round loop: guesses from text that was seen before. No model, no call, no wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

from coordinator.gamma.acceptance import OFF_PATH_WEIGHT
from coordinator.gamma.chances import Chances
from coordinator.stream import Stream
from outrider.drafting.guess import Chance, Evidence, Guess, Place, continue_places
from outrider.drafting.guess_tree import GuessTree
from outrider.drafting.past import CONTEXT_TOKENS, Corrections, PastOutputs
from outrider.drafting.suffix import SuffixIndex
from outrider.errors import InvalidArgument
from outrider.sampling.history import History
from outrider.sampling.masks import num_allowed
from outrider.serving.messages import Verdict
from outrider.serving.session_calls import SealedProposal, seal_ids
from outrider.settings import CoordinatorSettings

log = logging.getLogger(__name__)

LOOKUP, SUFFIX = "lookup", "suffix"
LOCAL_DRAFTERS = (LOOKUP, SUFFIX)
CORRECTION = "correction"
MAX_INDEXED_PROMPT_TOKENS = 32_768
"""Of a longer prompt, its end."""
TOKENS_A_STEP = 2048
"""Indexed without a look at other streams: about a millisecond."""
RECENT_TOKENS = 32
BAN = -100.0
"""A `logit_bias` that is as good as a mask."""


def check_local_drafters(settings: CoordinatorSettings) -> None:
    """Raises InvalidArgument, naming the setting, on drafters that do not exist or n-gram lengths that are no range."""
    unknown = [name for name in settings.local_drafters if name not in LOCAL_DRAFTERS]
    if unknown:
        raise InvalidArgument(
            f"local_drafters {', '.join(unknown)}: choose from {', '.join(LOCAL_DRAFTERS)}", field="local_drafters"
        )
    if settings.lookup_min_ngram > settings.lookup_max_ngram:
        raise InvalidArgument(
            f"lookup_min_ngram {settings.lookup_min_ngram} exceeds lookup_max_ngram {settings.lookup_max_ngram}",
            field="lookup_min_ngram",
        )


class LocalMemory:
    """What streams of one coordinator leave to one another: outputs and corrections by model and tenant, and by model
    how far each kind of evidence can be trusted. Raises InvalidArgument on settings that cannot be."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        check_local_drafters(settings)
        self.settings = settings
        self.past = PastOutputs(settings.draft_cache_bytes * 3 // 4)
        self.corrections = Corrections(settings.draft_cache_bytes // 4)
        self._chances: dict[Hashable, Chances] = {}

    def scope(self, stream: Stream) -> Hashable:
        """Streams of one scope may see what the others wrote."""
        return (stream.request.model, "" if self.settings.share_draft_cache else stream.request.tenant)

    def chances(self, stream: Stream) -> Chances:
        """Greedy text is copied more surely than sampled text."""
        model, greedy = stream.request.model, stream.sampling.greedy
        return self._chances.setdefault((model, greedy), Chances(decay=0.998, greedy=greedy))


class LocalDrafts:
    """Of one stream. Guesses depend on the log and on what other streams left, never on this stream's coins.

    A fault in here costs speed only: it is counted and logged, and the stream goes on without local drafters.
    """

    def __init__(self, stream: Stream, memory: LocalMemory) -> None:
        request = stream.request
        self.names = tuple(n for n in memory.settings.local_drafters if request.drafter in ("", n))
        """Drafters that may be used for this stream; none when it wants no drafts, or a draft worker's."""
        if not request.max_draft_tokens:
            self.names = ()
        self._teaches = bool(request.max_draft_tokens and memory.settings.local_drafters)
        self._stream = stream
        self._memory = memory
        self._scope = memory.scope(stream)
        self._chances = Chances(prior=memory.chances(stream) if request.learns_from_others else None)
        self._index = SuffixIndex(memory.settings.lookup_min_ngram)
        self._num_read = 0
        self._reads_past = request.learns_from_others
        self._masks = _Masks(stream) if _may_mask(stream) else None
        self._open_guesses: tuple[Guess, ...] = ()
        self._guessed_at = -1
        self._num_tokens = 0
        self._compute_us = 0
        self._closed = False

    async def prepare(self) -> None:
        """Reads the prompt, a part at a time."""
        if not self.names:
            return
        ids = self._stream.log.prompt_ids[-MAX_INDEXED_PROMPT_TOKENS:]
        with self._set_aside_if_broken():
            for start in range(0, len(ids), TOKENS_A_STEP):
                self._index.extend(ids[start : start + TOKENS_A_STEP])
                await asyncio.sleep(0)

    def guesses(self, num_tokens: int) -> tuple[Guess, ...]:
        """What each drafter would propose now, at most `num_tokens`; drafters that have nothing are left out."""
        if not self.names or num_tokens < 1:
            return ()
        length = self._stream.log.length
        if (length, num_tokens) != (self._guessed_at, self._num_tokens):
            with self._set_aside_if_broken():
                started = time.perf_counter_ns()
                self._read_log()
                places = self._index.places()
                found = (self._guess(name, places, (), num_tokens) for name in self.names)
                self._open_guesses = tuple(guess for guess in found if guess)
                self._guessed_at, self._num_tokens = length, num_tokens
                self._compute_us = (time.perf_counter_ns() - started) // 1000
        return self._open_guesses

    def continuation(self, drafted_ids: Sequence[int], num_tokens: int) -> Guess:
        """What may follow the log and these drafts, whose own chances are another matter."""
        if not self.names or num_tokens < 1 or drafted_ids[-1] in self._stream.request.stopping.stop_token_ids:
            return Guess()
        with self._set_aside_if_broken():
            self._read_log()
            places = self._index.places(drafted_ids)
            found = [self._guess(name, places, drafted_ids, num_tokens) for name in self.names]
            return max(found, key=Guess.expected_accepted)
        return Guess()

    def seal(self, guess: Guess) -> SealedProposal:
        """As a proposal. The time that this round's guesses took is told with it."""
        return seal_ids(guess.token_ids, guess.chances, guess.drafter, self._compute_us)

    def seal_tree(self, tree: GuessTree) -> SealedProposal:
        """As `seal`, of guesses that disagree."""
        return seal_ids(tree.token_ids, tree.path_chances, tree.drafter, self._compute_us, tree.parents)

    def committed(self, drafted_ids: Sequence[int] = (), verdict: Verdict | None = None) -> None:
        """The log has grown: what was guessed before is judged by it, and by the rows of the verdict past a rejection,
        whether it was verified or not. `drafted_ids`: the chain that was."""
        if not self._open_guesses:
            return
        with self._set_aside_if_broken():
            new_ids = self._stream.log.since(self._guessed_at)
            rows = self._rows_past(len(new_ids), verdict)
            for guess in self._open_guesses:
                for index, (evidence, guessed) in enumerate(zip(guess.evidence, guess.token_ids, strict=True)):
                    if index < len(new_ids) and guess.token_ids[:index] == new_ids[:index]:
                        self._chances.observe(evidence, guessed == new_ids[index])
                    elif index in rows and guess.token_ids[:index] == tuple(drafted_ids[:index]):
                        self._chances.observe(evidence, guessed == rows[index], OFF_PATH_WEIGHT)
                    else:
                        break
        self._open_guesses, self._guessed_at = (), -1

    def _rows_past(self, num_committed: int, verdict: Verdict | None) -> dict[int, int]:
        """The target's own choices after drafts that it did not take, by their number: where its choice is what it
        would have committed."""
        sampling = self._stream.sampling
        is_bent = sampling.needs_history or sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words
        if verdict is None or not sampling.greedy or is_bent:
            return {}
        return {index: x for index, x in enumerate(verdict.row_choices) if index >= num_committed}

    def learn(self, length: int, drafted_ids: Sequence[int], choices: Sequence[int]) -> None:
        """`choices[i]` is what the target itself would have said after the first `length` ids and i drafts."""
        if not self._teaches:
            return
        with self._set_aside_if_broken():
            ids = self._recent(length)
            for index, token_id in enumerate(choices):
                self._memory.corrections.learn(self._scope, [*ids, *drafted_ids[:index]], token_id)

    def close(self) -> None:
        """The stream has ended, however: its output is left to later ones. Harmless when repeated."""
        if self._teaches and not self._closed:
            with self._set_aside_if_broken():
                self._memory.past.add(self._scope, self._stream.log.output_ids)
        self._closed = True

    @contextmanager
    def _set_aside_if_broken(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            log.exception("request %s goes on without local drafters", self._stream.request.request_id)
            self._stream.statistics.num_draft_failures += 1
            self.names, self._teaches, self._open_guesses, self._guessed_at = (), False, (), -1

    def _guess(self, name: str, places: list[Place], drafted_ids: Sequence[int], num_tokens: int) -> Guess:
        guess = Guess(name)
        if name == LOOKUP:
            guess = _lookup(places, self._memory.settings.lookup_max_ngram, drafted_ids, num_tokens, self._chance)
        else:
            recent = [*self._recent(self._stream.log.length), *drafted_ids]
            if self._reads_past:
                places = places + self._memory.past.places(self._scope, recent)
            guess = continue_places(SUFFIX, places, drafted_ids, num_tokens, self._chance)
            if not guess and self._reads_past:
                guess = self._corrected(recent, num_tokens)
        return guess.cut(self._masks.num_allowed(drafted_ids, guess.token_ids)) if self._masks else guess

    @property
    def _chance(self) -> Chance:
        return self._chances.chance

    def _corrected(self, recent: Sequence[int], num_tokens: int) -> Guess:
        ids, evidence = list(recent), []
        for _ in range(num_tokens):
            known = self._memory.corrections.choice(self._scope, ids)
            if known is None:
                break
            token_id, num_agreeing = known
            evidence.append(Evidence(CORRECTION, CONTEXT_TOKENS, 2 if num_agreeing == 1 else 3))
            ids.append(token_id)
        chances = tuple(map(self._chance, evidence))
        return Guess(SUFFIX, tuple(ids[len(recent) :]), tuple(evidence), chances)

    def _read_log(self) -> None:
        output_ids = self._stream.log.output_ids
        self._index.extend(output_ids[self._num_read :])
        if self._masks:
            self._masks.extend(output_ids[self._num_read :])
        self._num_read = len(output_ids)

    def _recent(self, length: int) -> list[int]:
        """The last of the first `length` ids of the log."""
        prompt_ids, output_ids = self._stream.log.prompt_ids, self._stream.log.output_ids
        num_output = length - len(prompt_ids)
        recent = output_ids[max(0, num_output - RECENT_TOKENS) : num_output]
        missing = RECENT_TOKENS - len(recent)
        return [*(prompt_ids[-missing:] if missing else ()), *recent]


def _lookup(places: list[Place], max_ngram: int, drafted_ids: Sequence[int], num_tokens: int, chance: Chance) -> Guess:
    """What most often followed the longest n-gram that was seen before, the newest where counts are even."""
    capped = [place._replace(num_matching=min(max_ngram, place.num_matching), source=LOOKUP) for place in places]
    longest = max((place.num_matching for place in capped), default=0)
    best = [place for place in capped if place.num_matching == longest]
    return continue_places(LOOKUP, best, drafted_ids, num_tokens, chance)


def _may_mask(stream: Stream) -> bool:
    sampling, stopping = stream.sampling, stream.request.stopping
    is_banning = any(bias <= BAN for bias in sampling.logit_bias.values())
    return bool(sampling.allowed_token_ids or sampling.bad_words or stopping.stop_token_ids or is_banning)


class _Masks:
    """Where a guess must end: before an id that the request's masks or its bias rule out, and with a stop token."""

    def __init__(self, stream: Stream) -> None:
        self._sampling = stream.sampling
        self._stopping = stream.request.stopping
        self._history = History(())

    def extend(self, output_ids: Sequence[int]) -> None:
        for token_id in output_ids:
            self._history.push(token_id)

    def num_allowed(self, drafted_ids: Sequence[int], guessed_ids: Sequence[int]) -> int:
        for token_id in drafted_ids:
            self._history.push(token_id)
        found = num_allowed(guessed_ids, self._sampling, self._stopping, self._history)
        self._history.pop(len(drafted_ids))
        bias = self._sampling.logit_bias
        return next((n for n, token_id in enumerate(guessed_ids[:found]) if bias.get(token_id, 0.0) <= BAN), found)
