"""Layers with a state for each request instead of keys and values: a short convolution, and after it a recurrence.

`gpu.checkpoint.architecture.StateSpec` and its subclasses have the mathematics. Decodes of a step are computed
together, one token each. A prompt is computed in chunks of `CHUNK` tokens, as matrix products (Yang et al.,
arXiv:2412.06464): within a chunk that starts from the memory S, with c the running sums of g, the corrections D of a
gated delta net solve a triangular system,

    D_t = beta_t (v_t - exp(c_t) S^T k_t - sum over s < t of exp(c_t - c_s) (k_s . k_t) D_s)

and the outputs and the next memory are sums over the chunk's k and D. In Mamba 2, D is v: t x, with C for q and B for
k. States are float32, whatever the weights are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpu.checkpoint.architecture import GatedDeltaSpec, Mamba2Spec, ShortConvSpec, StateSpec
from gpu.models import layers

CHUNK = 64
_EPS = 1e-6  # added to the squared lengths of queries and keys


@dataclass(frozen=True, kw_only=True)
class StateMetadata:
    """The states of a step's B requests. The first `num_decodes` requests have one token, the others more."""

    query_lens_list: list[int]  # [B]
    num_decodes: int
    rows: Tensor  # int64 [B], the slots of the requests' states
    # Copies of states to keep, by request: (n, slot), the slot for the state after n of its tokens, n ascending.
    saves: Mapping[int, list[tuple[int, int]]]


class StateLayer(nn.Module):
    """A causal convolution over each request's latest tokens; a subclass computes the rest."""

    def __init__(self, spec: StateSpec, _: object, place: layers.Place) -> None:
        super().__init__()
        self.spec: Any = spec
        channels, tokens = sum(part.shape[0] for part in spec.conv), spec.conv[0].shape[2]
        self.projections = layers.Linear(*spec.projections, place=place)
        self.conv = place.parameter(channels, 1, tokens, dtype=torch.float32)
        self.conv_bias = place.parameter(channels, dtype=torch.float32) if spec.conv[0].bias else None
        self.vectors = nn.ParameterList(place.parameter(*part.shape, dtype=torch.float32) for part in spec.vectors)
        self.out = layers.RowLinear(spec.out, place)

    def forward(self, hidden: Tensor, _: layers.Rotation, metadata: StateMetadata, states: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]. Advances the requests' rows of `states`, float32 [slots, numbers]."""
        mixed, gate, others = self._project(hidden)
        channels, size = mixed.shape[1], math.prod(self.spec.memory)
        memory = states[:, :size].unflatten(1, self.spec.memory)
        latest = states[:, size:].unflatten(1, (channels, -1))  # inputs of the convolution
        outputs = []
        if count := metadata.num_decodes:
            rows = metadata.rows[:count]
            seen = torch.cat((latest[rows], mixed[:count].unsqueeze(2)), 2)
            latest[rows] = seen[:, :, 1:]
            convolved = (seen * self.conv.squeeze(1)).sum(2)
            convolved = convolved if self.conv_bias is None else convolved + self.conv_bias
            output, memory[rows] = self._advance(memory[rows], convolved, *(each[:count] for each in others))
            outputs.append(output)
            if saves := [(index, slot) for index, each in metadata.saves.items() if index < count for _, slot in each]:
                sources, slots = torch.tensor(saves, device=rows.device).unbind(1)
                states[slots] = states[rows[sources]]
        start = count
        for index in range(count, len(metadata.query_lens_list)):
            length, row = metadata.query_lens_list[index], int(metadata.rows[index])
            seen = torch.cat((latest[row], mixed[start : start + length].T), 1)
            latest[row] = seen[:, length:]
            convolved = F.conv1d(seen, self.conv, self.conv_bias, groups=channels).T
            state, begin = memory[row], 0
            for end, slot in [*metadata.saves.get(index, ()), (length, row)]:
                if begin < end:
                    tokens = (each[start + begin : start + end] for each in others)
                    output, state = self._advance(state, convolved[begin:end], *tokens)
                    outputs.append(output)
                memory[slot] = state
                if slot != row:
                    latest[slot] = seen[:, end : end + latest.shape[2]]
                begin = end
            start += length
        return self.out(self._finish(torch.cat(outputs), gate).to(hidden.dtype))

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the inputs of the convolution, float32 [T, channels], the gate, and the other inputs of `_advance`."""
        raise NotImplementedError

    def _advance(self, memory: Tensor, convolved: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the memory after them. The inputs are one token of each of B requests, [B, ...], or
        consecutive tokens of the one request that `memory` belongs to."""
        raise NotImplementedError

    def _finish(self, output: Tensor, gate: Tensor) -> Tensor:
        """Return the inputs of the last matrix, [T, numbers]."""
        raise NotImplementedError

    def weight_slots(self) -> Iterator[tuple[str, Tensor]]:
        rows = [part.shape[0] for part in self.spec.conv]
        for part, weight in zip(self.spec.conv, self.conv.split(rows), strict=True):
            yield part.weight_name, weight
        if self.conv_bias is not None:
            yield f"{self.spec.conv[0].name}.bias", self.conv_bias
        for part, vector in zip(self.spec.vectors, self.vectors, strict=True):
            yield part.weight_name, vector


