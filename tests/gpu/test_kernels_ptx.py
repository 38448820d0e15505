"""The kernels of a layer as Hopper would run them, in bfloat16: `tests.gpu.ptx` executes what Triton compiles. In a
process of its own, because Triton decides once whether it interprets: `python -m tests.gpu.test_kernels_ptx`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton  # noqa: F401  # before the kernels: without a card they use Triton only if it is already imported

from gpu import kernels
from gpu.kernels.attention import AttentionWork, attend_reference
from gpu.kernels.dispatch import interpreted
from gpu.kernels.elementwise import add_rms_norm_reference
from gpu.kernels.rope import rope_and_cache_reference


@pytest.mark.storm
@pytest.mark.timeout(600)
def test_what_is_compiled_for_a_layer_computes_what_was_meant() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_kernels_ptx"], check=False, env=environment, timeout=580
    )
    assert run.returncode == 0


def main() -> None:
    from triton.runtime.jit import JITFunction

    from tests.gpu.ptx import run_instead

    JITFunction.run = run_instead
    torch.manual_seed(0)
    with interpreted(), torch.inference_mode():  # CPU tensors to the launchers
        check_elementwise()
        check_rope()
        check_decode()


def assert_near(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((actual.double() - wanted.double()).norm() / wanted.double().norm())
    assert error < 4e-3, error  # a bfloat16 is off by half of that


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def check_elementwise() -> None:
    residual, delta, weight = random(3, 576), random(3, 576), random(576)
    total = (residual.double() + delta.double()).bfloat16()
    output = kernels.add_rms_norm(residual, delta, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_near(output, add_rms_norm_reference(total.double(), None, weight.double(), 1e-5))
    gate_up = random(2, 2 * 1100)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(kernels.silu_and_mul(gate_up), gate * gate.sigmoid() * up)


def check_rope() -> None:
    angles = torch.rand(40, 64) * 6.28
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).bfloat16()
    positions, slots = torch.tensor([3, 17, 0, 39]), torch.tensor([5, -1, 33, 12])
    qkv, norm, cache = random(4, 12, 128), random(2, 128), torch.zeros(4, 2, 2, 16, 128).bfloat16()
    wanted = cache.float()
    where = (positions, table.float(), wanted, slots)
    rotated = rope_and_cache_reference(qkv.float(), *where, num_heads=8, qk_norm=norm.float(), eps=1e-6)
    query = kernels.rope_and_cache(qkv, positions, table, cache, slots, num_heads=8, qk_norm=norm, eps=1e-6)
    assert_near(query, rotated)
    assert_near(cache, wanted)


def check_decode() -> None:
    """Lengths around a tile, one in three parts, one of nobody; whatever is not theirs is NaN."""
    lengths, num_parts = torch.tensor([1, 16, 63, 300, 0]).int(), [1, 1, 1, 3, 1]
    query, cache = random(5, 8, 128), torch.full((60, 2, 2, 16, 128), float("nan")).bfloat16()
    table, free = torch.full((5, 24), 10**6).int(), iter(torch.randperm(60).tolist())
    for request, length in enumerate(lengths.tolist()):
        for index, start in enumerate(range(0, length, 16)):
            table[request, index] = block = next(free)
            cache[block, :, :, : length - start] = random(2, 2, min(length - start, 16), 128)
    parts = [
        [request, part, count, int(lengths[request])]
        for request, count in enumerate(num_parts)
        for part in range(count)
    ]
    merged, none = torch.tensor([[1, 0, 0, 0], [3, 3, 3, 1]]).int(), torch.empty(0, 4).int()
    work = AttentionWork(torch.tensor([*parts, [-1] * 4]).int(), merged, none, none, 16)
    where, wanted = (table, lengths, torch.arange(6).int()), torch.empty(5, 8, 128, dtype=torch.float64)
    attend_reference(query.double(), cache.double(), *where, wanted, 128**-0.5, None)
    assert_near(kernels.paged_attention(query, cache, *where, work, scale=128**-0.5, num_decodes=5), wanted)


if __name__ == "__main__":
    main()
