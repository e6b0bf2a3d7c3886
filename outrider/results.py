"""What a request gives back: plain frozen dataclasses with the wire's names, so that no caller meets a protobuf. What
servers tell of themselves is in `outrider.server_info`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.sampling.params import AcceptanceRule, Named, Origin


@dataclass(frozen=True, slots=True)
class Started:
    """Sent first. With `seed`, `acceptance` and `prompt_hash` a broken stream can be resumed."""

    request_id: str
    seed: int
    acceptance: AcceptanceRule
    prompt_hash: int
    num_prompt_tokens: int
    model: str
    num_speculative_tokens: int | None = None
    """Drafts of every round, where their number is fixed; None: the service chooses."""
    max_speculative_tokens: int = 0
    """Drafts of a round at most."""
    drafter: str = ""
    """`auto`: the service chooses."""
    model_fingerprint: str = ""
    """Digest of the model's configuration and weights."""
    max_tokens: int = 0
    """Limit in use."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of the target's raw distribution. `top[i]` holds (id, logprob) pairs of token i, likeliest first."""

    token_logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of prompt tokens `first_position`, at least 1, and on; when asked for, before the first chunk."""

    first_position: int
    logprobs: Logprobs


class GammaCause(Named):
    """Why a round had as many drafts as it had; see the wire's enum."""

    UNSPECIFIED = 0
    FIXED = 1
    OFF = 2
    BEST = 3
    LOAD = 4
    PRIOR = 5
    MATCH = 6
    PROBE = 7
    WARM_UP = 8
    NO_ROOM = 9
    NO_MATCH = 10
    NO_DRAFTER = 11
    DRAFT_LATE = 12
    DRAFT_LOST = 13
    PREFILL = 14


@dataclass(frozen=True, slots=True)
class Step:
    """One round, as the coordinator measured it; times in ms. `round_ms` holds all the others but `emit_ms`, which
    comes after it; `sampling_ms` is a part of `verify_ms`. `ahead`: what became of the branches that the round before
    asked for, hit, late or miss; empty: none were. A hit was drafted beside the round before: 0 `draft_ms`; a late one
    was waited for as long. `cause`: of the number of drafts, which `reason` says in more words.
    `price_tokens_per_ms`: what each ms of drafting had to earn for the chain to go on; 0: it was as long as wanted."""

    num_draft_tokens_wanted: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    drafter: str
    draft_ms: float
    verify_ms: float
    network_ms: float
    queue_ms: float
    round_ms: float
    reason: str
    sampling_ms: float = 0.0
    emit_ms: float = 0.0
    ahead: str = ""
    cause: GammaCause = GammaCause.UNSPECIFIED
    soft_acceptances: bytes = b""
    """By position the target's own chance of each draft, out of 255."""
    price_tokens_per_ms: float = 0.0
    row_price_tokens: float = 0.0
    """Committed tokens that a row of the pass takes from this stream and from others."""
    draft_queue_ms: float = 0.0
    """A part of `draft_ms`."""
    draft_network_ms: float = 0.0
    """A part of `network_ms`."""
    start_ms: float = 0.0
    """After the request's arrival."""
    num_tokens: int = 0
    """Committed."""

    @property
    def overhead_ms(self) -> float:
        """The round less all work of the workers: coordinator, gRPC, conversion."""
        return self.round_ms - self.draft_ms - self.verify_ms - self.queue_ms


@dataclass(frozen=True, slots=True)
class StreamTrace:
    """Rounds of one choice of an earlier request, `num_left_out` further ones were not kept."""

    index: int
    steps: tuple[Step, ...]
    num_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one choice. `text` may be empty while a code point or a stop string is unfinished."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    origins: tuple[Origin, ...] = ()
    logprobs: Logprobs | None = None
    step: Step | None = None
    num_draft_tokens: int = 0
    """That its round checked."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, equal to the ids delivered."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one choice in ms."""

    queue_ms: float
    prefill_ms: float
    time_to_first_token_ms: float
    draft_ms: float
    verify_ms: float
    network_ms: float
    total_ms: float


