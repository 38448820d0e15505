"""Gated delta nets: linear attention with a state for each request instead of keys and values.

`gpu.checkpoint.architecture.GatedDeltaSpec` has the mathematics. Decodes of a step are computed together, one token
each. A prompt is computed in chunks of `CHUNK` tokens, as matrix products (Yang et al., arXiv:2412.06464): within a
chunk that starts from the state S, with c the running sums of g, the corrections D solve a triangular system,

    D_t = beta_t (v_t - exp(c_t) S^T k_t - sum over s < t of exp(c_t - c_s) (k_s . k_t) D_s)

and the outputs and the next state are sums over the chunk's k and D. States are float32, whatever the weights are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from gpu.checkpoint.architecture import GatedDeltaSpec
from gpu.models import layers

CHUNK = 64
_EPS = 1e-6  # added to the squared lengths of queries and keys


@dataclass(frozen=True, kw_only=True)
class StateMetadata:
    """The states of a step's B requests. The first `num_decodes` requests have one token, the others more."""

    query_lens_list: list[int]  # [B]
    num_decodes: int
    rows: torch.Tensor  # int64 [B], the slots of the requests' states
    # Copies of states to keep, by request: (n, slot), the slot for the state after n of its tokens, n ascending.
    saves: Mapping[int, list[tuple[int, int]]]


