"""The caller's end of the two session streams: whole messages built from plain data and read back into it.

A proposal passes from draft to target worker unopened: the coordinator needs its size and times, the target checks it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.drafting.proposal import Proposal
from outrider.drafting.ratio_stop import UNJUDGED, Judged, Price
from outrider.serving import convert, token_logprobs
from outrider.serving.messages import (
    NO_FEATURES,
    NOTHING_AHEAD,
    AheadWish,
    DraftOpening,
    FeatureRows,
    Header,
    TargetOpening,
    Verdict,
)
from outrider.serving.request_context import to_send
from outrider.serving.worker_calls import Metadata
from outrider.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc


@dataclass(frozen=True, slots=True)
class SealedProposal:
    """What the coordinator reads of a proposal. `message` goes to the target worker as it came."""

    num_draft_tokens: int = 0
    drafter: str = ""
    queue_us: int = 0
    compute_us: int = 0
    num_ingested_tokens: int = 0
    catch_up_us: int = 0
    num_bytes: int = 0
    is_tree: bool = False
    message: Any = None

    @property
    def queue_ms(self) -> float:
        """Before its drafter's turn."""
        return self.queue_us / 1000

    @property
    def draft_ms(self) -> float:
        """All of the worker's time, its queue and its coming level included."""
        return (self.catch_up_us + self.queue_us + self.compute_us) / 1000

    @property
    def catch_up_ms(self) -> float:
        """Of coming level with the committed text, which says nothing of what drafts take."""
        return self.catch_up_us / 1000

    @property
    def parents(self) -> tuple[int, ...]:
        """As in `Proposal`; empty: a chain."""
        return tuple(parent - 1 for parent in self.message.parents) if self.is_tree else ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The drafts."""
        return tuple(self.message.token_ids) if self.message is not None else ()


@dataclass(frozen=True, slots=True)
class SealedPromptLogprobs:
    """Of prompt tokens `first_position` and on. `message` goes to the client as it came."""

    first_position: int
    num_tokens: int
    message: Any = None


@dataclass(frozen=True, slots=True)
class Opened:
    """The draft session has its place."""

    context_length: int


@dataclass(frozen=True, slots=True)
class Proposed:
    """A proposal for the prefix that `header` names. features_end: where its drafter's features end; None: it needs
    none. num_cancelled_tokens: drafted ahead since the last message for branches that were never told."""

    header: Header
    proposal: SealedProposal
    features_end: int | None = None
    num_cancelled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Branched:
    """Proposals for outcomes of the round on top of `header`, by the hash of the prefix that each continues, the
    likeliest first; `outcomes`: (drafts that stand, the token after them) of each."""

    header: Header
    proposals: Mapping[int, SealedProposal]
    outcomes: Sequence[tuple[int, int]] = ()
    queue_us: int = 0
    compute_us: int = 0
    num_cancelled_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Begun:
    """The first row behind this prefix is there, nothing is drawn yet: from now on the proposal is not to be given up
    for being late."""

    header: Header


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next draft of the proposal behind this prefix, sent before the worker looks whether to go on."""

    header: Header
    proposal: SealedProposal


@dataclass(frozen=True, slots=True)
class Lagging:
    """The worker's own state: the last message did not fit it."""

    header: Header


@dataclass(frozen=True, slots=True)
class Ready:
    """The target's session stands at this prefix: a suspect's turn has come, or what was to be ingested is computed."""

    header: Header


@dataclass(frozen=True, slots=True)
class Alive:
    """A heartbeat."""


def draft_call(
    channel: grpc.aio.Channel, timeout_s: float | None, metadata: Metadata = ()
) -> grpc.aio.StreamStreamCall:
    stub = draft_pb2_grpc.DraftServiceStub(channel)
    return stub.Session(timeout=timeout_s, metadata=(*metadata, *to_send()))  # type: ignore[call-arg, return-value]


def target_call(
    channel: grpc.aio.Channel, timeout_s: float | None, metadata: Metadata = ()
) -> grpc.aio.StreamStreamCall:
    stub = target_pb2_grpc.TargetServiceStub(channel)
    return stub.Session(timeout=timeout_s, metadata=(*metadata, *to_send()))  # type: ignore[call-arg, return-value]


DRAFT_HEARTBEAT = draft_pb2.DraftServiceSessionRequest(heartbeat=common_pb2.Heartbeat())
TARGET_HEARTBEAT = target_pb2.TargetServiceSessionRequest(heartbeat=common_pb2.Heartbeat())


