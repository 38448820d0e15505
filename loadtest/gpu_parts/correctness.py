"""Every kernel on the card against float64 or float32 references, on fresh random data, before anything is timed.

References are the torch references on upcast inputs. The error is |actual - reference| / |reference| over the whole
output; outputs are poisoned first, so what is not written is NaN, and NaN never passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpu import kernels
from gpu.kernels import experts as moe
from gpu.kernels.attention import attend_reference
from gpu.kernels.elementwise import add_rms_norm_reference
from gpu.kernels.logits import apply_penalties_reference, row_statistics_reference
from gpu.kernels.prefill import capability_of
from gpu.kernels.product import linear
from gpu.kernels.quantized import quantize_rows, quantized_linear
from gpu.kernels.rope import rope_and_cache_reference
from gpu.kernels.sample import cutoffs_reference, sample_tokens_reference
from loadtest.gpu_parts.data import QUANTIZED, make_columns, make_logits, make_paged, make_quantized
from loadtest.gpu_parts.report import Report

LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}
HEAD_DIMS = (64, 80, 96, 128, 256)
Shape = tuple[tuple[int, int], int, int | None]  # (heads, KV heads), head size, window
Check = Callable[[], float]
# The requests of a step as (query tokens, all tokens). The decodes are few enough to be cut into parts.
ATTENTION = {
    "decode attention": [(1, n) for n in (1, 16, 63, 200, 700, 1500)],
    "prefill attention": [(1, 90), (70, 70), (33, 300), (130, 258)],
    "attention behind long prefixes": [(1, 90), (1, 9000), (3, 5000), (40, 2000)],  # cuts blocks and a decode
}


def check_all(report: Report, device: torch.device, *, tiny: bool) -> set[str]:
    """Run every check and return the names of kernels without a failed check; only those are timed."""
    failed, passed = set(), set()
    dtypes = (torch.float32,) if tiny else (torch.bfloat16, torch.float16, torch.float32)
    for dtype in dtypes:
        for name, what, check in _checks(device, dtype, tiny):
            try:
                error = check()
            except Exception as problem:
                report.fail(f"{name} ({what}, {dtype}): {type(problem).__name__}: {str(problem)[:300]}")
                failed.add(name)
                continue
            limit = LIMITS[dtype]
            passed.add(name)
            if not error <= limit:
                report.fail(f"{name} ({what}, {dtype}): relative error {error:.2e}, allowed {limit:.0e}")
                failed.add(name)
    print(f"correct: {', '.join(sorted(passed - failed)) or 'nothing'}", flush=True)
    return passed - failed


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Infinite where anything is NaN."""
    difference = (actual.double() - reference.double()).norm()
    error = float(difference / reference.double().norm().clamp(min=1e-30))
    return error if error == error else float("inf")


def _checks(device: torch.device, dtype: torch.dtype, tiny: bool) -> Iterator[tuple[str, str, Check]]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def norm() -> float:
        residual, delta = random(33, 576 if tiny else 4096), random(33, 576 if tiny else 4096)
        weight = random(residual.shape[1])
        total = (residual.double() + delta.double()).to(dtype).double()
        output = kernels.add_rms_norm(residual, delta, weight, 1e-5)
        reference = add_rms_norm_reference(total.clone(), None, weight.double(), 1e-5)
        return max(relative_error(residual, total), relative_error(output, reference))

    def activation() -> float:
        gate_up = random(33, 2 * 1100)
        gate, up = gate_up.double().chunk(2, dim=-1)
        return relative_error(kernels.silu_and_mul(gate_up), gate * gate.sigmoid() * up)

    def gather() -> float:
        source, indices = random(50, 1100), torch.randint(0, 50, (33,), device=device)
        return relative_error(kernels.gather_rows(source, indices), source[indices])

    def products() -> float:
        weight, bias, errors = random(1000, 576 if tiny else 4096), random(1000), []
        for rows in (1, 2, 16):
            x = random(rows, weight.shape[1])
            errors.append(relative_error(linear(x, weight, bias), x.double() @ weight.double().T + bias.double()))
        return max(errors)

    yield "linear", "1 to 16 rows", products
    yield "add_rms_norm", "33 rows", norm
    yield "silu_and_mul", "33 rows", activation
    yield "gather_rows", "33 rows", gather
    for head_dim in HEAD_DIMS if dtype == torch.bfloat16 else (128,):
        yield "rope_and_cache", f"heads of {head_dim}", partial(_rope, device, dtype, head_dim)
    for heads, head_dim, window in _attention_shapes(dtype):
        what = f"{heads[0]}/{heads[1]} heads of {head_dim}, window {window}"
        for name, lengths in ATTENTION.items():
            yield name, what, partial(_attention, device, dtype, heads, head_dim, window, lengths)
    multiplies_e4m3 = device.type == "cuda" and capability_of(device) >= (8, 9)
    if multiplies_e4m3 and dtype != torch.float32:
        for name, lengths in ATTENTION.items():
            check = partial(_attention, device, dtype, (8, 2), 128, None, lengths, torch.float8_e4m3fn)
            yield f"{name}, FP8 cache", "8/2 heads of 128", check
    for form in QUANTIZED:
        if multiplies_e4m3 and dtype == torch.float32 and form.startswith("FP8"):
            continue  # the sums of E4M3 products have 14 bits on a card
        check = partial(_quantized, device, dtype, form, 256 if tiny else 4096)
        yield f"linear layers, {form}", "1 to 200 rows", check
    yield "grouped_linear", "8 experts", partial(_experts, device, dtype, 64 if tiny else 1024)
    vocab_size = 500 if tiny else 128256
    yield "sample_tokens", f"{vocab_size} tokens", partial(_sample, device, dtype, vocab_size)
    yield "compute_logprobs", f"{vocab_size} tokens", partial(_logprobs, device, dtype, vocab_size)
    yield "logits processors", f"{vocab_size} tokens", partial(_logits_processors, device, vocab_size)