class GatedDeltaNet(nn.Module):
    """The layer of a `GatedDeltaSpec`, on one rank."""

    def __init__(self, spec: GatedDeltaSpec, _: object, place: layers.Place) -> None:
        super().__init__()
        self.spec = spec
        self.projections = layers.Linear(*spec.projections, place=place)
        self.conv = place.parameter(*spec.conv.shape, dtype=torch.float32)
        self.dt_bias, self.a_log = (place.parameter(spec.value_heads, dtype=torch.float32) for _ in range(2))
        self.norm = place.parameter(spec.value_dim, dtype=torch.float32)
        self.out = layers.Linear(spec.out, place=place)

    def forward(
        self, hidden: torch.Tensor, _: layers.Rotation, metadata: StateMetadata, states: torch.Tensor
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]. Advances the requests' rows of `states`, float32 [slots, numbers]."""
        spec = self.spec
        qkv, z, b, a = self._project(hidden)
        decay = -self.a_log.exp() * F.softplus(a.float() + self.dt_bias)  # g
        beta = b.float().sigmoid()
        heads = states[:, : -spec.conv_dim * (spec.conv.shape[2] - 1)].unflatten(
            1, (spec.value_heads, spec.key_dim, spec.value_dim)
        )
        inputs = states[:, heads[0].numel() :].unflatten(1, (spec.conv_dim, -1))  # latest inputs of the convolution
        output = torch.empty(len(hidden), spec.value_heads, spec.value_dim, device=hidden.device)
        if count := metadata.num_decodes:
            rows = metadata.rows[:count]
            seen = torch.cat((inputs[rows], qkv[:count].unsqueeze(2)), 2)
            inputs[rows] = seen[:, :, 1:]
            query, key, value = self._heads(F.silu((seen * self.conv.squeeze(1)).sum(2)))
            output[:count], heads[rows] = delta_step(heads[rows], query, key, value, decay[:count], beta[:count])
            if saves := [(index, slot) for index, each in metadata.saves.items() if index < count for _, slot in each]:
                sources, slots = torch.tensor(saves, device=rows.device).unbind(1)
                states[slots] = states[rows[sources]]
        start = count
        for index in range(count, len(metadata.query_lens_list)):
            stop = start + metadata.query_lens_list[index]
            row = int(metadata.rows[index])
            seen = torch.cat((inputs[row], qkv[start:stop].T), 1)
            inputs[row] = seen[:, stop - start :]
            query, key, value = self._heads(F.silu(F.conv1d(seen, self.conv, groups=spec.conv_dim)).T)
            state, begin = heads[row], 0
            for end, slot in [*metadata.saves.get(index, ()), (stop - start, row)]:
                part, tokens = slice(begin, end), slice(start + begin, start + end)
                if begin < end:
                    output[tokens], state = delta_chunks(
                        state, query[part], key[part], value[part], decay[tokens], beta[tokens]
                    )
                heads[slot] = state
                if slot != row:
                    inputs[slot] = seen[:, end : end + inputs.shape[2]]
                begin = end
            start = stop
        normed = F.rms_norm(output, self.norm.shape, self.norm, spec.norm.eps)
        return self.out(normed.mul_(F.silu(z.float())).flatten(1).to(hidden.dtype))

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values float32 [T, channels], the output gates [T, heads, dim], and b and a
        [T, heads]."""
        spec, projected = self.spec, self.projections(hidden)
        keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        if not spec.by_key_head:
            qkv, z, b, a = projected.split((2 * keys + values, values, spec.value_heads, spec.value_heads), 1)
            return qkv.float(), z.unflatten(1, (spec.value_heads, -1)), b, a
        group = spec.value_heads // spec.key_heads
        qkvz, ba = projected.split((2 * (keys + values), 2 * spec.value_heads), 1)
        sizes = (spec.key_dim, spec.key_dim, group * spec.value_dim, group * spec.value_dim)
        query, key, value, z = qkvz.unflatten(1, (spec.key_heads, -1)).split(sizes, 2)
        b, a = ba.unflatten(1, (spec.key_heads, 2, group)).unbind(2)
        qkv = torch.cat([each.flatten(1) for each in (query, key, value)], 1).float()
        return qkv, z.reshape(len(hidden), spec.value_heads, -1), b.flatten(1), a.flatten(1)

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, channels] -> queries and keys of unit length [T, value heads, key dim], values [T, value heads, dim]"""
        spec = self.spec
        keys = spec.key_heads * spec.key_dim
        query, key, value = qkv.split((keys, keys, spec.value_heads * spec.value_dim), 1)
        query, key = (each.unflatten(1, (spec.key_heads, -1)) for each in (query, key))
        query, key = (each * (each.square().sum(2, keepdim=True) + _EPS).rsqrt() for each in (query, key))
        query, key = (each.repeat_interleave(spec.value_heads // spec.key_heads, 1) for each in (query, key))
        return query * spec.key_dim**-0.5, key, value.unflatten(1, (spec.value_heads, -1))

    def weight_slots(self) -> Iterator[tuple[str, torch.Tensor]]:
        spec = self.spec
        for part, weight in zip(
            (spec.conv, spec.dt_bias, spec.a_log, spec.norm.weight),
            (self.conv, self.dt_bias, self.a_log, self.norm),
            strict=True,
        ):
            yield part.weight_name, weight


def delta_step(
    state: torch.Tensor,  # [B, heads, key dim, value dim]
    query: torch.Tensor,  # [B, heads, key dim]
    key: torch.Tensor,
    value: torch.Tensor,  # [B, heads, value dim]
    decay: torch.Tensor,  # [B, heads]
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one token each of B requests: the outputs [B, heads, value dim] and the next states."""
    state = state * decay.exp()[..., None, None]
    correction = beta.unsqueeze(2) * (value - (key.unsqueeze(2) @ state).squeeze(2))
    state = state.addcmul_(key.unsqueeze(3), correction.unsqueeze(2))
    return (query.unsqueeze(2) @ state).squeeze(2), state


def delta_chunks(
    state: torch.Tensor,  # [heads, key dim, value dim]
    query: torch.Tensor,  # [T, heads, key dim]
    key: torch.Tensor,
    value: torch.Tensor,  # [T, heads, value dim]
    decay: torch.Tensor,  # [T, heads]
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute T consecutive tokens of a request: the outputs [T, heads, value dim] and the next state."""
    outputs = []
    split = [each.transpose(0, 1).split(CHUNK, 1) for each in (query, key, value, decay, beta)]
    for queries, keys, values, decays, betas in zip(*split, strict=True):
        sums = decays.cumsum(1).unsqueeze(2)  # [heads, tokens, 1]
        grown = sums.exp()
        # exp(c_t - c_s) where s is not after t; elsewhere it could be infinite.
        between = (sums - sums.transpose(1, 2)).tril().exp().tril()
        system = ((keys @ keys.transpose(1, 2)) * between * betas.unsqueeze(2)).tril(-1)
        wanted = betas.unsqueeze(2) * (values - grown * (keys @ state))
        corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(grown * (queries @ state) + ((queries @ keys.transpose(1, 2)) * between) @ corrections)
        left = (sums[:, -1:] - sums).exp()
        state = state * grown[:, -1:] + (keys * left).transpose(1, 2) @ corrections
    return torch.cat(outputs, 1).transpose(0, 1), state
