"""Every setting, defined once: type, range, default, description.

1. The same fields make environment variables (`HEADRACE_MAX_NUM_SEQS`), keys of a TOML file (`max_num_seqs`) and flags
   (`--max-num-seqs`).
2. Only `app.config.sources` reads them. All other code gets a `Settings`, which is frozen. Secrets are never shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from app.config.rules import check_together, defaults_of_device
from app.config.setting_types import Keys, StringList, Tables, UserPath, is_secret, spelled
from engine.errors import HeadraceError
from protocol.syntax.reasoning import ReasoningParser, ToolParser

ENV_PREFIX = "HEADRACE_"
MIB = 2**20


class SettingsError(HeadraceError):
    """The server cannot start with its settings. The message has a line for each wrong setting."""


class Settings(BaseModel):
    """The settings of one server. Immutable; `model_copy(update=...)` makes a variant."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), validate_default=True)

    # The model.
    model: str = Field(
        "smollm2-135m-instruct",
        description="Model to serve: the embedded model's alias, a .gguf file, a Hugging Face directory, or a hub id, "
        "as org/name, org/name:Q4_K_M for a GGUF file, and @REVISION behind either.",
        min_length=1,
    )
    gguf_file: str | None = Field(
        None,
        description="GGUF file of the hub's repository or the directory to serve; of a split file, any part. "
        "Default: the one with the quantization in the model's name, else Q4_K_M if there is one.",
        min_length=1,
        examples=["Qwen3-8B-Q6_K.gguf"],
    )
    served_model_name: StringList = Field(
        (),
        description="Model names that clients may ask for, comma separated (as a flag also with blanks). Answers have "
        "the requested name, metrics and traces the first. Default: the model's.",
        examples=["my-model"],
    )
    check_model_name: bool = Field(
        True, description="Refuse requests for a model name that is not served; otherwise any name gets the model."
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto: the model's weights. dummy: random weights from its configuration, for benchmarks."
    )
    model_impl: Literal["auto", "headrace", "transformers"] = Field(
        "auto",
        description="What computes the model. transformers: that library, slowly. auto: that library if the model is "
        "unknown here, and Headrace otherwise.",
    )
    cache_dir: UserPath | None = Field(
        None,
        description="Folder of the embedded model and of measured step costs; models of the hub are in HF_HOME. "
        "Default: headrace in the user's cache folder.",
        examples=["/var/cache/headrace"],
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], spelled(half="float16", float="float32")] = (
        Field("auto", description="Type of weights and activations. auto: chosen by model and device.")
    )
    quantization: Literal["none", "int8", "int4"] = Field(
        "none",
        description="Quantization of weights of 16 or 32 bits when they are loaded on a CPU, in blocks of 32 with a "
        "scale each. The error is logged. none: 16 bits.",
    )
    tool_parser: ToolParser = Field(
        "auto",
        description="Syntax of the model's tool calls. auto: that of its chat template; calls of an unknown one stay "
        "text, and a template without tools gets them described in the prompt. none: an answer has calls only if its "
        "request demands one.",
    )
    reasoning_parser: ReasoningParser = Field(
        "auto",
        description="Tags around the model's reasoning. auto: those in its chat template. "
        "think: <think>. none: reasoning is part of the answer.",
    )
    chat_template: UserPath | None = Field(
        None,
        description="File of a Jinja chat template that replaces the model's own.",
        examples=["/etc/headrace/template.jinja"],
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one, else cpu.")
    seed: int = Field(0, description="Seed of dummy weights, and of requests without a seed.", ge=0, le=2**63 - 1)

    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="Sampling of requests that set none. model: its authors' recommendation, of generation_config.json "
        "or the GGUF file. openai: temperature 1, top_p 1, nothing else.",
    )

    # The engine.
    engine: Literal["thread", "process"] = Field(
        "thread",
        description="Where the engine runs: in a thread of the server, or in its own process. Several engines or ranks "
        "always have processes. Default on CUDA: process.",
    )
    data_parallel_size: int = Field(
        1, description="Engines that share the requests, each with all weights and its own KV cache.", ge=1, le=64
    )
    max_data_parallel_size: int | None = Field(
        None,
        description="On Ray: the largest number of engines, under load. Default: data_parallel_size.",
        ge=1,
        le=64,
        examples=[1],
    )
    tensor_parallel_size: int = Field(
        1, description="Ranks (processes; on CUDA devices) that share each layer of an engine.", ge=1, le=64
    )
    pipeline_parallel_size: int = Field(
        1, description="Stages, each of tensor_parallel_size ranks, that share the layers of an engine.", ge=1, le=64
    )
    enable_expert_parallel: bool = Field(
        False,
        description="Give each rank of a layer whole experts instead of a part of each. On the CPU path they always "
        "have whole experts.",
    )
    executor: Literal["auto", "uni", "mp", "ray"] = Field(
        "auto",
        description="Where the model runs. uni: in the engine. mp: in processes on this machine. ray: in actors on a "
        "Ray cluster. auto: uni, or mp if tensor_parallel_size or pipeline_parallel_size is above 1.",
    )
    max_model_len: int | None = Field(
        None, description="Longest prompt plus output, in tokens. Default: the model's limit.", ge=1, examples=[2048]
    )
    max_num_seqs: int = Field(
        64, description="Limit of requests that run at once. Default on CUDA: 256.", ge=1, le=65536
    )
    max_num_batched_tokens: int = Field(
        512,
        description="Token budget of one step: limits how much a long prompt delays running streams. Default on CUDA: "
        "2048.",
        ge=1,
        le=2**20,
    )
    pipeline_depth: int | None = Field(
        None,
        description="Steps in flight; with 2 a step is planned while another runs. Default: 2 on CUDA, else 1.",
        ge=1,
        le=2,
        examples=[1],
    )
    target_inter_token_latency: float = Field(
        0.08,
        description="Target for the seconds between two tokens of a stream: it limits prefill in mixed steps.",
        ge=0.001,
        le=60,
    )
    block_size: int = Field(16, description="Tokens per KV block.", ge=1, le=1024)
    kv_cache_memory: ByteSize | None = Field(
        None,
        description="Memory for the KV cache of one engine, for example 2GiB. Default: on a CPU a quarter of the free "
        "memory, at most 4GiB; on CUDA the rest of gpu_memory_utilization.",
        ge=MIB,
        examples=["2GiB"],
    )
    kv_cache_dtype: Annotated[Literal["auto", "fp8", "int8"], spelled(fp8_e4m3="fp8")] = Field(
        "auto",
        description="Type of keys and values in the KV cache. auto: as activations. fp8 (E4M3, on CUDA devices "
        "since Ada and Hopper) and int8 (on CPUs): 8 bits, for about twice the tokens in the same memory.",
    )
    kv_cache_dir: UserPath | None = Field(
        None,
        description="Directory that keeps KV blocks of prompts across restarts; engines may share it. Default: none.",
        examples=["/var/cache/headrace/kv"],
    )
    kv_cache_dir_size: ByteSize = Field(
        ByteSize(8 * 1024 * MIB),
        description="Limit of bytes in kv_cache_dir, for all models and engines together.",
        ge=16 * MIB,
        examples=["8GiB"],
    )
    kv_cache_ram: ByteSize = Field(
        ByteSize(0),
        description="Host memory for KV blocks that a GPU evicts; 0: none. Not for CPUs.",
        ge=0,
        examples=["16GiB"],
    )
    gpu_memory_utilization: float = Field(
        0.9, description="Share of a CUDA device's memory to fill, unless kv_cache_memory is set.", gt=0, le=1
    )
    enable_prefix_caching: bool = Field(True, description="Reuse the KV blocks of prompts that begin alike.")
    state_checkpoint_interval: int = Field(
        1024, description="Tokens between two checkpoints of a state, in models with linear attention.", ge=1, le=2**24
    )
    state_checkpoint_share: float = Field(
        0.2, description="Share of KV memory for checkpoints of states, in models with linear attention.", ge=0, le=0.9
    )
    num_threads: int | None = Field(
        None,
        description="Threads for computing on a CPU, per engine; on CUDA, up to 8 of them compile kernels at the "
        "start. Default: one per core, shared by the engines.",
        ge=1,
        le=4096,
        examples=[2],
    )

    # Several models.
    models: Tables = Field(
        {},
        description="Several models in one server, each loaded at its first request. In a TOML file a table for each, "
        "[models.NAME], with its model and settings; elsewhere JSON or a comma-separated list. Or repeat --model.",
        examples=["smollm2-135m-instruct,Qwen/Qwen3-0.6B"],
    )
    models_dir: UserPath | None = Field(
        None,
        description="Folder whose GGUF files and checkpoint folders are models of this server, by their names. It is "
        "read again for /v1/models and at SIGHUP.",
        examples=["/srv/models"],
    )
    memory: ByteSize | None = Field(
        None,
        description="Memory for several models together: weights, KV caches and engines. In a model's table, for that "
        "model: its KV cache takes what is left. Default: 80 % of the machine's or container's.",
        ge=64 * MIB,
        examples=["16GiB"],
    )
    pinned: bool = Field(
        False, description="Of several models: load at the start and never unload. Usually in a model's table."
    )
    idle_unload: float = Field(
        0.0, description="Of several models: seconds without a request until one is unloaded; 0: never.", ge=0, le=10**7
    )

    # The server.
    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface.", min_length=1)
    port: int = Field(8000, description="Port to listen on; 0 picks a free one.", ge=0, le=65535)
    reuse_port: bool = Field(
        False,
        description="Share the port with other servers (SO_REUSEPORT, on Linux). It is opened when the model is loaded "
        "and closed when the drain begins, without loss of connections.",
    )
    uds: UserPath | None = Field(
        None,
        description="Unix socket to listen on instead of host and port. A file left by an ended server is replaced.",
        examples=["/run/headrace/headrace.sock"],
    )
    uds_mode: str = Field("660", description="Permissions of the Unix socket, in octal.", pattern=r"^0?[0-7]{3}$")
    ssl_certfile: UserPath | None = Field(
        None,
        description="PEM file of the certificate, its chain and perhaps its key, for HTTPS (TLS 1.2 or newer). It is "
        "read again at SIGHUP.",
        examples=["/etc/headrace/tls.crt"],
    )
    ssl_keyfile: UserPath | None = Field(
        None,
        description="PEM file of the certificate's private key, without a passphrase.",
        examples=["/etc/headrace/tls.key"],
    )
    allowed_origins: StringList = Field(
        (),
        description="Origins of web pages that may call the API from a browser and read its answers (CORS), comma "
        "separated; *: any. Default: none.",
        examples=["https://chat.example.com"],
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
        30.0, description="Seconds in which requests in flight may finish after SIGTERM.", ge=0, le=86400
    )
    api_keys: Keys = Field(
        (),
        description="API keys of clients, comma separated; none: no key is required. Flags show in process lists: set "
        "HEADRACE_API_KEYS or the file instead.",
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
        description="Seconds in which a chat template that Headrace does not know must render a conversation.",
        ge=0.1,
        le=3600,
    )
    admin_keys: Keys = Field(
        (),
        description="Keys for administrators' routes such as /server_info and /abort_requests, comma separated; "
        "none: no such routes. They are not valid for other routes.",
        validate_default=False,
        examples=["admin-key-one"],
    )
    enable_tokenizer_info_endpoint: bool = Field(
        False, description="Serve /tokenizer_info: the tokenizer's configuration and the chat template."
    )
    embedding_pooling: Literal["mean", "last", "cls", "weighted_mean"] | None = Field(
        None,
        description="How /v1/embeddings pools hidden states unless a request asks otherwise. Default: as in the "
        "model's files (modules.json, pooling_type of a GGUF file), or else mean. cls and weighted_mean need an "
        "encoder.",
        examples=["mean"],
    )
    max_queued_requests: int = Field(
        512,
        description="Limit of choices that wait for their first token; more are refused with 429. Half of the places "
        "are reserved for tenants by weight, at least one each; the rest is first come, first served.",
        ge=1,
        le=2**20,
    )
    max_queued_tokens: int = Field(
        2**20,
        description="Limit of prompt tokens that wait; a request that would exceed it is refused, unless its tenant "
        "has no other that waits. Half of them are reserved for tenants by weight.",
        ge=1,
        le=2**31,
    )
    max_queue_time: float = Field(
        30.0, description="Seconds of expected queueing beyond which a request is refused; 0: none.", ge=0, le=86400
    )
    default_timeout: float | None = Field(
        None, description="Timeout in seconds of requests that set none.", ge=0.001, le=86400, examples=[600]
    )
    default_ttft_timeout: float | None = Field(
        None,
        description="Timeout in seconds until the first token, for requests that set none.",
        ge=0.001,
        le=86400,
        examples=[30],
    )
    max_timeout: float = Field(
        3600.0,
        description="Longest timeout in seconds of a request; longer timeouts are reduced to it.",
        ge=0.001,
        le=86400,
    )
    send_timeout: float = Field(
        30.0, description="Seconds after which a client that does not read is disconnected.", ge=0.001, le=86400
    )
    stall_limit: float = Field(
        60.0,
        description="Seconds without a step, although there is work, after which /livez fails. One of several engines "
        "counts as dead then, and is restarted.",
        ge=0.001,
        le=86400,
    )
    timeline_size: int = Field(
        1000, description="Timelines of ended requests to keep for /v1/requests/{id}/timeline.", ge=0, le=10**6
    )
    max_background_responses: int = Field(
        64,
        description="Limit of a tenant's background responses that wait or run; more are refused with 429.",
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
    files_dir: UserPath | None = Field(
        None,
        description="Folder of clients' files and batches (/v1/files, /v1/batches). Default: none, and no such routes.",
        examples=["/var/lib/headrace/files"],
    )
    files_max_age: int = Field(2_592_000, description="Seconds for which files are kept.", ge=1, le=2**31)
    files_bytes_per_tenant: ByteSize = Field(ByteSize(2048 * MIB), description="Limit of a tenant's files.", ge=MIB)
    max_file_bytes: ByteSize = Field(ByteSize(200_000_000), description="Largest uploaded file.", ge=1024)
    max_batch_rows: int = Field(16, description="Limit of batches' rows that are answered at once.", ge=1, le=4096)
    max_body_bytes: ByteSize | None = Field(
        None,
        description="Largest request body. Default: 4 MiB, and 64 bytes for each token of the context.",
        ge=1024,
        le=1024 * MIB,
        examples=["16MiB"],
    )
    body_timeout: float = Field(
        30.0, description="Seconds in which a client must send a request's head, and then its body.", ge=0.001, le=86400
    )
    max_connections: int | None = Field(
        None,
        description="Limit of connections. At the limit, a new one replaces the one that is idle for longest, or is "
        "refused if none is idle. Default: what the limit of open files (ulimit -n) allows.",
        ge=1,
        le=2**20,
        examples=[1000],
    )
    max_connections_per_address: int | None = Field(
        None,
        description="Limit of connections from one address, for IPv6 from one /64. Default: none, because behind a "
        "proxy all come from its address.",
        ge=1,
        le=2**20,
        examples=[100],
    )
    sse_keep_alive: float = Field(
        10.0, description="Seconds without data on a stream until a comment is sent; 0: never.", ge=0, le=3600
    )

    # Logs, metrics and traces.
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severity that is logged."
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: readable lines in a terminal, JSON elsewhere."
    )
    log_requests: bool = Field(True, description="One line per request, without its text.")
    metrics_prefix: str = Field(
        "vllm:",
        description="Prefix of the metrics' names; dashboards and autoscalers look for the default.",
        pattern=r"^([a-zA-Z_:][a-zA-Z0-9_:]*)?$",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="OTLP/HTTP collector that gets a trace per request; OTEL_TRACES_SAMPLER samples them. Needs the "
        "extra otel: pip install '.[otel]' in a clone.",
        pattern=r"^https?://",
        examples=["http://127.0.0.1:4318/v1/traces"],
    )
    trace_messages: bool = Field(False, description="Add the text of prompts and answers to traces, truncated.")

    @property
    def model_source(self) -> str:
        """The argument of `gpu.checkpoint.open_model`: the model with its `gguf_file`."""
        if self.gguf_file is None:
            return self.model
        if (folder := Path(self.model).expanduser()).is_dir():
            return str(folder / self.gguf_file)
        repo, at, revision = self.model.partition("@")
        return f"{repo}:{self.gguf_file}{at}{revision}"

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that clients may ask for; the first is the default. A local path shows only its last part."""
        if self.served_model_name:
            return tuple(dict.fromkeys(self.served_model_name))
        path = Path(self.model).expanduser()
        if path.suffix.lower() == ".gguf":
            return (path.stem,)
        return (path.resolve().name,) if path.is_dir() else (self.model,)

    @property
    def has_several_models(self) -> bool:
        """True if models are loaded and unloaded as requests ask for them; False for one that stays."""
        return bool(self.models) or self.models_dir is not None

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def has_rank_processes(self) -> bool:
        """True if an engine has rank processes, any of which may end."""
        return self.num_ranks > 1 or self.executor in ("mp", "ray")

    @property
    def engines_start_again(self) -> bool:
        """True if an engine that ends is restarted; otherwise the server ends with it."""
        return self.data_parallel_size > 1 or self.has_rank_processes

    @property
    def has_engine_processes(self) -> bool:
        """True if the engines run outside the server's process."""
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
        self.__dict__.update(defaults_of_device(self))  # not in `model_fields_set`: the user did not set them
        check_together(self)
        return self

    def without_secrets(self) -> dict[str, Any]:
        """Return plain data from which another process of this server makes its `Settings`."""
        secrets = {name for name, field in Settings.model_fields.items() if is_secret(field)}
        return self.model_dump(mode="json", exclude=secrets)
