from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetServiceSessionRequest(_message.Message):
    __slots__ = ("open", "verify", "decode", "stop", "heartbeat", "ingest")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    INGEST_FIELD_NUMBER: _ClassVar[int]
    open: TargetOpen
    verify: TargetVerify
    decode: TargetDecode
    stop: TargetStop
    heartbeat: _common_pb2.Heartbeat
    ingest: TargetIngest
    def __init__(self, open: _Optional[_Union[TargetOpen, _Mapping]] = ..., verify: _Optional[_Union[TargetVerify, _Mapping]] = ..., decode: _Optional[_Union[TargetDecode, _Mapping]] = ..., stop: _Optional[_Union[TargetStop, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., ingest: _Optional[_Union[TargetIngest, _Mapping]] = ...) -> None: ...

class TargetServiceSessionResponse(_message.Message):
    __slots__ = ("verdict", "out_of_step", "heartbeat", "prompt_logprobs", "features", "ready")
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    OUT_OF_STEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    verdict: Verdict
    out_of_step: _common_pb2.OutOfStep
    heartbeat: _common_pb2.Heartbeat
    prompt_logprobs: _common_pb2.PromptLogprobs
    features: _common_pb2.FeatureRows
    ready: TargetReady
    def __init__(self, verdict: _Optional[_Union[Verdict, _Mapping]] = ..., out_of_step: _Optional[_Union[_common_pb2.OutOfStep, _Mapping]] = ..., heartbeat: _Optional[_Union[_common_pb2.Heartbeat, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ..., features: _Optional[_Union[_common_pb2.FeatureRows, _Mapping]] = ..., ready: _Optional[_Union[TargetReady, _Mapping]] = ...) -> None: ...

class TargetOpen(_message.Message):
    __slots__ = ("session_id", "epoch", "prompt_ids", "committed_ids", "sampling", "stopping", "logprobs", "top_logprobs", "max_draft_tokens", "tenant", "features", "priority", "prompt_logprobs", "features_start", "deferred", "num_suspect_tokens", "fresh_seed", "tell_drafted", "worker_incarnation")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_START_FIELD_NUMBER: _ClassVar[int]
    DEFERRED_FIELD_NUMBER: _ClassVar[int]
    NUM_SUSPECT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FRESH_SEED_FIELD_NUMBER: _ClassVar[int]
    TELL_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    WORKER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    epoch: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.ResolvedSampling
    stopping: _common_pb2.ResolvedStopping
    logprobs: bool
    top_logprobs: int
    max_draft_tokens: int
    tenant: str
    features: str
    priority: int
    prompt_logprobs: int
    features_start: int
    deferred: bool
    num_suspect_tokens: int
    fresh_seed: bool
    tell_drafted: bool
    worker_incarnation: str
    def __init__(self, session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., committed_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.ResolvedSampling, _Mapping]] = ..., stopping: _Optional[_Union[_common_pb2.ResolvedStopping, _Mapping]] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., tenant: _Optional[str] = ..., features: _Optional[str] = ..., priority: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., features_start: _Optional[int] = ..., deferred: _Optional[bool] = ..., num_suspect_tokens: _Optional[int] = ..., fresh_seed: _Optional[bool] = ..., tell_drafted: _Optional[bool] = ..., worker_incarnation: _Optional[str] = ...) -> None: ...

class TargetIngest(_message.Message):
    __slots__ = ("header", "committed_ids")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.SessionHeader
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, header: _Optional[_Union[_common_pb2.SessionHeader, _Mapping]] = ..., committed_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetReady(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.SessionHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.SessionHeader, _Mapping]] = ...) -> None: ...

class TargetVerify(_message.Message):
    __slots__ = ("header", "committed_ids", "proposal", "expected_token_id", "drafter", "num_draft_tokens", "features_start", "tree_parents")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_START_FIELD_NUMBER: _ClassVar[int]
    TREE_PARENTS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.SessionHeader
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    proposal: _common_pb2.Proposal
    expected_token_id: int
    drafter: str
    num_draft_tokens: int
    features_start: int
    tree_parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, header: _Optional[_Union[_common_pb2.SessionHeader, _Mapping]] = ..., committed_ids: _Optional[_Iterable[int]] = ..., proposal: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ..., expected_token_id: _Optional[int] = ..., drafter: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., features_start: _Optional[int] = ..., tree_parents: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetDecode(_message.Message):
    __slots__ = ("header", "committed_ids", "credit_tokens", "num_draft_tokens", "drafter", "features_start", "tree_parents")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    FEATURES_START_FIELD_NUMBER: _ClassVar[int]
    TREE_PARENTS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.SessionHeader
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    credit_tokens: int
    num_draft_tokens: int
    drafter: str
    features_start: int
    tree_parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, header: _Optional[_Union[_common_pb2.SessionHeader, _Mapping]] = ..., committed_ids: _Optional[_Iterable[int]] = ..., credit_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., drafter: _Optional[str] = ..., features_start: _Optional[int] = ..., tree_parents: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetStop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("header", "num_accepted", "committed_ids", "origins", "soft_acceptances", "finish_reason", "matched_stop_token_id", "logprobs", "proposal_fault", "queue_us", "compute_us", "sampling_us", "num_batch_rows", "decode_ended", "num_cached_tokens", "num_draft_tokens", "row_choices", "drafted_ids", "drafted_parents", "draft_us", "features", "features_start", "drafted")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    SOFT_ACCEPTANCES_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FAULT_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_US_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_CHOICES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PARENTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    FEATURES_START_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.SessionHeader
    num_accepted: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[_common_pb2.TokenOrigin]
    soft_acceptances: bytes
    finish_reason: _common_pb2.FinishReason
    matched_stop_token_id: int
    logprobs: _common_pb2.TokenLogprobs
    proposal_fault: str
    queue_us: int
    compute_us: int
    sampling_us: int
    num_batch_rows: int
    decode_ended: bool
    num_cached_tokens: int
    num_draft_tokens: int
    row_choices: _containers.RepeatedScalarFieldContainer[int]
    drafted_ids: _containers.RepeatedScalarFieldContainer[int]
    drafted_parents: _containers.RepeatedScalarFieldContainer[int]
    draft_us: int
    features: bytes
    features_start: int
    drafted: _common_pb2.Proposal
    def __init__(self, header: _Optional[_Union[_common_pb2.SessionHeader, _Mapping]] = ..., num_accepted: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[_common_pb2.TokenOrigin, str]]] = ..., soft_acceptances: _Optional[bytes] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., matched_stop_token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., proposal_fault: _Optional[str] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., sampling_us: _Optional[int] = ..., num_batch_rows: _Optional[int] = ..., decode_ended: _Optional[bool] = ..., num_cached_tokens: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., row_choices: _Optional[_Iterable[int]] = ..., drafted_ids: _Optional[_Iterable[int]] = ..., drafted_parents: _Optional[_Iterable[int]] = ..., draft_us: _Optional[int] = ..., features: _Optional[bytes] = ..., features_start: _Optional[int] = ..., drafted: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ...) -> None: ...
