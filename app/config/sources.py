"""The sources of settings, and the messages for wrong ones.

1. The first source that has a setting wins, in the order flag, environment, file, default.
2. Unknown names are refused in all sources.
3. A `SettingsError` names the setting and its source, the value, the allowed values and a value that works. Secrets are
   never shown.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import ByteSize, ValidationError
from pydantic.fields import FieldInfo

from app.config.setting_types import has_password, is_secret, without_none
from app.config.settings import ENV_PREFIX, Settings, SettingsError
from app.config.several import check_models

CONFIG_VARIABLE = "HEADRACE_CONFIG"


def load_settings(
    flags: Mapping[str, Any] | None = None,
    config_file: Path | None = None,
    *,
    spelled: Callable[[str], str] | None = None,
) -> Settings:
    """Return the settings from flags, environment and file, as `given_settings` reads them. Raises `SettingsError`."""
    return check_settings(given_settings(flags, config_file, spelled=spelled))


class Given(NamedTuple):
    """The value of a setting and its source."""

    value: Any
    where: str  # as the user wrote it: --port, HEADRACE_PORT, port in headrace.toml


def given_settings(
    flags: Mapping[str, Any] | None = None,
    config_file: Path | None = None,
    *,
    spelled: Callable[[str], str] | None = None,
) -> dict[str, Given]:
    """Return the values from flags, environment and file by setting. `flags` are texts by field name; errors name them
    `spelled(name)`, by default as on the command line.

    `config_file` is `--config`; without it the file in `HEADRACE_CONFIG` is read, if any. Raises `SettingsError`.
    """
    if config_file is None and (named := os.environ.get(CONFIG_VARIABLE)):
        config_file = Path(named)
    given = _from_file(config_file) | _from_environment()
    spelled = spelled or flag_name
    return given | {name: Given(value, spelled(name)) for name, value in (flags or {}).items()}


def check_settings(given: Mapping[str, Given]) -> Settings:
    """Make `Settings` of values. Raises a `SettingsError` with a line for each wrong one."""
    try:
        return check_models(Settings(**{name: entry.value for name, entry in given.items()}))
    except ValidationError as error:
        # `from None`, because pydantic's message shows values, which may be keys.
        raise SettingsError("\n".join(_explain(problem, given) for problem in error.errors())) from None


def env_name(field_name: str) -> str:
    """Return the environment variable of a setting: ``HEADRACE_MAX_NUM_SEQS`` for ``max_num_seqs``."""
    return ENV_PREFIX + field_name.upper()


def flag_name(field_name: str) -> str:
    """Return the flag of a setting: ``--max-num-seqs`` for ``max_num_seqs``."""
    return "--" + field_name.replace("_", "-")


def allowed_values(field: FieldInfo) -> str:
    """Return the allowed values of a setting in words: ``"1 to 65535"``, ``"auto, cpu or cuda"``."""
    annotation = without_none(field.annotation)
    if get_origin(annotation) is Literal:
        *first, last = get_args(annotation)
        return f"{', '.join(first)} or {last}"
    low = next((m.ge for m in field.metadata if isinstance(m, Ge)), None)
    high = next((m.le for m in field.metadata if isinstance(m, Le)), None)
    if annotation is bool:
        return "true or false"
    if annotation is ByteSize:
        bounds = " to ".join(ByteSize(int(str(b))).human_readable() for b in (low, high) if b is not None)
        return f"a size such as 2GiB, {bounds if high is not None else f'at least {bounds}'}"
    if annotation in (int, float):
        kind = "a whole number" if annotation is int else "a number"
        above = next((m.gt for m in field.metadata if isinstance(m, Gt)), None)
        if above is not None:
            return f"{kind} above {above}, at most {high}"
        return f"{kind}, {low} to {high}" if high is not None else f"{kind}, at least {low}"
    pattern = next((m.pattern for m in field.metadata if getattr(m, "pattern", None)), None)
    if pattern:
        return f"text that matches {pattern}"
    if is_secret(field):
        return "one or more keys, comma-separated or a JSON array, none of them empty or with blanks around it"
    if get_origin(annotation) is dict:
        return "a table for each model, JSON, or a comma-separated list of models"
    return "a comma-separated list or a JSON array" if get_origin(annotation) is tuple else "text that is not empty"


def working_value(field: FieldInfo) -> str:
    """Return a value that works, as a user would type it."""
    return shown(field.examples[0] if field.examples else field.default)


def shown(value: object) -> str:
    """Return a setting's value as a user would type it: ``"true"``, ``"16.0MiB"``."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(shown, value))
    return value.human_readable() if isinstance(value, ByteSize) else str(value)