def _attention_shapes(dtype: torch.dtype) -> list[Shape]:
    """Each is compiled anew, which takes seconds: all head sizes in the type that is served, few in the others."""
    if dtype != torch.bfloat16:
        return [((8, 2), 128, None), ((8, 2), 80, 100)]
    shapes: list[Shape] = [((8, 2), head_dim, None) for head_dim in HEAD_DIMS]
    return [*shapes, ((8, 2), 128, 100), ((7, 1), 128, None), ((4, 4), 64, 100)]


def _rope(device: torch.device, dtype: torch.dtype, head_dim: int) -> float:
    angles = torch.rand(200, head_dim // 2, device=device) * 6.28
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(dtype)
    errors = []
    for qk_norm in (None, torch.randn(2, head_dim, device=device).to(dtype)):
        qkv = torch.randn(40, 12, head_dim, device=device).to(dtype)
        positions = torch.randint(0, 200, (40,), device=device)
        slots = torch.randperm(10 * 16, device=device)[:40]
        slots[7] = -1
        caches = [torch.zeros(10, 2, 2, 16, head_dim, device=device, dtype=t) for t in (dtype, torch.float32)]
        more: dict[str, Any] = {"num_heads": 8, "eps": 1e-6}
        norms = (qk_norm, None if qk_norm is None else qk_norm.float())
        reference = rope_and_cache_reference(
            qkv.float(), positions, table.float(), caches[1], slots, qk_norm=norms[1], **more
        )
        query = kernels.rope_and_cache(qkv, positions, table, caches[0], slots, qk_norm=norms[0], **more)
        errors += [relative_error(query, reference), relative_error(*caches)]
    return max(errors)


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dim: int,
    window: int | None,
    lengths: list[tuple[int, int]],
    kv_dtype: torch.dtype | None = None,
) -> float:
    paged = make_paged(lengths, heads, head_dim, device, dtype)
    paged = replace(paged, cache=paged.cache.to(kv_dtype or dtype))
    reference = paged.to(torch.device("cpu"), torch.float64)
    wanted = torch.empty_like(reference.query)
    tables = (reference.cache, reference.block_table, reference.seq_lens, reference.query_start_loc)
    errors = []
    for sinks in (None, 3 * torch.randn(heads[0], device=device)):
        attend_reference(reference.query, *tables, wanted, 0.1, window, sinks=None if sinks is None else sinks.cpu())
        output = torch.full_like(paged.query, float("nan"))
        paged.attend(output, window=window, sinks=sinks)
        errors.append(relative_error(output.cpu(), wanted))
    return max(errors)


def _quantized(device: torch.device, dtype: torch.dtype, form: str, in_size: int) -> float:
    """Products of few, some and many rows. Where activations are rounded to E4M3, the reference takes them rounded."""
    matrix = make_quantized(form, 1100, in_size, device)
    weights, errors = matrix.dequantize().double(), []
    for num_rows in (1, 17, 64, 200):
        x = torch.randn(num_rows, in_size, device=device).to(dtype)
        meant = x.double()
        if matrix.bits == 0 and capability_of(device) >= (8, 9):
            rounded, scales = quantize_rows(x, matrix.group)
            meant = rounded.double() * scales.double().repeat_interleave(matrix.group or in_size, 1)
            if not relative_error(meant, x) <= 0.04:  # E4M3 rounds by one sixteenth at most, and by 0.026 on average
                return float("inf")
        errors.append(relative_error(quantized_linear(x, matrix), meant @ weights.T))
    return max(errors)


