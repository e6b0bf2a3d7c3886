"""Between wire messages and plain data. Both directions of each message stand together.

What workers tell about themselves is in `convert_worker.py`. Nothing is judged here beyond what a dataclass cannot
hold: ranges are checked by `checks.py`, a proposal's substance by `proposal.check`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from outrider.drafting.proposal import MAX_Q_ENTRIES, Proposal, ProposalFault, SparseQ
from outrider.errors import InvalidArgument
from outrider.lm.tree import are_ordered
from outrider.sampling.masks import BadWords, TokenSet
from outrider.sampling.params import (
    AcceptanceRule,
    Finish,
    Grammar,
    GrammarKind,
    Origin,
    SamplingParams,
    StoppingParams,
)
from outrider.serving.messages import (
    AheadWish,
    Branches,
    DraftOpening,
    FeatureRows,
    Header,
    Opening,
    TargetOpening,
    Verdict,
)
from outrider.serving.token_logprobs import NO_LOGPROBS, TokenLogprobs
from outrider.v1 import common_pb2, draft_pb2, target_pb2


def header_to_pb(header: Header) -> common_pb2.SessionHeader:
    return common_pb2.SessionHeader(epoch=header.epoch, base_length=header.base_length, prefix_hash=header.prefix_hash)


def header_from_pb(message: common_pb2.SessionHeader) -> Header:
    return Header(message.epoch, message.base_length, message.prefix_hash)


def sampling_to_pb(params: SamplingParams) -> common_pb2.ResolvedSampling:
    return common_pb2.ResolvedSampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias_ids=list(params.logit_bias.keys()),
        logit_bias_values=list(params.logit_bias.values()),
        seed=params.seed,
        choice=params.choice,
        acceptance=int(params.acceptance),  # type: ignore[arg-type]
        allowed_token_ids=params.allowed_token_ids,
        bad_word_sizes=[len(word) for word in params.bad_words],
        bad_word_ids=[token_id for word in params.bad_words for token_id in word],
        grammar=_grammar_to_pb(params.grammar),
    )


def sampling_from_pb(message: common_pb2.ResolvedSampling, field: str = "open.sampling") -> SamplingParams:
    if len(message.logit_bias_ids) != len(message.logit_bias_values):
        raise InvalidArgument(
            f"{field}.logit_bias_values has {len(message.logit_bias_values)} values for "
            f"{len(message.logit_bias_ids)} ids",
            field=f"{field}.logit_bias_values",
        )
    bias = dict(zip(message.logit_bias_ids, message.logit_bias_values, strict=True))
    if len(bias) != len(message.logit_bias_ids):
        raise InvalidArgument(f"{field}.logit_bias_ids names an id twice", field=f"{field}.logit_bias_ids")
    try:
        acceptance = AcceptanceRule(message.acceptance)
    except ValueError:
        names = ", ".join(rule.name for rule in AcceptanceRule)
        raise InvalidArgument(
            f"{field}.acceptance {message.acceptance} is not one of {names}", field=f"{field}.acceptance"
        ) from None
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=bias,
        seed=message.seed,
        choice=message.choice,
        acceptance=acceptance,
        allowed_token_ids=TokenSet(sorted(set(message.allowed_token_ids))),
        bad_words=_bad_words_from_pb(message, field),
        grammar=_grammar_from_pb(message, field),
    )


def _grammar_to_pb(grammar: Grammar | None) -> common_pb2.ResolvedGrammar | None:
    if grammar is None:
        return None
    return common_pb2.ResolvedGrammar(kind=int(grammar.kind), text=grammar.text)  # type: ignore[arg-type]


def _grammar_from_pb(message: common_pb2.ResolvedSampling, field: str) -> Grammar | None:
    if not message.HasField("grammar"):
        return None
    try:
        return Grammar(GrammarKind(message.grammar.kind), message.grammar.text)
    except ValueError:
        names = ", ".join(kind.name for kind in GrammarKind)
        raise InvalidArgument(
            f"{field}.grammar.kind {message.grammar.kind} is not one of {names}", field=f"{field}.grammar.kind"
        ) from None


def _bad_words_from_pb(message: common_pb2.ResolvedSampling, field: str) -> BadWords:
    sizes, ids = message.bad_word_sizes, message.bad_word_ids
    if sum(sizes) != len(ids) or 0 in sizes:
        raise InvalidArgument(
            f"{field}.bad_word_sizes must be positive and sum to the {len(ids)} bad_word_ids, not to {sum(sizes)}",
            field=f"{field}.bad_word_sizes",
        )
    rest = iter(ids)
    return BadWords(tuple(itertools.islice(rest, size)) for size in sizes)


def stopping_to_pb(params: StoppingParams) -> common_pb2.ResolvedStopping:
    return common_pb2.ResolvedStopping(
        max_tokens=params.max_tokens, min_tokens=params.min_tokens, stop_token_ids=sorted(params.stop_token_ids)
    )


def stopping_from_pb(message: common_pb2.ResolvedStopping) -> StoppingParams:
    return StoppingParams(message.max_tokens, message.min_tokens, frozenset(message.stop_token_ids))


def proposal_to_pb(proposal: Proposal) -> common_pb2.Proposal:
    """One-hot places (greedy, COUPLED, lookup) put ids only on the wire."""
    message = common_pb2.Proposal(
        token_ids=proposal.token_ids,
        parents=[parent + 1 for parent in proposal.parents],
        confidences=bytes(round(255 * confidence) for confidence in proposal.confidences),
        drafter=proposal.drafter,
        queue_us=proposal.queue_us,
        compute_us=proposal.compute_us,
        ingested_tokens=proposal.num_ingested_tokens,
        catch_up_us=proposal.catch_up_us,
    )
    sparse = [q for q in proposal.q if q is not None]
    if sparse:
        message.q_sizes.extend(0 if q is None else len(q.ids) for q in proposal.q)
        message.q_ids = np.concatenate([q.ids for q in sparse]).astype("<u4").tobytes()
        message.q_counts = (np.concatenate([q.counts for q in sparse]) - 1).astype("<u2").tobytes()
    return message


def proposal_from_pb(message: common_pb2.Proposal) -> Proposal:
    """Raises ProposalFault on byte strings and lists that do not add up."""
    if message.parents and len(message.parents) != len(message.token_ids):
        raise ProposalFault(f"{len(message.parents)} parents for {len(message.token_ids)} drafts")
    if message.confidences and len(message.confidences) != len(message.token_ids):
        raise ProposalFault(f"{len(message.confidences)} confidences for {len(message.token_ids)} drafts")
    return Proposal(
        token_ids=tuple(message.token_ids),
        q=_unpack_q(message),
        confidences=tuple(byte / 255 for byte in message.confidences),
        drafter=message.drafter,
        queue_us=message.queue_us,
        compute_us=message.compute_us,
        num_ingested_tokens=message.ingested_tokens,
        catch_up_us=message.catch_up_us,
        parents=tuple(parent - 1 for parent in message.parents),
    )


def _unpack_q(message: common_pb2.Proposal) -> tuple[SparseQ | None, ...]:
    sizes = list(message.q_sizes)
    if sizes and len(sizes) != len(message.token_ids):
        raise ProposalFault(f"{len(sizes)} q_sizes for {len(message.token_ids)} drafts")
    if any(size > MAX_Q_ENTRIES for size in sizes):
        raise ProposalFault(f"a q of {max(sizes)} entries, at most {MAX_Q_ENTRIES} allowed")
    total = sum(sizes)
    if len(message.q_ids) != 4 * total or len(message.q_counts) != 2 * total:
        sizes_seen = f"{len(message.q_ids)} bytes of q_ids and {len(message.q_counts)} of q_counts"
        raise ProposalFault(f"{sizes_seen} for {total} entries")
    ids = np.frombuffer(message.q_ids, "<u4").astype(np.uint32, copy=False)
    counts = np.frombuffer(message.q_counts, "<u2").astype(np.int64) + 1
    q: list[SparseQ | None] = []
    end = 0
    for size in sizes:
        start, end = end, end + size
        q.append(SparseQ(ids[start:end], counts[start:end]) if size else None)
    return tuple(q)


def _opening_to_pb(opening: Opening) -> dict[str, Any]:
    """The fields that both kinds of opening have."""
    return {
        "session_id": opening.session_id,
        "epoch": opening.epoch,
        "prompt_ids": opening.prompt_ids,
        "committed_ids": opening.committed_ids,
        "sampling": sampling_to_pb(opening.sampling),
        "stopping": stopping_to_pb(opening.stopping),
        "tenant": opening.tenant,
        "features": opening.features,
        "worker_incarnation": opening.worker_incarnation,
    }


def _opening_from_pb(message: draft_pb2.DraftOpen | target_pb2.TargetOpen) -> dict[str, Any]:
    return {
        "session_id": message.session_id,
        "epoch": message.epoch,
        "prompt_ids": list(message.prompt_ids),
        "committed_ids": list(message.committed_ids),
        "sampling": sampling_from_pb(message.sampling),
        "stopping": stopping_from_pb(message.stopping),
        "tenant": message.tenant,
        "features": message.features,
        "worker_incarnation": message.worker_incarnation,
    }


def draft_open_to_pb(opening: DraftOpening) -> draft_pb2.DraftOpen:
    return draft_pb2.DraftOpen(
        **_opening_to_pb(opening),
        max_q_entries=opening.max_q_entries,
        drafter=opening.drafter,
        target_fingerprint=opening.target_fingerprint,
    )


def draft_open_from_pb(message: draft_pb2.DraftOpen) -> DraftOpening:
    return DraftOpening(
        **_opening_from_pb(message),
        max_q_entries=message.max_q_entries,
        drafter=message.drafter,
        target_fingerprint=message.target_fingerprint,
    )


def ahead_from_pb(message: draft_pb2.DraftAdvance) -> AheadWish:
    return AheadWish(message.ahead_branches, message.ahead_draft_tokens, message.ahead_value_ms)


def branches_to_pb(branches: Branches, num_cancelled_tokens: int) -> draft_pb2.DraftBranches:
    return draft_pb2.DraftBranches(
        header=header_to_pb(branches.header),
        prefix_hashes=branches.proposals.keys(),
        proposals=[proposal_to_pb(proposal) for proposal in branches.proposals.values()],
        queue_us=branches.queue_us,
        compute_us=branches.compute_us,
        num_cancelled_tokens=num_cancelled_tokens,
        num_accepted=[num_accepted for num_accepted, _ in branches.outcomes],
        next_token_ids=[token_id for _, token_id in branches.outcomes],
    )


def target_open_to_pb(opening: TargetOpening) -> target_pb2.TargetOpen:
    return target_pb2.TargetOpen(
        **_opening_to_pb(opening),
        logprobs=opening.logprobs,
        top_logprobs=opening.top_logprobs,
        max_draft_tokens=opening.max_draft_tokens,
        priority=opening.priority,
        prompt_logprobs=opening.prompt_logprobs,
        features_start=opening.features_start,
        deferred=opening.deferred,
        num_suspect_tokens=opening.num_suspect_tokens,
        fresh_seed=opening.has_fresh_seed,
        tell_drafted=opening.tells_drafted,
    )


def target_open_from_pb(message: target_pb2.TargetOpen) -> TargetOpening:
    return TargetOpening(
        **_opening_from_pb(message),
        logprobs=message.logprobs,
        top_logprobs=message.top_logprobs,
        max_draft_tokens=message.max_draft_tokens,
        priority=message.priority,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        features_start=message.features_start,
        deferred=message.deferred,
        num_suspect_tokens=message.num_suspect_tokens,
        has_fresh_seed=message.fresh_seed,
        tells_drafted=message.tell_drafted,
    )


def feature_rows_to_pb(features: FeatureRows) -> common_pb2.FeatureRows:
    return common_pb2.FeatureRows(features_start=features.start, features=features.rows)


def feature_rows_from_pb(message: common_pb2.FeatureRows) -> FeatureRows:
    return FeatureRows(message.features_start, message.features)


def prompt_logprobs_to_pb(first_position: int, logprobs: TokenLogprobs) -> common_pb2.PromptLogprobs:
    """`first_position`: of the token that the first entry is about."""
    return common_pb2.PromptLogprobs(first_position=first_position, logprobs=logprobs.unpacked())


def verdict_to_pb(verdict: Verdict) -> target_pb2.Verdict:
    message = target_pb2.Verdict(
        header=header_to_pb(verdict.header),
        num_accepted=verdict.num_accepted,
        committed_ids=verdict.committed_ids,
        origins=verdict.origins,  # type: ignore[arg-type]
        soft_acceptances=verdict.soft_acceptances,
        finish_reason=int(verdict.finish),  # type: ignore[arg-type]
        matched_stop_token_id=verdict.matched_stop_token_id,
        proposal_fault=verdict.proposal_fault,
        queue_us=verdict.queue_us,
        compute_us=verdict.compute_us,
        sampling_us=verdict.sampling_us,
        num_batch_rows=verdict.num_batch_rows,
        decode_ended=verdict.decode_ended,
        num_cached_tokens=verdict.num_cached_tokens,
        num_draft_tokens=verdict.num_draft_tokens,
        row_choices=verdict.row_choices,
        drafted_ids=verdict.drafted_ids,
        drafted_parents=[parent + 1 for parent in verdict.drafted_parents],
        draft_us=verdict.draft_us,
        features=verdict.features.rows,
        features_start=verdict.features.start,
    )
    if verdict.logprobs.num_tokens:
        message.logprobs.MergeFromString(verdict.logprobs.packed)
    if verdict.drafted_ids and verdict.drafted_q is not None:
        message.drafted.CopyFrom(proposal_to_pb(Proposal(verdict.drafted_ids, verdict.drafted_q)))
    return message


def verdict_from_pb(message: target_pb2.Verdict) -> Verdict:
    """Raises ValueError on an origin or finish reason that this version does not know, on drafts whose parents are no
    tree or whose q does not add up, and on logprobs that are not as many as they say."""
    drafted_parents = tuple(parent - 1 for parent in message.drafted_parents)
    if drafted_parents and not (len(drafted_parents) == len(message.drafted_ids) and are_ordered(drafted_parents)):
        raise ValueError(f"drafted_parents {drafted_parents} are no tree of {len(message.drafted_ids)} drafts")
    try:
        drafted_q = _unpack_q(message.drafted) if message.HasField("drafted") else None
    except ProposalFault as fault:
        raise ValueError(f"drafted: {fault}") from None
    if drafted_q and len(drafted_q) != len(message.drafted_ids):
        raise ValueError(f"drafted has {len(drafted_q)} q_sizes for {len(message.drafted_ids)} drafts")
    return Verdict(
        header=header_from_pb(message.header),
        committed_ids=tuple(message.committed_ids),
        origins=tuple(Origin(origin) for origin in message.origins),
        num_accepted=message.num_accepted,
        num_draft_tokens=message.num_draft_tokens,
        soft_acceptances=message.soft_acceptances,
        finish=Finish(message.finish_reason),
        matched_stop_token_id=message.matched_stop_token_id if message.HasField("matched_stop_token_id") else None,
        logprobs=TokenLogprobs.seal(message.logprobs) if message.HasField("logprobs") else NO_LOGPROBS,
        proposal_fault=message.proposal_fault,
        queue_us=message.queue_us,
        compute_us=message.compute_us,
        sampling_us=message.sampling_us,
        num_batch_rows=message.num_batch_rows,
        decode_ended=message.decode_ended,
        num_cached_tokens=message.num_cached_tokens,
        row_choices=tuple(message.row_choices),
        drafted_ids=tuple(message.drafted_ids),
        drafted_parents=drafted_parents,
        drafted_q=drafted_q,
        draft_us=message.draft_us,
        features=FeatureRows(message.features_start, message.features),
    )
