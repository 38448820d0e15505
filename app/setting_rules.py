"""What settings must be together. Imported by `app.settings`, which checks each alone."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.settings import Settings


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