def _experts(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """The two products of a mixture of experts, one of which has no token, and their sum."""
    num_tokens, num_experts, top_k = 150, 8, 2
    logits = torch.randn(num_tokens, num_experts, device=device)
    logits[:, 5] = -100.0
    shares, chosen = moe.route(logits, top_k, True)
    groups = moe.group_rows(chosen, num_experts)
    x = torch.randn(num_tokens, size, device=device).to(dtype)
    up, down = (torch.randn(num_experts, size, size, device=device).to(dtype) / size**0.5 for _ in range(2))
    hidden = moe.grouped_linear(x, up, None, groups, gather=True)
    pairs = moe.grouped_linear(hidden, down, None, groups, scatter=True)
    output = moe.combine(pairs, shares)
    wanted = moe.grouped_linear_reference(x.double(), up.double(), None, groups, True, False)
    error = relative_error(hidden, wanted)
    wanted = moe.grouped_linear_reference(hidden.double(), down.double(), None, groups, False, True)
    return max(error, relative_error(pairs, wanted), relative_error(output, moe.combine_reference(pairs, shares)))


def _sample(device: torch.device, dtype: torch.dtype, vocab_size: int) -> float:
    """Return the share of rows with a token that sorting does not keep, or that differs from the reference.

    Noise is the same to the last bits, so in one row of thousands two scores may be nearer than these.
    """
    num_rows, wrong = 32, 0
    places = torch.arange(num_rows, device=device)
    for values in ({}, {"temperature": 0.0}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8, "min_p": 0.01}):
        columns = make_columns(num_rows, device, **values)
        logits = make_logits(num_rows, vocab_size, device, dtype)
        token_ids, finite = kernels.sample_tokens(logits, columns, places, places)
        reference, _ = sample_tokens_reference(logits, columns, places, places)
        chosen = logits.float().gather(1, token_ids.unsqueeze(1)).squeeze(1)
        outside = chosen < cutoffs_reference(logits.float(), columns, places) - 1e-3
        wrong += int((outside | ~finite).sum()) * num_rows + max(0, int((token_ids != reference).sum()) - 1)
    return wrong / num_rows


def _logprobs(device: torch.device, dtype: torch.dtype, vocab_size: int) -> float:
    logits = make_logits(8, vocab_size, device, dtype)
    token_ids = torch.randint(0, vocab_size, (8,), device=device)
    result = kernels.compute_logprobs(logits, token_ids, 20)
    log_sum, chosen, greater = row_statistics_reference(logits.double(), token_ids)
    assert torch.equal(result.ranks, greater + 1)
    return relative_error(result.chosen, chosen - log_sum)


def _logits_processors(device: torch.device, vocab_size: int) -> float:
    logits = make_logits(4, vocab_size, device, torch.float32)
    columns = make_columns(4, device)
    for name, values in (
        ("repetition_penalty", [1.0, 1.3, 0.8, 1.1]),
        ("presence_penalty", [0.5, 0.0, -0.5, 0.1]),
        ("frequency_penalty", [0.0, 0.1, 0.2, -0.3]),
        ("num_prompt_tokens", [0, 5, 2000, 100]),
        ("num_tokens", [2999, 5, 2500, 101]),
    ):
        columns[name].copy_(torch.tensor(values))
    token_ids = torch.randint(0, 300, (4, 3000), device=device).int()
    scratch = torch.zeros(4, vocab_size, dtype=torch.int32, device=device)
    places = torch.tensor([2, -1, 0, 3], device=device)
    reference = logits.clone()
    kernels.apply_penalties(logits, columns, token_ids, places, scratch=scratch)
    apply_penalties_reference(reference, columns, token_ids, places)
    error = relative_error(logits, reference)
    assert not scratch.any()
    words = torch.randint(-(2**31), 2**31, (1, -(-vocab_size // 32)), device=device).int()
    kernels.apply_bitmask(logits, words, torch.tensor([-1, 0, -1, -1], device=device))
    allowed = ((words.unsqueeze(2) >> torch.arange(32, device=device)) & 1).flatten()[:vocab_size] == 1
    assert torch.equal(logits[1].isfinite(), allowed)
    at = torch.tensor([0, 3, 3], device=device), torch.tensor([7, 9, 9], device=device)
    before = logits.clone()
    kernels.add_bias(logits, *at, torch.tensor([1.0, 2.0, 3.0], device=device))
    before.index_put_(at, torch.tensor([1.0, 2.0, 3.0], device=device), accumulate=True)
    return max(error, relative_error(logits[[0, 2, 3]], before[[0, 2, 3]]))