def _from_file(path: Path | None) -> dict[str, Given]:
    if path is None:
        return {}
    try:
        values = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(
            f"Cannot read the settings file {path}: {error.strerror}. Name one that exists, or leave out --config."
        ) from error
    except (ValueError, RecursionError) as error:  # also from large numbers and deeply nested lists
        raise SettingsError(f"The settings file {path} is not TOML: {error}. A line that works: port = 8000") from error
    fields = Settings.model_fields
    if problems := [f"{path}: {unknown_setting(name, fields)}" for name in values if name not in fields]:
        raise SettingsError("\n".join(problems))
    return {name: Given(value, f"{name} in {path}") for name, value in values.items()}


# Kubernetes sets variables for every Service in the pods' environment: for a Service named "headrace", HEADRACE_PORT,
# HEADRACE_SERVICE_HOST and more. They are no settings.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT_\d+_(TCP|UDP)(_.+)?)$")
_LINK_OF_A_PORT = re.compile(r"\w+_PORT=(tcp|udp|sctp)://")


def _from_environment() -> dict[str, Given]:
    variables = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(ENV_PREFIX)
        and name != CONFIG_VARIABLE
        and not _SERVICE_LINK.search(name)
        and not _LINK_OF_A_PORT.match(f"{name}={value}")
    }
    known = {env_name(name): name for name in Settings.model_fields}
    if problems := [unknown_setting(name, known) for name in variables if name not in known]:
        raise SettingsError("\n".join(problems))
    given = [name for name in Settings.model_fields if variables.get(env_name(name))]  # empty means "not set"
    return {name: Given(variables[env_name(name)], env_name(name)) for name in given}


