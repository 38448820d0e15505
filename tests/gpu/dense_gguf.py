"""Writes GGUF files of the dense and hybrid families from checkpoints of transformers, as llama.cpp's converter lays
them out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tests.gpu.checkpoint_files import permute

ARCHITECTURES = {
    "ministral3": "mistral3",
    "phi3": "phi3",
    "granite": "granite",
    "granitemoehybrid": "granite",  # without Mamba and experts, else granitehybrid
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "glm4": "glm4",
    "qwen2_moe": "qwen2moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
}
GEMMA = {"gemma3n", "gemma4"}
DELTA_NETS = {"qwen3next", "qwen35", "qwen35moe"}
PERMUTED = {"mistral3", "granite", "granitehybrid", "smollm3"}
RENAMED = {"shared_mlp.output_linear": "mlp.down_proj", "e_score_correction_bias": "e_score_correction.bias"}


def write_gguf(
    path: Path,
    oracle: PreTrainedModel,
    *,
    squeezed: bool = False,
    kind: str = "F32",
    split: bool = True,
    tensors: Mapping[str, np.ndarray] | None = None,
    **metadata: Any,
) -> Path:
    """Write the file; `squeezed` as older converters did, without dimensions of 1. Matrices are of type `kind`.
    Without `split`, as older converters did, DeepSeek's matrix from latents and Qwen3-Next's projection to queries,
    keys, values and gates are whole. `tensors` are added. `metadata` replaces values by their keys; None leaves them
    out."""
    config = oracle.config
    config.allow_global_per_layer_attribute_access = True
    name = architecture_of(config)
    has_experts = name == "granitehybrid" and config.num_local_experts
    writer = gguf.GGUFWriter(str(path), name)
    _describe(writer, config)
    if hasattr(config, "kv_lora_rank"):
        _describe_latents(writer, config, split)
    if name in DELTA_NETS:
        _describe_delta_nets(writer, config)
    if name in GEMMA:
        _describe_gemma(writer, config)
    for key, value in metadata.items():
        written = writer.kv_data[0]
        if value is None:
            del written[f"{name}.{key}"]
        else:
            kept = written.get(f"{name}.{key}") or gguf.GGUFValue(value, gguf.GGUFValueType.get_type(value))
            kept.value = value
            written[f"{name}.{key}"] = kept
    architecture = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}[name]
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    experts: dict[str, list[np.ndarray]] = {}
    for given, tensor in revert_weight_conversion(oracle, oracle.state_dict()).items():
        in_hf, values, part = given, tensor.float().numpy(), given.split(".")[-2]
        if given == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name in PERMUTED and part in heads:
            values = permute(values, heads[part])
        if ".input_linear" in given:
            layer = given.split(".")[2]
            kind_of = "_exps" if "block_sparse_moe" in given else "_shexp" if has_experts else ""
            for each, rows in zip(("gate", "up"), np.split(values, 2, axis=-2), strict=True):
                writer.add_tensor(f"blk.{layer}.ffn_{each}{kind_of}.weight", np.ascontiguousarray(rows))
            continue
        if part == "kv_b_proj" and split:
            matrices = values.reshape(config.num_attention_heads, -1, values.shape[1])
            to_keys, to_values = np.split(matrices, [config.qk_nope_head_dim], 1)
            writer.add_tensor(_name(names, given.replace(part, "k_b_proj")), to_keys.swapaxes(1, 2).copy())
            writer.add_tensor(_name(names, given.replace(part, "v_b_proj")), to_values.copy())
            continue
        if not has_experts:
            for old, new in RENAMED.items():
                in_hf = in_hf.replace(old, new)
        if name in DELTA_NETS:
            if in_hf.endswith("norm.weight") and "linear_attn" not in in_hf:
                values = values + 1
            if part == "in_proj_qkvz" and split:
                for named, rows in _sorted_rows(values, config):
                    _add(writer, f"blk.{given.split('.')[2]}.{named}.weight", rows, kind)
                continue
            if name != "qwen3next":
                values = _tiled(given, values, config)
        if name in GEMMA and (found := _of_gemma(given)):
            if "{" in found:
                experts.setdefault(found, []).append(values)
            else:
                _add(writer, found, values, kind)
            continue
        in_hf, values = _of_states(in_hf, values)
        if ".experts.gate_up_proj" in in_hf:
            for each, rows in zip(("gate_proj", "up_proj"), np.split(values, 2, 1), strict=True):
                experts[in_hf.replace("gate_up_proj", f"{each}.weight")] = list(rows)
        elif ".experts.down_proj" in in_hf:
            experts[f"{in_hf.removesuffix('.weight')}.weight"] = list(values)
        elif ".experts." in in_hf:
            stem, expert = in_hf.split(".experts.")
            experts.setdefault(f"{stem}.experts.{expert.split('.', 1)[1]}", []).append(values)
        else:
            _add(writer, _name(names, in_hf), values.squeeze() if squeezed else values, kind)
    for added, values in (tensors or {}).items():
        writer.add_tensor(added, values)
    for in_hf, matrices in experts.items():
        if "{" in in_hf:
            writer.add_tensor(in_hf.replace("{}", "weight"), np.stack(matrices))
            continue
        merged = in_hf.removeprefix("model.") if "feed_forward" in in_hf else in_hf
        writer.add_tensor(_name(names, merged), np.stack(matrices))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    is_matrix = values.ndim == 2 and not name.endswith(("conv1d.weight", "norm.weight")) and values.shape[1] % 32 == 0
    quantized = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values), quantized), raw_dtype=quantized)


def _sorted_rows(values: np.ndarray, config: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the projection to queries, keys and values, and that to gates, of rows that come by key head."""
    keys, dim = config.linear_num_key_heads, config.linear_key_head_dim
    of_head = config.linear_num_value_heads // keys * config.linear_value_head_dim
    by_head = values.reshape(keys, -1, values.shape[1])
    *qkv, z = (each.reshape(-1, values.shape[1]) for each in np.split(by_head, np.cumsum([dim, dim, of_head]), 1))
    yield from (("attn_qkv", np.concatenate(qkv)), ("attn_gate", z))