@dataclass(frozen=True, slots=True)
class DrafterUse:
    """Rounds in which `drafter` (empty: plain rounds) was used for one reason, and what came of its drafts.

    expected_tokens_per_s: what it was chosen for, the mean over its rounds; 0: not chosen by expectation. tokens_per_s:
    what its rounds gave, from choice to commit; 0: not measured (drafts after another's chain).
    """

    drafter: str
    reason: str
    num_rounds: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    expected_tokens_per_s: float = 0.0
    tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DrafterOutlook:
    """What `drafter` (empty: plain decoding) promised when it was last weighed against the others, with the number of
    drafts that pays most."""

    drafter: str
    num_draft_tokens: int
    expected_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Speculation:
    """Counts of one choice, under vLLM's names. Histograms and per-position tuples are indexed by the number itself."""

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    gamma_histogram: tuple[int, ...]
    num_draft_tokens_per_pos: tuple[int, ...]
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_dropped_proposals: int
    num_draft_failures: int
    drafters: tuple[str, ...]
    num_proposal_bytes: int
    num_plain_tokens: int
    num_correction_tokens: int
    num_bonus_tokens: int
    drafter_uses: tuple[DrafterUse, ...] = ()
    drafter_outlooks: tuple[DrafterOutlook, ...] = ()
    num_feature_bytes: int = 0
    num_branches: int = 0
    num_branch_hits: int = 0
    num_branch_misses: int = 0
    num_ahead_draft_tokens: int = 0
    num_wasted_draft_tokens: int = 0
    num_pipelined_verifies: int = 0
    num_dropped_verifies: int = 0

    @property
    def branch_hit_rate(self) -> float:
        """Of the rounds that had asked for branches before; 0 without any."""
        num_rounds = self.num_branch_hits + self.num_branch_misses
        return self.num_branch_hits / num_rounds if num_rounds else 0.0

    @property
    def num_steps(self) -> int:
        """Rounds of the target, plain ones and the prefill's among them."""
        return sum(self.gamma_histogram)

    @property
    def num_tokens(self) -> int:
        """Tokens that these rounds delivered; resumed ones are not among them."""
        made = self.num_plain_tokens + self.num_correction_tokens + self.num_bonus_tokens
        return made + self.num_accepted_draft_tokens

    @property
    def tokens_per_step(self) -> float:
        """What a pass of the target gave in the mean, drafted or not: 1 for plain decoding; 0 without rounds."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0


@dataclass(frozen=True, slots=True)
class Complete:
    """The end of one choice. `finish_reason` is `stop` or `length`; `matched_stop` an id, a string or None.

    num_resumes: how often the client went on with it after a loss. Usage and the counts of rounds and drafts are of the
    whole text all the same. `time_to_first_token_ms` and `total_ms` are then as the client measured them; all other
    times, drafters, bytes and branches are of what came after the last loss.
    """

    index: int
    finish_reason: str
    matched_stop: int | str | None
    usage: Usage
    timings: Timings
    speculation: Speculation
    num_resumes: int = 0


Event = Started | PromptLogprobs | Chunk | Complete


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. `chunks` are what it arrived in, one a round. `prompt_logprobs`: entry i is of prompt token i + 1
    (the first has none); None when they were not asked for."""

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    logprobs: Logprobs | None
    chunks: tuple[Chunk, ...]
    finish_reason: str
    matched_stop: int | str | None
    usage: Usage
    timings: Timings
    speculation: Speculation
    started: Started
    prompt_logprobs: Logprobs | None = None
    num_resumes: int = 0

    @classmethod
    def join(
        cls, started: Started, chunks: Sequence[Chunk], complete: Complete, prompt: Sequence[PromptLogprobs] = ()
    ) -> Completion:
        """One choice's events put together."""
        return cls(
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            origins=tuple(origin for chunk in chunks for origin in chunk.origins),
            logprobs=_joined([chunk.logprobs for chunk in chunks if chunk.logprobs is not None]),
            chunks=tuple(chunks),
            finish_reason=complete.finish_reason,
            matched_stop=complete.matched_stop,
            usage=complete.usage,
            timings=complete.timings,
            speculation=complete.speculation,
            started=started,
            prompt_logprobs=_joined([told.logprobs for told in prompt]),
            num_resumes=complete.num_resumes,
        )


class Gathering:
    """The events of one choice, put together as they come."""

    def __init__(self) -> None:
        self.completion: Completion | None = None
        """Once the choice has ended."""
        self._started: Started | None = None
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._chunks: list[Chunk] = []

    def take(self, event: Event) -> None:
        """The next one."""
        match event:
            case Started():
                self._started = event
            case PromptLogprobs():
                self._prompt_logprobs.append(event)
            case Chunk():
                self._chunks.append(event)
            case Complete() if self._started is not None:
                self.completion = Completion.join(self._started, self._chunks, event, self._prompt_logprobs)


def _joined(parts: Sequence[Logprobs]) -> Logprobs | None:
    if not parts:
        return None
    token_logprobs = tuple(value for part in parts for value in part.token_logprobs)
    return Logprobs(token_logprobs, tuple(row for part in parts for row in part.top))
