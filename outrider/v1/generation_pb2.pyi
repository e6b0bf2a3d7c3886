from outrider.v1 import common_pb2 as _common_pb2
from outrider.v1 import record_pb2 as _record_pb2
from outrider.v1 import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GammaCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GAMMA_CAUSE_UNSPECIFIED: _ClassVar[GammaCause]
    GAMMA_CAUSE_FIXED: _ClassVar[GammaCause]
    GAMMA_CAUSE_OFF: _ClassVar[GammaCause]
    GAMMA_CAUSE_BEST: _ClassVar[GammaCause]
    GAMMA_CAUSE_LOAD: _ClassVar[GammaCause]
    GAMMA_CAUSE_PRIOR: _ClassVar[GammaCause]
    GAMMA_CAUSE_MATCH: _ClassVar[GammaCause]
    GAMMA_CAUSE_PROBE: _ClassVar[GammaCause]
    GAMMA_CAUSE_WARM_UP: _ClassVar[GammaCause]
    GAMMA_CAUSE_NO_ROOM: _ClassVar[GammaCause]
    GAMMA_CAUSE_NO_MATCH: _ClassVar[GammaCause]
    GAMMA_CAUSE_NO_DRAFTER: _ClassVar[GammaCause]
    GAMMA_CAUSE_DRAFT_LATE: _ClassVar[GammaCause]
    GAMMA_CAUSE_DRAFT_LOST: _ClassVar[GammaCause]
    GAMMA_CAUSE_PREFILL: _ClassVar[GammaCause]

class StreamState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_STATE_UNSPECIFIED: _ClassVar[StreamState]
    STREAM_STATE_WAITING: _ClassVar[StreamState]
    STREAM_STATE_PREFILL: _ClassVar[StreamState]
    STREAM_STATE_RUNNING: _ClassVar[StreamState]
