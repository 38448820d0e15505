"""The input batch does what a dictionary of lists would do, whatever plans arrive."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduler.plan import NewRequestData, SchedulerOutput
from gpu.input_batch import InputBatch, StepInputs
from tests.gpu.sampling_helpers import new_request

MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE = 5, 23, 4


def plan_of(
    scheduled: dict[str, int],
    *,
    new: list[NewRequestData] | None = None,
    removed: list[str] | None = None,
    new_blocks: dict[str, list[int]] | None = None,
    going_on: Collection[str] = (),
) -> SchedulerOutput:
    """Everybody samples but those whose prefill is `going_on`."""
    return SchedulerOutput(
        step=0,
        removed_request_ids=removed or [],
        new_requests=new or [],
        new_block_ids=new_blocks or {},
        request_ids=list(scheduled),
        num_scheduled_tokens=list(scheduled.values()),
        num_sampled_tokens=[int(request_id not in going_on) for request_id in scheduled],
        total_num_scheduled_tokens=sum(scheduled.values()),
    )


@dataclass
class Known:
    """What the naive model remembers of a request."""

    tokens: list[int]
    num_computed: int
    blocks: list[int]


def check_inputs(inputs: StepInputs, scheduled: dict[str, int], known: dict[str, Known]) -> list[str]:
    """Compare with the obvious loops. Returns the ids that must sample, in device order."""
    ids = list(scheduled)
    in_order = [r for r in ids if scheduled[r] == 1] + [r for r in ids if scheduled[r] != 1]
    assert [ids[i] for i in inputs.order] == in_order
    assert inputs.num_decodes == sum(n == 1 for n in scheduled.values())

    input_ids, positions, slots, starts, sampling, logits_indices = [], [], [], [0], [], []
    for place, r in enumerate(in_order):
        k = known[r]
        end = k.num_computed + scheduled[r]
        for position in range(k.num_computed, end):
            input_ids.append(k.tokens[position])
            positions.append(position)
            slots.append(k.blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        starts.append(len(input_ids))
        needed = -(-end // BLOCK_SIZE)
        assert inputs.block_table[place, :needed].tolist() == k.blocks[:needed]
        assert inputs.seq_lens[place] == end
        if end == len(k.tokens):
            sampling.append(r)
            logits_indices.append(len(input_ids) - 1)
    assert inputs.input_ids.tolist() == input_ids
    assert inputs.positions.tolist() == positions
    assert inputs.slot_mapping.tolist() == slots
    assert inputs.query_start_loc.tolist() == starts
    assert inputs.query_lens.tolist() == [scheduled[r] for r in in_order]
    assert [in_order[place] for place in inputs.samples] == sampling
    assert inputs.logits_indices.tolist() == logits_indices
    return sampling


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_plans_equal_a_naive_model(data: st.DataObject):
    batch = InputBatch(max_num_seqs=MAX_NUM_SEQS, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
    known: dict[str, Known] = {}
    next_block = 0

    def blocks(count: int) -> list[int]:
        nonlocal next_block
        next_block += count
        return list(range(next_block - count, next_block))

    for step in range(data.draw(st.integers(1, 12), label="steps")):
        full = [r for r, k in known.items() if len(k.tokens) > MAX_MODEL_LEN]
        leaving = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True) if known else st.just([]))
        removed = sorted({*full, *leaving})
        gone = {r: known.pop(r) for r in removed}

        new = []
        for i in range(data.draw(st.integers(0, MAX_NUM_SEQS - len(known)), label="new")):
            resumed = data.draw(st.sampled_from(["", *(r for r in removed if r not in full)]))
            request_id = resumed if resumed and resumed not in known else f"{step}.{i}"
            length = st.lists(st.integers(0, 999), min_size=1, max_size=MAX_MODEL_LEN)
            tokens = gone[request_id].tokens if request_id in gone else data.draw(length)
            num_computed = data.draw(st.integers(0, len(tokens) - 1), label="prefix hit")
            own = blocks(-(-len(tokens) // BLOCK_SIZE))
            known[request_id] = Known(list(tokens), num_computed, list(own))
            new.append(new_request(request_id, tokens, num_computed_tokens=num_computed, block_ids=own))

        scheduled, new_blocks = {}, {}
        for r in data.draw(st.permutations(sorted(known))):
            k = known[r]
            count = data.draw(st.integers(0, len(k.tokens) - k.num_computed), label="tokens")
            if count == 0:
                continue
            scheduled[r] = count
            missing = -(-(k.num_computed + count) // BLOCK_SIZE) - len(k.blocks)
            if missing > 0:
                new_blocks[r] = blocks(missing)
                k.blocks += new_blocks[r]
        going_on = [r for r, count in scheduled.items() if known[r].num_computed + count < len(known[r].tokens)]
        plan = plan_of(scheduled, new=new, removed=removed, new_blocks=new_blocks, going_on=going_on)
        batch.apply(plan)
        if scheduled:
            inputs = batch.prepare(plan)
            sampling = check_inputs(inputs, scheduled, known)
            sampled = np.array([data.draw(st.integers(0, 999)) for _ in sampling], dtype=np.int64)
            batch.advance(inputs, sampled)
            for r, count in scheduled.items():
                known[r].num_computed += count
            for r, token in zip(sampling, sampled.tolist(), strict=True):
                known[r].tokens.append(token)
        assert len(batch) == len(known)
        for r, k in known.items():
            assert batch.token_ids(r) == k.tokens
            assert batch.num_computed_tokens(r) == k.num_computed


def test_a_request_may_fill_its_context_to_the_last_token():
    batch = InputBatch(max_num_seqs=1, max_model_len=8, block_size=4)
    request = new_request("a", range(8), block_ids=[0, 1], presence_penalty=1.0)
    plan = plan_of({"a": 8}, new=[request])
    batch.apply(plan)
    batch.advance(batch.prepare(plan), np.array([99]))
    assert batch.token_ids("a") == [*range(8), 99]


def test_a_request_beyond_the_rows_or_their_length_is_refused_and_leaves_nothing():
    batch = InputBatch(max_num_seqs=1, max_model_len=8, block_size=4)
    with pytest.raises(ValueError, match="10 tokens"):
        batch.apply(plan_of({}, new=[new_request("long", range(9 + 1))]))
    batch.apply(plan_of({}, new=[new_request("a")]))
    with pytest.raises(ValueError, match="all 1 rows"):
        batch.apply(plan_of({}, new=[new_request("b")]))
    with pytest.raises(ValueError, match="already"):
        batch.apply(plan_of({}, new=[new_request("a")]))
    assert "b" not in batch
    batch.apply(plan_of({}, removed=["a", "b", "long"], new=[new_request("c")]))
    assert len(batch) == 1
