"""Compiles every kernel for a GPU, without one: `python -m tests.gpu.compile_kernels 90 bfloat16`.

The first number is a compute capability, 9.0; further words are the kernels to compile, by default all. With "narrow"
those of 4 and 8 bits are compiled, in all of their forms.

The public functions are called with CPU tensors of real types and shapes; what would be launched is compiled instead.
The interpreter forgives what the compiler does not (types that change in a loop, shapes that do not fit a matrix
instruction), and only the compiler knows registers. Prints one JSON object per kernel. Runs in a process of its own,
because Triton decides once whether it interprets.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from gpu import kernels
from gpu.checkpoint.architecture import Heads
from gpu.device.tables import DeviceTables, device_columns
from gpu.kernels import prefill
from gpu.kernels.dispatch import interpreted
from gpu.kernels.product import linear
from gpu.kernels.quantized import MOST_ROWS, MULTIPLIES_E4M3, quantized_linear
from gpu.kernels.whole import whole_attention, whole_prompts
from gpu.runner.rows import BatchSizes
from gpu.weights.tensors import QuantizedMatrix

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}
SMALL = {torch.float32: torch.bfloat16}  # packed matrices are multiplied by 16 bits
COMPILED: set[str] = set()
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def compile_instead(
    capability: int,
    names: list[str],
    kernel: JITFunction,
    *args,
    grid,
    warmup=False,
    num_warps=4,
    num_stages=3,
    **keywords,
) -> None:
    """In place of `JITFunction.run`: specialize as a launch would, compile, and say what came of it."""
    if names and kernel.fn.__name__ not in names:
        return
    given = dict(zip(kernel.arg_names, args, strict=False)) | keywords
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = given[parameter.name]
        aligned = isinstance(value, torch.Tensor) and not parameter.do_not_specialize_on_alignment
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        else:
            signature[parameter.name] = "fp32"
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    form = str((kernel.fn.__name__, signature, constants, attributes, num_warps, num_stages))
    if form in COMPILED:
        return
    COMPILED.add(form)
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    name = kernel.fn.__name__
    report = {"kernel": name, "shared": compiled.metadata.shared}
    report["joins"] = compiled.metadata.enable_fp_fusion
    report |= resources(compiled.asm["cubin"], with_instructions=name == "_race")
    report["matrix_instructions"] = len(re.findall(r"wgmma\.mma_async|mma\.sync|tcgen05\.mma", compiled.asm["ptx"]))
    print(json.dumps(report), flush=True)


def resources(cubin: bytes, *, with_instructions: bool) -> dict[str, int]:
    """Registers per thread and bytes of stack, where registers that do not fit are spilled; if asked for, since every
    start of the disassembler costs half a second, the number of instructions."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        options = ["--dump-sass"] if with_instructions else []
        listing = subprocess.run(
            [DISASSEMBLER, *options, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    assert found is not None
    usage = {"registers": int(found[1]), "stack": int(found[2])}
    if not with_instructions:
        return usage
    instructions = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/ +(?!NOP)(\S.*?) ;", listing, re.MULTILINE)
    return usage | {"instructions": len(instructions)}


def call_all(dtype: torch.dtype = torch.bfloat16) -> None:
    """Every public function, at the shapes of Llama 3 8B (and Qwen3's norms, and heads of no power of two)."""

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def ints(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.int32)

    def longs(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.int64)

    def floats(*shape: int) -> torch.Tensor:
        return zeros(*shape, dtype=torch.float32)

    kernels.add_rms_norm(zeros(4, 4096), zeros(4, 4096), zeros(4096), 1e-5)
    kernels.silu_and_mul(zeros(4, 2 * 14336))
    kernels.gelu_and_mul(zeros(4, 2 * 14336))
    kernels.gather_rows(zeros(4, 4096), longs(3))
    kernels.clamped_swiglu(zeros(4, 2 * 2880), 1.702, 7.0)
    groups = kernels.group_rows(longs(4, 2), 8)
    kernels.grouped_linear(zeros(4, 4096), zeros(8, 512, 4096), zeros(8, 512), groups, gather=True)
    kernels.grouped_linear(zeros(8, 2880), zeros(8, 512, 2880), None, groups, scatter=True)
    kernels.combine(zeros(8, 4096), floats(4, 2))
    for rows in (1, 2):
        linear(zeros(rows, 4096), zeros(128256, 4096))
    for rows in (1, 2, MOST_ROWS + 1):
        quantized_linear(zeros(rows, 4096, dtype=SMALL.get(dtype, dtype)), packed(4, 128))
    quantized_linear(zeros(1, 4096, dtype=SMALL.get(dtype, dtype)), packed(0, 128))
    cache = zeros(4, 2, 8, 16, 128)
    table = zeros(2, 64, 128)
    where = (zeros(4, 48, 128), longs(4), table, cache, longs(4))
    kernels.rope_and_cache(*where, num_heads=32, qk_norm=zeros(2, 128))
    kernels.rope_and_cache(*where, num_heads=32, query_scales=floats(64))
    for head_dim, window, longest in (
        (128, None, None),
        (128, None, 3),
        (64, None, None),
        (80, 512, None),
        (256, 512, None),
    ):
        query, paged, lengths = zeros(512, 32, head_dim), zeros(4, 2, 8, 16, head_dim), (ints(4), ints(5))
        work = kernels.list_attention_work(query, 8, *lengths, window=window, longest_chunk=longest)
        kernels.paged_attention(
            query,
            paged,
            ints(4, 64),
            *lengths,
            work,
            scale=1.0,
            window=window,
            softcap=50.0 if head_dim == 256 else None,
            sinks=floats(32) if head_dim == 80 else None,
        )
    for head_dim, reach in ((32, None), (64, None), (64, 64), (256, 256)):
        heads = Heads(12, 1 if head_dim == 256 else 12, head_dim, head_dim**-0.5)
        qkv = zeros(512, heads.query + 2 * heads.kv, head_dim)
        whole_attention(qkv, heads, whole_prompts(np.array([0, 100, 512], np.int32), qkv, heads), reach)
    tables = DeviceTables(BatchSizes(4, 4096, 16), 128256, torch.device("cpu"))
    kernels.scatter_words(tables.buffer, ints(7), 2)
    for all_decode in (True, False):
        kernels.step_inputs(tables, 4, 4, all_decode=all_decode)
    kernels.record_step(tables, 4, longs(3), zeros(3, dtype=torch.bool), ints(4))
    logits = zeros(4, 128256)
    columns = device_columns(4)
    kernels.sample_tokens(logits, columns, longs(4), longs(4))
    kernels.compute_logprobs(logits, longs(4), 3)
    kernels.apply_bitmask(logits, ints(4, 4008), longs(4))
    logits = logits.float()
    kernels.add_bias(logits, longs(4), longs(4), floats(4))
    kernels.apply_penalties(logits, columns, ints(4, 4096), longs(4), scratch=ints(4, 128256))


def packed(bits: int, group: int, *, has_zeros: bool = False) -> QuantizedMatrix:
    """A matrix of Llama 3 8B."""
    numbers = torch.zeros(1024, 4096 // (2 if bits == 4 else 1), dtype=torch.uint8)
    groups = 4096 // group if group else 1
    zeros = torch.zeros(groups, 1024, dtype=torch.uint8) if has_zeros else None
    return QuantizedMatrix(numbers, torch.zeros(groups, 1024), zeros, None, 8 if bits else 0, bits, group, 64)


def call_narrow(dtype: torch.dtype) -> None:
    """Products with weights of 4 and 8 bits, for any number of rows, and a cache of 8 bits."""
    for rows in (1, 2, 64, 512, 600):
        x = torch.zeros(rows, 4096, dtype=dtype)
        for bits, group in ((4, 128), (8, 0), (0, 128), (0, 0)):
            quantized_linear(x, packed(bits, group, has_zeros=bits == 4))
    if prefill.capability_of(x.device) < MULTIPLIES_E4M3:
        return
    ids = torch.zeros(4, dtype=torch.int64)
    for head_dim in (64, 128, 256):
        cache = torch.zeros(4, 2, 8, 16, head_dim).to(torch.float8_e4m3fn)
        qkv, table = torch.zeros(4, 48, head_dim, dtype=dtype), torch.zeros(2, 64, head_dim, dtype=dtype)
        kernels.rope_and_cache(qkv, ids, table, cache, ids, num_heads=32)
        query, lengths = torch.zeros(512, 32, head_dim, dtype=dtype), (ids.int(), torch.zeros(5, dtype=torch.int32))
        work = kernels.list_attention_work(query, 8, *lengths)
        kernels.paged_attention(query, cache, torch.zeros(4, 64, dtype=torch.int32), *lengths, work, scale=1.0)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("Triton would interpret: unset TRITON_INTERPRET")
    capability = int(sys.argv[1])

    def run(kernel: JITFunction, *args, **keywords) -> None:
        compile_instead(capability, [name for name in sys.argv[3:] if name != "narrow"], kernel, *args, **keywords)

    JITFunction.run = run
    prefill.capability_of = lambda device: divmod(capability, 10)  # type: ignore[assignment]
    with interpreted():  # CPU tensors to the launchers
        (call_narrow if "narrow" in sys.argv else call_all)(getattr(torch, sys.argv[2]))