def seal_ids(
    token_ids: Sequence[int],
    confidences: Sequence[float],
    drafter: str,
    compute_us: int = 0,
    parents: Sequence[int] = (),
) -> SealedProposal:
    """One-hot drafts: a chain, or a tree of this shape."""
    proposal = Proposal(
        tuple(token_ids),
        confidences=tuple(confidences),
        drafter=drafter,
        compute_us=compute_us,
        parents=tuple(parents),
    )
    return _sealed(convert.proposal_to_pb(proposal))


def continued(chain: SealedProposal, token_ids: Sequence[int]) -> SealedProposal:
    """The chain with one-hot drafts after its own."""
    message = common_pb2.Proposal()
    message.CopyFrom(chain.message)
    message.token_ids.extend(token_ids)
    if message.q_sizes:
        message.q_sizes.extend([0] * len(token_ids))
    message.ClearField("confidences")
    return _sealed(message)


def joined(parts: Sequence[SealedProposal]) -> SealedProposal:
    """One chain of sampled drafts that came in parts; what is told of it as a whole came with the last one."""
    message = common_pb2.Proposal()
    message.CopyFrom(parts[-1].message)
    for field in ("token_ids", "q_sizes"):
        message.ClearField(field)
        getattr(message, field).extend(entry for part in parts for entry in getattr(part.message, field))
    for field in ("q_ids", "q_counts", "confidences"):
        setattr(message, field, b"".join(getattr(part.message, field) for part in parts))
    return _sealed(message)


def own_drafts(verdict: Verdict, drafter: str) -> SealedProposal:
    """What the target drafted by itself in that round: nothing of it has crossed as a proposal."""
    proposal = Proposal(
        verdict.drafted_ids,
        q=verdict.drafted_q or (),
        drafter=drafter,
        compute_us=verdict.draft_us,
        parents=verdict.drafted_parents,
    )
    return dataclasses.replace(_sealed(convert.proposal_to_pb(proposal)), num_bytes=0)


def draft_open(opening: DraftOpening) -> Any:
    return draft_pb2.DraftServiceSessionRequest(open=convert.draft_open_to_pb(opening))


def draft_advance(
    header: Header,
    committed_ids: Sequence[int],
    num_draft_tokens: int,
    drafter: str,
    tree_width: int = 0,
    features: FeatureRows = NO_FEATURES,
    *,
    ahead: AheadWish = NOTHING_AHEAD,
    has_proposal: bool = False,
    price: Price | None = None,
    judged: Judged = UNJUDGED,
) -> Any:
    """`header` is the state after `committed_ids` are appended. `tree_width` 0: the worker's own. `ahead`: to draft
    behind the outcomes of the round that begins. `has_proposal`: a branch is at hand, no proposal is wanted. `price`:
    what drafts must earn, None: they are as many as wanted. `judged`: how the target found an earlier proposal."""
    return draft_pb2.DraftServiceSessionRequest(
        advance=draft_pb2.DraftAdvance(
            header=convert.header_to_pb(header),
            committed_ids=committed_ids,
            num_draft_tokens=num_draft_tokens,
            drafter=drafter,
            tree_width=tree_width,
            features=features.rows,
            features_start=features.start,
            ahead_branches=ahead.num_branches,
            ahead_draft_tokens=ahead.num_draft_tokens,
            ahead_value_ms=ahead.value_ms,
            has_proposal=has_proposal,
            tell_drafts=True,
            price_tokens_per_ms=price.tokens_per_ms if price is not None else None,
            row_price_tokens=price.row_tokens if price is not None else 0.0,
            expected_acceptances=bytes(round(255 * chance) for chance in price.expected) if price is not None else b"",
            soft_acceptances=judged.soft_acceptances,
            judged_prefix_hash=judged.prefix_hash,
        )
    )


def draft_features(features: FeatureRows) -> Any:
    """Too many for an advance: before it."""
    return draft_pb2.DraftServiceSessionRequest(features=convert.feature_rows_to_pb(features))


