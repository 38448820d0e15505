"""Published models of 0.6 to 8 billion parameters, on the meta device: every tensor, and no memory."""

from functools import partial

import pytest
import torch
import transformers
from transformers import AutoConfig

from gpu.attention import TritonAttention
from gpu.checkpoint.tensors import tensor_shapes
from gpu.models.decoder import CausalLM
from gpu.models.layers import weight_slots
from loadtest.gpu_parts.models import PUBLISHED, kv_bytes_per_token, load_shape

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# Body and head of the model, in parameters that a decode step reads (the head too where it is tied to the embedding),
# and bytes of KV cache per token in bfloat16: known figures, which every roofline is made of.
KNOWN = {
    "Llama-3.1-8B": (7.505e9, 131_072),
    "Llama-3.2-1B": (1.236e9, 32_768),
    "Qwen3-0.6B": (0.596e9, 114_688),
    "Qwen3-4B": (4.022e9, 147_456),
    "Qwen3-8B": (7.568e9, 147_456),
}


def oracle_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The tensors of transformers' model of this configuration; a tied head is not one of its own."""
    published = PUBLISHED[name]
    config = AutoConfig.for_model(MODEL_TYPES[published["architectures"][0]], **published)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in tied}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_published_model_has_the_tensors_that_transformers_gives_it(name):
    config = load_shape(name)
    attention = partial(TritonAttention, block_size=16)
    model = CausalLM(config, dtype=torch.bfloat16, device="meta", max_model_len=4096, attention=attention)
    wanted = oracle_shapes(name)
    assert {name: slot.shape for name, slot in weight_slots(model).items()} == wanted
    assert tensor_shapes(config) == wanted
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    caches = model.allocate_kv_cache(10, torch.bfloat16, torch.device("meta"))
    assert sum(cache.nbytes for cache in caches) == 10 * 16 * kv_bytes_per_token(config, 2)


@pytest.mark.parametrize("name", list(KNOWN))
def test_what_a_decode_step_must_read_is_as_known(name):
    config = load_shape(name)
    num_read = sum(torch.Size(shape).numel() for name, shape in tensor_shapes(config).items() if len(shape) == 2)
    if not config.tie_word_embeddings:
        num_read -= config.vocab_size * config.hidden_size  # of the embedding, one row per token
    parameters, kv_bytes = KNOWN[name]
    assert num_read == pytest.approx(parameters, rel=1e-3)
    assert kv_bytes_per_token(config, 2) == kv_bytes
