"""What a worker refuses when a session opens. Coordinators check too, but workers trust nobody.

Every refusal is InvalidArgument and names the field, the value and the limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.proposal import MAX_Q_ENTRIES
from outrider.errors import InvalidArgument
from outrider.sampling.masks import leaves_a_token
from outrider.sampling.params import SamplingParams, StoppingParams
from outrider.serving.messages import DraftOpening, Opening, TargetOpening

MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 100.0
MAX_TOP_LOGPROBS = 20
MAX_BAD_WORDS = 512
SESSION_ID_BYTES = 16


def refuse(field: str, problem: str) -> InvalidArgument:
    """The error to raise about `open.<field>`."""
    return InvalidArgument(f"open.{field} {problem}", field=f"open.{field}")


def check_opening(opening: Opening, *, vocab_size: int) -> None:
    """What both kinds of worker demand."""
    if len(opening.session_id) != SESSION_ID_BYTES:
        raise refuse("session_id", f"has {len(opening.session_id)} bytes, must have {SESSION_ID_BYTES}")
    if not opening.prompt_ids:
        raise refuse("prompt_ids", "is empty; give at least one token")
    check_ids("open.prompt_ids", opening.prompt_ids, vocab_size)
    check_ids("open.committed_ids", opening.committed_ids, vocab_size)
    _check_sampling(opening.sampling, vocab_size)
    _check_stopping(opening.stopping, vocab_size)
    if not leaves_a_token(opening.sampling, opening.stopping, vocab_size):
        raise refuse(
            "sampling.allowed_token_ids",
            "less the ends of bad_words and, with min_tokens, the stop ids leaves no token that may always come next",
        )
    if len(opening.committed_ids) >= opening.stopping.max_tokens:
        raise refuse(
            "committed_ids",
            f"holds {len(opening.committed_ids)} tokens, max_tokens is {opening.stopping.max_tokens}: nothing is left",
        )
    if opening.committed_ids and opening.committed_ids[-1] in opening.stopping.stop_token_ids:
        raise refuse("committed_ids", f"ends with the stop token {opening.committed_ids[-1]}: nothing is left")


def check_draft_opening(opening: DraftOpening, *, vocab_size: int) -> None:
    """A draft worker's demands. Its own context length is none: beyond it proposals are empty."""
    check_opening(opening, vocab_size=vocab_size)
    if not 1 <= opening.max_q_entries <= MAX_Q_ENTRIES:
        raise refuse("max_q_entries", f"is {opening.max_q_entries}, must be in 1 to {MAX_Q_ENTRIES}")


def check_num_drafts(num_draft_tokens: int, max_draft_tokens: int) -> None:
    """Of an advance. Raises InvalidArgument where they are more than the worker allows."""
    if num_draft_tokens > max_draft_tokens:
        raise InvalidArgument(
            f"advance.num_draft_tokens is {num_draft_tokens}, this worker allows {max_draft_tokens}",
            field="advance.num_draft_tokens",
        )


def check_target_opening(
    opening: TargetOpening, *, vocab_size: int, context_length: int, max_draft_tokens: int
) -> None:
    """A target worker's demands."""
    check_opening(opening, vocab_size=vocab_size)
    num_tokens = len(opening.prompt_ids) + len(opening.committed_ids)
    if num_tokens + 1 > context_length:
        raise refuse(
            "prompt_ids",
            f"and committed_ids hold {num_tokens} tokens, the context of {context_length} has no room for one more: "
            "shorten the prompt",
        )
    if opening.num_suspect_tokens and not opening.deferred:
        raise refuse("num_suspect_tokens", f"is {opening.num_suspect_tokens}: a suspect's opening must be deferred")
    if opening.max_draft_tokens > max_draft_tokens:
        raise refuse("max_draft_tokens", f"is {opening.max_draft_tokens}, this worker allows {max_draft_tokens}")
    if opening.top_logprobs > MAX_TOP_LOGPROBS:
        raise refuse("top_logprobs", f"is {opening.top_logprobs}, at most {MAX_TOP_LOGPROBS} are given")
    if (opening.prompt_logprobs or 0) > MAX_TOP_LOGPROBS:
        raise refuse("prompt_logprobs", f"is {opening.prompt_logprobs}, at most {MAX_TOP_LOGPROBS} are given")
    if opening.top_logprobs and not opening.logprobs:
        raise refuse("top_logprobs", "needs logprobs as well")


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument unless every id is a real one."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        index, token_id = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidArgument(f"{field}[{index}] is {token_id}, the vocabulary has {vocab_size} ids", field=field)


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    # `low <= value <= high` is false for NaN, so that NaN is refused by every line.
    temperature = params.temperature
    if not (temperature == 0.0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE):
        raise refuse(
            "sampling.temperature", f"is {temperature}, must be 0 or in {MIN_TEMPERATURE} to {MAX_TEMPERATURE}"
        )
    if params.top_k < 0:
        raise refuse("sampling.top_k", f"is {params.top_k}, must not be negative (0: off)")
    if not 0.0 < params.top_p <= 1.0:
        raise refuse("sampling.top_p", f"is {params.top_p}, must be above 0 and at most 1")
    if not 0.0 <= params.min_p <= 1.0:
        raise refuse("sampling.min_p", f"is {params.min_p}, must be in 0 to 1")
    if not 0.01 <= params.repetition_penalty <= 10.0:  # smaller ones make float32 logits infinite
        raise refuse("sampling.repetition_penalty", f"is {params.repetition_penalty}, must be in 0.01 to 10")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2.0 <= getattr(params, name) <= 2.0:
            raise refuse(f"sampling.{name}", f"is {getattr(params, name)}, must be in -2 to 2")
    check_ids("open.sampling.logit_bias_ids", list(params.logit_bias), vocab_size)
    for token_id, value in params.logit_bias.items():
        if not -100.0 <= value <= 100.0:
            raise refuse("sampling.logit_bias_values", f"shifts id {token_id} by {value}, must be in -100 to 100")
    check_ids("open.sampling.allowed_token_ids", params.allowed_token_ids, vocab_size)
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise refuse(
            "sampling.bad_word_sizes", f"names {len(params.bad_words)} words, at most {MAX_BAD_WORDS} are taken"
        )
    for word in params.bad_words:
        check_ids("open.sampling.bad_word_ids", word, vocab_size)


def _check_stopping(stopping: StoppingParams, vocab_size: int) -> None:
    if stopping.max_tokens < 1:
        raise refuse("stopping.max_tokens", f"is {stopping.max_tokens}, must be at least 1")
    if not 0 <= stopping.min_tokens <= stopping.max_tokens:
        raise refuse(
            "stopping.min_tokens", f"is {stopping.min_tokens}, must be in 0 to max_tokens ({stopping.max_tokens})"
        )
    check_ids("open.stopping.stop_token_ids", sorted(stopping.stop_token_ids), vocab_size)