class ShortConv(StateLayer):
    """The layer of a `ShortConvSpec`."""

    spec: ShortConvSpec

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        b, c, x = self.projections(hidden).chunk(3, 1)
        return (b * x).float(), c, ()

    def _advance(self, memory: Tensor, convolved: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        return convolved, memory

    def _finish(self, output: Tensor, gate: Tensor) -> Tensor:
        return output * gate


class Mamba2(StateLayer):
    """The layer of a `Mamba2Spec`."""

    spec: Mamba2Spec

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        inner = self.spec.heads * self.spec.head_dim
        gate, mixed, step = self.projections(hidden).split((inner, self.conv.shape[0], self.spec.heads), 1)
        return mixed.float(), gate, (F.softplus(step.float() + self.vectors[0]),)

    def _advance(self, memory: Tensor, convolved: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        spec, (step,) = self.spec, others
        _, a_log, d, _ = self.vectors
        of_groups = (spec.groups * spec.state_dim,) * 2
        x, key, query = F.silu(convolved).split((spec.heads * spec.head_dim, *of_groups), 1)
        x = x.unflatten(1, (spec.heads, -1))
        key, query = (
            each.unflatten(1, (spec.groups, -1)).repeat_interleave(spec.heads // spec.groups, 1)
            for each in (key, query)
        )
        compute = delta_step if memory.ndim == 4 else delta_chunks
        output, memory = compute(memory, query, key, x * step.unsqueeze(2), -a_log.exp() * step, None)
        return output + x * d.unsqueeze(1), memory

    def _finish(self, output: Tensor, gate: Tensor) -> Tensor:
        gated = (output.flatten(1) * F.silu(gate.float())).unflatten(1, (self.spec.groups, -1))
        return F.rms_norm(gated, gated.shape[2:], None, self.spec.norm.eps).flatten(1) * self.vectors[3]


class GatedDeltaNet(StateLayer):
    """The layer of a `GatedDeltaSpec`."""

    spec: GatedDeltaSpec

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        spec, projected = self.spec, self.projections(hidden)
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        if spec.by_key_head:
            group = spec.value_heads // spec.key_heads
            qkvz, ba = projected.split((2 * (keys + values), 2 * spec.value_heads), 1)
            sizes = (spec.key_dim, spec.key_dim, group * spec.value_dim, group * spec.value_dim)
            *qkv, z = qkvz.unflatten(1, (spec.key_heads, -1)).split(sizes, 2)
            b, a = (each.flatten(1) for each in ba.unflatten(1, (spec.key_heads, 2, group)).unbind(2))
            mixed, z = torch.cat([each.flatten(1) for each in qkv], 1), z.flatten(1)
        else:
            mixed, z, b, a = projected.split((2 * keys + values, values, spec.value_heads, spec.value_heads), 1)
        dt_bias, a_log, _ = self.vectors
        decay = -a_log.exp() * F.softplus(a.float() + dt_bias)  # g
        return mixed.float(), z.unflatten(1, (spec.value_heads, -1)), (decay, b.float().sigmoid())

    def _advance(self, memory: Tensor, convolved: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        keys = spec.key_heads * spec.key_dim
        query, key, value = F.silu(convolved).split((keys, keys, spec.value_heads * spec.value_dim), 1)
        query, key = (each.unflatten(1, (spec.key_heads, -1)) for each in (query, key))
        query, key = (each * (each.square().sum(2, keepdim=True) + _EPS).rsqrt() for each in (query, key))
        group = spec.value_heads // spec.key_heads
        if spec.tiled:
            query, key = (each.repeat(1, group, 1) for each in (query, key))
        else:
            query, key = (each.repeat_interleave(group, 1) for each in (query, key))
        value = value.unflatten(1, (spec.value_heads, -1))
        compute = delta_step if memory.ndim == 4 else delta_chunks
        return compute(memory, query * spec.key_dim**-0.5, key, value, *others)

    def _finish(self, output: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(output, output.shape[2:], self.vectors[2], self.spec.norm.eps)
        return normed.mul_(F.silu(gate.float())).flatten(1)


def delta_step(
    state: Tensor,  # [B, heads, key dim, value dim]
    query: Tensor,  # [B, heads, key dim]
    key: Tensor,
    value: Tensor,  # [B, heads, value dim]
    decay: Tensor,  # [B, heads]
    beta: Tensor | None,  # None: values are not corrected
) -> tuple[Tensor, Tensor]:
    """Compute one token each of B requests: the outputs [B, heads, value dim] and the next states."""
    state = state * decay.exp()[..., None, None]
    if beta is not None:
        value = beta.unsqueeze(2) * (value - (key.unsqueeze(2) @ state).squeeze(2))
    state = state.addcmul_(key.unsqueeze(3), value.unsqueeze(2))
    return (query.unsqueeze(2) @ state).squeeze(2), state


def delta_chunks(
    state: Tensor,  # [heads, key dim, value dim]
    query: Tensor,  # [T, heads, key dim]
    key: Tensor,
    value: Tensor,  # [T, heads, value dim]
    decay: Tensor,  # [T, heads]
    beta: Tensor | None,  # None: values are not corrected
) -> tuple[Tensor, Tensor]:
    """Compute T consecutive tokens of a request: the outputs [T, heads, value dim] and the next state."""
    outputs = []
    given = (query, key, value, decay, decay if beta is None else beta)
    split = [each.transpose(0, 1).split(CHUNK, 1) for each in given]
    for queries, keys, values, decays, betas in zip(*split, strict=True):
        sums = decays.cumsum(1).unsqueeze(2)  # [heads, tokens, 1]
        grown = sums.exp()
        # exp(c_t - c_s) where s is not after t; elsewhere it could be infinite.
        between = (sums - sums.transpose(1, 2)).tril().exp().tril()
        corrections = values
        if beta is not None:
            system = ((keys @ keys.transpose(1, 2)) * between * betas.unsqueeze(2)).tril(-1)
            wanted = betas.unsqueeze(2) * (values - grown * (keys @ state))
            corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(grown * (queries @ state) + ((queries @ keys.transpose(1, 2)) * between) @ corrections)
        left = (sums[:, -1:] - sums).exp()
        state = state * grown[:, -1:] + (keys * left).transpose(1, 2) @ corrections
    return torch.cat(outputs, 1).transpose(0, 1), state
