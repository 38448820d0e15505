"""Every setting, defined once: type, range, default, description, and the rules between settings.

The same fields make environment variables (`HEADRACE_MAX_NUM_SEQS`), keys of a TOML file (`max_num_seqs`) and flags
(`--max-num-seqs`). Whoever starts the server calls `app.config.sources.load_settings`; everybody else is handed a
`Settings`, which is frozen and reads nothing by itself. Secrets are never shown.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from engine.errors import HeadraceError
from protocol.syntax.message_syntax import ReasoningParser, ToolParser

# -------------------------------------------------------------------------------------------------------- setting rules
# The rules between settings. `Settings` checks each setting alone.


def check_together(settings: Settings) -> None:
    """Raise ValueError that says what does not go together, and what works."""
    if settings.max_num_batched_tokens < settings.max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens ({settings.max_num_batched_tokens}) must be at least max_num_seqs "
            f"({settings.max_num_seqs}), because every running request needs one token of each step. For example: "
            f"max_num_batched_tokens = {max(512, settings.max_num_seqs)}"
        )
    for name in ("default_timeout", "default_ttft_timeout"):
        if (seconds := getattr(settings, name)) is not None and seconds > settings.max_timeout:
            raise ValueError(
                f"{name} ({seconds:g}) must be at most max_timeout ({settings.max_timeout:g}), the longest that a "
                f"request gets. What works: max_timeout = {seconds:g}, or a smaller {name}"
            )
    _check_hosts(settings)
    _check_tiers(settings)
    _check_ranks(settings)


def _check_hosts(settings: Settings) -> None:
    for name in settings.allowed_hosts:
        if name != "*" and not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name):  # no Host header would match
            raise ValueError(
                f"allowed_hosts: got {name!r}; allowed: names of hosts, without scheme, port, path or pattern, or * "
                "for every host. A value that works: llm.example.com"
            )


def _check_tiers(settings: Settings) -> None:
    keeps_blocks = settings.kv_cache_dir is not None or settings.kv_cache_ram
    if keeps_blocks and not settings.enable_prefix_caching:
        raise ValueError(
            "kv_cache_dir and kv_cache_ram keep what the prefix cache finds, and enable_prefix_caching is false. "
            "What works: enable_prefix_caching = true, or neither of them"
        )
    if keeps_blocks and settings.has_rank_processes:
        raise ValueError(
            "kv_cache_dir and kv_cache_ram are for an engine that computes by itself, and here "
            f"{settings.num_ranks} processes do. What works: executor = uni with tensor_parallel_size = 1 and "
            "pipeline_parallel_size = 1, or neither of them"
        )
    default = type(settings).model_fields["kv_cache_dir_size"].default
    if settings.kv_cache_dir is None and settings.kv_cache_dir_size != default:
        raise ValueError(
            f"kv_cache_dir_size ({settings.kv_cache_dir_size.human_readable()}) bounds what is in kv_cache_dir, which "
            "is not set. What works: kv_cache_dir = /var/cache/headrace/kv, or neither of them"
        )


def _check_ranks(settings: Settings) -> None:
    least, most = settings.data_parallel_size, settings.max_data_parallel_size
    if most is not None and (most < least or (settings.executor != "ray" and most > least)):
        raise ValueError(
            f"max_data_parallel_size ({most}) must be at least data_parallel_size ({least}), and more only on a "
            f"Ray cluster; executor is {settings.executor}. What works: max_data_parallel_size = {least}"
        )
    if settings.executor == "uni" and settings.num_ranks > 1:
        raise ValueError(
            f"executor is uni, which computes in one process, and tensor_parallel_size "
            f"({settings.tensor_parallel_size}) x pipeline_parallel_size ({settings.pipeline_parallel_size}) asks for "
            f"{settings.num_ranks}. What works: executor = mp, or 1 for both"
        )
    if settings.enable_expert_parallel and settings.tensor_parallel_size == 1:
        raise ValueError(
            "enable_expert_parallel spreads experts over the processes of tensor_parallel_size, which is 1. What "
            "works: tensor_parallel_size = 2, or enable_expert_parallel = false"
        )


# -------------------------------------------------------------------------------------------------------- setting types
# What settings are made of besides pydantic's own types, and what their annotations say.


def _as_list(value: object) -> object:
    """Read text as a JSON array if it begins like one, else as comma-separated parts."""
    if not isinstance(value, str):
        return value
    if value.strip().startswith("["):
        return json.loads(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def _not_empty(value: object) -> object:
    if value == "":
        raise ValueError("empty")  # which would be the current directory
    return value


def check_key(key: SecretStr) -> SecretStr:
    """Return the key if a client can send it. Raises ValueError for an empty one, which a header without a value would
    match, and for one with blanks around it or line breaks in it, which no header could match."""
    text = key.get_secret_value()
    if not text or text != text.strip() or not text.isprintable():
        raise ValueError("not a key")
    return key


def _check_keys(keys: Iterable[SecretStr]) -> tuple[SecretStr, ...]:
    checked = tuple(check_key(key) for key in keys)
    if not checked:
        raise ValueError("no key")  # a list that was given and has none would open the server to everybody
    return checked


StringList = Annotated[tuple[str, ...], BeforeValidator(_as_list)]
UserPath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(Path.expanduser)]
Keys = Annotated[tuple[SecretStr, ...], BeforeValidator(_as_list), AfterValidator(_check_keys)]


def is_secret(field: FieldInfo) -> bool:
    """Whether a setting's value must never be shown."""
    return SecretStr in get_args(without_none(field.annotation))


