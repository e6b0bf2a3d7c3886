"""One frozen settings class per process. A field is a flag (`--num-threads`) and a variable (`OUTRIDER_NUM_THREADS`).

Flags win over the environment, the environment over defaults. An unknown flag or an unknown `OUTRIDER_` variable is an
error. No torch, no grpc here.
"""

from __future__ import annotations

import os
from collections.abc import Set
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from outrider.errors import InvalidArgument

PREFIX = "OUTRIDER_"
METADATA_KEY_FORM = r"^[a-z0-9_.-]+$"
"""Of a metadata key that gRPC takes."""
AddressList = Annotated[tuple[str, ...], NoDecode]


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _split_commas(cls, value: Any, info: Any) -> Any:
        annotation = cls.model_fields[info.field_name].annotation
        return (
            tuple(v.strip() for v in value.split(",") if v.strip())
            if isinstance(value, str) and annotation == tuple[str, ...]
            else value
        )


class ListenerSettings(_Settings):
    """What listens on a port."""

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 picks a free one and prints it.")
    drain_grace_s: float = Field(
        30.0,
        ge=0,
        description="After SIGTERM, running streams may take this long; what lasts longer is handed over in time.",
    )
    drain_delay_s: float = Field(
        0.0, ge=0, description="Wait between NOT_SERVING and refusing, for balancers to notice."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log level shown.")
    log_format: Literal["text", "json"] = Field(
        "text", description="json: an object a line, with request and trace ids; never a prompt or a text."
    )
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="Port of /metrics for Prometheus; 0: a free one; unset: none."
    )
    metrics_host: str = Field(
        "",
        description="Address of metrics_port, which asks nobody who they are and knows no TLS; empty: loopback, this "
        "machine alone.",
    )


class ServerSettings(ListenerSettings):
    """What every gRPC server has."""

    heartbeat_ms: int = Field(500, ge=10, description="Heartbeat interval while work is outstanding.")
    ping_interval_ms: int = Field(10_000, ge=100, description="Time between pings to whoever is connected.")
    ping_timeout_ms: int = Field(
        5_000, ge=100, description="Who answers no ping for so long is gone: its streams end and free what they hold."
    )
    reflection: bool = Field(True, description="Serve gRPC reflection, for grpcurl.")
    max_concurrent_calls: int = Field(
        8192, ge=1, description="Calls at once, those that are being refused among them; more are not even read."
    )
    tls_cert: str = Field(
        "", description="PEM file of this process's certificates: shown to callers, and to those that it calls."
    )
    tls_key: str = Field("", description="PEM file of the certificate's key; files of TLS are read again on change.")
    tls_ca: str = Field(
        "", description="PEM file of authorities: coordinators and workers that are called must be certified by them."
    )
    tls_client_ca: str = Field(
        "", description="PEM file of authorities: only callers that are certified by them are served (mTLS)."
    )
    fleet_token_file: str = Field(
        "",
        description="File of secrets that coordinators and workers share, one a line: the first is shown, each is "
        "taken.",
    )
    insecure: bool = Field(False, description="Listen beyond loopback although anyone there may call.")
    health_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of the health service alone, at `host`, in plaintext: for probes that know no TLS.",
    )
    otlp_endpoint: str = Field(
        "",
        description="OpenTelemetry collector that traces go to, http://host:port of its gRPC port; empty: none do.",
    )


class GatewaySettings(ListenerSettings):
    """The OpenAI-compatible gateway."""

    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 picks a free one and prints it.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of /metrics for Prometheus; 0: a free one; unset: beside the API.",
    )
    coordinators: AddressList = Field(
        ("127.0.0.1:50050",),
        description="Coordinators to call, comma separated: host:port, or dns:///host:port for all behind it.",
    )
    max_concurrent_requests: int = Field(4096, ge=1, description="Requests at once; more are refused.")
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Longest body of a request.")
    max_client_pause_s: float = Field(
        60.0,
        gt=0,
        description="A client that reads nothing of its answer, or sends no request, for this long is cut off.",
    )
    tls_cert: str = Field(
        "", description="PEM file of the gateway's certificates: for HTTPS, and shown to coordinators that ask for one."
    )
    tls_key: str = Field("", description="PEM file of the certificate's key; files of TLS are read again on change.")
    tls_ca: str = Field(
        "",
        description="PEM file of authorities that coordinators must be certified by; empty: they are called in "
        "plaintext.",
    )
    insecure: bool = Field(
        False,
        description="Listen beyond loopback in plaintext too, and believe whoever calls: what is before the gateway "
        "keeps others out.",
    )
    allowed_hosts: AddressList = Field(
        (),
        description="Names, comma separated, under which pages in browsers may reach a gateway on loopback, beside "
        "loopback's own: those that a proxy before it passes on.",
    )
    trusted_tenant_header: str = Field(
        "x-outrider-tenant",
        pattern=METADATA_KEY_FORM,
        description="Header that names the tenant: passed on to coordinators, whose setting of this name it must be.",
    )


