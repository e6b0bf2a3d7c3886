"""What a draft worker answers in a session, as messages."""

from __future__ import annotations

from outrider.drafting.proposal import Proposal
from outrider.serving import convert
from outrider.serving.messages import Branches, Header
from outrider.v1 import common_pb2, draft_pb2

Answer = draft_pb2.DraftServiceSessionResponse


def opened(context_length: int) -> Answer:
    """The session has its place."""
    return Answer(opened=draft_pb2.DraftOpened(context_length=context_length))


def begun(header: Header) -> Answer:
    """The first row behind the prefix is there, nothing is drawn from it yet."""
    return Answer(begun=draft_pb2.DraftBegun(header=convert.header_to_pb(header)))


def drawn(header: Header, draft: Proposal) -> Answer:
    """The next draft of the proposal behind the prefix."""
    return Answer(drawn=draft_pb2.DraftDrawn(header=convert.header_to_pb(header), draft=convert.proposal_to_pb(draft)))


def proposed(
    header: Header, proposal: Proposal, features_end: int | None = None, num_cancelled_tokens: int = 0
) -> Answer:
    """features_end: where the features end that the drafter has; None: it needs none. num_cancelled_tokens: drafted
    ahead since the last answer for branches that were never told."""
    return Answer(
        proposal=draft_pb2.DraftProposal(
            header=convert.header_to_pb(header),
            proposal=convert.proposal_to_pb(proposal),
            features_end=features_end,
            num_cancelled_tokens=num_cancelled_tokens,
        )
    )


def branched(branches: Branches, num_cancelled_tokens: int) -> Answer:
    """Proposals for outcomes not known yet."""
    return Answer(branches=convert.branches_to_pb(branches, num_cancelled_tokens))


def out_of_step(header: Header) -> Answer:
    """The session's own state, which the message did not fit."""
    return Answer(out_of_step=common_pb2.OutOfStep(header=convert.header_to_pb(header)))