def read_draft(message: Any) -> Opened | Proposed | Begun | Drawn | Branched | Lagging | Alive:
    """Raises ValueError on branches without a hash each."""
    match message.WhichOneof("message"):
        case "opened":
            return Opened(message.opened.context_length)
        case "proposal":
            answer = message.proposal
            features_end = answer.features_end if answer.HasField("features_end") else None
            return Proposed(
                convert.header_from_pb(answer.header),
                _sealed(answer.proposal),
                features_end,
                answer.num_cancelled_tokens,
            )
        case "begun":
            return Begun(convert.header_from_pb(message.begun.header))
        case "drawn":
            return Drawn(convert.header_from_pb(message.drawn.header), _sealed(message.drawn.draft))
        case "branches":
            told = message.branches
            return Branched(
                convert.header_from_pb(told.header),
                dict(zip(told.prefix_hashes, map(_sealed, told.proposals), strict=True)),
                tuple(zip(told.num_accepted, told.next_token_ids, strict=True)),
                told.queue_us,
                told.compute_us,
                told.num_cancelled_tokens,
            )
        case "out_of_step":
            return Lagging(convert.header_from_pb(message.out_of_step.header))
    return Alive()


def _sealed(proposal: Any) -> SealedProposal:
    return SealedProposal(
        num_draft_tokens=len(proposal.token_ids),
        drafter=proposal.drafter,
        queue_us=proposal.queue_us,
        compute_us=proposal.compute_us,
        num_ingested_tokens=proposal.ingested_tokens,
        catch_up_us=proposal.catch_up_us,
        num_bytes=proposal.ByteSize(),
        is_tree=bool(proposal.parents),
        message=proposal,
    )


def target_open(opening: TargetOpening) -> Any:
    return target_pb2.TargetServiceSessionRequest(open=convert.target_open_to_pb(opening))


def target_verify(
    header: Header,
    committed_ids: Sequence[int],
    proposal: SealedProposal,
    *,
    drafter: str = "",
    num_draft_tokens: int = 0,
    tree_parents: Sequence[int] = (),
    expected_token_id: int | None = None,
) -> Any:
    """`committed_ids`: the last ids of the header's prefix that the worker lacks; usually none. Without drafts the
    worker's own `drafter` (empty: its first) makes `num_draft_tokens`, as a tree of this shape if one is given.
    `expected_token_id`: the header is that of a prefix that is not committed yet, and this is its last id."""
    return target_pb2.TargetServiceSessionRequest(
        verify=target_pb2.TargetVerify(
            header=convert.header_to_pb(header),
            committed_ids=committed_ids,
            proposal=proposal.message,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            tree_parents=[parent + 1 for parent in tree_parents],
            expected_token_id=expected_token_id,
        )
    )


def target_decode(
    header: Header,
    committed_ids: Sequence[int],
    credit_tokens: int,
    *,
    drafter: str = "",
    num_draft_tokens: int = 0,
    tree_parents: Sequence[int] = (),
) -> Any:
    """As in `target_verify`: `drafter`, `num_draft_tokens` and `tree_parents` at every step."""
    return target_pb2.TargetServiceSessionRequest(
        decode=target_pb2.TargetDecode(
            header=convert.header_to_pb(header),
            committed_ids=committed_ids,
            credit_tokens=credit_tokens,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            tree_parents=[parent + 1 for parent in tree_parents],
        )
    )


def features_from(question: Any, start: int | None) -> Any:
    """A question for verdicts, of which the first is to carry features from `start` on; None: those not sent yet."""
    if start is not None:
        getattr(question, question.WhichOneof("message")).features_start = start
    return question


def target_ingest(header: Header, committed_ids: Sequence[int]) -> Any:
    """`committed_ids`: the last ids of the header's prefix, as far as the worker lacks them."""
    return target_pb2.TargetServiceSessionRequest(
        ingest=target_pb2.TargetIngest(header=convert.header_to_pb(header), committed_ids=committed_ids)
    )


def target_stop() -> Any:
    """Ends a running `decode` with the token in flight."""
    return target_pb2.TargetServiceSessionRequest(stop=target_pb2.TargetStop())


def read_target(message: Any) -> Verdict | SealedPromptLogprobs | FeatureRows | Lagging | Ready | Alive:
    """Raises ValueError on a verdict that cannot be read, see `convert.verdict_from_pb`, and on logprobs of a prompt
    that are not as many as they say."""
    match message.WhichOneof("message"):
        case "verdict":
            return convert.verdict_from_pb(message.verdict)
        case "prompt_logprobs":
            told = message.prompt_logprobs
            return SealedPromptLogprobs(told.first_position, token_logprobs.count(told.logprobs), told)
        case "features":
            return convert.feature_rows_from_pb(message.features)
        case "out_of_step":
            return Lagging(convert.header_from_pb(message.out_of_step.header))
        case "ready":
            return Ready(convert.header_from_pb(message.ready.header))
    return Alive()