def _tiled(name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """Return Qwen3.5's numbers of value heads with the first of every key head before the second of any."""
    keys, count = config.linear_num_key_heads, config.linear_num_value_heads
    heads = np.arange(count).reshape(keys, -1).T.ravel()
    channels = (heads[:, None] * config.linear_value_head_dim + np.arange(config.linear_value_head_dim)).ravel()
    before = 2 * keys * config.linear_key_head_dim
    if name.endswith(("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return values[heads]
    if name.endswith("in_proj_z.weight"):
        return values[channels]
    if name.endswith("linear_attn.out_proj.weight"):
        return values[:, channels]
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return values[[*range(before), *(before + channels)]]
    return values


def architecture_of(config: Any) -> str:
    is_hybrid = config.model_type == "granitemoehybrid" and "linear_attention" in config.layer_types
    return "granitehybrid" if is_hybrid else ARCHITECTURES[config.model_type]


def _of_states(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    if name.endswith("A_log"):
        return name, -np.exp(values)[:, None]
    if name.endswith(".D"):
        return name, values[:, None]
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return name, values.squeeze(1)
    if name.endswith("mamba.norm.weight"):
        return name, values[None]
    return name.replace("dt_bias", "dt_proj.bias").replace("expert_bias", "expert_bias.bias"), values


def _name(names: gguf.TensorNameMap, in_hf: str) -> str:
    found = names.get_name(in_hf, try_suffixes=(".weight", ".bias"))
    assert found is not None, in_hf
    return found


def _describe(writer: gguf.GGUFWriter, config: Any) -> None:
    values = config.to_dict()
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    inner = values.get("shared_intermediate_size", values.get("intermediate_size"))
    kv_heads = config.num_key_value_heads
    if architecture_of(config) == "granitehybrid":
        inner = config.intermediate_size
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_ssm_conv_kernel(config.mamba_d_conv)
        writer.add_ssm_state_size(config.mamba_d_state)
        writer.add_ssm_group_count(config.mamba_n_groups)
        writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
        writer.add_ssm_time_step_rank(config.mamba_n_heads)
    if config.model_type == "lfm2":
        inner = -(-(2 * config.intermediate_size // 3) // config.block_multiple_of) * config.block_multiple_of
        writer.add_shortconv_l_cache(config.conv_L_cache)
    if config.model_type == "lfm2_moe":
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if architecture_of(config) in ("granitehybrid", "lfm2", "lfm2moe"):
        kv_heads = [kv_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if inner is not None:
        writer.add_feed_forward_length(inner)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    if not hasattr(config, "kv_lora_rank"):
        writer.add_head_count_kv(kv_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(values.get("rms_norm_eps", values.get("norm_eps")))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * full.get("partial_rotary_factor", 1.0)))
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    if full["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        if "mscale_all_dim" in full and not hasattr(config, "kv_lora_rank"):
            writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"])
        if "llama_4_scaling_beta" in full:
            writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if full["rope_type"] == "longrope":
        original = full["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))))
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(full[f"{length}_factor"], dtype=np.float32))
    if values.get("sliding_window"):
        writer.add_sliding_window(values["sliding_window"])
    if config.model_type == "olmo3":
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if config.model_type == "granitemoehybrid":
        writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    if "attention_multiplier" in values:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if config.model_type in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text", "lfm2_moe"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        if config.model_type != "lfm2_moe":
            writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


_OF_GEMMA = {
    "layer_scalar": "layer_output_scale.weight",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    "experts.gate_up_proj": "ffn_gate_up_exps.weight",
    "experts.down_proj": "ffn_down_exps.weight",
    "altup.correct_output_scale": "altup_correct_scale.weight",
}


def _of_gemma(name: str) -> str | None:
    """Return the name of a tensor that converters of Gemma 3n and 4 treat apart, with {} if they stack it."""
    for stacked, in_gguf in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
        if stacked in name:
            return f"{in_gguf}.{{}}"
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_OF_GEMMA[rest]}" if rest in _OF_GEMMA else None


def _describe_gemma(writer: gguf.GGUFWriter, config: Any) -> None:
    values, kinds = config.to_dict(), config.layer_types
    windows = [kind == "sliding_attention" for kind in kinds]
    writer.add_sliding_window_pattern(windows)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    local = config.rope_parameters["sliding_attention"]["rope_theta"]
    writer.add_rope_freq_base_swa(local)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.model_type == "gemma3n_text":
        writer.add_altup_active_idx(config.altup_active_idx)
        writer.add_altup_num_inputs(config.altup_num_inputs)
        shares = torch.tensor(config.activation_sparsity_pattern)
        writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
        return
    of_full = values["per_layer_config"][str(kinds.index("full_attention"))]
    dim = of_full["head_dim"]
    written = writer.kv_data[0]
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        written[f"gemma4.{key}"].value = dim
    writer.add_rope_dimension_count_swa(config.head_dim)
    writer.add_key_length_swa(config.head_dim)
    writer.add_value_length_swa(config.head_dim)
    if config.use_double_wide_mlp:
        first, inner = config.num_hidden_layers - config.num_kv_shared_layers, config.intermediate_size
        del written["gemma4.feed_forward_length"]
        writer.add_feed_forward_length([inner if index < first else 2 * inner for index in range(len(kinds))])
    if "num_key_value_heads" in of_full:
        heads = config.num_key_value_heads, of_full["num_key_value_heads"]
        del written["gemma4.attention.head_count_kv"]
        writer.add_head_count_kv([heads[not has_window] for has_window in windows])
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    rotated = int(dim * config.rope_parameters["full_attention"].get("partial_rotary_factor", 1.0) / 2)
    divisors = np.array([1.0] * rotated + [1e30] * (dim // 2 - rotated), np.float32)
    writer.add_tensor("rope_freqs.weight", divisors)


def _describe_delta_nets(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    recurrent = [kind == "linear_attention" for kind in config.layer_types]
    writer.add_array(f"{architecture_of(config)}.attention.recurrent_layers", recurrent)
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])


def _describe_latents(writer: gguf.GGUFWriter, config: Any, split: bool) -> None:
    values = config.to_dict()
    key, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    if split:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
        key, value = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_key_length(key)
    writer.add_value_length(value)
    writer.add_head_count_kv(1 if split else config.num_attention_heads)
    if config.q_lora_rank is not None:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(config.kv_lora_rank)
    dense = [index for index, kind in enumerate(values.get("mlp_layer_types", ())) if kind == "dense"]
    writer.add_leading_dense_block_count(values.get("first_k_dense_replace", len(dense)))
    writer.add_expert_count(config.n_routed_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    if config.norm_topk_prob:
        writer.add_expert_weights_norm(True)
    if values.get("topk_method") != "greedy":
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
