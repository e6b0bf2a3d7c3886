"""What crosses a session stream, as plain data: sessions and the round loop work on these, `convert.py` on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.drafting.proposal import Proposal, SparseQ
from outrider.sampling.params import Finish, Origin, SamplingParams, StoppingParams
from outrider.serving.token_logprobs import NO_LOGPROBS, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Header:
    """One state of one session incarnation: `base_length` committed ids, prompt included, with this rolling hash."""

    epoch: int
    base_length: int
    prefix_hash: int


class OutOfStep(Exception):
    """The header does not fit the session's state. Carries the session's own header; nothing was changed."""

    def __init__(self, header: Header) -> None:
        super().__init__(f"session is at epoch {header.epoch} with {header.base_length} committed tokens")
        self.header = header


@dataclass(frozen=True, slots=True)
class FeatureRows:
    """States of the target at consecutive positions from `start` on, those that the opening named one after the other:
    bfloat16, little-endian."""

    start: int = 0
    rows: bytes = b""


NO_FEATURES = FeatureRows()


@dataclass(frozen=True, slots=True)
class AheadWish:
    """What a draft worker is to draft ahead of a verdict: `num_draft_tokens` drafts behind each of the likeliest
    outcomes, `num_branches` of them at most. `value_ms`: what a branch that is used saves, so that drafts which are
    unlikely to be used are left out; 0: not told, and every branch is whole."""

    num_branches: int = 0
    num_draft_tokens: int = 0
    value_ms: float = 0.0

    def __bool__(self) -> bool:
        return self.num_branches > 0 and self.num_draft_tokens > 0


NOTHING_AHEAD = AheadWish()


@dataclass(frozen=True, slots=True)
class Branches:
    """Proposals for outcomes of the round on top of `header`, by the hash of the prefix that each continues, the
    likeliest first; `outcomes`: (drafts that stand, the token after them) of each. Times in microseconds."""

    header: Header
    proposals: Mapping[int, Proposal] = field(default_factory=dict)
    outcomes: Sequence[tuple[int, int]] = ()
    queue_us: int = 0
    compute_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The whole truth about a stream. `committed_ids` is output committed before this opening. `features`: states of
    the target that verdicts carry and drafts are made from, comma separated. `worker_incarnation`: of the process that
    is meant; empty: whichever answers at the address."""

    epoch: int
    prompt_ids: Sequence[int]
    committed_ids: Sequence[int] = ()
    sampling: SamplingParams
    stopping: StoppingParams
    session_id: bytes = bytes(16)
    tenant: str = ""
    features: str = ""
    worker_incarnation: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOpening(Opening):
    """Opens a draft session. `target_fingerprint`: of the model whose features will follow."""

    max_q_entries: int = 64
    drafter: str = ""
    target_fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOpening(Opening):
    """Opens a target session. `max_draft_tokens`: drafts that one round may carry. `prompt_logprobs`: alternatives to
    tell for each prompt token; None: no prompt logprobs at all. `features_start`: first position whose features are
    wanted. `deferred`: no token is wanted before a question comes. `num_suspect_tokens`: until so many are decided no
    other suspect is computed beside this stream; 0: it is none. `has_fresh_seed`: nobody has used the seed before.
    `tells_drafted`: verdicts have `drafted_q`."""

    logprobs: bool = False
    top_logprobs: int = 0
    max_draft_tokens: int = 0
    priority: int = 0
    prompt_logprobs: int | None = None
    features_start: int = 0
    deferred: bool = False
    num_suspect_tokens: int = 0
    has_fresh_seed: bool = False
    tells_drafted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Tokens committed on top of `header`: accepted drafts, then one more; fewer where the stream ended earlier.

    `soft_acceptances`: one byte per drafted position. `proposal_fault`: why the proposal was dropped, or the target's
    own drafter gave none; empty: neither. `num_draft_tokens`: drafts checked; `drafted_ids`: those that the target
    drafted by itself, `drafted_parents` their shape (empty: a chain). Times in microseconds.
    """

    header: Header
    committed_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    num_accepted: int = 0
    num_draft_tokens: int = 0
    soft_acceptances: bytes = b""
    finish: Finish = Finish.NONE
    matched_stop_token_id: int | None = None
    logprobs: TokenLogprobs = NO_LOGPROBS
    proposal_fault: str = ""
    queue_us: int = 0
    compute_us: int = 0
    sampling_us: int = 0
    num_batch_rows: int = 0
    decode_ended: bool = False
    num_cached_tokens: int = 0
    row_choices: tuple[int, ...] = ()
    """Likeliest id of the raw distribution after the prefix and the first i drafts of a chain; empty: not told."""
    drafted_ids: tuple[int, ...] = ()
    drafted_parents: tuple[int, ...] = ()
    drafted_q: tuple[SparseQ | None, ...] | None = None
    """Of `drafted_ids`, as in `Proposal`; None: not told."""
    draft_us: int = 0
    features: FeatureRows = FeatureRows()