def unknown_setting(name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown setting."""
    return f"there is no setting {name!r}. {_meant(name, known) or '`headrace serve --help` lists the settings.'}"


def unknown_flag(name: str, known: Iterable[str], program: str) -> str:
    """Return the message for an unknown flag; `program --help` lists the known ones."""
    if not name.startswith("-"):
        return f"{name!r} is not a flag. Only the model is given without a flag: {program} MODEL"
    return f"there is no setting {name!r}. {_meant(name, known) or f'`{program} --help` lists the flags.'}"


# vLLM's settings: the name in Headrace, or, with blanks, what to do instead. Those without either ("") are no mistyped
# names of others.
_OF_VLLM = {
    "enforce_eager": "Leave it out: on CUDA, graphs of decode steps cannot be turned off.",
    **dict.fromkeys(
        ("compilation_config", "max_seq_len_to_capture", "cuda_graph_sizes", "max_capture_size"),
        "Leave it out: on CUDA the graphs follow max_num_seqs.",
    ),
    "enable_chunked_prefill": "Leave it out: prefill is always chunked. max_num_batched_tokens and "
    "target_inter_token_latency limit the chunks.",
    "enable_auto_tool_choice": "Leave it out: tools need no setting. tool_parser names the syntax of unusual models.",
    "enable_reasoning": "Leave it out: reasoning needs no setting. reasoning_parser names its tags.",
    "trust_remote_code": "Leave it out: Headrace never runs code of a repository.",
    "disable_log_requests": "What works: --no-log-requests, or log_requests = false.",
    "enable_log_requests": "Leave it out: requests are logged, without their text.",
    "disable_log_stats": "Leave it out: the log has no figures; they are at /metrics.",
    "revision": "Write it behind the model: org/name@REVISION.",
    "hf_token": "What works: the environment variable HF_TOKEN.",
    "root_path": "Leave it out: routes are served at / and at /v1. A proxy may cut off a prefix.",
    "enable_ssl_refresh": "Leave it out: at SIGHUP the certificate is read again.",
    **dict.fromkeys(
        ("tokenizer", "tokenizer_mode", "skip_tokenizer_init"),
        "Leave it out: the model's own tokenizer is used, from tokenizer.json or the GGUF file.",
    ),
    **dict.fromkeys(
        ("runner", "task", "convert"), "Leave it out: the model's files say whether it generates, embeds or scores."
    ),
    **dict.fromkeys(
        ("enable_lora", "lora_modules", "max_loras", "max_lora_rank"),
        "Adapters (LoRA) are not served. What works: a model into which the adapter was merged.",
    ),
    **dict.fromkeys(
        ("speculative_config", "speculative_model", "num_speculative_tokens"), "Speculative decoding is not supported."
    ),
    **dict.fromkeys(
        ("guided_decoding_backend", "structured_outputs_config"), "Leave it out: there is one engine of grammars."
    ),
    **dict.fromkeys(
        ("rope_scaling", "rope_theta", "hf_overrides"), "What works: the changed value in the model's config.json."
    ),
    "cpu_offload_gb": "Weights are not offloaded. What works: a smaller quantization, or more devices.",
    "scheduling_policy": "Leave it out: requests with a lower priority field run first.",
    "max_logprobs": "Leave it out: a request gets at most 20 per token, or all with -1.",
    "distributed_executor_backend": "executor",
    "num_gpu_blocks_override": "kv_cache_memory",
    "async_scheduling": "pipeline_depth",
    "download_dir": "cache_dir",
    "uvicorn_log_level": "log_level",
    "otlp_traces_endpoint": "otlp_endpoint",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "kv_offloading_size": "kv_cache_ram",
    "swap_space": "kv_cache_ram",
    "tool_call_parser": "tool_parser",
    "default_chat_template_kwargs": "template_kwargs",
    "shutdown_timeout": "drain_timeout",
    "generation_config": "sampling_defaults",
    **dict.fromkeys(("headless", "response_role", "tool_server", "logits_processors", "worker_cls"), ""),
    **dict.fromkeys(("config_format", "max_log_len", "enable_server_load_tracking", "prefix_caching_hash_algo"), ""),
    # of version 0.1:
    **dict.fromkeys(("trace_names", "trace_sample_ratio", "response_store_age", "routes_without_v1"), ""),
    "response_store_size": "response_store_bytes",
}


def _meant(name: str, known: Iterable[str]) -> str:
    by_field = {_field_name(each): each for each in known}
    if (of_vllm := _OF_VLLM.get(_field_name(name).removeprefix("no_"))) is not None:
        return f"Did you mean {by_field[of_vllm]}?" if of_vllm in by_field else of_vllm if " " in of_vllm else ""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"Did you mean {nearest[0]}?" if nearest else ""


def _field_name(spelled: str) -> str:
    return spelled.removeprefix(ENV_PREFIX).removeprefix("--").replace("-", "_").lower()


def _explain(problem: Any, given: Mapping[str, Given]) -> str:
    if not problem["loc"]:  # a rule between settings, which has a complete message
        return str(problem["ctx"]["error"]) if "error" in problem.get("ctx", {}) else str(problem["msg"])
    name = str(problem["loc"][0])
    field = Settings.model_fields.get(name)
    if field is None:
        return unknown_setting(name, Settings.model_fields)
    entry = given[name]
    value = "a value that is not shown" if is_secret(field) or has_password(entry.value) else repr(entry.value)
    example = working_value(field)
    hint = ". Quantized files need none" if name == "quantization" else ""
    return f"{entry.where}: got {value}; allowed: {allowed_values(field)}. A value that works: {example}{hint}"
