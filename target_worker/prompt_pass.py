"""Logprobs of a prompt's own tokens, and of any row: what requests with `prompt_logprobs` and `logprobs` are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from outrider.errors import Internal
from outrider.lm.interface import Forward, Program, SequenceHandle
from outrider.sampling.logprobs import raw_logprobs
from outrider.serving.session_log import SessionLog
from outrider.serving.token_logprobs import NO_LOGPROBS, TokenLogprobs

MAX_PROMPT_LOGIT_BYTES = 32 << 20
MAX_PROMPT_LOGIT_ROWS = 256
"""Prompt logprobs are computed so many rows at a time: logits of a whole prompt would not fit in memory."""

TellPrompt = Callable[[int, TokenLogprobs], None]
"""(position of the first prompt token, logprobs of it and the next ones); on the thread that runs the program."""


def compute_prompt(
    log: SessionLog, sequence: SequenceHandle, num_prompt_tokens: int, tell: TellPrompt, num_top: int
) -> Program[tuple[int, int]]:
    """All prompt rows but the last, each with logits, so that none can be taken from a prefix cache. Returns time
    waited and computed, in us."""
    last = num_prompt_tokens - 1
    num_rows = max(1, min(MAX_PROMPT_LOGIT_ROWS, MAX_PROMPT_LOGIT_BYTES // (4 * log.vocab_size)))
    sequence.truncate(0)
    sequence.committed_length = len(log.ids)
    queue_us = compute_us = 0
    if last == 0:
        tell(1, NO_LOGPROBS)
    for start in range(0, last, num_rows):
        end = min(start + num_rows, last)
        result = yield Forward(sequence, log.ids[start:end], num_logits=end - start)
        queue_us += result.queue_us
        compute_us += result.compute_us
        if not np.isfinite(result.logits.max(axis=1)).all():
            raise Internal(
                f"the model's logits after prompt tokens {start} to {end - 1} hold NaN or +inf", reason="BAD_LOGITS"
            )
        tell(start + 1, logprobs(result.logits, log.ids[start + 1 : end + 1], num_top))
    return queue_us, compute_us


def logprobs(logits: np.ndarray, token_ids: Sequence[int], num_top: int) -> TokenLogprobs:
    """Of token i in row i."""
    rows = [raw_logprobs(logits[i], token_id, num_top) for i, token_id in enumerate(token_ids)]
    return TokenLogprobs.pack(
        [logprob for logprob, _, _ in rows],
        len(rows[0][1]) if rows else 0,
        [token_id for _, ids, _ in rows for token_id in ids.tolist()],
        [logprob for _, _, logprobs in rows for logprob in logprobs.tolist()],
    )
