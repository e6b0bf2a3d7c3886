from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcceptanceRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACCEPTANCE_RULE_UNSPECIFIED: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_TOKEN: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_BLOCK: _ClassVar[AcceptanceRule]
    ACCEPTANCE_RULE_COUPLED: _ClassVar[AcceptanceRule]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class TokenOrigin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_ORIGIN_UNSPECIFIED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_ACCEPTED: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_CORRECTION: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_BONUS: _ClassVar[TokenOrigin]
    TOKEN_ORIGIN_PLAIN: _ClassVar[TokenOrigin]

class GrammarKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GRAMMAR_KIND_UNSPECIFIED: _ClassVar[GrammarKind]
    GRAMMAR_KIND_JSON_SCHEMA: _ClassVar[GrammarKind]
    GRAMMAR_KIND_REGEX: _ClassVar[GrammarKind]
    GRAMMAR_KIND_LARK: _ClassVar[GrammarKind]
ACCEPTANCE_RULE_UNSPECIFIED: AcceptanceRule
ACCEPTANCE_RULE_TOKEN: AcceptanceRule
ACCEPTANCE_RULE_BLOCK: AcceptanceRule
ACCEPTANCE_RULE_COUPLED: AcceptanceRule
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
TOKEN_ORIGIN_UNSPECIFIED: TokenOrigin
TOKEN_ORIGIN_ACCEPTED: TokenOrigin
TOKEN_ORIGIN_CORRECTION: TokenOrigin
TOKEN_ORIGIN_BONUS: TokenOrigin
TOKEN_ORIGIN_PLAIN: TokenOrigin
GRAMMAR_KIND_UNSPECIFIED: GrammarKind
GRAMMAR_KIND_JSON_SCHEMA: GrammarKind
GRAMMAR_KIND_REGEX: GrammarKind
GRAMMAR_KIND_LARK: GrammarKind

class ResolvedSampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias_ids", "logit_bias_values", "seed", "choice", "acceptance", "allowed_token_ids", "bad_word_sizes", "bad_word_ids", "grammar")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_SIZES_FIELD_NUMBER: _ClassVar[int]
    BAD_WORD_IDS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias_values: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    choice: int
    acceptance: AcceptanceRule
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_word_sizes: _containers.RepeatedScalarFieldContainer[int]
    bad_word_ids: _containers.RepeatedScalarFieldContainer[int]
    grammar: ResolvedGrammar
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias_ids: _Optional[_Iterable[int]] = ..., logit_bias_values: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ..., choice: _Optional[int] = ..., acceptance: _Optional[_Union[AcceptanceRule, str]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_word_sizes: _Optional[_Iterable[int]] = ..., bad_word_ids: _Optional[_Iterable[int]] = ..., grammar: _Optional[_Union[ResolvedGrammar, _Mapping]] = ...) -> None: ...

class ResolvedGrammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: GrammarKind
    text: str
    def __init__(self, kind: _Optional[_Union[GrammarKind, str]] = ..., text: _Optional[str] = ...) -> None: ...

class ResolvedStopping(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionHeader(_message.Message):
    __slots__ = ("epoch", "base_length", "prefix_hash")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    base_length: int
    prefix_hash: int
    def __init__(self, epoch: _Optional[int] = ..., base_length: _Optional[int] = ..., prefix_hash: _Optional[int] = ...) -> None: ...

class OutOfStep(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: SessionHeader
    def __init__(self, header: _Optional[_Union[SessionHeader, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("token_ids", "parents", "q_sizes", "q_ids", "q_counts", "confidences", "drafter", "queue_us", "compute_us", "ingested_tokens", "catch_up_us")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    Q_SIZES_FIELD_NUMBER: _ClassVar[int]
    Q_IDS_FIELD_NUMBER: _ClassVar[int]
    Q_COUNTS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_US_FIELD_NUMBER: _ClassVar[int]
    INGESTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CATCH_UP_US_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    q_sizes: _containers.RepeatedScalarFieldContainer[int]
    q_ids: bytes
    q_counts: bytes
    confidences: bytes
    drafter: str
    queue_us: int
    compute_us: int
    ingested_tokens: int
    catch_up_us: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., q_sizes: _Optional[_Iterable[int]] = ..., q_ids: _Optional[bytes] = ..., q_counts: _Optional[bytes] = ..., confidences: _Optional[bytes] = ..., drafter: _Optional[str] = ..., queue_us: _Optional[int] = ..., compute_us: _Optional[int] = ..., ingested_tokens: _Optional[int] = ..., catch_up_us: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_logprobs", "num_top", "top_ids", "top_logprobs")
    TOKEN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_logprobs: _containers.RepeatedScalarFieldContainer[float]
    num_top: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_logprobs: _Optional[_Iterable[float]] = ..., num_top: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("first_position", "logprobs")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    logprobs: TokenLogprobs
    def __init__(self, first_position: _Optional[int] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class FeatureRows(_message.Message):
    __slots__ = ("features_start", "features")
    FEATURES_START_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    features_start: int
    features: bytes
    def __init__(self, features_start: _Optional[int] = ..., features: _Optional[bytes] = ...) -> None: ...
