"""Which layers share blocks, and how much more fits where most of them have a window."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.messages import ModelFacts
from engine.scheduler.kv_cache_manager import KVCacheManager
from engine.scheduler.request import Request
from gpu.checkpoint import ModelConfig
from gpu.kv_cache import kv_layout
from tests.engine.helpers import make_request
from tests.gpu.test_kv_cache import CONFIG

GEMMA_3_270M = replace(
    CONFIG, num_hidden_layers=18, sliding_window=512, layer_types=ModelConfig.alternating(18, 6), head_dim=256
)
BLOCK_SIZE, CHUNK = 16, 512


def test_layers_of_one_kind_are_one_group():
    for window in (None, 64):
        layout = kv_layout(replace(CONFIG, sliding_window=window))
        assert (layout.windows, layout.groups, layout.slots) == ((window,), (0, 0), (0, 1))


def test_groups_are_as_large_as_the_kind_with_the_fewest_layers():
    layout = kv_layout(GEMMA_3_270M)
    assert layout.windows == (None, *[512] * 5)
    assert layout.num_slots == 3
    assert len(set(zip(layout.groups, layout.slots, strict=True))) == 18, "nobody shares a place"
    assert [layer for layer in range(18) if layout.groups[layer] == 0] == [5, 11, 17]
    uneven = kv_layout(replace(GEMMA_3_270M, num_hidden_layers=26, layer_types=ModelConfig.alternating(26, 6)))
    assert (uneven.windows, uneven.num_slots) == ((None, *[512] * 6), 4)


def fitting(windows: tuple[int | None, ...], num_blocks: int, num_tokens: int) -> int:
    """How many requests have come to their last token when the blocks are gone."""
    kv = KVCacheManager(
        num_blocks,
        BLOCK_SIZE,
        facts=ModelFacts(kv_windows=windows),
        max_step_tokens=CHUNK,
        enable_prefix_caching=False,
    )
    for number in range(num_blocks):
        message = make_request([number] * (num_tokens - 1))
        request = Request(message, sequence_number=number, eos_token_ids=(), max_model_len=num_tokens)
        if not kv.can_admit(request, []):
            return number
        for end in [*range(CHUNK, num_tokens, CHUNK), num_tokens]:
            assert kv.extend(request, end) is not None
            request.num_computed_tokens = end
            kv.commit(request)
    raise AssertionError("more than there are blocks")


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "ratio"), [(8192, 4.4), (32768, 5.4)])
def test_more_long_requests_fit_than_if_all_layers_kept_everything(num_tokens: int, ratio: float):
    windows = kv_layout(GEMMA_3_270M).windows
    num_blocks = 100 * len(windows) * num_tokens // BLOCK_SIZE
    everywhere = fitting((None,) * len(windows), num_blocks, num_tokens)
    assert everywhere == 100
    assert fitting(windows, num_blocks, num_tokens) >= ratio * everywhere
