"""Logprobs of tokens from the target that has them to the client that asked, packed once and passed on unread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.v1 import common_pb2

MAX_LOGPROB = 1e-3
"""A chance of 1, and what rounding may add to it elsewhere."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of the target's raw distribution: one entry per token, with its likeliest alternatives.

    `packed` is the wire's message of this name, four bytes a logprob. It is kept as bytes: a message holds on to all of
    what it came in.
    """

    num_tokens: int = 0
    packed: bytes = b""

    @classmethod
    def pack(
        cls, token_logprobs: Sequence[float], num_top: int, top_ids: Sequence[int], top_logprobs: Sequence[float]
    ) -> TokenLogprobs:
        """`num_top` alternatives of each token, one token's after another's. Logprobs are rounded to float32."""
        message = common_pb2.TokenLogprobs(
            token_logprobs=token_logprobs, num_top=num_top, top_ids=top_ids, top_logprobs=top_logprobs
        )
        return cls.seal(message)

    @classmethod
    def seal(cls, message: common_pb2.TokenLogprobs) -> TokenLogprobs:
        """Raises ValueError on one whose alternatives are not as many as it says."""
        return cls(count(message), message.SerializeToString())

    def unpacked(self) -> common_pb2.TokenLogprobs:
        """The message."""
        return common_pb2.TokenLogprobs.FromString(self.packed)

    def cut(self, num_tokens: int) -> TokenLogprobs:
        """Of the first `num_tokens` of them; of all where there are no more."""
        if num_tokens >= self.num_tokens:
            return self
        message = self.unpacked()
        del message.token_logprobs[num_tokens:]
        del message.top_ids[num_tokens * message.num_top :]
        del message.top_logprobs[num_tokens * message.num_top :]
        return TokenLogprobs(num_tokens, message.SerializeToString())


NO_LOGPROBS = TokenLogprobs()


def count(message: common_pb2.TokenLogprobs) -> int:
    """Of tokens. Raises ValueError on a message whose alternatives are not as many as it says."""
    num_tokens, num_ids, num_values = len(message.token_logprobs), len(message.top_ids), len(message.top_logprobs)
    if not num_ids == num_values == num_tokens * message.num_top:
        raise ValueError(
            f"logprobs of {num_tokens} tokens with {message.num_top} alternatives each have {num_ids} top_ids and "
            f"{num_values} top_logprobs"
        )
    return num_tokens


def fault_in(message: common_pb2.TokenLogprobs, num_top: int, vocab_size: int) -> str:
    """Why these cannot be logprobs of a model with so many ids (0: not known), `num_top` alternatives asked for; empty:
    they can. -inf is one: of an id that cannot come."""
    values, told_top = message.token_logprobs[:], message.num_top
    if not values:
        return ""
    if told_top != num_top and told_top != min(num_top, vocab_size or num_top):
        return f"it has {told_top} alternatives to each token where {num_top} were asked for"
    if not _are_logprobs(values) or (told_top and not _are_logprobs(message.top_logprobs[:])):
        return "it has a logprob that is NaN or above 0"
    if told_top and vocab_size and max(message.top_ids[:]) >= vocab_size:
        return f"it has an alternative beyond the vocabulary of {vocab_size}"
    return ""


def _are_logprobs(values: Sequence[float]) -> bool:
    """`max` passes over NaN that do not come first, a sum over none."""
    return max(values) <= MAX_LOGPROB and sum(values) < math.inf
