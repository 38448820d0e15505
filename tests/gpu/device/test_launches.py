"""What a step starts on the device and sends to it: little, and it never waits for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from gpu.device.graphs import ladder
from gpu.device.tables import Upload
from gpu.kernels.dispatch import interpreted
from gpu.models.decoder import CausalLM
from tests.gpu.device_runners import (
    MAX_NUM_SEQS,
    Again,
    make_executor,
)
from tests.gpu.runner.test_rows import plan_of
from tests.gpu.sampling_helpers import new_request


def test_a_steady_decode_sends_nothing_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    original = Upload.send

    def counting(self: Upload) -> None:
        sent.append(self.num_words)
        original(self)

    monkeypatch.setattr(Upload, "send", counting)
    executor = make_executor("device", Again())
    while executor.runner.prepare():
        pass
    everyone = [new_request(f"r{i}", [i, 2, 3], block_ids=[i], temperature=0.0) for i in range(3)]
    executor.submit(plan_of({r.request_id: 3 for r in everyone}, new=everyone)).result()
    sent.clear()
    decodes = {r.request_id: 1 for r in everyone}
    executor.submit(plan_of(decodes)).result()
    executor.submit(plan_of(decodes, new_blocks={"r0": [9], "r1": [10], "r2": [11]})).result()
    executor.submit(plan_of(decodes)).result()
    executor.submit(plan_of({"r1": 1})).result()
    assert sent == [0, 3, 0, 1]  # the same as in the prefill; three blocks; nothing; who is left


class Waits(TorchDispatchMode):
    """Notes every operation that, on a card, would stop the host until all work before it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name in ("index", "index_put_") and any(
            index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        sized_by_data = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal") or by_mask or sized_by_data:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_starting_a_step_waits_for_nothing_on_the_device() -> None:
    """On the kernels, since their references look at what they compute; prefill, mixed steps, decodes, every feature
    but those of a prompt."""
    graphs = Again()
    executor = make_executor("device", graphs)
    features: list[dict[str, Any]] = [
        {"logit_bias": {3: 1.0}, "repetition_penalty": 1.2},
        {"min_tokens": 3, "stop_token_ids": (1, 2)},
        {"logprobs": 2, "top_p": 0.9},
        {},
    ]
    everyone = [
        new_request(f"r{i}", range(i, i + 5), block_ids=[2 * i, 2 * i + 1], temperature=1.0, seed=i, **feature)
        for i, feature in enumerate(features)
    ]
    names = [request.request_id for request in everyone]
    plans = [
        plan_of({"r0": 5, "r1": 3, "r3": 4}, new=[everyone[0], everyone[1], everyone[3]], going_on=["r1", "r3"]),
        plan_of({"r0": 1, "r1": 2, "r2": 5, "r3": 1}, new=[everyone[2]]),
        plan_of(dict.fromkeys(names, 1)),
        plan_of({"r3": 1}),
    ]
    with interpreted():
        for _ in range(1 + len(ladder(MAX_NUM_SEQS))):  # one of the other kind, and those of whole steps
            executor.runner.prepare()
        for plan in plans:
            with Waits() as waits:
                step = executor.submit(plan)
            assert waits.found == []
            assert len(step.result().sampled_token_ids) == len(plan.request_ids)
    assert graphs.num_replayed == 3  # all but the decodes with features, for which no graph is captured yet
    with Waits() as waits:
        executor.submit(plan_of({"r0": 1}))
    assert waits.found  # by the references, which shows that it would be noticed


class Launches(TorchDispatchMode):
    """Notes what the host starts on the device: kernels of Triton, and operations of torch that are no views."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        run = GridExecutor.__call__

        def launch(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            self.names.append(executor.fn.__name__)
            with _disable_current_modes():  # what the interpreter computes with is none of the step's
                run(executor, *args, **kwargs)

        monkeypatch.setattr(GridExecutor, "__call__", launch)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        converts = name == "to" and result.dtype != args[0].dtype
        if converts or not (func.is_view or name.startswith("empty")):
            self.names.append(name)
        return result


@pytest.mark.slow
def test_little_is_started_around_the_layers_and_steps_with_prompts_are_graphs_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = make_executor("device", Again())
    launches = Launches(monkeypatch)
    monkeypatch.setattr(CausalLM, "forward", lambda self, input_ids, *rest: self.embed_tokens(input_ids))
    everyone = [new_request(f"r{i}", [i, 2, 3, 4], block_ids=[i], temperature=1.0) for i in range(3)]
    plans = [
        plan_of({"r0": 4, "r1": 4}, new=everyone[:2]),
        plan_of({"r0": 1, "r1": 1}),
        plan_of({"r0": 1, "r2": 3}, new=everyone[2:], going_on=["r2"]),
    ]
    inputs, draw = ["_step_inputs", "_gather_rows"], ["linear", "_race", "_weigh_above", "_finish", "_record_step"]
    with interpreted():
        while executor.runner.prepare():
            pass
        names = []
        for plan in plans:
            launches.names.clear()
            with launches:
                executor.submit(plan)
            names.append(list(launches.names))
    mixed = [
        "_scatter_words",
        *inputs,
        "copy_",
        "sum",
        "_gather_rows",
        *draw,
        "copy_",
        "copy_",
    ]
    assert names == [mixed, [*inputs, *draw, "copy_"], mixed]
