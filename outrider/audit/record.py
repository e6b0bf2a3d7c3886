"""A recorded stream as plain data: all that decided its tokens besides the target's weights."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from outrider.drafting.proposal import EMPTY, Proposal
from outrider.sampling.params import Finish, Origin, SamplingParams, StoppingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round: what was checked, and what came of it. Fields as in the wire's message of this name.

    `proposal` is empty where there was none, and where it is of no account. `unreadable` says why it could not be read;
    the target could not either, then.
    """

    base_length: int
    committed_ids: tuple[int, ...]
    origins: tuple[Origin, ...] = ()
    proposal: Proposal = EMPTY
    unreadable: str = ""
    num_draft_tokens: int = 0
    proposal_fault: str = ""
    epoch: int = 1
    numerics_index: int = 0
    drafts_untold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How the request wanted ids read as text, and which strings end it."""

    stop_strings: tuple[str, ...] = ()
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """One stream. `wire`: the message as it came; other fields as in it. `text`: None where its version does not tell
    it."""

    request_id: str
    model: str
    model_fingerprint: str
    numerics_fingerprints: tuple[str, ...] = ()
    index: int = 0
    prompt_ids: tuple[int, ...]
    resumed_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...]
    sampling: SamplingParams
    stopping: StoppingParams
    finish: Finish = Finish.NONE
    matched_stop_string: str = ""
    text: TextOptions | None = None
    rounds: tuple[RoundRecord, ...] = ()
    num_rounds_left_out: int = 0
    max_draft_tokens: int = 64
    wire: bytes = b""

    @property
    def sha256(self) -> str:
        """Of the message as it came, hexadecimal."""
        return hashlib.sha256(self.wire).hexdigest()
