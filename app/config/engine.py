"""The engine's configuration and its public description, made from settings and a model.

An `engine` here is an executor, an `EngineReady` or a `Machine` of the simulator.
"""

from __future__ import annotations

from typing import Any

from app.config.settings import Settings
from engine.config import EngineConfig
from engine.messages import FACTS_OF_PLANS

# The settings that /server_info shows: no secrets, no paths, no addresses.
SHOWN_SETTINGS = (
    *("load_format", "dtype", "quantization", "device", "seed", "engine", "data_parallel_size", "max_model_len"),
    *("max_data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel", "executor"),
    *("max_num_seqs", "max_num_batched_tokens", "target_inter_token_latency", "block_size", "kv_cache_memory"),
    *("num_threads", "gpu_memory_utilization", "sampling_defaults", "enable_prefix_caching", "pipeline_depth"),
    *("kv_cache_dtype", "state_checkpoint_interval", "state_checkpoint_share"),
    *("max_queue_time", "max_queued_requests", "max_queued_tokens", "default_timeout", "default_ttft_timeout"),
    *("max_timeout", "max_body_bytes", "embedding_pooling", "template_kwargs", "worker_class", "model_impl"),
)


def engine_config(settings: Settings, engine: Any, **more: Any) -> EngineConfig:
    """Return the configuration of an engine's core. `more` are fields that come from neither settings nor engine."""
    depth = settings.pipeline_depth or engine.pipeline_depth
    batched, is_encoder = settings.max_num_batched_tokens, engine.facts.is_encoder
    return EngineConfig(
        max_model_len=engine.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(batched, engine.max_model_len) if is_encoder else batched,
        target_inter_token_latency=settings.target_inter_token_latency,
        enable_prefix_caching=settings.enable_prefix_caching and not is_encoder,
        state_checkpoint_interval=settings.state_checkpoint_interval,
        facts=engine.facts,
        pipeline_depth=max(depth, settings.pipeline_parallel_size),
        num_stages=settings.pipeline_parallel_size,
        **more,
    )


def describe(engine: Any, settings: Settings) -> dict[str, Any]:
    """Return the description of an engine, as JSON. With its step costs it is all that a simulation needs."""
    return {
        "models": list(settings.model_names),
        "max_model_len": engine.max_model_len,
        "kv_cache": {
            "num_blocks": engine.num_blocks,
            "block_size": engine.block_size,
            **{name: getattr(engine.facts, name) for name in FACTS_OF_PLANS},
        },
        "pipeline_depth": engine.pipeline_depth,
        "settings": {name: getattr(settings, name) for name in SHOWN_SETTINGS}
        | {"engine": "process" if settings.has_engine_processes else "thread"},
    }
