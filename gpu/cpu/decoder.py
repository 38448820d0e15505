"""The decoder of `gpu.models.decoder`, computed by the C++ library: same weights, one call a step.

Only the rounding differs. Weights keep the bits of a GGUF file; activations are rounded to bfloat16 for matrix
products, if the processor multiplies bfloat16; everything between matrices is float32. The bits of a row's result do
not depend on the rest of the batch, on the chunks of its prompt, or on how much of it the prefix cache had.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import StepAbandoned
from gpu.checkpoint import ModelConfig, RopeScaling
from gpu.checkpoint.architecture import (
    AttentionSpec,
    ClampedSwiGLUSpec,
    DecoderSpec,
    GatedAttentionSpec,
    GatedDeltaSpec,
    GeGLUSpec,
    HeadOrder,
    Heads,
    LayerSpec,
    MoESpec,
    Part,
    RMSNormSpec,
    Rope,
    Stack,
    SwiGLUSpec,
    parts_of,
    records_of,
)
from gpu.checkpoint.encoder import EncoderAttentionSpec, EncoderNetworkSpec, LayerNormSpec
from gpu.checkpoint.families.table import spec_of
from gpu.checkpoint.tensors import Weight
from gpu.cpu.communicator import SharedMemoryCommunicator
from gpu.cpu.library import (
    STOP_INTERVAL,
    ForwardStruct,
    HeadsStruct,
    LayerStruct,
    Library,
    MatrixStruct,
    ModelStruct,
    StepStruct,
    StopFunction,
    Threads,
    draw,
)
from gpu.cpu.weights import BF16, FORMS, LANES, PackedWeights, zeros
from gpu.kv_cache import STATE_GROUP, kv_layout, widest_heads
from gpu.rotary import query_scales, rotations
from gpu.runner.runner import ModelInputs, StateInputs

TILE = 16  # tokens: `headrace::kTile`
MAX_GROUP = 32  # query heads over one KV head: `kMaxRows` of csrc/attention_run.h
_NO_STATES = StateInputs(np.empty(0, dtype=np.int64), [], {})
# Values of `headrace::Then` for activations of `gpu.checkpoint.encoder.EncoderNetworkSpec`, with a gate and without.
ACTIVATIONS = {("silu", True): 2, ("gelu_tanh", True): 3, ("gelu", True): 4}
ACTIVATIONS |= {("silu", False): 6, ("gelu_tanh", False): 7, ("gelu", False): 8, ("relu", False): 9}
_ALL = 2**30  # tokens: as far ahead as a request goes
_LOGITS_ROWS = 64  # rows of logits that ranks exchange at a time

# The kinds of parts that `forward` computes; torch computes models with any other.
_KINDS = {
    *(DecoderSpec, LayerSpec, AttentionSpec, Heads, Rope, RopeScaling, RMSNormSpec, Part, Stack, HeadOrder),
    *(SwiGLUSpec, GeGLUSpec, MoESpec, ClampedSwiGLUSpec, GatedAttentionSpec, GatedDeltaSpec),
}


class CPUCausalLM:
    """A `gpu.model_loader.ServedModel` for one thread at a time. `quantized` False rounds all weights to bfloat16."""

    shards = None  # every rank has the logits of all tokens

    def __init__(
        self,
        library: Library,
        config: ModelConfig,
        weights: Iterable[tuple[str, Weight]],
        *,
        block_size: int,
        max_model_len: int,
        num_threads: int,
        quantized: bool = True,
        spec: DecoderSpec | None = None,
        communicator: SharedMemoryCommunicator | None = None,
        max_num_batched_tokens: int = 0,
        kv_cache_dtype: str = "auto",
    ) -> None:
        """Read all weights. Raises ModelError if they are not those of `config`.

        `kv_cache_dtype` "int8" rounds the keys and values of each token's head to integers with a scale; "auto" keeps
        them in bfloat16.

        `spec` is a rank's part of the model, cut by outputs (`gpu.sharding`). The tensor ranks of a stage need a
        `communicator`, through which they exchange results for up to `max_num_batched_tokens` tokens; every rank then
        makes every call.
        """
        self.config = config
        self.block_size = block_size
        self._library = library
        self._threads = Threads(library, num_threads)
        spec = self._spec = spec or spec_of(config)
        self._layers = (LayerStruct * len(spec.layers))()
        for struct, layer in zip(self._layers, spec.layers, strict=True):
            attention = layer.attention
            struct.attended_begin = _attended_begin(attention)
            struct.is_gated = isinstance(attention, GatedAttentionSpec)
            heads = attention.heads if isinstance(attention, AttentionSpec) else widest_heads(spec)
            struct.heads = HeadsStruct(
                query=heads.query,
                kv=heads.kv,
                dim=heads.dim,
                block_size=block_size,
                window=heads.window or 0,
                scale=heads.scale,
                softcap=heads.softcap or 0.0,
                is_int8=kv_cache_dtype == "int8",
            )
            if isinstance(attention, EncoderAttentionSpec):
                reach = attention.reach
                struct.heads.window, struct.heads.ahead = (0, _ALL) if reach is None else (reach + 1, reach)
        self._model = ModelStruct(
            layers=ctypes.cast(self._layers, ctypes.POINTER(LayerStruct)),
            num_layers=len(spec.layers),
            hidden=config.hidden_size,
            epsilon=_epsilon(spec),
            embedding_scale=spec.embedding_scale,
            activation=max(_activation(layer.feed_forward) for layer in spec.layers),
            centred=any(isinstance(record, LayerNormSpec) for record in records_of(spec)),
            post_norms=spec.layers[0].attention_post_norm is not None,
            **_begins(spec),
        )
        # Layers with a state have no positions, and get the angles of others.
        ropes = [each.attention.rope for each in spec.layers if isinstance(each.attention, AttentionSpec)]
        self._ropes = [getattr(layer.attention, "rope", ropes[0]) for layer in spec.layers]
        self._softcap = spec.softcap
        self._states: NDArray[np.float32] | None = None  # [slots, layers, numbers]
        self.set_max_model_len(max_model_len)
        self._weights = PackedWeights(library, self._model, spec, quantized=quantized)
        self._weights.load(weights, config)
        self._head: MatrixStruct = self._model.embedding if spec.head is None else self._model.head
        self._logits = np.empty(0, dtype=np.float32)
        self._width = -(-config.vocab_size // LANES) * LANES  # logits of a row, padded
        self.draw = partial(draw, self._threads)
        self._stopped_by: BaseException | None = None
        self._max_tokens: int | None = None
        if communicator is not None:
            self._join(communicator, max_num_batched_tokens)

    @staticmethod
    def supports(config: ModelConfig) -> bool:
        """Return True if the library supports every part of this model in its size. No published model has an
        unsupported size."""
        spec = spec_of(config)
        records = list(records_of(spec))
        if not {type(record) for record in records} <= _KINDS:
            return False
        heads, epsilon = widest_heads(spec), _epsilon(spec)
        merged = [_projections(layer.attention) for layer in spec.layers]  # their biases are one vector, or none
        mixtures = [layer.feed_forward for layer in spec.layers if isinstance(layer.feed_forward, MoESpec)]
        outs = [layer.attention.out for layer in spec.layers]
        unmerged = set(parts_of(spec)).difference(outs, *merged, *map(parts_of, mixtures))
        post_norms = [(layer.attention_post_norm, layer.feed_forward_post_norm) for layer in spec.layers]
        return (
            heads.dim % 16 == 0
            and heads.query // heads.kv <= MAX_GROUP
            and config.hidden_size % LANES == 0
            and all(record.gate.shape[0] % LANES == 0 for record in records if isinstance(record, SwiGLUSpec))
            and all(size % LANES == 0 for state in spec.state_layers for size in state.memory[1:])
            and all(each.value_heads % each.key_heads == 0 for each in records if isinstance(each, GatedDeltaSpec))
            and not any((record.size or 0) % 2 for record in records if isinstance(record, Rope))
            and not any(
                mixture.shared and (mixture.shared_gate is None or isinstance(mixture.experts[0], ClampedSwiGLUSpec))
                for mixture in mixtures
            )
            and len({type(layer.feed_forward) for layer in spec.layers} - {MoESpec}) <= 1
            and not (mixtures and any(layer.feed_forward_post_norm for layer in spec.layers))
            and len({(record.query, record.kv, record.dim) for record in records if type(record) is Heads}) == 1
            and all(record.eps == epsilon for record in records if type(record) is RMSNormSpec)
            and len({norm is None for pair in post_norms for norm in pair}) == 1
            and all(len({part.bias for part in parts}) == 1 for parts in merged)
            and not any(part.bias for part in unmerged)
        )

    @property
    def tokens_of_experts(self) -> list[NDArray[np.int64]]:
        """The number of tokens routed to each expert so far, for each layer with experts."""
        return self._weights.tokens_of_experts

    @property
    def element_size(self) -> float:
        """The bytes of a number in the KV cache: 2 of bfloat16, or one of an integer and a part of its scale's 4."""
        heads = self._layers[0].heads
        return 1 + 4 / heads.dim if heads.is_int8 else 2

    @property
    def tokens_held(self) -> int:
        """The tokens that a cache block takes memory for: the block size, rounded up to whole tiles."""
        return -(-self.block_size // TILE) * TILE

    @property
    def forms(self) -> str:
        """The forms of the weights, for the log: "4-bit, 8-bit weights (AVX-512)"."""
        forms = set[int]().union(*(matrix.forms for matrix in self._weights.matrices))
        keys = ", keys and values in int8" if self._layers[0].heads.is_int8 else ""
        return f"{', '.join(FORMS[form] for form in sorted(forms))} weights{keys} ({self._library.instructions})"

    @property
    def prompt_form_differs(self) -> bool:
        """True if prefill has other weights than decode: AMX tiles need quantized weights rounded to bfloat16."""
        forms = set[int]().union(*(matrix.forms for matrix in self._weights.matrices))
        return bool(self._library.functions.hr_has_tiles()) and forms != {BF16}

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """Replace the cache of every slot by a zeroed one. csrc/attention.h has its layout."""
        layout, heads = kv_layout(self.config, self._spec), self._layers[0].heads
        pair = (TILE * (heads.dim + 4),) if heads.is_int8 else (2, TILE * heads.dim)
        shape = (num_blocks, self.tokens_held // TILE, heads.kv, *pair)
        self.kv_caches = [zeros(2 * math.prod(shape)).view(np.uint16).reshape(shape) for _ in range(layout.num_slots)]
        for layer, group, slot in zip(self._layers, layout.groups, layout.slots, strict=True):
            if group != STATE_GROUP:
                layer.kv_cache, layer.group = self.kv_caches[slot].ctypes.data, group

    def allocate_states(self, num_slots: int) -> None:
        """Allocate zeroed states, for a batch's rows and then for checkpoints, and append them to the caches."""
        layers = self._spec.state_layers
        shape = (num_slots, len(layers), layers[0].state_size)
        self._states = zeros(4 * math.prod(shape)).view(np.float32).reshape(shape)
        self.kv_caches += [self._states[:, index] for index in range(len(layers))]
        for delta, states in zip(self._weights.deltas, self.kv_caches[-len(layers) :], strict=True):
            delta.states, delta.stride = states.ctypes.data, shape[1] * shape[2]

    def forward(
        self,
        inputs: ModelInputs,
        cancellation_check: Callable[[], None] | None = None,
        added: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float32]:
        """Compute as `gpu.runner.runner.LanguageModel.forward`. `cancellation_check` is called about every 20 ms, while
        its `news` is not 0 if it has one: a call waits for the interpreter's lock, which a busy thread keeps for 5 ms.
        Of several tensor ranks, only the first calls its check; if that ends the pass, the others raise StepAbandoned.
        `added` [T] are the rows that an encoder adds to its embeddings."""
        num_tokens = len(inputs.input_ids)
        if self._max_tokens is not None and num_tokens > self._max_tokens:
            raise ValueError(f"a step has {num_tokens} tokens; the ranks have room for {self._max_tokens}")
        hidden = np.empty((num_tokens, self.config.hidden_size), dtype=np.float32)
        states = _NO_STATES
        if inputs.states is not None and self._states is not None:
            states = inputs.states
            for row, source in states.begins:
                self._states[row] = self._states[source] if source >= 0 else 0.0
        news = getattr(cancellation_check, "news", None)
        of_requests = [states.saves.get(index, []) for index in range(len(inputs.seq_lens))]
        save_begin = np.cumsum([0, *map(len, of_requests)], dtype=np.int32)
        saves = np.array([save for saves in of_requests for save in saves], dtype=np.int64)
        step = ForwardStruct(
            step=StepStruct(
                num_tokens=num_tokens,
                num_requests=len(inputs.seq_lens),
                positions=inputs.positions.ctypes.data,
                query_start_loc=inputs.query_start_loc.ctypes.data,
                seq_lens=inputs.seq_lens.ctypes.data,
                block_table=inputs.block_tables.ctypes.data,
                block_table_stride=inputs.block_tables.shape[2],
                rows=states.rows.ctypes.data,
                save_begin=save_begin.ctypes.data,
                saves=saves.ctypes.data,
            ),
            input_ids=inputs.input_ids.ctypes.data,
            input=None if inputs.hidden is None else inputs.hidden.ctypes.data,
            num_prompt_tokens=inputs.num_prompt_tokens.ctypes.data,
            hidden=hidden.ctypes.data,
            stop=StopFunction() if cancellation_check is None else self._stop_function(cancellation_check),
            news=None if news is None else ctypes.addressof(news),
            stop_interval=STOP_INTERVAL,
            added=None if added is None else added.ctypes.data,
        )
        if self._library.functions.hr_forward(self._threads.handle, self._model, step):
            error, self._stopped_by = self._stopped_by, None
            raise error or StepAbandoned("the first rank found that this step was abandoned")
        return hidden

    def set_max_model_len(self, max_model_len: int) -> None:
        """Set the longest served context, in tokens, and compute its tables of rotary angles."""
        sizes = {rope: 0 if rope.dim == 0 else rope.size or self.config.head_dim for rope in self._ropes}
        self._rotary = {rope: np.empty((2, max_model_len, size // 2), np.float32) for rope, size in sizes.items()}
        for rope, table in self._rotary.items():
            for positions, cosines, sines in rotations(max_model_len, sizes[rope], rope):
                table[0, positions], table[1, positions] = cosines, sines
        self._query_scales = {rope: query_scales(max_model_len, rope.scaling) for rope in self._ropes}
        for layer, rope in zip(self._layers, self._ropes, strict=True):
            layer.rotary = sizes[rope]
            layer.cosines, layer.sines = (half.ctypes.data for half in self._rotary[rope])
            scales = self._query_scales[rope]
            layer.query_scales = None if scales is None else scales.ctypes.data

    def compute_logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the logits: [R, hidden] -> [R, vocab], in memory that the next call reuses."""
        rows, width = len(hidden), self._width
        if self._logits.size < rows * width:
            self._logits = np.empty(rows * width, dtype=np.float32)
        logits = self._logits[: rows * width].reshape(rows, width)
        for part in self._parts(rows):
            self._of_head(self._library.functions.hr_logits, hidden[part], logits[part].ctypes.data, width)
        if self._spec.logits_scale != 1.0:
            logits *= np.float32(self._spec.logits_scale)
        if self._softcap is not None:
            logits[:] = np.tanh(logits / np.float32(self._softcap)) * np.float32(self._softcap)
        return logits[:, : self.config.vocab_size]

    def most_likely(self, hidden: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Choose as `gpu.runner.runner.LanguageModel.most_likely`, without writing the logits to memory."""
        token_ids = np.empty(len(hidden), dtype=np.int64)
        finite = np.empty(len(hidden), dtype=np.bool_)
        for part in self._parts(len(hidden)):
            outputs = token_ids[part].ctypes.data, finite[part].ctypes.data
            self._of_head(self._library.functions.hr_largest_product, hidden[part], *outputs)
        return token_ids, finite

    def _of_head(self, function: Callable[..., Any], hidden: NDArray[np.float32], *outputs: int) -> None:
        """Call a function of the library that multiplies the head by these rows."""
        rows, begin = len(hidden), self._model.vocabulary_begin
        function(self._threads.handle, self._head, hidden.ctypes.data, rows, begin, *outputs)

    def _join(self, communicator: SharedMemoryCommunicator, max_tokens: int) -> None:
        """Set up the memory through which ranks exchange results."""
        sizes = (max_tokens, _LOGITS_ROWS, self._width)
        functions = self._library.functions
        memory = communicator.room(functions.hr_shared_bytes(self._model, communicator.size, *sizes))
        functions.hr_join(self._threads.handle, communicator.handle, self._model, *sizes, memory.ctypes.data)
        self._shared = communicator, memory  # kept alive as long as the library uses them
        self._max_tokens = max_tokens

    def _parts(self, rows: int) -> list[slice]:
        """Slice rows so that ranks can exchange each slice's logits; a single rank gets one slice."""
        step = max(1, rows) if self._max_tokens is None else _LOGITS_ROWS
        return [slice(start, start + step) for start in range(0, rows, step)]

    def _stop_function(self, cancellation_check: Callable[[], None]) -> ctypes._CFunctionType:
        def answers() -> Iterator[int]:
            try:
                yield 0
                while True:
                    cancellation_check()
                    yield 0
            except GeneratorExit:  # the step is over
                raise
            except BaseException as error:  # raised after the call, because nothing may be raised through the library
                self._stopped_by = error
                yield 1

        # A function could be interrupted between its entry and its `try`, and ctypes would drop that exception. A
        # generator is resumed inside its `try`.
        resumed = answers()
        next(resumed)
        return StopFunction(resumed.__next__)


def _activation(network: object) -> int:
    """Return the value of `headrace::Then` that computes the inputs of `down`."""
    if isinstance(network, EncoderNetworkSpec):
        return ACTIVATIONS[network.activation, network.gate is not None]
    return ACTIVATIONS["gelu_tanh" if type(network) is GeGLUSpec else "silu", True]


def _epsilon(spec: DecoderSpec) -> float:
    return next(record.eps for record in records_of(spec) if isinstance(record, RMSNormSpec))


def _projections(attention: Any) -> tuple[Part, ...]:
    return attention.qkv if isinstance(attention, AttentionSpec) else attention.projections


def _begin(part: Part | None) -> int:
    """Return where a rank's shard begins in the whole model."""
    return 0 if part is None or part.ranges is None else part.ranges[0][0]


def _attended_begin(attention: Any) -> int:
    """Return where the outputs of a rank's heads begin among those of all heads."""
    if isinstance(attention, AttentionSpec):
        return _begin(attention.qkv[0]) // (2 if isinstance(attention, GatedAttentionSpec) else 1)
    return _begin(attention.dt_bias) * attention.value_dim


def _begins(spec: DecoderSpec) -> dict[str, int]:
    """Return where a rank's shards begin in the whole model, by the fields of `ModelStruct`."""
    layer = spec.layers[0]
    gates = [each.feed_forward.gate for each in spec.layers if isinstance(each.feed_forward, SwiGLUSpec)]
    return {
        "hidden_begin": _begin(layer.attention.out),
        "inner_begin": _begin(gates[0] if gates else None),
        "vocabulary_begin": _begin(spec.head or spec.embedding),
    }