def has_password(value: object) -> bool:
    """Whether it is a URL with one, or with a name that may be as secret."""
    return isinstance(value, str) and re.search(r"://[^/?#]*@", value) is not None


def without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        return next(arg for arg in get_args(annotation) if arg is not type(None))
    return annotation


# ------------------------------------------------------------------------------------------------------------- settings


ENV_PREFIX = "HEADRACE_"
MIB = 2**20


class SettingsError(HeadraceError):
    """The server cannot start as it was told to. One line per setting that is wrong."""


class Settings(BaseSettings):
    """How one server runs. Immutable; `model_copy(update=...)` makes a variant."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        enable_decoding=False,  # the types below read lists, with commas or as JSON
        env_ignore_empty=True,  # `HEADRACE_X=` in a compose file means "not set"
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
        validate_default=True,
    )

    # The model.
    model: str = Field(
        "smollm2-135m-instruct",
        description="What to serve: the embedded model's alias, a .gguf file, a Hugging Face directory or a hub id.",
        min_length=1,
    )
    served_model_name: StringList = Field(
        (),
        description="Names that clients may ask for, comma separated. Answers carry the one that was asked for, "
        "metrics and traces the first. Default: the model's.",
        examples=["my-model"],
    )
    check_model_name: bool = Field(
        True, description="Refuse requests for a model name that is not served; otherwise any name gets the model."
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto: the model's weights. dummy: random weights from its configuration, for benchmarks."
    )
    cache_dir: UserPath | None = Field(
        None,
        description="Where the embedded model is kept, and what steps of any model cost; models of the hub are in "
        "HF_HOME. Default: headrace in the user's cache folder.",
        examples=["/var/cache/headrace"],
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Type of weights and activations. auto: what suits model and device."
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="What weights of 16 or 32 bits are rounded to when they are loaded, on a CPU: blocks of 32 with a "
        "scale each. What it costs is logged. none: they stay in 16 bits.",
    )
    tool_parser: ToolParser = Field(
        "auto",
        description="Syntax of the tool calls that the model writes. auto: what its chat template teaches, else the "
        "model is told of tools in words. none: calls are looked for only where a request demands one.",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="Tags around the reasoning that the model writes. auto: those in its chat template. "
        "think: <think>. none: reasoning is part of the answer.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one, else cpu.")
    seed: int = Field(
        0, description="Seeds dummy weights and the draws of requests that bring no seed.", ge=0, le=2**63 - 1
    )

    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="Where the sampling that a request leaves open comes from. model: its authors' recommendation, of "
        "generation_config.json or the GGUF file. openai: temperature 1, top_p 1, nothing else.",
    )

    # The engine.
    engine: Literal["thread", "process"] = Field(
        "thread",
        description="Where the engine runs: in a thread of the server, or in a process of its own, as several engines "
        "or ranks always do.",
    )
    data_parallel_size: int = Field(
        1, description="Engines that share the requests, each with all weights and a KV cache of its own.", ge=1, le=64
    )
    max_data_parallel_size: int | None = Field(
        None,
        description="On Ray: most engines, which there are while much waits. Default: data_parallel_size.",
        ge=1,
        le=64,
        examples=[1],
    )
    tensor_parallel_size: int = Field(
        1, description="Ranks (processes; on CUDA devices) that share each layer of an engine.", ge=1, le=64
    )
    pipeline_parallel_size: int = Field(
        1,
        description="Stages, each of tensor_parallel_size ranks, that share the layers of an engine.",
        ge=1,
        le=64,
    )
    enable_expert_parallel: bool = Field(
        False,
        description="Processes that share a layer have whole experts of it, instead of a part of each. On the CPU path "
        "they always have.",
    )
    executor: Literal["auto", "uni", "mp", "ray"] = Field(
        "auto",
        description="What runs the model: uni: the engine itself. mp: processes on this machine. ray: actors on a Ray "
        "cluster. auto: uni, or mp where tensor_parallel_size or pipeline_parallel_size asks for several.",
    )
    max_model_len: int | None = Field(
        None,
        description="Longest prompt plus output, in tokens. Default: what the model allows.",
        ge=1,
        examples=[2048],
    )
    max_num_seqs: int = Field(64, description="Most requests that run at once.", ge=1, le=65536)
    max_num_batched_tokens: int = Field(
        512,
        description="Token budget of one step: bounds how much a long prompt delays the streams beside it.",
        ge=1,
        le=2**20,
    )
    pipeline_depth: int | None = Field(
        None,
        description="Steps on their way at once; with 2 one is planned while another runs. Default: 2 on CUDA, else 1.",
        ge=1,
        le=2,
        examples=[1],
    )
    target_inter_token_latency: float = Field(
        0.08,
        description="Seconds between two tokens of a stream to aim at: prefill beside running streams is cut to fit.",
        ge=0.001,
        le=60,
    )
    block_size: int = Field(16, description="Tokens per KV block.", ge=1, le=1024)
    kv_cache_memory: ByteSize | None = Field(
        None,
        description="Memory for the KV cache of one engine, for example 2GiB. Default: a quarter of what is free "
        "on a CPU, 4GiB at most; on CUDA what gpu_memory_utilization leaves.",
        ge=MIB,
        examples=["2GiB"],
    )
    kv_cache_dir: UserPath | None = Field(
        None,
        description="Directory where KV blocks of prompts outlive a restart; engines may share one. Default: none.",
        examples=["/var/cache/headrace/kv"],
    )
    kv_cache_dir_size: ByteSize = Field(
        ByteSize(8 * 1024 * MIB),
        description="Most bytes in kv_cache_dir, of all models and engines together.",
        ge=16 * MIB,
        examples=["8GiB"],
    )
    kv_cache_ram: ByteSize = Field(
        ByteSize(0),
        description="Host memory for KV blocks beside a device's own; 0: none. Not for CPUs, which compute in it.",
        ge=0,
        examples=["16GiB"],
    )
    gpu_memory_utilization: float = Field(
        0.9,
        description="Share of a CUDA device's memory to fill, unless kv_cache_memory says how large the cache is.",
        gt=0,
        le=1,
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV blocks of prompts that begin alike.")
    num_threads: int | None = Field(
        None,
        description="Threads for computing on a CPU, per engine; on CUDA, up to 8 of them compile kernels at the "
        "start. Default: one per core, shared by the engines.",
        ge=1,
        le=4096,
        examples=[2],
    )

    # The server.
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.", min_length=1)
    port: int = Field(8000, description="Port to listen on; 0 picks a free one.", ge=0, le=65535)
    reuse_port: bool = Field(
        False,
        description="Share the port with other servers (SO_REUSEPORT, on Linux): it is opened when the model is loaded "
        "and closed when the drain begins, without losing a connection.",
    )
    allowed_hosts: StringList = Field(
        (),
        description="Host names by which clients may call the server, comma separated, besides localhost and IP "
        "addresses; web pages of these hosts may use it. Default: none on a loopback address without API keys, any "
        "elsewhere. *: any, always.",
        examples=["llm.example.com"],
    )
    worker_class: Literal["asyncio", "uvloop", "trio"] = Field("uvloop", description="The event loop.")
    drain_timeout: float = Field(
        30.0, description="Seconds that requests in flight have to finish after SIGTERM.", ge=0, le=86400
    )
    api_keys: Keys = Field(
        (),
        description="Keys that clients must send, comma separated; none: no key is asked for. Flags show in process "
        "lists: set HEADRACE_API_KEYS or the file instead.",
        validate_default=False,  # a list that is given must have a key
        examples=["key-one,key-two"],
    )
    api_keys_file: UserPath | None = Field(
        None,
        description="TOML file of tenants with their keys, weights, limits and rights, read again at SIGHUP; see "
        "docs/reliability.md.",
        examples=["/etc/headrace/tenants.toml"],
    )
    template_kwargs: StringList = Field(
        ("enable_thinking", "thinking", "thinking_budget", "reasoning_effort", "preserve_thinking", "date_string"),
        description="Template variables that chat_template_kwargs may set, comma separated; *: any.",
        examples=["enable_thinking,date_string"],
    )
    template_timeout: float = Field(
        10.0,
        description="Seconds that a chat template has for one conversation, if it is not one that Headrace knows.",
        ge=0.1,
        le=3600,
    )
    admin_keys: Keys = Field(
        (),
        description="Keys for administrators' routes such as /server_info and /abort_requests, comma separated; "
        "none: there are no such routes. They open no other route.",
        validate_default=False,
        examples=["admin-key-one"],
    )
    enable_tokenizer_info_endpoint: bool = Field(
        False, description="Serve /tokenizer_info: the tokenizer's configuration and the chat template."
    )
    embedding_pooling: Literal["mean", "last"] | None = Field(
        None,
        description="How /v1/embeddings pools hidden states if a request does not say. Not set: as the model's files "
        "say (modules.json, pooling_type of a GGUF file), or else mean.",
        examples=["mean"],
    )
    max_queued_requests: int = Field(
        512,
        description="Most choices that wait for their first token; more are refused with 429. Tenants share half of "
        "them by weight, each has one at least; the rest is for whoever comes first.",
        ge=1,
        le=2**20,
    )
    max_queued_tokens: int = Field(
        2**20,
        description="Most prompt tokens that wait; a request that would exceed it is refused, unless its tenant has "
        "nobody waiting. Tenants share half of them by weight.",
        ge=1,
        le=2**31,
    )
    max_queue_time: float = Field(
        30.0, description="Seconds of expected queueing beyond which a request is refused; 0: none.", ge=0, le=86400
    )
    default_timeout: float | None = Field(
        None,
        description="Seconds that a request has to finish if it asks for none.",
        ge=0.001,
        le=86400,
        examples=[600],
    )
    default_ttft_timeout: float | None = Field(
        None,
        description="Seconds that a request has to its first token if it asks for none.",
        ge=0.001,
        le=86400,
        examples=[30],
    )
    max_timeout: float = Field(
        3600.0,
        description="Longest timeout in seconds that a request may ask for; longer is cut to it.",
        ge=0.001,
        le=86400,
    )
    send_timeout: float = Field(
        30.0, description="Seconds without reading anything after which a client is cut.", ge=0.001, le=86400
    )
    stall_limit: float = Field(
        60.0,
        description="Seconds without a step, although there is work, after which /livez fails. One engine of several "
        "counts as dead then, and is started again.",
        ge=0.001,
        le=86400,
    )
    timeline_size: int = Field(
        1000, description="Ended requests whose timeline is kept for /v1/requests/{id}/timeline.", ge=0, le=10**6
    )
    max_background_responses: int = Field(
        64,
        description="Most background responses of a tenant that wait or run at once; more are refused with 429.",
        ge=1,
        le=2**20,
    )
    response_store_bytes: ByteSize = Field(
        ByteSize(64 * MIB),
        description="Memory for the kept responses of a tenant (previous_response_id, GET /v1/responses/{id}), with "
        "their conversations, and for the events of background responses; 0: no response is kept.",
        ge=0,
        le=1024 * 1024 * MIB,
        examples=["64MiB"],
    )
    max_body_bytes: ByteSize | None = Field(
        None,
        description="Largest request body. Default: 4 MiB, and 64 bytes for each token of the context.",
        ge=1024,
        le=1024 * MIB,
        examples=["16MiB"],
    )
    body_timeout: float = Field(
        30.0,
        description="Seconds that a client has to send its request's body, and before that the head.",
        ge=0.001,
        le=86400,
    )
    max_connections: int | None = Field(
        None,
        description="Most connections at once; when there are more, the one idle for longest is closed, and only if "
        "none is idle the new one refused. Default: what the limit of open files (ulimit -n) allows.",
        ge=1,
        le=2**20,
        examples=[1000],
    )
    max_connections_per_address: int | None = Field(
        None,
        description="Most connections from one address, of IPv6 from one /64. Default: no such limit, because behind a "
        "proxy all come from its address.",
        ge=1,
        le=2**20,
        examples=[100],
    )
    sse_keep_alive: float = Field(
        10.0, description="Seconds of silence on a stream after which a comment is sent; 0: never.", ge=0, le=3600
    )

    # What it tells about itself.
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severity that is logged."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: readable lines in a terminal, JSON elsewhere."
    )
    log_requests: bool = Field(True, description="One line per request, without its text.")
    metrics_prefix: str = Field(
        "vllm:",
        description="Begins the metrics' names; the default is what dashboards and autoscalers look for.",
        pattern=r"^([a-zA-Z_:][a-zA-Z0-9_:]*)?$",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="OTLP/HTTP collector that gets a trace per request; OTEL_TRACES_SAMPLER samples them. Needs the "
        "extra otel: pip install '.[otel]' in a clone.",
        pattern=r"^https?://",
        examples=["http://127.0.0.1:4318/v1/traces"],
    )
    trace_messages: bool = Field(False, description="Traces have the text of prompts and answers, some of each.")

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that clients may ask for; the first is the one in responses. A local path shows only its last part."""
        if self.served_model_name:
            return tuple(dict.fromkeys(self.served_model_name))
        path = Path(self.model).expanduser()
        if path.suffix == ".gguf":
            return (path.stem,)
        return (path.resolve().name,) if path.is_dir() else (self.model,)

    @property
    def num_ranks(self) -> int:
        """Of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_rank_processes(self) -> bool:
        """Whether an engine computes in processes of its own, which may be lost."""
        return self.num_ranks > 1 or self.executor in ("mp", "ray")

    @property
    def engines_start_again(self) -> bool:
        """Whether an engine that ends is followed by another. Else the server ends with it."""
        return self.data_parallel_size > 1 or self.has_rank_processes

    @property
    def has_engine_processes(self) -> bool:
        """Whether its engines run outside of the server's process."""
        return self.engine == "process" or self.engines_start_again

    @field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false of a TOML file where a number is wanted: pydantic would read them as 1 and 0."""
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("true or false where neither is allowed")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        check_together(self)
        return self

    def without_secrets(self) -> dict[str, Any]:
        """Plain data for another process of this server, from which it makes its `Settings`."""
        secrets = {name for name, field in Settings.model_fields.items() if is_secret(field)}
        return self.model_dump(mode="json", exclude=secrets)

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **others: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # `load_settings` reads the sources, in the open and in order; constructing a Settings reads none.
        return (init_settings,)
