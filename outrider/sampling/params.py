"""What decides a stream's text besides target and prompt: every value resolved, none defaulted here."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.sampling.masks import ALL_TOKENS, NO_BAD_WORDS, BadWords, TokenSet

MAX_CHOICES = 16
"""Of one request."""


class Named(enum.IntEnum):
    """Reads as its name in lower case wherever it is printed; on the wire and in arithmetic it is its number."""

    def __str__(self) -> str:
        return self.name.lower()

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class AcceptanceRule(Named):
    """Numbers equal those of the wire's enum."""

    TOKEN = 1
    BLOCK = 2
    COUPLED = 3


class Origin(Named):
    """Where a committed token came from. Numbers equal those of the wire's enum."""

    ACCEPTED = 1
    CORRECTION = 2
    BONUS = 3
    PLAIN = 4


class Finish(Named):
    """Why a stream ended; NONE while it has not. Numbers equal those of the wire's enum."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class GrammarKind(Named):
    """Numbers equal those of the wire's enum."""

    JSON_SCHEMA = 1
    REGEX = 2
    LARK = 3


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of a text. `text`: a JSON schema, a regular expression, or a grammar in llguidance's dialect of Lark."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling parameters; meanings and ranges as in `ResolvedSampling` of the wire.

    `allowed_token_ids` may be given as any ids, empty for all; `bad_words` as sequences of ids.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    choice: int = 0
    acceptance: AcceptanceRule = AcceptanceRule.BLOCK
    allowed_token_ids: TokenSet = ALL_TOKENS
    bad_words: BadWords = NO_BAD_WORDS
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.allowed_token_ids, TokenSet):
            object.__setattr__(self, "allowed_token_ids", TokenSet(sorted(set(self.allowed_token_ids))))
        if not isinstance(self.bad_words, BadWords):
            object.__setattr__(self, "bad_words", BadWords(map(tuple, self.bad_words)))

    @property
    def greedy(self) -> bool:
        """Temperature 0: the exact argmax of the processed logits, lowest id on ties."""
        return self.temperature == 0.0

    @property
    def decides_by_match(self) -> bool:
        """Greedy and COUPLED: the target chooses for itself, and a draft is an id that its choice confirms or not."""
        return self.greedy or self.acceptance is AcceptanceRule.COUPLED

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens shift logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def needs_history(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.has_penalties or self.grammar is not None or any(len(word) > 1 for word in self.bad_words)


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """Where a stream ends as far as ids tell; `stop_token_ids` includes the model's own unless ignored."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def masks_stops(self) -> bool:
        """Whether a text may not end with a stop token at first."""
        return self.min_tokens > 0 and bool(self.stop_token_ids)
