"""What streams must leave behind: nothing that is held, and a count for each of their tokens."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.results import Speculation
from outrider.server_info import Worker


def held(workers: Iterable[Worker]) -> list[Worker]:
    """Those with a session or a block of anybody's, as the coordinator counts them or as they say themselves."""
    return [
        w for w in workers
        if w.num_sessions or w.capacity.num_sessions or w.capacity.num_waiting
        or w.capacity.num_free_blocks != w.capacity.num_blocks
    ]  # fmt: skip


def num_accounted(told: Speculation) -> int:
    """Tokens that were decided in one of the ways there are."""
    return told.num_accepted_draft_tokens + told.num_correction_tokens + told.num_bonus_tokens + told.num_plain_tokens
