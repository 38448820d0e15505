"""The decoder-only transformer of Llama, Mistral, Qwen2 and Qwen3. Imported by gpu.models.registry.

Attributes are named as in Hugging Face checkpoints, because their paths are the checkpoint's tensor names. All tokens
of a step lie one after the other in one dimension T, whatever request they belong to; only attention knows requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from gpu.attention import AttentionBackend, AttentionMetadata, FusedAttention
from gpu.checkpoint import ModelConfig
from gpu.layers.activation import silu_and_mul
from gpu.layers.embedding import Embedding, LMHead
from gpu.layers.linear import Linear
from gpu.layers.norm import QKNorm, RMSNorm
from gpu.layers.rotary import RotaryEmbedding, Rotation, rotate_
from gpu.models.loading import load_weights


class CausalLM(nn.Module):
    """A decoder and its language-model head. Call under `torch.inference_mode()`."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int,
        attention: AttentionBackend,
    ) -> None:
        super().__init__()
        self.attention = attention
        self.model = Decoder(config, dtype=dtype, device=device, max_model_len=max_model_len, attention=attention)
        self.lm_head = LMHead(
            config.vocab_size,
            config.hidden_size,
            tied_to=self.model.embed_tokens if config.tie_word_embeddings else None,
            dtype=dtype,
            device=device,
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[torch.Tensor],
        cancellation_check: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """One step: int64 [T] token ids and their positions -> final-normed hidden states [T, hidden].

        Writes the keys and values of the T tokens to `kv_caches` (one per layer), at the slots of the metadata.
        `cancellation_check` is called before each layer, and may raise to end the pass.
        """
        return self.model(input_ids, positions, metadata, kv_caches, cancellation_check)

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """The zeroed cache of every layer, in the layout of the attention backend."""
        return self.attention.allocate_kv_cache(num_blocks, dtype, device)

    def set_max_model_len(self, max_model_len: int) -> None:
        """The longest context that is served, in tokens, where it is not the one that the model was made for."""
        self.model.rotary.resize(max_model_len)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, hidden] -> [R, vocab]. Pass only the rows that sample: this is the largest matrix there is."""
        return self.lm_head(hidden)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy and convert tensors under their Hugging Face names. Raises WeightsMismatch, which says what is missing,
        unexpected, given twice or of the wrong shape."""
        # Old checkpoints keep the rotary frequencies, and many a tied one its embedding a second time.
        tied = ("lm_head.weight",) if self.lm_head.tied else ()
        load_weights(self, weights, ignored=("rotary_emb.inv_freq", *tied))


class Decoder(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int,
        attention: AttentionBackend,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(
            config.head_dim, max_model_len, config.rope_theta, config.rope_scaling, dtype=dtype, device=device
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, attention, dtype=dtype, device=device) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_caches: Sequence[torch.Tensor],
        cancellation_check: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        residual = self.embed_tokens(input_ids)
        rotation = self.rotary(positions)
        delta = None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            if cancellation_check is not None:
                cancellation_check()
            delta = layer(residual, delta, rotation, metadata, kv_cache)
        return self.norm(residual, delta)


class DecoderLayer(nn.Module):
    """Attention and feed-forward network, each behind a norm."""

    def __init__(
        self, config: ModelConfig, attention: AttentionBackend, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = SelfAttention(config, attention, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = MLP(config, dtype=dtype, device=device)

    def forward(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        rotation: Rotation,
        metadata: AttentionMetadata,
        kv_cache: torch.Tensor,
    ) -> torch.Tensor:
        """`residual` [T, hidden] is updated in place and lacks one contribution: `delta`, of the layer before. The
        contribution of this layer is returned, so that the next norm adds and normalizes in one pass."""
        delta = self.self_attn(self.input_layernorm(residual, delta), rotation, metadata, kv_cache)
        return self.mlp(self.post_attention_layernorm(residual, delta))


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(
        self, config: ModelConfig, attention: AttentionBackend, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_qk_heads = config.num_attention_heads + config.num_key_value_heads
        self.head_dim = config.head_dim
        self.attention = attention
        self.fused = attention if isinstance(attention, FusedAttention) else None
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=config.attention_bias,
            dtype=dtype,
            device=device,
        )
        self.qk_norm = (
            QKNorm(
                config.num_attention_heads,
                config.num_key_value_heads,
                config.head_dim,
                config.rms_norm_eps,
                dtype=dtype,
                device=device,
            )
            if config.qk_norm
            else None
        )
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, dtype=dtype, device=device)

    def forward(
        self, hidden: torch.Tensor, rotation: Rotation, metadata: AttentionMetadata, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))
        if self.fused is not None:
            norm, eps = (None, 0.0) if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
            output = self.fused.forward_fused(heads, rotation.positions, rotation.table, norm, eps, kv_cache, metadata)
            return self.o_proj(output.flatten(1))
        qk, value = heads[:, : self.num_qk_heads], heads[:, self.num_qk_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        rotate_(qk, *rotation.angles)
        query, key = qk[:, : self.num_heads], qk[:, self.num_heads :]
        output = self.attention.forward(query, key, value, kv_cache, metadata)
        return self.o_proj(output.flatten(1))


class MLP(nn.Module):
    """The SwiGLU feed-forward network."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, {"gate_proj": inner, "up_proj": inner}, dtype=dtype, device=device)
        self.down_proj = Linear(inner, {"down_proj": hidden}, dtype=dtype, device=device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]"""
        return self.down_proj(silu_and_mul(self.gate_up_proj(hidden)))
