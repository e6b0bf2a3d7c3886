"""The exported families of one model's totals: names, meanings, labels."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from coordinator.round_parts import PARTS
from coordinator.statistics import StreamStatistics
from coordinator.traces import CAUSES
from outrider.results import GammaCause, Speculation
from outrider.serving.metrics import PREFIX

FALLBACKS = tuple(
    reason
    for reason, cause in CAUSES.items()
    if cause in (GammaCause.NO_DRAFTER, GammaCause.DRAFT_LATE, GammaCause.DRAFT_LOST)
)
"""Reasons of rounds that a draft worker could not take part in."""
NO_PROPOSAL = "no-proposal"
"""The cause of a round whose drafter answered and gave nothing to verify: it had nothing, or what cannot be."""
SPEC = f"{PREFIX}spec_decode_"
BUCKETS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Of histograms of drafts a round."""


@dataclass(slots=True)
class Totals:
    """All streams of one model. `rounds` has their counts added up; its times and outlooks are not used."""

    rounds: StreamStatistics = field(default_factory=StreamStatistics)
    num_prompt_tokens: int = 0
    finished: Tally[str] = field(default_factory=Tally)
    fallbacks: Tally[str] = field(default_factory=Tally)
    part_ms: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """By part of a round."""


def families(models: Mapping[str, Totals], failures: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    """All of `models`, by name. failures: requests by model and gRPC status."""
    counted = [(name, totals, totals.rounds.speculation()) for name, totals in models.items()]
    yield from _tokens(counted)
    yield from _speculation(counted)
    yield from _drafting_ahead(counted)
    yield _round_parts(counted)
    yield from _outcomes(counted, failures)


_Counted = list[tuple[str, Totals, Speculation]]
_AHEAD = {
    "num_branches": "Drafts made ahead for outcomes of rounds not decided yet.",
    "num_branch_hits": "Of them, those that were used.",
    "num_branch_misses": "Rounds that found none, though some were wanted.",
    "num_ahead_draft_tokens": "Tokens drafted ahead.",
    "num_wasted_draft_tokens": "Of them, those in branches that nobody used.",
    "num_pipelined_verifies": "Rounds sent to the target before the verdict of the one before.",
    "num_dropped_verifies": "Of them, those that had counted on another verdict.",
}
"""Fields of `Speculation` that are exported under their own names."""


def _tokens(counted: _Counted) -> Iterator[Metric]:
    labels = ["model_name"]
    prompt = CounterMetricFamily(f"{PREFIX}prompt_tokens", "Prompt tokens of streams that began.", labels=labels)
    cached = CounterMetricFamily(
        f"{PREFIX}prompt_tokens_cached",
        "Of them, those that a target had in its cache; told at a stream's end.",
        labels=labels,
    )
    generated = CounterMetricFamily(f"{PREFIX}generation_tokens", "Tokens committed.", labels=labels)
    by_origin = CounterMetricFamily(
        f"{PREFIX}generation_tokens_by_origin",
        "Accepted drafts, corrections, bonus tokens and plain ones: all of generation_tokens.",
        labels=["model_name", "origin"],
    )
    for name, totals, told in counted:
        origins = {
            "accepted": told.num_accepted_draft_tokens,
            "correction": told.num_correction_tokens,
            "bonus": told.num_bonus_tokens,
            "plain": told.num_plain_tokens,
        }
        prompt.add_metric([name], totals.num_prompt_tokens)
        cached.add_metric([name], totals.rounds.num_cached_tokens)
        generated.add_metric([name], sum(origins.values()))
        for origin, number in origins.items():
            by_origin.add_metric([name, origin], number)
    yield from (prompt, cached, generated, by_origin)


def _speculation(counted: _Counted) -> Iterator[Metric]:
    def counter(name: str, meaning: str, *more: str) -> CounterMetricFamily:
        return CounterMetricFamily(SPEC + name, meaning, labels=["model_name", *more])

    drafts = counter("num_drafts", "Rounds that verified at least one draft.")
    drafted = counter("num_draft_tokens", "Drafts verified.")
    accepted = counter("num_accepted_tokens", "Drafts accepted and delivered.")
    drafted_at = counter("num_draft_tokens_per_pos", "Drafts verified, by position in the round.", "position")
    accepted_at = counter("num_accepted_tokens_per_pos", "Drafts accepted, by position in the round.", "position")
    rounds = counter(
        "num_rounds", "Rounds, plain ones too, by drafter (empty: none) and why it was chosen.", "drafter", "reason"
    )
    drafted_by = counter("num_draft_tokens_by_drafter", "Drafts verified, by who made them.", "drafter")
    accepted_by = counter("num_accepted_tokens_by_drafter", "Drafts accepted, by who made them.", "drafter")
    fallbacks = counter(
        "num_fallbacks",
        "Rounds for which no draft worker's proposal was to be had; of those without any such worker, the ones that "
        "no other drafter could draft for either.",
        "cause",
    )
    dropped = counter("num_dropped_proposals", "Malformed, stale or late proposals; told at a stream's end.")
    failures = counter("num_draft_failures", "Times that a stream lost its drafter; told at its end.")
    proposal_bytes = counter("proposal_bytes", "Bytes of proposals on the wire, both ways; told at a stream's end.")
    lengths = HistogramMetricFamily(
        f"{SPEC}accepted_tokens_per_draft", "Drafts accepted in each round of num_drafts.", labels=["model_name"]
    )
    gammas = HistogramMetricFamily(
        f"{SPEC}draft_tokens_per_round", "Drafts verified in each round, plain ones too.", labels=["model_name"]
    )
    for name, totals, told in counted:
        drafts.add_metric([name], told.num_spec_steps)
        drafted.add_metric([name], told.num_draft_tokens)
        accepted.add_metric([name], told.num_accepted_draft_tokens)
        for position, number in enumerate(told.num_draft_tokens_per_pos):
            drafted_at.add_metric([name, str(position)], number)
        for position, number in enumerate(told.num_accepted_tokens_per_pos):
            accepted_at.add_metric([name, str(position)], number)
        made, kept = Tally[str](), Tally[str]()
        for use in told.drafter_uses:
            rounds.add_metric([name, use.drafter, use.reason], use.num_rounds)
            if use.drafter:
                made[use.drafter] += use.num_draft_tokens
                kept[use.drafter] += use.num_accepted_draft_tokens
        for drafter in made:
            drafted_by.add_metric([name, drafter], made[drafter])
            accepted_by.add_metric([name, drafter], kept[drafter])
        for cause in (*FALLBACKS, NO_PROPOSAL):
            fallbacks.add_metric([name, cause], totals.fallbacks[cause])
        dropped.add_metric([name], told.num_dropped_proposals)
        failures.add_metric([name], told.num_draft_failures)
        proposal_bytes.add_metric([name], told.num_proposal_bytes)
        lengths.add_metric([name], *_buckets(told.acceptance_histogram))
        gammas.add_metric([name], *_buckets(told.gamma_histogram))
    yield from (drafts, drafted, accepted, drafted_at, accepted_at, rounds, drafted_by, accepted_by)
    yield from (fallbacks, dropped, failures, proposal_bytes, lengths, gammas)


def _drafting_ahead(counted: _Counted) -> Iterator[Metric]:
    for field_name, meaning in _AHEAD.items():
        family = CounterMetricFamily(SPEC + field_name, f"{meaning} Told at a stream's end.", labels=["model_name"])
        for name, _, told in counted:
            family.add_metric([name], getattr(told, field_name))
        yield family


def _round_parts(counted: _Counted) -> Metric:
    seconds = CounterMetricFamily(
        f"{PREFIX}round_seconds",
        "Time of streams from their places on, by what it went to: the parts of their rounds leave nothing out.",
        labels=["model_name", "part"],
    )
    for name, totals, _ in counted:
        for part, ms in totals.part_ms.items():
            seconds.add_metric([name, part], ms / 1000)
    return seconds


def _outcomes(counted: _Counted, failures: Mapping[tuple[str, str], int]) -> Iterator[Metric]:
    success = CounterMetricFamily(
        f"{PREFIX}request_success", "Streams that finished, by why.", labels=["model_name", "finished_reason"]
    )
    failure = CounterMetricFamily(
        f"{PREFIX}request_failure", "Requests that ended with another status than OK.", labels=["model_name", "status"]
    )
    for name, totals, _ in counted:
        for reason, number in totals.finished.items():
            success.add_metric([name, reason], number)
    for labels, number in failures.items():
        failure.add_metric(labels, number)
    yield from (success, failure)


def _buckets(histogram: tuple[int, ...]) -> tuple[list[tuple[str, float]], float]:
    """Cumulative buckets and the sum; entry i of `histogram` is how often i was seen."""
    cumulative = [(str(float(bound)), float(sum(histogram[: bound + 1]))) for bound in BUCKETS]
    total = sum(i * number for i, number in enumerate(histogram))
    return [*cumulative, ("+Inf", float(sum(histogram)))], float(total)
