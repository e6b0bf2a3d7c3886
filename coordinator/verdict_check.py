"""Verdicts that cannot be: of a worker that is broken, or of another make. What they would commit is not committed.

A wrong token of the vocabulary looks like any other. What is found here are those that would take the coordinator or
its other streams with them: past the end of the text, ids that nothing stands for, counts of drafts that nobody sent;
and logprobs that are none, which go to the client unread.
"""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.stream import Stream
from outrider.sampling.params import Finish
from outrider.serving.messages import Verdict
from outrider.serving.session_calls import SealedPromptLogprobs
from outrider.serving.token_logprobs import fault_in


def fault_of(verdict: Verdict, stream: Stream) -> str:
    """Why it cannot be the next one of this stream; empty: it can."""
    request, ids, num_left = stream.request, verdict.committed_ids, stream.num_remaining_tokens
    stop_ids, vocab_size = request.stopping.stop_token_ids, request.vocab_size
    if len(ids) > num_left:
        return f"it commits {len(ids)} tokens where {num_left} are left"
    if vocab_size and max((*ids, *verdict.row_choices)) >= vocab_size:
        return f"it holds an id beyond the vocabulary of {vocab_size}"
    stops = next((place for place, token_id in enumerate(ids) if token_id in stop_ids), None)
    if (stops is not None) != (verdict.finish is Finish.STOP) or stops not in (None, len(ids) - 1):
        return "it goes on behind a stop token, or ends without one"
    if len(ids) == num_left and verdict.finish is Finish.NONE:
        return "it does not end with the last token"
    num_drafts = max(verdict.num_draft_tokens, len(verdict.soft_acceptances), len(verdict.row_choices) - 1)
    if max(num_drafts, verdict.num_accepted) > request.max_draft_tokens:
        return f"it tells of {num_drafts} drafts where {request.max_draft_tokens} are allowed"
    if not request.logprobs:
        return ""
    if verdict.logprobs.num_tokens < len(ids):
        return f"it has {verdict.logprobs.num_tokens} logprobs for {len(ids)} tokens"
    return fault_in(verdict.logprobs.unpacked(), request.top_logprobs, vocab_size)


def prompt_fault_of(told: Iterable[SealedPromptLogprobs], stream: Stream) -> str:
    """Why these cannot be logprobs of this stream's prompt; empty: they can, or there are none."""
    request = stream.request
    faults = (fault_in(part.message.logprobs, request.prompt_logprobs or 0, request.vocab_size) for part in told)
    return next(filter(None, faults), "")
