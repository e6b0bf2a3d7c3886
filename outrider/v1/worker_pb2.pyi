from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_DRAFT: _ClassVar[WorkerRole]
    WORKER_ROLE_TARGET: _ClassVar[WorkerRole]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_DRAFT: WorkerRole
WORKER_ROLE_TARGET: WorkerRole

class DescribeWorkerRequest(_message.Message):
    __slots__ = ("without_tokenizer",)
    WITHOUT_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    without_tokenizer: bool
    def __init__(self, without_tokenizer: _Optional[bool] = ...) -> None: ...

class DescribeWorkerResponse(_message.Message):
    __slots__ = ("role", "model", "model_fingerprint", "tokenizer_fingerprint", "tokenizer_json", "chat_template", "special_tokens", "eos_token_ids", "bos_token_id", "vocab_size", "context_length", "generation_defaults", "capacity", "drafters", "versions", "numerics_fingerprint", "dtype", "weight_bytes", "incarnation", "simulated", "timings", "numerics", "cache_counters", "target_drafters", "features", "drafter_features", "target_fingerprints", "max_ahead_branches", "unix_time_s")
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class DrafterFeaturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_JSON_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    CACHE_COUNTERS_FIELD_NUMBER: _ClassVar[int]
    TARGET_DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FEATURES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    MAX_AHEAD_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    tokenizer_json: bytes
    chat_template: str
    special_tokens: _containers.ScalarMap[str, str]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    vocab_size: int
    context_length: int
    generation_defaults: GenerationDefaults
    capacity: WorkerCapacity
    drafters: _containers.RepeatedScalarFieldContainer[str]
    versions: _containers.ScalarMap[str, str]
    numerics_fingerprint: str
    dtype: str
    weight_bytes: int
    incarnation: str
    simulated: bool
    timings: _containers.RepeatedCompositeFieldContainer[PassTiming]
    numerics: Numerics
    cache_counters: CacheCounters
    target_drafters: _containers.RepeatedCompositeFieldContainer[TargetDrafter]
    features: str
    drafter_features: _containers.ScalarMap[str, str]
    target_fingerprints: _containers.RepeatedScalarFieldContainer[str]
    max_ahead_branches: int
    unix_time_s: float
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., tokenizer_json: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., generation_defaults: _Optional[_Union[GenerationDefaults, _Mapping]] = ..., capacity: _Optional[_Union[WorkerCapacity, _Mapping]] = ..., drafters: _Optional[_Iterable[str]] = ..., versions: _Optional[_Mapping[str, str]] = ..., numerics_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., incarnation: _Optional[str] = ..., simulated: _Optional[bool] = ..., timings: _Optional[_Iterable[_Union[PassTiming, _Mapping]]] = ..., numerics: _Optional[_Union[Numerics, _Mapping]] = ..., cache_counters: _Optional[_Union[CacheCounters, _Mapping]] = ..., target_drafters: _Optional[_Iterable[_Union[TargetDrafter, _Mapping]]] = ..., features: _Optional[str] = ..., drafter_features: _Optional[_Mapping[str, str]] = ..., target_fingerprints: _Optional[_Iterable[str]] = ..., max_ahead_branches: _Optional[int] = ..., unix_time_s: _Optional[float] = ...) -> None: ...

class TargetDrafter(_message.Message):
    __slots__ = ("name", "kind", "source", "num_parameters", "weight_bytes", "max_draft_tokens", "agreement", "num_probe_tokens", "first_draft_ms", "next_draft_ms", "warning", "draws_trees", "rank_agreement", "depth_agreement")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROBE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    NEXT_DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    WARNING_FIELD_NUMBER: _ClassVar[int]
    DRAWS_TREES_FIELD_NUMBER: _ClassVar[int]
    RANK_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    kind: str
    source: str
    num_parameters: int
    weight_bytes: int
    max_draft_tokens: int
    agreement: float
    num_probe_tokens: int
    first_draft_ms: float
    next_draft_ms: float
    warning: str
    draws_trees: bool
    rank_agreement: _containers.RepeatedScalarFieldContainer[float]
    depth_agreement: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., kind: _Optional[str] = ..., source: _Optional[str] = ..., num_parameters: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., agreement: _Optional[float] = ..., num_probe_tokens: _Optional[int] = ..., first_draft_ms: _Optional[float] = ..., next_draft_ms: _Optional[float] = ..., warning: _Optional[str] = ..., draws_trees: _Optional[bool] = ..., rank_agreement: _Optional[_Iterable[float]] = ..., depth_agreement: _Optional[_Iterable[float]] = ...) -> None: ...