class CoordinatorSettings(ServerSettings):
    """The coordinator."""

    port: int = Field(50050, ge=0, le=65535, description="Port to listen on; 0 picks a free one and prints it.")
    target_workers: AddressList = Field((), description="host:port of target workers, comma separated.")
    draft_workers: AddressList = Field((), description="host:port of draft workers, comma separated.")
    model_aliases: AddressList = Field((), description="Further names of served models: alias=model, comma separated.")
    draft_models: AddressList = Field(
        (),
        description="Draft model of a target: target=draft, comma separated; others pair with any of their tokenizer.",
    )
    lease_ms: int = Field(5000, ge=100, description="Lease of a worker that registers itself.")
    max_registered_workers: int = Field(1024, ge=1, description="Workers that may register; more are refused.")
    max_running_requests: int = Field(256, ge=1, description="Streams at once; more wait.")
    max_waiting_requests: int = Field(256, ge=0, description="Waiting streams; more are refused with a retry delay.")
    default_max_tokens: int = Field(256, ge=1, description="max_tokens of a request that gives none.")
    max_request_s: float = Field(3600.0, gt=0, description="Longest life of a request without a deadline.")
    num_speculative_tokens: int | None = Field(
        None, ge=0, description="Fixed number of drafts a round; unset: adaptive."
    )
    max_speculative_tokens: int = Field(16, ge=1, le=64, description="Cap of the adaptive number of drafts.")
    acceptance: Literal["token", "block", "coupled"] = Field("block", description="Rule when a request names none.")
    draft_ahead: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Draft for likely outcomes before the verdict. auto: adaptive streams do where it pays; on: all, "
        "wherever a draft worker can.",
    )
    max_q_entries: int = Field(64, ge=1, le=256, description="Entries of a draft distribution on the wire.")
    local_drafters: AddressList = Field(
        ("lookup", "suffix"), description="Drafters that guess from earlier text, in the coordinator; empty: none."
    )
    lookup_max_ngram: int = Field(4, ge=1, description="Longest n-gram that lookup matches.")
    lookup_min_ngram: int = Field(2, ge=1, description="Shortest n-gram that local drafters match.")
    draft_cache_bytes: int = Field(
        64 << 20, ge=0, description="Memory of past outputs that later streams of a tenant draft from; 0: none."
    )
    share_draft_cache: bool = Field(False, description="Draft from other tenants' outputs too: latency can leak them.")
    peer_timeout_s: float = Field(2.0, gt=0, description="A worker silent for this long with work outstanding is lost.")
    draft_breaker_share: float = Field(
        0.02,
        gt=0,
        description="Share of the time that streams may lose to one draft worker before it is left alone; 1: never.",
    )
    draft_breaker_max_open_s: float = Field(
        60.0,
        gt=0,
        description="A draft worker that cost more is left alone for so long at most; then one stream tries.",
    )
    max_bad_proposals: int = Field(
        3,
        ge=1,
        description="Impossible proposals after which a draft worker is asked no more until it is restarted.",
    )
    target_wait_s: float = Field(
        30.0,
        ge=0,
        description="Once all target workers are lost, a running stream waits so long for one to come back; one whose "
        "client gave a deadline, until that.",
    )
    warm_standby: bool = Field(
        False,
        description="A second target worker computes each stream's text too, in its idle time: losing the first costs "
        "about a pass, and the second one's cache is shared by twice the streams.",
    )
    emit_buffer_chunks: int = Field(64, ge=1, description="Chunks waiting for a slow client before its stream pauses.")
    max_client_pause_s: float = Field(
        60.0, gt=0, description="A stream that is paused for a client that reads nothing for this long is ended."
    )
    trace_steps: int = Field(
        16_384, ge=0, description="Rounds of the last requests that are kept for `outrider trace`; 0: none."
    )
    trace_sample_ratio: float = Field(
        0.01,
        ge=0,
        le=1,
        description="Share of requests that go to otlp_endpoint, of those whose callers have not decided.",
    )
    operator_tenants: AddressList = Field(
        (),
        description="Tenants that `outrider top` shows the streams of all tenants, comma separated; others see theirs.",
    )
    record_streams: int = Field(
        0,
        ge=0,
        description="Last streams that are recorded for `outrider audit`: their prompts and texts are kept in memory, "
        "for their own tenants to fetch; 0: none.",
    )
    record_bytes: int = Field(64 << 20, ge=1 << 20, description="Memory of such records at most.")
    trusted_tenant_header: str = Field(
        "x-outrider-tenant",
        pattern=METADATA_KEY_FORM,
        description="Metadata key whose value names the tenant; with tokens_file it must agree with the token's.",
    )
    tokens_file: str = Field(
        "", description="File of callers' tokens (`outrider token new`): only they are served, each as its tenant."
    )
    tenant_limits_file: str = Field("", description="TOML file of what each tenant may ask for; see SECURITY.md.")


