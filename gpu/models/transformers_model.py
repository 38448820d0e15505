"""Decoders that transformers implements, with the paged attention of this project: the slow path, for models without a
record.

transformers lets its models call an attention function by name (AttentionInterface). Ours writes a layer's keys and
values to its cache and attends to those of each token's request. All else is transformers' code, for which a step is
one sequence of T tokens with their positions.

1. Weights are read from safetensors only, and no code but that of the installed transformers runs.
2. When a model is loaded, its code is asked which attention each layer needs (`probe`). A need that paged attention
   does not serve is refused.
3. Then two requests are computed in chunks with the cache, and compared with transformers' own attention over each
   (`_check`). So a model that keeps a state, or mixes the tokens of a step elsewhere, is refused, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.utils import logging as their_logging

from gpu.attention import AttentionMetadata, TorchAttention
from gpu.checkpoint import ModelConfig, ModelError
from gpu.checkpoint.architecture import Heads
from gpu.checkpoint.families.table import spec_of
from gpu.models.decoder import CausalLM
from gpu.models.torch_model import TorchModel, resolve_dtype, use_threads
from gpu.runner.runner import ModelInputs

logger = logging.getLogger(__name__)

_PAGED, _PROBE = "headrace_paged", "headrace_probe"
# Arguments of the attention function that change nothing here: positions are applied by then, and the mask is known.
_WITHOUT_EFFECT = {
    *("dropout", "is_causal", "output_attentions", "output_hidden_states", "output_router_logits", "use_cache"),
    *("past_key_values", "position_embeddings", "position_ids", "sliding_window"),
}
_CHECKED_TOKENS = 24  # of each of two requests
_MOST_MASKED = 2**20  # positions of a mask that are looked at


def load_transformers_model(
    config: ModelConfig, *, dtype: str, device: str, block_size: int, num_threads: int
) -> TorchModel:
    """Load a model, check it, and log that it is slow. Raises ModelError for a model that cannot be served."""
    use_threads(num_threads)
    kind, place = resolve_dtype(dtype, config, device), torch.device(device)
    computes = f"transformers {transformers.__version__}, the slow path"
    logger.warning("%s has no record here. What computes it: %s", config.architecture, computes)
    try:
        decoder = TransformersCausalLM(config, kind, place, block_size)
        model = TorchModel(decoder, kind, place, block_size=block_size)
        _check(model, decoder)
    except ModelError:
        raise
    except Exception as error:
        raise _refusal(config, f"{type(error).__name__}: {error}") from error
    model.forms = f"{model.forms.partition(' (')[0]} ({computes})"
    return model


def _refusal(config: ModelConfig, why: str) -> ModelError:
    return ModelError(f"transformers' {config.architecture} cannot be served: {why}.")


class TransformersCausalLM(CausalLM):
    """A decoder of transformers, as `gpu.models.torch_model.TorchModel` uses the project's own."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, block_size: int) -> None:
        nn.Module.__init__(self)
        self.config, self.spec, self.communicator = config, spec_of(config), None
        self.tokens_of_experts = torch.zeros(0, 0)
        self._decoder = _load(config, dtype).to(device).eval()
        self.base: Any = getattr(self._decoder, self._decoder.base_model_prefix)
        self._given = _Given()
        setattr(self._decoder, self._decoder.base_model_prefix, self._given)
        self._layers: dict[nn.Module, tuple[int, TorchAttention]] = {}
        self._step: tuple[AttentionMetadata, Sequence[torch.Tensor], Callable[[], None] | None] | None = None
        self._backends = cache(lambda heads: TorchAttention(heads, block_size))
        for module in self.base.modules():
            module.headrace_decoder = [self]  # in a list, so that it does not become a part of the module
        count = min(8, config.max_position_embeddings)
        self.states(_PROBE, torch.zeros(1, count, dtype=torch.int64, device=device))
        if len(self._layers) != config.num_hidden_layers:
            called = f"{len(self._layers)} of {config.num_hidden_layers} layers call the attention function"
            raise _refusal(config, f"{called}; the others have another attention, or states")

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: Sequence[Any],
        kv_caches: Sequence[torch.Tensor],
        cancellation_check: Callable[[], None] | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step, as in `CausalLM`."""
        self._step = metadata[0], kv_caches, cancellation_check
        return self.base(input_ids=input_ids[None], position_ids=positions[None], use_cache=False).last_hidden_state[0]

    @torch.inference_mode()
    def states(self, attention: str, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the final hidden states of whole requests, int64 [B, T] tokens, with an attention by its name."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand(len(input_ids), -1)
        self.base.set_attn_implementation(attention)
        states = self.base(input_ids=input_ids, position_ids=positions, use_cache=False).last_hidden_state
        self.base.set_attn_implementation(_PAGED)
        return states

    def own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given.states = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return self._decoder(input_ids=ids, use_cache=False).logits[0]

    def allocate_kv_cache(self, num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        return [backend.allocate_kv_cache(num_blocks, dtype, device) for _, backend in self._layers.values()]

    def set_max_model_len(self, max_model_len: int) -> None:
        """Do nothing: transformers computes the angles of each step."""

    def attend(
        self, module: nn.Module, *qkv: Any, s_aux: torch.Tensor | None = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Attend in one layer. Queries, keys and values are [1, heads, T, head_dim]; a mask follows."""
        assert self._step is not None
        metadata, kv_caches, cancellation_check = self._step
        if cancellation_check is not None:
            cancellation_check()
        layer, backend = self._layers[module]
        query, key, value = (each[0].transpose(0, 1).to(kv_caches[layer].dtype) for each in qkv[:3])
        sinks = None if s_aux is None else s_aux.float()
        return backend.forward(query, key, value, kv_caches[layer], metadata, sinks)[None].to(qkv[0].dtype), None

    def probe(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **needs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Record the attention that a layer needs. Raises ModelError if paged attention does not serve it."""
        config, count = self.config, query.shape[2]
        heads, kv, dim = query.shape[1], config.num_key_value_heads, config.head_dim
        others = sorted(name for name, need in needs.items() if need is not None and name not in _WITHOUT_EFFECT)
        why = ""
        if module in self._layers:
            why = "attends twice"
        elif [each.shape[1:] for each in (query, key, value)] != [(heads, count, dim), *[(kv, count, dim)] * 2]:
            why = f"has keys {[*key.shape[1:]]} and values {[*value.shape[1:]]}, which should be {[kv, count, dim]}"
        elif others:
            why = f"needs {', '.join(others)}"
        elif (
            not isinstance(attention_mask, _Mask)
            or attention_mask.window == 0
            or not getattr(module, "is_causal", True)
        ):
            why = "has a mask that is neither causal nor a window"
        if why:
            raise _refusal(config, f"layer {len(self._layers)} {why}")
        scale = dim**-0.5 if scaling is None else float(scaling)
        spec = Heads(heads, kv, dim, scale, attention_mask.window, softcap)
        self._layers[module] = len(self._layers), self._backends(spec)
        return torch.zeros_like(query).transpose(1, 2), None


class _Output(MoeModelOutputWithPast):
    cross_attentions = None  # which GPT-2's head asks for


class _Given(nn.Module):
    """Replaces the base model of a decoder, and returns given states: the decoder makes logits of them."""

    states: torch.Tensor

    def forward(self, *_: Any, **__: Any) -> _Output:
        return _Output(last_hidden_state=self.states)


def _load(config: ModelConfig, dtype: torch.dtype) -> Any:
    """Return the decoder with its weights. Raises ModelError if files and model do not have the same tensors."""
    shows_bars = their_logging.is_progress_bar_enabled()
    their_logging.disable_progress_bar()
    try:
        decoder, report = getattr(transformers, config.architecture).from_pretrained(
            config.transformers_dir,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    finally:
        if shows_bars:
            their_logging.enable_progress_bar()
    for name, keys in report.items():
        if keys:
            raise _refusal(config, f"{len(keys)} {name} in the checkpoint: {', '.join(sorted(map(str, keys))[:8])}")
    return decoder


class _Mask(torch.Tensor):
    """The window of a mask, in a tensor of zeros. None: all tokens before; 0: a mask that is no window."""

    window: int | None = 0


def _mask(*, q_length: int, kv_length: int, mask_function: Callable, config: Any, **_: Any) -> torch.Tensor:
    """Return the mask that a mask function gives, described by its window."""
    mask = torch.zeros(1, 1, q_length, kv_length).as_subclass(_Mask)
    count = min(config.max_position_embeddings, _MOST_MASKED)
    keys = torch.arange(count)
    queries = keys[[0, 1 % count, count // 3, count // 2, count - 1]][:, None]
    zero = torch.zeros((), dtype=torch.int64)
    visible = mask_function(zero, zero, queries, keys).expand(len(queries), count)
    window = int(visible[-1].sum())
    if bool((visible == ((keys <= queries) & (keys > queries - window))).all()):
        mask.window = None if window == count else window
    return mask


def _calls(method: str) -> Callable[..., Any]:
    return lambda module, *given, **more: getattr(module.headrace_decoder[0], method)(module, *given, **more)


transformers.AttentionInterface.register(_PAGED, _calls("attend"))
transformers.AttentionInterface.register(_PROBE, _calls("probe"))
AttentionMaskInterface.register(_PROBE, _mask)


@torch.inference_mode()
def _check(model: TorchModel, decoder: TransformersCausalLM) -> None:
    """Raise ModelError unless chunks of two requests in one step have the states that transformers computes alone."""
    size, count = model.tokens_held, min(_CHECKED_TOKENS, decoder.config.max_position_embeddings)
    tokens = np.random.default_rng(0).integers(0, decoder.config.vocab_size, (2, count))
    expected = decoder.states("eager", torch.from_numpy(tokens).to(model.device)).float().cpu()
    found = torch.empty_like(expected)
    blocks = np.arange(2 * -(-count // size), dtype=np.int32).reshape(-1, 2).T  # of each request, in turns
    model.allocate_kv_cache(blocks.size)
    third = count // 3
    # Request, begin and end: a chunk, a decode and a chunk, two chunks.
    for step in ([(0, 0, third)], [(0, third, third + 1), (1, 0, third)], [(0, third + 1, count), (1, third, count)]):
        requests, starts, stops = zip(*step, strict=True)
        lengths = np.subtract(stops, starts)
        states = model.forward(
            ModelInputs(
                input_ids=np.concatenate([tokens[request, start:stop] for request, start, stop in step]),
                positions=np.concatenate([np.arange(start, stop) for _, start, stop in step]),
                query_start_loc=np.cumsum([0, *lengths], dtype=np.int32),
                seq_lens=np.array(stops, dtype=np.int32),
                block_tables=np.ascontiguousarray(blocks[None, [*requests]]),
                num_decodes=int(lengths[0] == 1),
                num_prompt_tokens=np.full(len(step), count, dtype=np.int32),
            )
        )
        for (request, start, stop), rows in zip(step, np.split(states, np.cumsum(lengths)[:-1]), strict=True):
            found[request, start:stop] = torch.from_numpy(rows)
    model.kv_caches = []
    model.compute_logits(found[0].numpy())  # this must work, too
    off = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median()  # of most tokens: experts may be near ties
    if not off < (1e-3 if model.dtype == torch.float32 else 0.1):
        why = f"its states are {float(off):.1%} off in chunks: it keeps a state, or needs to see a request as a whole"
        raise _refusal(decoder.config, why)