class Numerics(_message.Message):
    __slots__ = ("mode", "proven", "row_counts", "num_histories", "num_tokens", "probe_s", "environment")
    class EnvironmentEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODE_FIELD_NUMBER: _ClassVar[int]
    PROVEN_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HISTORIES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROBE_S_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    mode: str
    proven: bool
    row_counts: _containers.RepeatedScalarFieldContainer[int]
    num_histories: int
    num_tokens: int
    probe_s: float
    environment: _containers.ScalarMap[str, str]
    def __init__(self, mode: _Optional[str] = ..., proven: _Optional[bool] = ..., row_counts: _Optional[_Iterable[int]] = ..., num_histories: _Optional[int] = ..., num_tokens: _Optional[int] = ..., probe_s: _Optional[float] = ..., environment: _Optional[_Mapping[str, str]] = ...) -> None: ...

class CacheCounters(_message.Message):
    __slots__ = ("num_preemptions", "num_idle_evictions", "num_cached_tokens", "num_copied_blocks")
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_IDLE_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_preemptions: int
    num_idle_evictions: int
    num_cached_tokens: int
    num_copied_blocks: int
    def __init__(self, num_preemptions: _Optional[int] = ..., num_idle_evictions: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_copied_blocks: _Optional[int] = ...) -> None: ...

class PassTiming(_message.Message):
    __slots__ = ("prefill", "min_sequences", "max_sequences", "base_ms", "ms_per_row", "ms_per_context_token", "spread_ms", "min_rows", "max_rows", "num_passes")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    MIN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    BASE_MS_FIELD_NUMBER: _ClassVar[int]
    MS_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    MS_PER_CONTEXT_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SPREAD_MS_FIELD_NUMBER: _ClassVar[int]
    MIN_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    prefill: bool
    min_sequences: int
    max_sequences: int
    base_ms: float
    ms_per_row: float
    ms_per_context_token: float
    spread_ms: float
    min_rows: int
    max_rows: int
    num_passes: int
    def __init__(self, prefill: _Optional[bool] = ..., min_sequences: _Optional[int] = ..., max_sequences: _Optional[int] = ..., base_ms: _Optional[float] = ..., ms_per_row: _Optional[float] = ..., ms_per_context_token: _Optional[float] = ..., spread_ms: _Optional[float] = ..., min_rows: _Optional[int] = ..., max_rows: _Optional[int] = ..., num_passes: _Optional[int] = ...) -> None: ...

class GenerationDefaults(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ...) -> None: ...

class WorkerCapacity(_message.Message):
    __slots__ = ("num_blocks", "block_size", "num_free_blocks", "num_sessions", "num_waiting", "max_batch_tokens", "max_draft_tokens", "num_promised_blocks", "max_promised_blocks")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMISED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    block_size: int
    num_free_blocks: int
    num_sessions: int
    num_waiting: int
    max_batch_tokens: int
    max_draft_tokens: int
    num_promised_blocks: int
    max_promised_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_sessions: _Optional[int] = ..., num_waiting: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., max_draft_tokens: _Optional[int] = ..., num_promised_blocks: _Optional[int] = ..., max_promised_blocks: _Optional[int] = ...) -> None: ...

class RegisterWorkerRequest(_message.Message):
    __slots__ = ("role", "address", "model_fingerprint", "tokenizer_fingerprint", "incarnation", "capacity")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    role: WorkerRole
    address: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    incarnation: str
    capacity: WorkerCapacity
    def __init__(self, role: _Optional[_Union[WorkerRole, str]] = ..., address: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., incarnation: _Optional[str] = ..., capacity: _Optional[_Union[WorkerCapacity, _Mapping]] = ...) -> None: ...

class RegisterWorkerResponse(_message.Message):
    __slots__ = ("lease_id", "lease_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_ms: int
    def __init__(self, lease_id: _Optional[str] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RenewWorkerRequest(_message.Message):
    __slots__ = ("lease_id", "capacity")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    capacity: WorkerCapacity
    def __init__(self, lease_id: _Optional[str] = ..., capacity: _Optional[_Union[WorkerCapacity, _Mapping]] = ...) -> None: ...

class RenewWorkerResponse(_message.Message):
    __slots__ = ("lease_ms",)
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    def __init__(self, lease_ms: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