class WorkerSettings(ServerSettings):
    """What both workers have."""

    model: str = Field("smollm2-135m", description="Bundle name, hub id, local folder, GGUF file, or toy:key=value,...")
    model_name: str = Field("", description="Name that clients use; empty: derived from `model`.")
    revision: str = Field(
        "", description="Branch, tag or commit of a hub id; empty: its default one. The commit in use is told."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with a checkpoint.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="Number type of the weights.")
    numerics: Literal["fast", "exact"] = Field(
        "fast",
        description="exact: text does not depend on drafts or neighbours to the bit; proved at load, or refused.",
    )
    device: str = Field("auto", description="cpu, cuda, cuda:N, or auto.")
    num_threads: int = Field(0, ge=0, description="CPU threads of the model; 0: all cores.")
    block_size: int = Field(16, ge=1, le=1024, description="Tokens per cache block.")
    kv_cache_bytes: int = Field(
        0, ge=0, description="Memory of the cache; 0: a quarter of what is free, at most 4 GiB."
    )
    memory_fraction: float = Field(
        0.0, ge=0, le=1, description="Cache as a share of the memory free once the model is loaded; 0: kv_cache_bytes."
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = Field(
        "auto", description="Number type of cached keys and values; auto: that of the weights."
    )
    max_context_length: int = Field(0, ge=0, description="Longest sequence; 0: the model's own.")
    max_batch_tokens: int = Field(512, ge=1, description="Rows of one packed model call.")
    prefill_rows: int = Field(
        0, ge=0, description="Prompt rows of a pass beside running streams; 0: as many as lengthen it by 30%."
    )
    max_waiting_sessions: int = Field(64, ge=0, description="Sessions waiting for cache blocks; more are refused.")
    session_idle_lease_s: float = Field(60.0, gt=0, description="A session without a message for this long is freed.")
    max_draft_tokens: int = Field(16, ge=1, le=64, description="Drafts that one round may carry.")
    coordinators: AddressList = Field(
        (),
        description="Coordinators to register with, comma separated: host:port, or dns:///host:port for all behind it.",
    )
    advertise_address: str = Field("", description="host:port that coordinators should use; empty: host and port.")


class DraftWorkerSettings(WorkerSettings):
    """A draft worker."""

    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 picks a free one and prints it.")
    weight_dtype: Literal["auto", "int8", "int4"] = Field(
        "auto",
        description="On a CPU, int8: half the bytes that a draft reads; int4: a third, agreeing a bit less.",
    )
    draft_vocab: str = Field("", description="File of the ids to draft (`outrider draft-vocab`); empty: all ids.")
    target_tokenizer: str = Field(
        "", description="The target's folder, hub id or tokenizer.json, where the draft model has another tokenizer."
    )
    drafters: AddressList = Field(("model",), description="Drafters to offer, the default one first.")
    head: str = Field(
        "",
        description="Folder or file of an EAGLE head, or one that comes with outrider, to draft with in the place of a "
        "model: targets send it their states.",
    )
    target: str = Field(
        "", description="The head's target, as in `model`: its embedding is read, and its output head, no layer."
    )
    head_states: AddressList = Field(
        (),
        description="States of the target that the head reads, as its features name them; empty: as its config does.",
    )
    tree_width: int = Field(2, ge=1, le=16, description="Guesses beside one another at each level of the tree drafter.")
    ahead_branches: int = Field(
        16, ge=0, le=64, description="Outcomes of a round that drafts are made for before its verdict; 0: none."
    )


class TargetWorkerSettings(WorkerSettings):
    """A target worker."""

    port: int = Field(50052, ge=0, le=65535, description="Port to listen on; 0 picks a free one and prints it.")
    tensor_parallel: int = Field(1, ge=1, le=64, description="Processes that share the model's weights and cache.")
    heads: AddressList = Field(
        (),
        description="What drafts inside this worker, comma separated, the default first: a head's folder or file "
        "(name=... before it where two are of a kind), one that comes with outrider, skip, or 'skip:10;11' (quoted in "
        "a shell). Empty: none.",
    )
    features: AddressList = Field(
        (),
        description="States that draft workers may draft from, comma separated: N is the input of layer N, -1 what the "
        "output head reads. Those of heads are among them anyway.",
    )
    cache_overcommit: float = Field(
        2.0, ge=1, description="Cache blocks promised to streams per block there is; 1: none is ever preempted."
    )
    losslessness_every_rounds: int = Field(
        256,
        ge=0,
        description="One round of so many begins a run of 16 tokens that are tested as draws from the target "
        "(outrider_losslessness_* in the metrics); 0: none does.",
    )


class ClientSettings(_Settings):
    """Of commands that call a coordinator."""

    token: str = Field("", description="Token to show; better in a file.")
    token_file: str = Field("", description="File whose first line is the token to show; read again on change.")
    tls: bool = Field(False, description="Call by TLS; so do the other settings of TLS.")
    tls_ca: str = Field("", description="PEM file of authorities that the coordinator must be certified by.")
    tls_cert: str = Field("", description="PEM file of the caller's own certificates, where it asks for them.")
    tls_key: str = Field("", description="PEM file of their key.")
    tls_server_name: str = Field("", description="What its certificate must name; empty: the host that is dialled.")


class DistillSettings(_Settings):
    """Making a draft from a target."""

    model: str = Field("smollm2-135m", description="Target: bundle name, hub id or local folder.")
    revision: str = Field("", description="Hub revision; empty: the default one.")
    kind: Literal["eagle3", "model", "exit"] = Field(
        "eagle3",
        description="eagle3: a head on the target's hidden states. model: a small model of its own. exit: a block that "
        "speaks for the target after its first layers.",
    )
    out: str = Field("", description="Folder for the draft, the report and what a killed run goes on from.")
    data: str = Field("", description="Folder of generated text, to share between runs; empty: `data` in out.")
    prompts: str = Field(
        "20000", description="Number of built-in prompts at most, or a JSONL file of {prompt} or {messages}."
    )
    minutes: float = Field(60.0, gt=0, description="Time for everything; prompts left over are not used.")
    num_steps: int = Field(0, ge=0, description="Training steps; 0: as many as the minutes leave time for.")
    seed: int = Field(0, ge=0, description="Key of all random choices.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Number type of the target and of products; auto: bfloat16 where the processor has it."
    )
    num_threads: int = Field(0, ge=0, description="CPU threads; 0: all cores.")
    generation_share: float = Field(0.45, gt=0, lt=1, description="Share of the minutes for generating text.")
    batch_size: int = Field(64, ge=1, description="Sequences generated together.")
    max_new_tokens: int = Field(144, ge=2, description="Longest answer in tokens.")
    max_prompt_tokens: int = Field(320, ge=1, description="Longer prompts are left out, and counted.")
    greedy_share: float = Field(0.5, ge=0, le=1, description="Share of the training text said at temperature 0.")
    min_temperature: float = Field(0.7, gt=0, description="Lowest temperature of the rest.")
    max_temperature: float = Field(1.0, gt=0, description="Highest temperature of the rest.")
    held_out_prompts: int = Field(64, ge=1, description="Prompts of each set on which acceptance is measured.")
    draft_vocab_size: int = Field(10240, ge=1, description="Ids that the draft can guess.")
    draft_layers: str = Field("", description="kind=model: layers of the target to start from; empty: first and last.")
    exit_layer: int = Field(0, ge=0, description="kind=exit: target layers before the block; 0: a fifth of them.")
    num_unrolled_steps: int = Field(4, ge=1, le=8, description="kind=eagle3: guesses ahead that training unrolls.")
    train_batch_tokens: int = Field(2048, ge=1, description="Tokens of one training step, padding included.")
    learning_rate: float = Field(0.0, ge=0, description="Of the matrices; 0: by kind.")
    acceptance_share: float = Field(
        0.2, ge=0, le=1, description="Last share of the training that uses the acceptance-aware loss."
    )
    checkpoint_interval_s: float = Field(60.0, ge=0, description="Between checkpoints of the training.")

    @model_validator(mode="after")
    def _check(self) -> DistillSettings:
        if not self.out:
            raise InvalidArgument("out: give a folder for the draft", field="out")
        if self.min_temperature > self.max_temperature:
            raise InvalidArgument(
                f"min_temperature {self.min_temperature:g} is above max_temperature {self.max_temperature:g}",
                field="min_temperature",
            )
        return self


def known_variables() -> set[str]:
    """Every `OUTRIDER_` variable that some process reads."""
    classes = (
        CoordinatorSettings,
        DraftWorkerSettings,
        TargetWorkerSettings,
        GatewaySettings,
        DistillSettings,
        ClientSettings,
    )
    return {PREFIX + name.upper() for cls in classes for name in cls.model_fields}


def unknown_variables(extra: Set[str] = frozenset()) -> list[str]:
    """`OUTRIDER_` variables in the environment that nothing reads: refused at start, since they are typos."""
    return sorted(n for n in os.environ if n.startswith(PREFIX) and n not in known_variables() | extra)
