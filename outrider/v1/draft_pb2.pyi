from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftServiceSessionRequest(_message.Message):
    __slots__ = ("open", "advance", "heartbeat", "features")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ADVANCE_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    open: DraftOpen
    advance: DraftAdvance
    heartbeat: _common_pb2.Heartbeat
    features: _common_pb2.FeatureRows
    def __init__(self, open: _Optional[_Union[DraftOpen, _Mapping]] = ..., advance: _Optional[_Union[DraftAdvance, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., features: _Optional[_Union[_common_pb2.FeatureRows, _Mapping]] = ...) -> None: ...

class DraftServiceSessionResponse(_message.Message):
    __slots__ = ("opened", "proposal", "out_of_step", "branches", "heartbeat", "begun", "drawn")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_STEP_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    DRAWN_FIELD_NUMBER: _ClassVar[int]
    opened: DraftOpened
    proposal: DraftProposal
    out_of_step: _common_pb2.OutOfStep
    branches: DraftBranches
    heartbeat: _common_pb2.Heartbeat
    begun: DraftBegun
    drawn: DraftDrawn
    def __init__(self, opened: _Optional[_Union[DraftOpened, _Mapping]] = ..., proposal: _Optional[_Union[DraftProposal, _Mapping]] = ..., out_of_step: _Optional[_Union[_common_pb2.OutOfStep, _Mapping]] = ..., branches: _Optional[_Union[DraftBranches, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., begun: _Optional[_Union[DraftBegun, _Mapping]] = ..., drawn: _Optional[_Union[DraftDrawn, _Mapping]] = ...) -> None: ...

class DraftOpen(_message.Message):
    __slots__ = ("session_id", "epoch", "prompt_ids", "committed_ids", "sampling", "stopping", "max_q_entries", "drafter", "tenant", "features", "target_fingerprint", "worker_incarnation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    MAX_Q_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    epoch: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.ResolvedSampling
    stopping: _common_pb2.ResolvedStopping
    max_q_entries: int
    drafter: str
    tenant: str
    features: str
    target_fingerprint: str
    worker_incarnation: str
    def __init__(self, session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., committed_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.ResolvedSampling, _Mapping]] = ..., stopping: _Optional[_Union[_common_pb2.ResolvedStopping, _Mapping]] = ..., max_q_entries: _Optional[int] = ..., drafter: _Optional[str] = ..., tenant: _Optional[str] = ..., features: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., worker_incarnation: _Optional[str] = ...) -> None: ...

class DraftOpened(_message.Message):
    __slots__ = ("context_length",)
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    context_length: int
    def __init__(self, context_length: _Optional[int] = ...) -> None: ...

class DraftAdvance(_message.Message):
    __slots__ = ("header", "committed_ids", "num_draft_tokens", "price_tokens_per_ms", "drafter", "features", "features_start", "tree_width", "ahead_branches", "ahead_draft_tokens", "ahead_value_ms", "has_proposal", "row_price_tokens", "soft_acceptances", "judged_prefix_hash", "expected_acceptances", "tell_drafts")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRICE_TOKENS_PER_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_START_FIELD_NUMBER: _ClassVar[int]
    TREE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    AHEAD_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    AHEAD_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_VALUE_MS_FIELD_NUMBER: _ClassVar[int]
    HAS_PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    ROW_PRICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOFT_ACCEPTANCES_FIELD_NUMBER: _ClassVar[int]
    JUDGED_PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_ACCEPTANCES_FIELD_NUMBER: _ClassVar[int]
    TELL_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.SessionHeader
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens: int
    price_tokens_per_ms: float
    drafter: str
    features: bytes
    features_start: int
    tree_width: int
    ahead_branches: int
    ahead_draft_tokens: int
    ahead_value_ms: float
    has_proposal: bool
    row_price_tokens: float
    soft_acceptances: bytes
    judged_prefix_hash: int
    expected_acceptances: bytes
    tell_drafts: bool
    def __init__(self, header: _Optional[_Union[_common_pb2.SessionHeader, _Mapping]] = ..., committed_ids: _Optional[_Iterable[int]] = ..., num_draft_tokens: _Optional[int] = ..., price_tokens_per_ms: _Optional[float] = ..., drafter: _Optional[str] = ..., features: _Optional[bytes] = ..., features_start: _Optional[int] = ..., tree_width: _Optional[int] = ..., ahead_branches: _Optional[int] = ..., ahead_draft_tokens: _Optional[int] = ..., ahead_value_ms: _Optional[float] = ..., has_proposal: _Optional[bool] = ..., row_price_tokens: _Optional[float] = ..., soft_acceptances: _Optional[bytes] = ..., judged_prefix_hash: _Optional[int] = ..., expected_acceptances: _Optional[bytes] = ..., tell_drafts: _Optional[bool] = ...) -> None: ...

class DraftBegun(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.SessionHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.SessionHeader, _Mapping]] = ...) -> None: ...

class DraftDrawn(_message.Message):
    __slots__ = ("header", "draft")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.SessionHeader
    draft: _common_pb2.Proposal
    def __init__(self, header: _Optional[_Union[_common_pb2.SessionHeader, _Mapping]] = ..., draft: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ...) -> None: ...

class DraftProposal(_message.Message):
    __slots__ = ("header", "proposal", "features_end", "num_cancelled_tokens")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FEATURES_END_FIELD_NUMBER: _ClassVar[int]
    NUM_CANCELLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.SessionHeader
    proposal: _common_pb2.Proposal
    features_end: int
    num_cancelled_tokens: int
    def __init__(self, header: _Optional[_Union[_common_pb2.SessionHeader, _Mapping]] = ..., proposal: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ..., features_end: _Optional[int] = ..., num_cancelled_tokens: _Optional[int] = ...) -> None: ...

class DraftBranches(_message.Message):
    __slots__ = ("header", "prefix_hashes", "proposals", "queue_us", "compute_us", "num_cancelled_tokens", "num_accepted", "next_token_ids")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASHES_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    NUM_CANCELLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.SessionHeader
    prefix_hashes: _containers.RepeatedScalarFieldContainer[int]
    proposals: _containers.RepeatedCompositeFieldContainer[_common_pb2.Proposal]
    queue_us: int
    compute_us: int
    num_cancelled_tokens: int
    num_accepted: _containers.RepeatedScalarFieldContainer[int]
    next_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, header: _Optional[_Union[_common_pb2.SessionHeader, _Mapping]] = ..., prefix_hashes: _Optional[_Iterable[int]] = ..., proposals: _Optional[_Iterable[_Union[_common_pb2.Proposal, _Mapping]]] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., num_cancelled_tokens: _Optional[int] = ..., num_accepted: _Optional[_Iterable[int]] = ..., next_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...