GAMMA_CAUSE_UNSPECIFIED: GammaCause
GAMMA_CAUSE_FIXED: GammaCause
GAMMA_CAUSE_OFF: GammaCause
GAMMA_CAUSE_BEST: GammaCause
GAMMA_CAUSE_LOAD: GammaCause
GAMMA_CAUSE_PRIOR: GammaCause
GAMMA_CAUSE_MATCH: GammaCause
GAMMA_CAUSE_PROBE: GammaCause
GAMMA_CAUSE_WARM_UP: GammaCause
GAMMA_CAUSE_NO_ROOM: GammaCause
GAMMA_CAUSE_NO_MATCH: GammaCause
GAMMA_CAUSE_NO_DRAFTER: GammaCause
GAMMA_CAUSE_DRAFT_LATE: GammaCause
GAMMA_CAUSE_DRAFT_LOST: GammaCause
GAMMA_CAUSE_PREFILL: GammaCause
STREAM_STATE_UNSPECIFIED: StreamState
STREAM_STATE_WAITING: StreamState
STREAM_STATE_PREFILL: StreamState
STREAM_STATE_RUNNING: StreamState

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "sampling", "stopping", "output", "structured_output", "priority", "speculation", "resume_token_ids", "prompt_hash", "lora_adapter", "tools_json", "image_urls", "resume_choice", "model_fingerprint")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    LORA_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    IMAGE_URLS_FIELD_NUMBER: _ClassVar[int]
    RESUME_CHOICE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: ChatPrompt
    sampling: SamplingOptions
    stopping: StoppingOptions
    output: OutputOptions
    structured_output: StructuredOutput
    priority: int
    speculation: SpeculationOptions
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_hash: int
    lora_adapter: str
    tools_json: str
    image_urls: _containers.RepeatedScalarFieldContainer[str]
    resume_choice: int
    model_fingerprint: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., sampling: _Optional[_Union[SamplingOptions, _Mapping]] = ..., stopping: _Optional[_Union[StoppingOptions, _Mapping]] = ..., output: _Optional[_Union[OutputOptions, _Mapping]] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., priority: _Optional[int] = ..., speculation: _Optional[_Union[SpeculationOptions, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., prompt_hash: _Optional[int] = ..., lora_adapter: _Optional[str] = ..., tools_json: _Optional[str] = ..., image_urls: _Optional[_Iterable[str]] = ..., resume_choice: _Optional[int] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., chat_template_kwargs: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class SamplingOptions(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "allowed_token_ids", "bad_words")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: TokenIds
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., bad_words: _Optional[_Iterable[str]] = ...) -> None: ...

class StoppingOptions(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    include_stop_str_in_output: bool
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., include_stop_str_in_output: _Optional[bool] = ...) -> None: ...

class OutputOptions(_message.Message):
    __slots__ = ("logprobs", "top_logprobs", "skip_special_tokens", "n", "prompt_logprobs", "record")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    logprobs: bool
    top_logprobs: int
    skip_special_tokens: bool
    n: int
    prompt_logprobs: int
    record: bool
    def __init__(self, logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., skip_special_tokens: _Optional[bool] = ..., n: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., record: _Optional[bool] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ...) -> None: ...

class SpeculationOptions(_message.Message):
    __slots__ = ("num_speculative_tokens", "max_speculative_tokens", "drafter", "acceptance", "report_steps")
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    REPORT_STEPS_FIELD_NUMBER: _ClassVar[int]
    num_speculative_tokens: int
    max_speculative_tokens: int
    drafter: str
    acceptance: _common_pb2.AcceptanceRule
    report_steps: bool
    def __init__(self, num_speculative_tokens: _Optional[int] = ..., max_speculative_tokens: _Optional[int] = ..., drafter: _Optional[str] = ..., acceptance: _Optional[_Union[_common_pb2.AcceptanceRule, str]] = ..., report_steps: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "chunk", "complete", "prompt_logprobs")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    started: GenerateStarted
    chunk: GenerateChunk
    complete: GenerateComplete
    prompt_logprobs: _common_pb2.PromptLogprobs
    def __init__(self, started: _Optional[_Union[GenerateStarted, _Mapping]] = ..., chunk: _Optional[_Union[GenerateChunk, _Mapping]] = ..., complete: _Optional[_Union[GenerateComplete, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_common_pb2.PromptLogprobs, _Mapping]] = ...) -> None: ...

class GenerateStarted(_message.Message):
    __slots__ = ("request_id", "seed", "acceptance", "prompt_hash", "num_prompt_tokens", "model", "num_speculative_tokens", "max_speculative_tokens", "drafter", "model_fingerprint", "max_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    acceptance: _common_pb2.AcceptanceRule
    prompt_hash: int
    num_prompt_tokens: int
    model: str
    num_speculative_tokens: int
    max_speculative_tokens: int
    drafter: str
    model_fingerprint: str
    max_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., acceptance: _Optional[_Union[_common_pb2.AcceptanceRule, str]] = ..., prompt_hash: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., model: _Optional[str] = ..., num_speculative_tokens: _Optional[int] = ..., max_speculative_tokens: _Optional[int] = ..., drafter: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class GenerateChunk(_message.Message):
    __slots__ = ("index", "token_ids", "text", "logprobs", "origins", "step", "num_draft_tokens")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ORIGINS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    logprobs: _common_pb2.TokenLogprobs
    origins: _containers.RepeatedScalarFieldContainer[_common_pb2.TokenOrigin]
    step: StepRecord
    num_draft_tokens: int
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., origins: _Optional[_Iterable[_Union[_common_pb2.TokenOrigin, str]]] = ..., step: _Optional[_Union[StepRecord, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ...) -> None: ...

class StepRecord(_message.Message):
    __slots__ = ("num_draft_tokens_wanted", "num_draft_tokens", "num_accepted_draft_tokens", "drafter", "draft_ms", "verify_ms", "network_ms", "queue_ms", "round_ms", "reason", "sampling_ms", "emit_ms", "cause", "soft_acceptances", "price_tokens_per_ms", "row_price_tokens", "draft_queue_ms", "draft_network_ms", "start_ms", "num_tokens", "ahead")
    NUM_DRAFT_TOKENS_WANTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    ROUND_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MS_FIELD_NUMBER: _ClassVar[int]
    EMIT_MS_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SOFT_ACCEPTANCES_FIELD_NUMBER: _ClassVar[int]
    PRICE_TOKENS_PER_MS_FIELD_NUMBER: _ClassVar[int]
    ROW_PRICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NETWORK_MS_FIELD_NUMBER: _ClassVar[int]
    START_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    num_draft_tokens_wanted: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    drafter: str
    draft_ms: float
    verify_ms: float
    network_ms: float
    queue_ms: float
    round_ms: float
    reason: str
    sampling_ms: float
    emit_ms: float
    cause: GammaCause
    soft_acceptances: bytes
    price_tokens_per_ms: float
    row_price_tokens: float
    draft_queue_ms: float
    draft_network_ms: float
    start_ms: float
    num_tokens: int
    ahead: str
    def __init__(self, num_draft_tokens_wanted: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., drafter: _Optional[str] = ..., draft_ms: _Optional[float] = ..., verify_ms: _Optional[float] = ..., network_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., round_ms: _Optional[float] = ..., reason: _Optional[str] = ..., sampling_ms: _Optional[float] = ..., emit_ms: _Optional[float] = ..., cause: _Optional[_Union[GammaCause, str]] = ..., soft_acceptances: _Optional[bytes] = ..., price_tokens_per_ms: _Optional[float] = ..., row_price_tokens: _Optional[float] = ..., draft_queue_ms: _Optional[float] = ..., draft_network_ms: _Optional[float] = ..., start_ms: _Optional[float] = ..., num_tokens: _Optional[int] = ..., ahead: _Optional[str] = ...) -> None: ...

class GenerateComplete(_message.Message):
    __slots__ = ("index", "finish_reason", "matched_stop_token_id", "matched_stop_string", "usage", "timings", "speculation")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    index: int
    finish_reason: _common_pb2.FinishReason
    matched_stop_token_id: int
    matched_stop_string: str
    usage: Usage
    timings: RequestTimings
    speculation: SpeculationStats
    def __init__(self, index: _Optional[int] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., matched_stop_token_id: _Optional[int] = ..., matched_stop_string: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timings: _Optional[_Union[RequestTimings, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class RequestTimings(_message.Message):
    __slots__ = ("queue_ms", "prefill_ms", "time_to_first_token_ms", "draft_ms", "verify_ms", "network_ms", "total_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    TIME_TO_FIRST_TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_MS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    prefill_ms: float
    time_to_first_token_ms: float
    draft_ms: float
    verify_ms: float
    network_ms: float
    total_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., time_to_first_token_ms: _Optional[float] = ..., draft_ms: _Optional[float] = ..., verify_ms: _Optional[float] = ..., network_ms: _Optional[float] = ..., total_ms: _Optional[float] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "mean_acceptance_length", "draft_acceptance_rate", "acceptance_histogram", "gamma_histogram", "num_draft_tokens_per_pos", "num_accepted_tokens_per_pos", "num_dropped_proposals", "num_draft_failures", "drafters", "num_proposal_bytes", "num_plain_tokens", "num_correction_tokens", "num_bonus_tokens", "drafter_uses", "drafter_outlooks", "num_feature_bytes", "num_branches", "num_branch_hits", "num_branch_misses", "num_ahead_draft_tokens", "num_wasted_draft_tokens", "num_pipelined_verifies", "num_dropped_verifies")
    NUM_SPEC_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    GAMMA_HISTOGRAM_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_FAILURES_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROPOSAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_PLAIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRECTION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BONUS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_USES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_OUTLOOKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FEATURE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCH_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCH_MISSES_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_WASTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PIPELINED_VERIFIES_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_VERIFIES_FIELD_NUMBER: _ClassVar[int]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: _containers.RepeatedScalarFieldContainer[int]
    gamma_histogram: _containers.RepeatedScalarFieldContainer[int]
    num_draft_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    num_accepted_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    num_dropped_proposals: int
    num_draft_failures: int
    drafters: _containers.RepeatedScalarFieldContainer[str]
    num_proposal_bytes: int
    num_plain_tokens: int
    num_correction_tokens: int
    num_bonus_tokens: int
    drafter_uses: _containers.RepeatedCompositeFieldContainer[DrafterUse]
    drafter_outlooks: _containers.RepeatedCompositeFieldContainer[DrafterOutlook]
    num_feature_bytes: int
    num_branches: int
    num_branch_hits: int
    num_branch_misses: int
    num_ahead_draft_tokens: int
    num_wasted_draft_tokens: int
    num_pipelined_verifies: int
    num_dropped_verifies: int
    def __init__(self, num_spec_steps: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., mean_acceptance_length: _Optional[float] = ..., draft_acceptance_rate: _Optional[float] = ..., acceptance_histogram: _Optional[_Iterable[int]] = ..., gamma_histogram: _Optional[_Iterable[int]] = ..., num_draft_tokens_per_pos: _Optional[_Iterable[int]] = ..., num_accepted_tokens_per_pos: _Optional[_Iterable[int]] = ..., num_dropped_proposals: _Optional[int] = ..., num_draft_failures: _Optional[int] = ..., drafters: _Optional[_Iterable[str]] = ..., num_proposal_bytes: _Optional[int] = ..., num_plain_tokens: _Optional[int] = ..., num_correction_tokens: _Optional[int] = ..., num_bonus_tokens: _Optional[int] = ..., drafter_uses: _Optional[_Iterable[_Union[DrafterUse, _Mapping]]] = ..., drafter_outlooks: _Optional[_Iterable[_Union[DrafterOutlook, _Mapping]]] = ..., num_feature_bytes: _Optional[int] = ..., num_branches: _Optional[int] = ..., num_branch_hits: _Optional[int] = ..., num_branch_misses: _Optional[int] = ..., num_ahead_draft_tokens: _Optional[int] = ..., num_wasted_draft_tokens: _Optional[int] = ..., num_pipelined_verifies: _Optional[int] = ..., num_dropped_verifies: _Optional[int] = ...) -> None: ...

class DrafterUse(_message.Message):
    __slots__ = ("drafter", "reason", "num_rounds", "num_draft_tokens", "num_accepted_draft_tokens", "expected_tokens_per_s", "tokens_per_s")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    reason: str
    num_rounds: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    expected_tokens_per_s: float
    tokens_per_s: float
    def __init__(self, drafter: _Optional[str] = ..., reason: _Optional[str] = ..., num_rounds: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ..., expected_tokens_per_s: _Optional[float] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class DrafterOutlook(_message.Message):
    __slots__ = ("drafter", "num_draft_tokens", "expected_tokens_per_s")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    num_draft_tokens: int
    expected_tokens_per_s: float
    def __init__(self, drafter: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., expected_tokens_per_s: _Optional[float] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelInfoResponse(_message.Message):
    __slots__ = ("model", "model_fingerprint", "tokenizer_fingerprint", "context_length", "vocab_size", "eos_token_ids", "generation_defaults", "draft_model", "drafters", "acceptance_rules", "max_speculative_tokens", "has_chat_template", "dtype", "default_max_tokens", "simulated", "aliases")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RULES_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    context_length: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    generation_defaults: _worker_pb2.GenerationDefaults
    draft_model: str
    drafters: _containers.RepeatedScalarFieldContainer[str]
    acceptance_rules: _containers.RepeatedScalarFieldContainer[_common_pb2.AcceptanceRule]
    max_speculative_tokens: int
    has_chat_template: bool
    dtype: str
    default_max_tokens: int
    simulated: bool
    aliases: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., tokenizer_fingerprint: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., generation_defaults: _Optional[_Union[_worker_pb2.GenerationDefaults, _Mapping]] = ..., draft_model: _Optional[str] = ..., drafters: _Optional[_Iterable[str]] = ..., acceptance_rules: _Optional[_Iterable[_Union[_common_pb2.AcceptanceRule, str]]] = ..., max_speculative_tokens: _Optional[int] = ..., has_chat_template: _Optional[bool] = ..., dtype: _Optional[str] = ..., default_max_tokens: _Optional[int] = ..., simulated: _Optional[bool] = ..., aliases: _Optional[_Iterable[str]] = ...) -> None: ...

class GetTraceRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class GetTraceResponse(_message.Message):
    __slots__ = ("streams",)
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedCompositeFieldContainer[StreamTrace]
    def __init__(self, streams: _Optional[_Iterable[_Union[StreamTrace, _Mapping]]] = ...) -> None: ...

class StreamTrace(_message.Message):
    __slots__ = ("index", "steps", "num_left_out")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    index: int
    steps: _containers.RepeatedCompositeFieldContainer[StepRecord]
    num_left_out: int
    def __init__(self, index: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepRecord, _Mapping]]] = ..., num_left_out: _Optional[int] = ...) -> None: ...

class ListStreamsRequest(_message.Message):
    __slots__ = ("max_streams",)
    MAX_STREAMS_FIELD_NUMBER: _ClassVar[int]
    max_streams: int
    def __init__(self, max_streams: _Optional[int] = ...) -> None: ...

class ListStreamsResponse(_message.Message):
    __slots__ = ("streams", "num_left_out", "num_hidden", "models", "uptime_s")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    NUM_HIDDEN_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedCompositeFieldContainer[StreamStatus]
    num_left_out: int
    num_hidden: int
    models: _containers.RepeatedCompositeFieldContainer[ModelTotals]
    uptime_s: float
    def __init__(self, streams: _Optional[_Iterable[_Union[StreamStatus, _Mapping]]] = ..., num_left_out: _Optional[int] = ..., num_hidden: _Optional[int] = ..., models: _Optional[_Iterable[_Union[ModelTotals, _Mapping]]] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class StreamStatus(_message.Message):
    __slots__ = ("request_id", "index", "model", "tenant", "state", "age_ms", "num_prompt_tokens", "num_tokens", "max_tokens", "timings", "speculation", "last_step")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    model: str
    tenant: str
    state: StreamState
    age_ms: float
    num_prompt_tokens: int
    num_tokens: int
    max_tokens: int
    timings: RequestTimings
    speculation: SpeculationStats
    last_step: StepRecord
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., state: _Optional[_Union[StreamState, str]] = ..., age_ms: _Optional[float] = ..., num_prompt_tokens: _Optional[int] = ..., num_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., timings: _Optional[_Union[RequestTimings, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ..., last_step: _Optional[_Union[StepRecord, _Mapping]] = ...) -> None: ...

class ModelTotals(_message.Message):
    __slots__ = ("model", "speculation")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    speculation: SpeculationStats
    def __init__(self, model: _Optional[str] = ..., speculation: _Optional[_Union[SpeculationStats, _Mapping]] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("versions", "models", "workers", "num_requests_running", "num_requests_waiting", "uptime_s", "draining", "model_aliases", "unix_time_s", "num_requests_paused")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class ModelAliasesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MODEL_ALIASES_FIELD_NUMBER: _ClassVar[int]
    UNIX_TIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_PAUSED_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.ScalarMap[str, str]
    models: _containers.RepeatedScalarFieldContainer[str]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    num_requests_running: int
    num_requests_waiting: int
    uptime_s: float
    draining: bool
    model_aliases: _containers.ScalarMap[str, str]
    unix_time_s: float
    num_requests_paused: int
    def __init__(self, versions: _Optional[_Mapping[str, str]] = ..., models: _Optional[_Iterable[str]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., num_requests_running: _Optional[int] = ..., num_requests_waiting: _Optional[int] = ..., uptime_s: _Optional[float] = ..., draining: _Optional[bool] = ..., model_aliases: _Optional[_Mapping[str, str]] = ..., unix_time_s: _Optional[float] = ..., num_requests_paused: _Optional[int] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("role", "address", "model", "healthy", "detail", "num_sessions", "network_ms", "capacity", "drafters", "numerics_fingerprint", "weight_bytes", "dtype", "numerics", "cache_counters", "draft_rounds", "clock_offset_ms", "versions", "incarnation", "model_fingerprint")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NETWORK_MS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    CACHE_COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_MS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    role: _worker_pb2.WorkerRole
    address: str
    model: str
    healthy: bool
    detail: str
    num_sessions: int
    network_ms: float
    capacity: _worker_pb2.WorkerCapacity
    drafters: _containers.RepeatedScalarFieldContainer[str]
    numerics_fingerprint: str
    weight_bytes: int
    dtype: str
    numerics: _worker_pb2.Numerics
    cache_counters: _worker_pb2.CacheCounters
    draft_rounds: DraftRounds
    clock_offset_ms: float
    versions: _containers.ScalarMap[str, str]
    incarnation: str
    model_fingerprint: str
    def __init__(self, role: _Optional[_Union[_worker_pb2.WorkerRole, str]] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., healthy: _Optional[bool] = ..., detail: _Optional[str] = ..., num_sessions: _Optional[int] = ..., network_ms: _Optional[float] = ..., capacity: _Optional[_Union[_worker_pb2.WorkerCapacity, _Mapping]] = ..., drafters: _Optional[_Iterable[str]] = ..., numerics_fingerprint: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., dtype: _Optional[str] = ..., numerics: _Optional[_Union[_worker_pb2.Numerics, _Mapping]] = ..., cache_counters: _Optional[_Union[_worker_pb2.CacheCounters, _Mapping]] = ..., draft_rounds: _Optional[_Union[DraftRounds, _Mapping]] = ..., clock_offset_ms: _Optional[float] = ..., versions: _Optional[_Mapping[str, str]] = ..., incarnation: _Optional[str] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class DraftRounds(_message.Message):
    __slots__ = ("num_rounds", "round_ms", "wait_ms", "num_draft_tokens", "num_accepted_draft_tokens")
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ROUND_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_rounds: int
    round_ms: float
    wait_ms: float
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    def __init__(self, num_rounds: _Optional[int] = ..., round_ms: _Optional[float] = ..., wait_ms: _Optional[float] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: ChatPrompt
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens", "each_token")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EACH_TOKEN_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    each_token: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ..., each_token: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "token_bytes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, text: _Optional[str] = ..., token_bytes: _Optional[_Iterable[bytes]] = ...) -> None: ...
