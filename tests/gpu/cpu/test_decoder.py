"""The library's decoder against the torch model on the same weights, and the bits it promises."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from engine.commands import FinishRequests
from engine.errors import StepAbandoned
from engine.executor import AbortCheck
from engine.messages import FinishReason
from engine.transport.channel import EngineChannel
from gpu.attention import TorchAttention
from gpu.checkpoint import ModelError, ModelFiles, QuantizedRows
from gpu.checkpoint.tensors import Weight
from gpu.cpu.decoder import CPUCausalLM
from gpu.cpu.library import Library, load_library
from gpu.kv_cache import kv_layout
from gpu.models.decoder import CausalLM
from gpu.runner.runner import CancellationCheck, ModelInputs
from gpu.weights.reading import dummy_weights, read_weights
from gpu.weights.tensors import as_tensors
from tests.gpu.dense_models import DENSE
from tests.gpu.native_builds import needs_library
from tests.gpu.oracles import LLAMA3_ROPE, YARN, model_config
from tests.gpu.paging import Span, make_group_metadata, positions_of
from tests.gpu.sink_models import SinksConfig

pytestmark = [needs_library, pytest.mark.usefixtures("every_build", "sinks_family")]

SHAPE: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
GEMMA: dict[str, Any] = {"num_hidden_layers": 6, "sliding_window": 37, "initializer_range": 0.02}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama3-rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE),
    "wide-heads": LlamaConfig(**SHAPE | {"head_dim": 80}),
    "mistral-window": MistralConfig(**SHAPE, sliding_window=37),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE | {"head_dim": 32}),
    "sinks": SinksConfig(**SHAPE, use_sliding_window=True, sliding_window=37, max_window_layers=1),
    "gemma2": Gemma2Config(
        **SHAPE | GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=1.0, query_pre_attn_scalar=24
    ),
    "gemma3": Gemma3TextConfig(**SHAPE | GEMMA | {"num_key_value_heads": 1, "head_dim": 256}),
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
MODELS |= {
    "mixtral": MixtralConfig(**SHAPE, **EXPERTS),
    "qwen3-moe": Qwen3MoeConfig(
        **SHAPE | EXPERTS | {"head_dim": 32, "moe_intermediate_size": 48, "mlp_only_layers": [1]}, norm_topk_prob=False
    ),
    "gpt-oss": GptOssConfig(**SHAPE, **EXPERTS, sliding_window=37, swiglu_limit=1.5, rope_parameters=YARN),
}
MODELS |= DENSE
NUM_BLOCKS = 64
PROMPT = 45  # tokens of every request; those behind are generated ones


class Model:
    """A decoder of the library with its cache, and the torch model of the same weights in float32."""

    def __init__(self, oracle: PreTrainedConfig | ModelFiles, block_size: int, *, quantized: bool = False) -> None:
        self.config = oracle.config if isinstance(oracle, ModelFiles) else model_config(oracle)
        self.block_size = block_size
        self.num_groups = kv_layout(self.config).num_groups
        weights: list[tuple[str, Weight]]
        if isinstance(oracle, ModelFiles):
            weights = list(read_weights(oracle))
        else:
            plain = [(name, self._spread(name, array)) for name, array in dummy_weights(self.config)]
            weights = [(name, self._quantized(name, array) if quantized else array) for name, array in plain]
        library = load_library()
        assert library is not None
        self.fast = CPUCausalLM(
            library, self.config, weights, block_size=block_size, max_model_len=600, num_threads=2, quantized=quantized
        )
        attention = partial(TorchAttention, block_size=block_size)
        self.slow = CausalLM(self.config, dtype=torch.float32, device="cpu", max_model_len=600, attention=attention)
        self.slow.load_weights(as_tensors(weights))
        self.new_cache()

    @staticmethod
    def _spread(name: str, array: np.ndarray) -> np.ndarray:
        # bfloat16 numbers, so that both models hold the same; large, so that attention is far from uniform.
        if name.endswith("norm.weight"):  # of which no two are the same
            return array + 0.5 * np.sin(np.arange(len(array), dtype=np.float32) + 37 * len(name))
        return (torch.from_numpy(array) * (5.0 if "proj" in name else 20.0)).bfloat16().float().numpy()

    @staticmethod
    def _quantized(name: str, array: np.ndarray) -> Weight:
        if array.ndim == 1 or array.shape[1] % 32:
            return array
        kind = "Q8_0" if "embed" in name or "v_proj" in name else "Q4_1"
        return QuantizedRows(kind, array.shape, quantize(array, GGMLQuantizationType[kind]))

    def new_cache(self) -> None:
        num_blocks = NUM_BLOCKS * self.num_groups
        self.fast.allocate_kv_cache(num_blocks)
        self.slow_cache = self.slow.allocate_kv_cache(num_blocks, torch.float32, torch.device("cpu"))

    @property
    def fast_cache(self) -> list[torch.Tensor]:
        return [torch.from_numpy(cache).view(torch.bfloat16) for cache in self.fast.kv_caches]

    def spans(self, lengths: list[tuple[int, int]]) -> list[Span]:
        """(query_len, seq_len) of each request, on blocks of its own that lie about."""
        order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(5)).tolist()
        spans = []
        for query_len, seq_len in lengths:
            count = -(-seq_len // self.block_size)
            spans.append(Span(query_len, seq_len, order[:count]))
            order = order[count:]
        return spans

    def run(self, spans: list[Span], ids: torch.Tensor, *, slow: bool = False) -> torch.Tensor:
        if not slow:
            return torch.from_numpy(self.fast.forward(self.inputs(spans, ids)))
        with torch.inference_mode():
            metadata = make_group_metadata(spans, self.block_size, self.num_groups)
            return self.slow.forward(ids, positions_of(spans), metadata, self.slow_cache)

    def inputs(self, spans: list[Span], ids: torch.Tensor) -> ModelInputs:
        metadata, *others = make_group_metadata(spans, self.block_size, self.num_groups)
        return ModelInputs(
            input_ids=ids.numpy(),
            positions=positions_of(spans).numpy(),
            query_start_loc=metadata.query_start_loc.numpy(),
            seq_lens=metadata.seq_lens.numpy(),
            block_tables=np.stack([each.block_table.numpy() for each in (metadata, *others)]),
            num_decodes=metadata.num_decodes,
            num_prompt_tokens=np.full(len(spans), PROMPT, dtype=np.int32),
        )


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


def relative_error(seen: torch.Tensor, expected: torch.Tensor) -> float:
    return ((seen - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_logits_are_the_torch_models(name: str):
    model = Model(MODELS[name], block_size=16)
    spans = model.spans([(150, 150), (40, 40)])
    ids = tokens(190) % model.config.vocab_size
    seen, expected = model.run(spans, ids), model.run(spans, ids, slow=True)
    if model.config.num_experts:  # where experts are a close call, rounding may choose others
        errors = (seen - expected).norm(dim=1) / expected.norm(dim=1)
        assert errors.quantile(0.8) < 0.02
        expected = seen
    assert relative_error(seen, expected) < 0.02  # bfloat16 activations through three layers
    rows = seen[[149, 189]]
    logits = torch.from_numpy(model.fast.compute_logits(rows.numpy()).copy())
    assert relative_error(logits, model.slow.compute_logits(expected[[149, 189]])) < 0.03
    token_ids, finite = model.fast.most_likely(rows.numpy())
    assert token_ids.tolist() == logits.argmax(-1).tolist()
    assert finite.all()


def test_a_quantized_model_is_the_torch_model_too():
    model = Model(MODELS["llama"], 16, quantized=True)
    spans, ids = model.spans([(70, 70)]), tokens(70)
    assert relative_error(model.run(spans, ids), model.run(spans, ids, slow=True)) < 0.02


@pytest.mark.parametrize("name", ["ministral3", "phi4-mini-long", "granite", "smollm3-window", "olmo3", "glm4"])
def test_chunks_and_neighbours_change_no_bit_of_a_relative_of_llama(name: str):
    test_chunks_decodes_and_neighbours_change_no_bit(name, 16, quantized=False)


@pytest.mark.parametrize("name", ["llama", "mistral-window", "sinks"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("block_size", [4, 16, 24, 48])
def test_chunks_decodes_and_neighbours_change_no_bit(name: str, block_size: int, quantized: bool):
    model = Model(MODELS[name], block_size, quantized=quantized)
    length = min(300, NUM_BLOCKS * block_size // 2)
    ids = tokens(length, seed=block_size) % model.config.vocab_size
    spans = model.spans([(length, length), (9, 9)])
    whole = model.run(spans[:1], ids)

    model.new_cache()
    pieces, done = [], 0
    for end in (1, 2, 17, 60, 61, length - 30, length - 1, length):
        if end <= done:
            continue
        piece = [Span(end - done, end, spans[0].blocks)]
        extra = torch.empty(0, dtype=torch.int64)
        if end % 2:  # a neighbour in some steps
            piece, extra = [*piece, spans[1]], tokens(9)
        pieces.append(model.run(piece, torch.cat((ids[done:end], extra)))[: end - done])
        done = end
    assert torch.equal(torch.cat(pieces), whole)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "qwen2-moe"])
@pytest.mark.parametrize("quantized", [False, True])
def test_whoever_else_goes_to_an_expert_changes_no_bit(name: str, quantized: bool):
    test_chunks_decodes_and_neighbours_change_no_bit(name, 16, quantized)


def test_how_many_tokens_went_to_each_expert():
    model = Model(MODELS["qwen3-moe"], block_size=16)
    assert [len(counts) for counts in model.fast.tokens_of_experts] == [6, 6]  # one of three layers is dense
    model.run(model.spans([(30, 30), (1, 1)]), tokens(31))
    assert [int(counts.sum()) for counts in model.fast.tokens_of_experts] == [62, 62]


@given(lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=5))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_request_in_a_mixture_gets_what_it_gets_alone(mixture_model: Model, lengths: list[tuple[int, int]]):
    model = mixture_model
    spans = model.spans([(query, computed + query) for query, computed in lengths])
    ids = [tokens(span.seq_len, seed=i) for i, span in enumerate(spans)]
    whole = []
    for span, own in zip(spans, ids, strict=True):
        whole.append(model.run([Span(span.seq_len, span.seq_len, span.blocks)], own)[-span.query_len :])
    step = torch.cat([own[-span.query_len :] for span, own in zip(spans, ids, strict=True)])
    assert torch.equal(model.run(spans, step), torch.cat(whole))


@pytest.fixture(scope="module")
def mixture_model(every_build: Library) -> Model:
    return Model(MODELS["llama"], block_size=16, quantized=True)


def test_what_others_left_in_the_cache_is_never_read():
    model = Model(MODELS["llama"], block_size=16)
    spans, ids = model.spans([(21, 21)]), tokens(22)
    clean = model.run(spans, ids[:21])
    after = model.run([Span(1, 22, spans[0].blocks)], ids[21:])
    for cache in model.fast_cache:
        cache.fill_(float("nan"))
    assert torch.equal(model.run(spans, ids[:21]), clean)
    assert torch.equal(model.run([Span(1, 22, spans[0].blocks)], ids[21:]), after)


def test_numbers_that_are_not_finite_stay_in_their_row():
    model = Model(MODELS["llama"], block_size=16)
    spans, ids = model.spans([(5, 5), (5, 5)]), tokens(10)
    clean = model.run(spans, ids)
    cache = model.fast_cache[0].view(NUM_BLOCKS, -1)
    cache[spans[0].blocks[0]] = float("nan")
    after = model.run([Span(1, 5, spans[0].blocks), Span(1, 5, spans[1].blocks)], ids[[4, 9]])
    _, finite = model.fast.most_likely(after.numpy())
    assert finite.tolist() == [False, True]
    assert torch.equal(after[1], clean[9])


def test_a_pass_ends_where_nobody_wants_it_any_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpu.cpu.decoder.STOP_INTERVAL", 0.0)
    model = Model(MODELS["llama"], block_size=16)
    inputs = model.inputs(model.spans([(30, 30)]), tokens(30))
    asked = []

    def cancellation_check(after: int) -> Callable[[], None]:
        def ask() -> None:
            asked.append(after)
            if len(asked) > after:
                raise StepAbandoned("nobody")

        return ask

    with pytest.raises(StepAbandoned, match="nobody"):
        model.fast.forward(inputs, cancellation_check(1))
    assert len(asked) == 2
    asked.clear()
    model.fast.forward(inputs, cancellation_check(99))
    assert len(asked) == SHAPE["num_hidden_layers"]


def test_a_pass_asks_nothing_while_there_is_no_news(monkeypatch: pytest.MonkeyPatch):
    """A question waits for the interpreter's lock; the number of the inbox needs none."""
    monkeypatch.setattr("gpu.cpu.decoder.STOP_INTERVAL", 0.0)
    model = Model(MODELS["llama"], block_size=16)
    inputs = model.inputs(model.spans([(30, 30)]), tokens(30))
    channel = EngineChannel()
    check = CancellationCheck(AbortCheck(channel.are_leaving, ["a"]))
    channel.are_leaving.ids.add("a")  # not as a command would: the answer would be True
    model.fast.forward(inputs, check)
    channel.put(FinishRequests(["a"], FinishReason.ABORT))
    with pytest.raises(StepAbandoned):
        model.fast.forward(inputs, check)


def test_weights_of_another_model_are_refused_by_name():
    config = model_config(MODELS["llama"])
    library = load_library()
    assert library is not None
    options: dict[str, Any] = {"block_size": 16, "max_model_len": 64, "num_threads": 1}
    weights = dict(dummy_weights(config))
    rest = [item for item in weights.items() if item[0] != "model.norm.weight"]
    with pytest.raises(ModelError, match=r"1 missing: model\.norm\.weight\. Fetch"):
        CPUCausalLM(library, config, rest, **options)
    odd = [("model.layers.9.mlp.up_proj.weight", np.zeros((128, 96), np.float32)), *weights.items()]
    with pytest.raises(ModelError, match=r"1 unknown: .model\.layers\.9\.mlp\.up_proj\.weight.\. Fetch"):
        CPUCausalLM(library, config, odd, **options)
