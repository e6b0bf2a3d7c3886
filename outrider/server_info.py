"""What servers tell of themselves: models, workers, their caches and drafters. Plain frozen dataclasses with the wire's
names, so that no caller meets a protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.results import Speculation, Step, Timings
from outrider.sampling.params import AcceptanceRule, Named


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What absent sampling fields mean; None: the neutral value."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model."""

    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    generation_defaults: GenerationDefaults
    draft_model: str
    drafters: tuple[str, ...]
    acceptance_rules: tuple[AcceptanceRule, ...]
    max_speculative_tokens: int
    has_chat_template: bool
    dtype: str
    default_max_tokens: int
    simulated: bool
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Capacity:
    """Cache and batch sizes of a worker, as it told last."""

    num_blocks: int
    block_size: int
    num_free_blocks: int
    num_sessions: int
    num_waiting: int
    max_batch_tokens: int
    max_draft_tokens: int
    num_promised_blocks: int = 0
    """To open sequences for their whole lives, whether they hold them yet or not."""
    max_promised_blocks: int = 0
    """At once; 0: without a limit, or not told."""


@dataclass(frozen=True, slots=True)
class Numerics:
    """How a worker computes rows, and what its probe found at load.

    mode: `fast`, or `exact`: a row's logits depend on its own sequence's ids alone, to the bit. proven: the probe
    computed a text of `num_tokens` in `num_histories` ways, by passes of each of `row_counts`, and no bit differed.
    environment: what decides rounding there, by name.
    """

    mode: str = "fast"
    proven: bool = False
    row_counts: tuple[int, ...] = ()
    num_histories: int = 0
    num_tokens: int = 0
    probe_s: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> str:
        """In a line, without the environment."""
        if not self.proven:
            return f"{self.mode}, not probed"
        return (
            f"{self.mode}, proven: {self.num_histories} histories of {self.num_tokens} tokens, passes of "
            f"{_ranges(self.row_counts)} rows, bitwise equal, in {self.probe_s:.1f} s"
        )


def _ranges(counts: Sequence[int]) -> str:
    """1, 2, 3, 8 as "1-3, 8"."""
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][-1] == count - 1:
            runs[-1].append(count)
        else:
            runs.append([count])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """What has happened to a worker's cache since it started.

    Preempted: blocks taken while a forward waited or was half done; evicted when idle: taken between forwards.
    """

    num_preemptions: int = 0
    num_idle_evictions: int = 0
    num_cached_tokens: int = 0
    num_copied_blocks: int = 0


@dataclass(frozen=True, slots=True)
class DraftRounds:
    """Rounds of one coordinator's streams that asked a draft worker for drafts, since the coordinator knows it.

    round_ms: what they took. wait_ms: of it, waiting for the worker's turn to come, and for drafts that did not come in
    time. Drafts are counted as verified.
    """

    num_rounds: int = 0
    round_ms: float = 0.0
    wait_ms: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


TREE_SUFFIX = "-tree"
"""After the name of a drafter inside a target: its trees."""


@dataclass(frozen=True, slots=True)
class TargetDrafter:
    """A drafter inside a target worker, which requests call `name`, and what its probe found at load.

    kind: medusa, eagle, eagle3 or toy. source: as the worker's settings name it. max_draft_tokens: longest chain; 0:
    any. agreement: share of a text of the target's own in which its likeliest next token was the target's; None: not
    probed. n drafts take about first_draft_ms + (n - 1) * next_draft_ms. warning: of the probe; empty: none.
    draws_trees: it draws trees as well, no deeper than its longest chain. rank_agreement: as `agreement`, of its first,
    second, ... guess at a place, whatever its depth; depth_agreement: of its first guess after none, one, ... of its
    own that were right. Empty: not probed.
    """

    name: str
    kind: str
    source: str = ""
    num_parameters: int = 0
    weight_bytes: int = 0
    max_draft_tokens: int = 0
    agreement: float | None = None
    num_probe_tokens: int = 0
    first_draft_ms: float = 0.0
    next_draft_ms: float = 0.0
    warning: str = ""
    draws_trees: bool = False
    rank_agreement: tuple[float, ...] = ()
    depth_agreement: tuple[float, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What requests may call it: its name for chains, and one for trees where it draws them."""
        return (self.name, f"{self.name}{TREE_SUFFIX}") if self.draws_trees else (self.name,)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker as the coordinator sees it; `role` is `draft` or `target`."""

    role: str
    address: str
    model: str
    healthy: bool
    detail: str
    num_sessions: int
    network_ms: float
    capacity: Capacity
    drafters: tuple[str, ...]
    numerics_fingerprint: str
    weight_bytes: int
    dtype: str
    numerics: Numerics
    cache_counters: CacheCounters
    draft_rounds: DraftRounds
    clock_offset_ms: float | None = None
    """How far its clock is ahead of the coordinator's; None: not told."""
    versions: Mapping[str, str] = field(default_factory=dict)
    incarnation: str = ""
    """Tells two processes at one address apart."""
    model_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The coordinator and its workers."""

    models: tuple[str, ...]
    workers: tuple[Worker, ...]
    num_requests_running: int
    num_requests_waiting: int
    uptime_s: float
    draining: bool
    versions: Mapping[str, str] = field(default_factory=dict)
    model_aliases: Mapping[str, str] = field(default_factory=dict)
    unix_time_s: float = 0.0
    """By its own clock; 0: not told."""
    num_requests_paused: int = 0
    """Streams of those that run that wait for their clients to read."""


class StreamState(Named):
    """How far a stream is: it waits for a place, has one and no token yet, or tokens come."""

    UNSPECIFIED = 0
    WAITING = 1
    PREFILL = 2
    RUNNING = 3


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """A choice that waits or runs at the coordinator, and its counts so far. last_step: None while it has no round, or
    none is recorded."""

    request_id: str
    index: int
    model: str
    tenant: str
    state: StreamState
    age_ms: float
    num_prompt_tokens: int
    num_tokens: int
    max_tokens: int
    timings: Timings
    speculation: Speculation
    last_step: Step | None = None


@dataclass(frozen=True, slots=True)
class Activity:
    """What a coordinator does: its streams, those that began first are first, and what all streams of all tenants did
    since its start, by model.

    num_left_out: streams that would have been told, had more been asked for. num_hidden: those of other tenants.
    """

    streams: tuple[StreamStatus, ...]
    num_left_out: int
    num_hidden: int
    models: Mapping[str, Speculation]
    uptime_s: float
