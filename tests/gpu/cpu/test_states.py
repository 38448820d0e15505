"""Gated delta nets in the library, against the torch model on the same weights, and the bits that they promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig

from gpu.checkpoint import open_model
from gpu.checkpoint.architecture import GatedDeltaSpec
from gpu.cpu.decoder import CPUCausalLM
from gpu.models.state_layers import StateMetadata
from gpu.runner.runner import StateInputs
from tests.gpu.checkpoint.test_dense_files import made
from tests.gpu.cpu.test_decoder import SHAPE, Model, relative_error, tokens
from tests.gpu.dense_gguf import write_gguf
from tests.gpu.native_builds import needs_library
from tests.gpu.oracles import model_config
from tests.gpu.paging import Span, make_group_metadata, positions_of

pytestmark = [needs_library, pytest.mark.usefixtures("every_build")]

DELTA: dict[str, Any] = {
    **SHAPE | {"num_hidden_layers": 4, "head_dim": 32},
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 6,  # all: where experts are a close call, rounding may choose others
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MODELS: dict[str, PreTrainedConfig] = {
    "qwen3-next": Qwen3NextConfig(**DELTA, **EXPERTS, mlp_only_layers=[1]),
    "qwen3.5": Qwen3_5TextConfig(**DELTA | {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3}),
    "qwen3.5-moe": Qwen3_5MoeTextConfig(**DELTA, **EXPERTS, layer_types=["full_attention", *["linear_attention"] * 3]),
}
LARGEST_ERROR = 0.03  # of bfloat16 in attention, and on some processors in products
SLOTS, OLD = 6, 7.0  # rows and checkpoints; what a slot held before


class Hybrid(Model):
    """A model with states: row r of a step has slot r, unless `rows` says otherwise."""

    def new_cache(self) -> None:
        super().new_cache()
        self.fast.allocate_states(SLOTS)
        self.slow_states = self.slow.allocate_states(SLOTS, torch.device("cpu"))
        for states in (self.fast_states, self.slow_states):
            states.fill_(OLD)

    @property
    def fast_states(self) -> torch.Tensor:
        return torch.from_numpy(self.fast._states)

    def step(
        self,
        spans: list[Span],
        ids: torch.Tensor,
        rows: list[int],
        begins: list[tuple[int, int]] | None = None,
        saves: dict[int, list[tuple[int, int]]] | None = None,
    ) -> torch.Tensor:
        states = StateInputs(np.array(rows), begins or [], saves or {})
        return torch.from_numpy(self.fast.forward(self.inputs(spans, ids)._replace(states=states)))

    def slow_step(
        self,
        spans: list[Span],
        ids: torch.Tensor,
        rows: list[int],
        begins: list[tuple[int, int]],
        saves: dict[int, list[tuple[int, int]]],
    ) -> torch.Tensor:
        for row, source in begins:
            self.slow_states[row] = self.slow_states[source] if source >= 0 else 0.0
        metadata = make_group_metadata(spans, self.block_size, self.num_groups)
        of_states = StateMetadata(
            query_lens_list=metadata[0].query_lens_list,
            num_decodes=metadata[0].num_decodes,
            rows=torch.tensor(rows),
            saves=saves,
        )
        with torch.inference_mode():
            caches = [*self.slow_cache, *self.slow_states.unbind(1)]
            return self.slow.forward(ids, positions_of(spans), [*metadata, of_states], caches)


def memories(model: Hybrid, states: torch.Tensor) -> torch.Tensor:
    """The states, [slots, layers, numbers], without the inputs of convolutions, which torch has in another order."""
    layer = model.fast._spec.state_layers[0]
    return states[:, :, : int(np.prod(layer.memory))]


def convolved(model: Hybrid, states: torch.Tensor, *, by_token: bool) -> torch.Tensor:
    """The inputs of convolutions in states, [slots, layers, tokens, channels]."""
    layer = model.fast._spec.state_layers[0]
    assert isinstance(layer, GatedDeltaSpec)
    rest, kept = states[:, :, int(np.prod(layer.memory)) :], layer.conv[0].shape[2] - 1
    return rest.unflatten(2, (kept, -1)) if by_token else rest.unflatten(2, (-1, kept)).transpose(2, 3)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_states_and_copies_are_the_torch_models(name: str):
    model = Hybrid(MODELS[name], block_size=16)
    assert CPUCausalLM.supports(model.config)
    spans = model.spans([(1, 1), (70, 70), (33, 33)])
    steps: list[tuple[Any, ...]] = [
        (spans, tokens(104), [0, 2, 1], [(0, -1), (2, -1), (1, -1)], {0: [(1, 3)], 1: [(0, 4), (64, 5)]}),
        ([Span(1, 2, spans[0].blocks), Span(5, 75, spans[1].blocks)], tokens(6, 1), [0, 2], [(0, 3)], {0: [(1, 4)]}),
    ]
    for step in steps:
        seen, expected = model.step(*step), model.slow_step(*step)
        assert relative_error(seen, expected) < LARGEST_ERROR
    of_fast, of_slow = memories(model, model.fast_states), memories(model, model.slow_states)
    latest = convolved(model, model.fast_states, by_token=True), convolved(model, model.slow_states, by_token=False)
    for slot in range(SLOTS):
        assert relative_error(of_fast[slot], of_slow[slot]) < LARGEST_ERROR
        assert relative_error(latest[0][slot], latest[1][slot]) < LARGEST_ERROR
    assert (of_fast[5] != OLD).any()
    assert (of_fast[4] != OLD).any()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize(("name", "split"), [("qwen3-next", True), ("qwen3-next", False), ("qwen3.5", True)])
def test_gguf_files_give_what_torch_makes_of_them(tmp_path: Path, name: str, split: bool, kind: str):
    """Value heads of Qwen3.5 are tiled over key heads; rows of Qwen3-Next are sorted, or grouped if not `split`."""
    oracle = made(Qwen3NextConfig(**DELTA, **EXPERTS) if name == "qwen3-next" else Qwen3_5TextConfig(**DELTA))
    with torch.no_grad():
        for matrix in oracle.parameters():
            if matrix.ndim > 1:
                matrix.copy_((5 * matrix).bfloat16())
    files = open_model(str(write_gguf(tmp_path / "m.gguf", oracle, kind=kind, split=split)))
    assert CPUCausalLM.supports(files.config)
    model = Hybrid(files, block_size=16, quantized=True)
    step: tuple[Any, ...] = (model.spans([(70, 70)]), tokens(70), [0], [(0, -1)], {})
    assert relative_error(model.step(*step), model.slow_step(*step)) < LARGEST_ERROR


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("quantized", [False, True])
def test_chunks_copies_decodes_and_neighbours_change_no_bit(name: str, quantized: bool):
    model = Hybrid(MODELS[name], block_size=16, quantized=quantized)
    length, other = 150, 9
    ids, others = tokens(length, seed=3), tokens(other, seed=4)
    spans = model.spans([(length, length), (other, other)])
    whole = model.step(spans[:1], ids, [1], [(1, -1)], {0: [(60, 3), (61, 4), (130, 5)]})
    kept = model.fast_states.clone()

    model.new_cache()
    model.fast_states[3:] = kept[3:]
    pieces, done, begins = [], 0, [(1, -1)]
    for end in (1, 2, 17, 60, 61, 140, 149, length):
        piece, extra, rows = [Span(end - done, end, spans[0].blocks)], torch.empty(0, dtype=torch.int64), [1]
        if end % 2:  # a neighbour in some steps
            piece, extra, rows, begins = [*piece, spans[1]], others, [1, 0], [*begins, (0, -1)]
        seen = model.step(piece, torch.cat((ids[done:end], extra)), rows, begins)
        pieces.append(seen[: end - done])
        if end == 61:  # as after an eviction: the request goes on from the copy, in another row
            assert torch.equal(model.fast_states[1], kept[4])
            model.fast_states[1] = OLD
        begins, done = [(1, 4)] if end == 61 else [], end
    assert torch.equal(torch.cat(pieces), whole)
    assert torch.equal(model.fast_states[1], kept[1])
    assert torch.equal(model.fast_states[3:], kept[3:])
    assert (model.fast_states[2] == OLD).all()


def test_threads_change_no_bit():
    model = Hybrid(MODELS["qwen3-next"], block_size=16)
    spans, ids = model.spans([(40, 40), (9, 9)]), tokens(49)
    begins = [(0, -1), (1, -1)]
    expected = model.step(spans, ids, [0, 1], begins)
    kept = model.fast_states.clone()
    model.fast._threads = type(model.fast._threads)(model.fast._library, 5)
    assert torch.equal(model.step(spans, ids, [0, 1], begins), expected)
    assert torch.equal(model.fast_states, kept)


def test_a_state_that_is_not_finite_stays_in_its_request():
    model = Hybrid(MODELS["qwen3.5"], block_size=16)
    spans, ids = model.spans([(5, 5), (5, 5)]), tokens(10)
    begins = [(0, 2), (1, -1)]
    clean = model.step(spans, ids, [0, 1], [(0, -1), (1, -1)])
    model.fast_states[2] = float("nan")
    seen = model.step(spans, ids, [0, 1], begins)
    assert not seen[:5].isfinite().any()
    assert torch.equal(seen[5:], clean[5:])


def test_sizes_that_fill_no_whole_vector_are_left_to_torch():
    for size in ("linear_key_head_dim", "linear_value_head_dim"):
        assert not CPUCausalLM.supports(model_config(Qwen3NextConfig(**DELTA | EXPERTS | {size: 24})))
