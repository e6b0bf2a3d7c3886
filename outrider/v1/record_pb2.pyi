from outrider.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetRecordRequest(_message.Message):
    __slots__ = ("request_id", "stream_index")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    STREAM_INDEX_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    stream_index: int
    def __init__(self, request_id: _Optional[str] = ..., stream_index: _Optional[int] = ...) -> None: ...

class GetRecordResponse(_message.Message):
    __slots__ = ("stream", "num_streams")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    stream: StreamRecord
    num_streams: int
    def __init__(self, stream: _Optional[_Union[StreamRecord, _Mapping]] = ..., num_streams: _Optional[int] = ...) -> None: ...

class StreamRecord(_message.Message):
    __slots__ = ("version", "request_id", "model", "model_fingerprint", "numerics_fingerprints", "index", "prompt_ids", "resumed_ids", "output_ids", "sampling", "stopping", "finish_reason", "matched_stop_string", "rounds", "num_rounds_left_out", "max_draft_tokens", "text")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    version: int
    request_id: str
    model: str
    model_fingerprint: str
    numerics_fingerprints: _containers.RepeatedScalarFieldContainer[str]
    index: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    resumed_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.ResolvedSampling
    stopping: _common_pb2.ResolvedStopping
    finish_reason: _common_pb2.FinishReason
    matched_stop_string: str
    rounds: _containers.RepeatedCompositeFieldContainer[RoundRecord]
    num_rounds_left_out: int
    max_draft_tokens: int
    text: TextOptions
    def __init__(self, version: _Optional[int] = ..., request_id: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., numerics_fingerprints: _Optional[_Iterable[str]] = ..., index: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., resumed_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.ResolvedSampling, _Mapping]] = ..., stopping: _Optional[_Union[_common_pb2.ResolvedStopping, _Mapping]] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., matched_stop_string: _Optional[str] = ..., rounds: _Optional[_Iterable[_Union[RoundRecord, _Mapping]]] = ..., num_rounds_left_out: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., text: _Optional[_Union[TextOptions, _Mapping]] = ...) -> None: ...

class TextOptions(_message.Message):
    __slots__ = ("stop_strings", "skip_special_tokens")
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    skip_special_tokens: bool
    def __init__(self, stop_strings: _Optional[_Iterable[str]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class RoundRecord(_message.Message):
    __slots__ = ("base_length", "committed_ids", "origins", "proposal", "num_draft_tokens", "proposal_fault", "epoch", "numerics_index", "drafts_untold")
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_IDS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FAULT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_INDEX_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_UNTOLD_FIELD_NUMBER: _ClassVar[int]
    base_length: int
    committed_ids: _containers.RepeatedScalarFieldContainer[int]
    origins: _containers.RepeatedScalarFieldContainer[_common_pb2.TokenOrigin]
    proposal: _common_pb2.Proposal
    num_draft_tokens: int
    proposal_fault: str
    epoch: int
    numerics_index: int
    drafts_untold: bool
    def __init__(self, base_length: _Optional[int] = ..., committed_ids: _Optional[_Iterable[int]] = ..., origins: _Optional[_Iterable[_Union[_common_pb2.TokenOrigin, str]]] = ..., proposal: _Optional[_Union[_common_pb2.Proposal, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., proposal_fault: _Optional[str] = ..., epoch: _Optional[int] = ..., numerics_index: _Optional[int] = ..., drafts_untold: _Optional[bool] = ...) -> None: ...
