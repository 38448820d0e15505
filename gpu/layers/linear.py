"""Linear layers, merged where one input feeds several of them. Imported by gpu.models.

Whatever form the weight has, a linear layer is `forward` and `weight_slots`: a packed, quantized or sharded one is
another class with these two methods, and models do not see the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from gpu.layers.packed import pack, packed_linear
from gpu.layers.weights import WeightSlot, empty_parameter, sibling


class Linear(nn.Module):
    """One or several linear layers on the same input, as one matrix product.

    `parts` maps the checkpoint's names to their output sizes, in the order in which they lie in the output:
    ``{"q_proj": 576, "k_proj": 192, "v_proj": 192}``, or simply ``{"o_proj": 576}``. One large product reads its
    input once and costs one launch instead of three.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.parts = dict(parts)
        out_features = sum(self.parts.values())
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None
        self._packed: torch.Tensor | None = None  # instead of `weight` once it is loaded, where that is faster

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., sum of parts]"""
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        self._packed = pack(self.weight)
        if self._packed is not None:
            del self.weight

    def weight_slots(self, path: str) -> Iterator[tuple[str, WeightSlot]]:
        start = 0
        for name, size in self.parts.items():
            rows = slice(start, start + size)
            yield sibling(path, f"{name}.weight"), WeightSlot.into(self.weight[rows])
            if self.bias is not None:
                yield sibling(path, f"{name}.bias"), WeightSlot.into(self.bias[rows])
            start += size
