"""Row table and input batch do what a dictionary of lists would do, whatever plans arrive."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.messages import TokenLogprobs
from engine.plan import NewRequestData, SchedulerOutput
from gpu.runner.host_runner import InputBatch
from gpu.runner.rows import COLUMNS, BatchSizes, RowTable, StepShape
from gpu.runner.runner import ModelInputs
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


def make_rows(max_num_seqs: int, max_model_len: int, block_size: int) -> tuple[RowTable, InputBatch]:
    sizes = BatchSizes(max_num_seqs, max_model_len, block_size)
    rows = RowTable(sizes)
    return rows, InputBatch(rows, sizes)


def token_ids_of(rows: RowTable, batch: InputBatch, request_id: str) -> list[int]:
    """Prompt and output of one request, as its row has them."""
    row = rows[request_id]
    return batch.token_ids[row, : rows.columns["num_tokens"][row]].tolist()


@dataclass
class Known:
    """What the naive model remembers of a request."""

    tokens: list[int]
    num_computed: int
    blocks: list[int]


def check_inputs(
    shape: StepShape, inputs: ModelInputs, scheduled: dict[str, int], known: dict[str, Known]
) -> list[str]:
    """Compare with the obvious loops. Returns the ids that must sample, in device order."""
    ids = list(scheduled)
    in_order = [r for r in ids if scheduled[r] == 1] + [r for r in ids if scheduled[r] != 1]
    assert [ids[i] for i in shape.order] == in_order
    assert shape.num_decodes == inputs.num_decodes == sum(n == 1 for n in scheduled.values())

    input_ids, positions, starts, sampling, logits_indices = [], [], [0], [], []
    for place, r in enumerate(in_order):
        k = known[r]
        end = k.num_computed + scheduled[r]
        for position in range(k.num_computed, end):
            input_ids.append(k.tokens[position])
            positions.append(position)
        starts.append(len(input_ids))
        needed = -(-end // BLOCK_SIZE)
        assert inputs.block_tables[0, place, :needed].tolist() == k.blocks[:needed]
        assert shape.seq_lens[place] == end
        if end == len(k.tokens):
            sampling.append(r)
            logits_indices.append(len(input_ids) - 1)
    assert inputs.input_ids.tolist() == input_ids
    assert inputs.positions.tolist() == positions
    assert inputs.query_start_loc.tolist() == shape.query_start_loc.tolist() == starts
    assert shape.query_lens.tolist() == [scheduled[r] for r in in_order]
    assert inputs.seq_lens.tolist() == shape.seq_lens.tolist()
    assert [in_order[place] for place in shape.samples] == sampling
    assert shape.logits_indices.tolist() == logits_indices
    assert shape.positions.tolist() == [len(known[r].tokens) for r in sampling]
    return sampling


@pytest.mark.slow
@pytest.mark.seconds
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_plans_equal_a_naive_model(data: st.DataObject):
    rows, batch = make_rows(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE)
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
        rows.apply(plan, batch)
        if scheduled:
            shape = rows.shape(plan)
            sampling = check_inputs(shape, batch.inputs(shape), scheduled, known)
            sampled = np.array([data.draw(st.integers(0, 999)) for _ in sampling], dtype=np.int64)
            batch.record(shape.sampling_rows, shape.positions, sampled)
            rows.advance(shape)
            for r, count in scheduled.items():
                known[r].num_computed += count
            for r, token in zip(sampling, sampled.tolist(), strict=True):
                known[r].tokens.append(token)
        assert len(rows) == len(known)
        for r, k in known.items():
            assert token_ids_of(rows, batch, r) == k.tokens
            assert rows.columns["num_computed_tokens"][rows[r]] == k.num_computed


def test_a_request_may_fill_its_context_to_the_last_token():
    rows, batch = make_rows(1, 8, 4)
    request = new_request("a", range(8), block_ids=[0, 1], presence_penalty=1.0)
    plan = plan_of({"a": 8}, new=[request])
    rows.apply(plan, batch)
    shape = rows.shape(plan)
    batch.record(shape.sampling_rows, shape.positions, np.array([99]))
    rows.advance(shape)
    assert token_ids_of(rows, batch, "a") == [*range(8), 99]


@pytest.mark.parametrize("part", ["biases", "named_tokens", "store"])
def test_a_row_whose_removal_fails_is_removed_by_the_next_plan(part: str, monkeypatch: pytest.MonkeyPatch):
    rows, batch = make_rows(1, MAX_MODEL_LEN, BLOCK_SIZE)
    rows.apply(plan_of({"a": 2}, new=[new_request("a", [1, 2], block_ids=[0])]), batch)
    with monkeypatch.context() as patch:
        patch.setattr(batch if part == "store" else getattr(rows, part), "remove", fail)
        with pytest.raises(MemoryError):
            rows.apply(plan_of({}, removed=["a"]), batch)
    rows.apply(plan_of({"b": 1}, new=[new_request("b", [3], block_ids=[1])], removed=["a"]), batch)
    assert token_ids_of(rows, batch, "b") == [3]


@pytest.mark.parametrize("lost", ["new", "blocks"])
def test_a_plan_on_top_of_one_that_was_not_applied_is_refused_until_its_requests_are_removed(
    lost: str, monkeypatch: pytest.MonkeyPatch
):
    """Its blocks never came, so it would write where another request reads."""
    rows, batch = make_rows(2, MAX_MODEL_LEN, BLOCK_SIZE)
    first = plan_of({"a": 4}, new=[new_request("a", [1, 2, 3, 4], block_ids=[0])])
    second = plan_of({"a": 1}, new_blocks={"a": [1]})
    if lost == "blocks":
        rows.apply(first, batch)
    with monkeypatch.context() as patch:
        patch.setattr(batch, "append_blocks", fail)
        with pytest.raises(MemoryError):
            rows.apply(first if lost == "new" else second, batch)
    with pytest.raises(ValueError, match="were not applied"):
        rows.apply(plan_of({"a": 1}), batch)
    again = new_request("a", [1, 2, 3, 4, 5], block_ids=[0, 1])
    rows.apply(plan_of({"a": 5}, new=[again], removed=["a"]), batch)
    assert token_ids_of(rows, batch, "a") == [1, 2, 3, 4, 5]


def fail(*args: Any) -> None:
    raise MemoryError


def test_a_request_beyond_the_rows_or_their_length_is_refused_and_leaves_nothing():
    rows, batch = make_rows(1, 8, 4)
    with pytest.raises(ValueError, match="10 tokens"):
        rows.apply(plan_of({}, new=[new_request("long", range(9 + 1))]), batch)
    rows.apply(plan_of({}, new=[new_request("a")]), batch)
    with pytest.raises(ValueError, match="all 1 rows"):
        rows.apply(plan_of({}, new=[new_request("b")]), batch)
    with pytest.raises(ValueError, match="already"):
        rows.apply(plan_of({}, new=[new_request("a")]), batch)
    assert "b" not in rows
    rows.apply(plan_of({}, removed=["a", "b", "long"], new=[new_request("c")]), batch)
    assert len(rows) == 1


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=MAX_NUM_SEQS))
def test_a_request_may_be_sampled_at_several_of_its_last_positions(requests: list[tuple[int, int, int]]):
    """As the plan says it, computed and sampled tokens of each; what it gained goes back to its place in the plan."""
    rows, batch = make_rows(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE)
    scheduled = {str(i): count for i, (count, _, _) in enumerate(requests)}
    num_sampled = [min(sampled, count) for count, sampled, _ in requests]
    new = [
        new_request(str(i), range(computed + count), num_computed_tokens=computed, logprobs=i % 2 or None)
        for i, (count, _, computed) in enumerate(requests)
    ]
    plan = plan_of(scheduled, new=new)
    plan.num_sampled_tokens = num_sampled
    rows.apply(plan, batch)
    shape = rows.shape(plan)

    positions = batch.inputs(shape).positions.tolist()
    tokens: list[list[int]] = [[] for _ in requests]
    for sample, place in enumerate(shape.samples.tolist()):
        index = int(shape.order[place])
        assert shape.sampling_rows[sample] == rows[str(index)]
        assert positions[shape.logits_indices[sample]] + 1 == shape.positions[sample]
        tokens[index].append(sample)
    for index, (count, _, computed) in enumerate(requests):
        end = computed + count + 1
        assert shape.positions[tokens[index]].tolist() == list(range(end - num_sampled[index], end))
    num_samples = sum(num_sampled)
    entries = {sample: TokenLogprobs(sample, 0.0, 1, []) for sample in range(num_samples)}
    output = shape.output(np.arange(num_samples), np.ones(num_samples, dtype=bool), entries)
    assert output.sampled_token_ids == tokens
    assert {i: [entry.token_id for entry in of] for i, of in output.logprobs.items()} == {
        i: of for i, of in enumerate(tokens) if of
    }


def test_every_column_is_filled_from_the_request_and_a_row_without_one_is_off():
    rows, batch = make_rows(2, 8, 4)
    off = {column.name: rows.columns[column.name].tolist() for column in COLUMNS}
    assert off == {column.name: [column.default] * 2 for column in COLUMNS}
    parameters: dict[str, Any] = {
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": -1,
        "logprobs": 2,
    }
    penalties: dict[str, Any] = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    more: dict[str, Any] = {"logit_bias": {1: 1.0}, "min_tokens": 2, "stop_token_ids": (3,)}
    request = new_request("a", [4, 5, 6], num_prompt_tokens=2, num_computed_tokens=1, **parameters, **penalties, **more)
    rows.apply(plan_of({}, new=[request]), batch)
    lengths = {"num_prompt_tokens": 2, "num_tokens": 3, "num_computed_tokens": 1}
    assert {name: column[0] for name, column in rows.columns.items()} == {
        **{name: value for name, value in parameters.items() if name != "logprobs"},
        **penalties,
        **lengths,
        "seed": 2**64 - 1,
        "num_logprobs": 2,
        "of_grammar": False,
        "is_penalized": True,
        "is_biased": True,
        "may_stop_at": 4,
    }
    assert {name: column[1] for name, column in rows.columns.items()} == {name: of[1] for name, of in off.items()}
