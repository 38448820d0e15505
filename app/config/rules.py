"""The rules between settings. `Settings` checks each setting alone, and imports this file; so it is `Any` here."""

from __future__ import annotations

import re
from typing import Any

from gpu.host import cuda_devices, has_torch

# On CUDA, a step of hundreds of tokens takes about as long as a step of a few. The engine gets a process of its own,
# because in the server's process the thread that launches kernels would often wait for the interpreter's lock.
DEFAULTS_ON_CUDA: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "engine": "process"}


def defaults_of_device(settings: Any) -> dict[str, Any]:
    """Return the defaults that differ on this machine's device, for settings that the user did not set. The default of
    `max_num_seqs` is never above a `max_num_batched_tokens` that the user set."""
    if settings.device in ("cpu", "simulated") or not cuda_devices() or not has_torch():
        return {}
    chosen = {name: value for name, value in DEFAULTS_ON_CUDA.items() if name not in settings.model_fields_set}
    if "max_num_seqs" in chosen and "max_num_batched_tokens" not in chosen:
        chosen["max_num_seqs"] = min(chosen["max_num_seqs"], settings.max_num_batched_tokens)
    return chosen


def check_together(settings: Any) -> None:
    """Raise a ValueError that names the settings that exclude each other, and values that work."""
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
    if settings.gguf_file is not None and ":" in settings.model:
        raise ValueError(
            f"gguf_file ({settings.gguf_file}) names a file of model, which names a quantization already "
            f"({settings.model}). What works: model = {settings.model.partition(':')[0]}, or no gguf_file"
        )
    _check_hosts(settings)
    _check_doors(settings)
    _check_tiers(settings)
    _check_ranks(settings)


def _check_hosts(settings: Any) -> None:
    for name in settings.allowed_hosts:
        if name != "*" and not re.fullmatch(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*", name):  # no Host header would match
            raise ValueError(
                f"allowed_hosts: got {name!r}; allowed: names of hosts, without scheme, port, path or pattern, or * "
                "for every host. A value that works: llm.example.com"
            )


# As browsers write an origin: hosts are in ASCII, and the scheme's usual port is left out.
_USUAL_PORT = "http://.*:80$|https://.*:443$"
_ORIGIN = re.compile(rf"(?i:(?!{_USUAL_PORT})[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d{{1,5}})?)")


def _check_doors(settings: Any) -> None:
    for origin in settings.allowed_origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"allowed_origins: got {origin!r}; allowed: scheme, host and port as browsers send them in Origin, "
                "without a path, a pattern or the scheme's usual port, or * for every page. A value that works: "
                "https://chat.example.com"
            )
    if settings.uds is not None and settings.reuse_port:
        raise ValueError(
            "reuse_port shares a port, and uds is a Unix socket, which one server has. What works: one of the two"
        )


def _check_tiers(settings: Any) -> None:
    keeps_blocks = settings.kv_cache_dir is not None or settings.kv_cache_ram
    if keeps_blocks and not settings.enable_prefix_caching:
        raise ValueError(
            "kv_cache_dir and kv_cache_ram need the prefix cache, and enable_prefix_caching is false. "
            "What works: enable_prefix_caching = true, or neither kv_cache_dir nor kv_cache_ram"
        )
    if keeps_blocks and settings.has_rank_processes:
        raise ValueError(
            "kv_cache_dir and kv_cache_ram need an engine without rank processes, and these settings ask for "
            f"{settings.num_ranks}. What works: executor = uni with tensor_parallel_size = 1 and "
            "pipeline_parallel_size = 1, or neither kv_cache_dir nor kv_cache_ram"
        )
    default = type(settings).model_fields["kv_cache_dir_size"].default
    if settings.kv_cache_dir is None and settings.kv_cache_dir_size != default:
        raise ValueError(
            f"kv_cache_dir_size ({settings.kv_cache_dir_size.human_readable()}) limits kv_cache_dir, which is not set. "
            "What works: kv_cache_dir = /var/cache/headrace/kv, or kv_cache_dir_size unset"
        )


def _check_ranks(settings: Any) -> None:
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
