"""What a runner compiles before it serves, and what more it would while it does: `python -m tests.gpu.compile_census`.

A launch of a kernel is noted by what Triton would compile it for (types, constants, alignment, ones), and nothing
runs. First a rehearsal, then graphs, then steps of every kind; and the same for a stage of a pipeline. Prints what is
compiled in the rehearsal, and what is first launched later, each as JSON. Runs in a process of its own, because Triton
decides once whether it interprets.
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from gpu.device.runner import DeviceRunner
from gpu.device.warm_up import compile_stage, graph_memory, rehearse
from gpu.kernels import product
from gpu.kernels.dispatch import interpreted
from gpu.models.decoder import CausalLM
from gpu.models.torch_model import TorchModel
from gpu.runner.host_runner import ModelRunner
from gpu.runner.rows import BatchSizes
from gpu.runner.runner import NO_LINKS, Runner, WorkerOptions
from tests.gpu.device_runners import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    MAX_TOKENS,
    NUM_BLOCKS,
    VOCAB_SIZE,
    Again,
    make_executor,
)
from tests.gpu.runner.test_rows import plan_of
from tests.gpu.sampling_helpers import new_request

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 3, "logprobs": 5},
    {"logit_bias": {3: 1.0}},
    {"repetition_penalty": 1.3},
    {"logprobs": -1},
]

OF_STAGE = WorkerOptions(
    max_model_len=MAX_MODEL_LEN, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_TOKENS, block_size=BLOCK_SIZE
)


def form_of(kernel: JITFunction, args: tuple[Any, ...], keywords: dict[str, Any]) -> str:
    """As specific as Triton is: a type for each argument, and what is known of its value."""
    given = dict(zip(kernel.arg_names, args, strict=False)) | keywords
    parts = [kernel.fn.__name__]
    for parameter in kernel.params:
        value = given[parameter.name]
        if isinstance(value, torch.Tensor):
            aligned = value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
            parts.append(f"{parameter.name}: {value.dtype}{' aligned' if aligned else ''}")
        elif parameter.is_constexpr or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            parts.append(f"{parameter.name}={value}")
        elif isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
            parts.append(f"{parameter.name}: % 16")
    return ", ".join([*parts, *(f"{name}={keywords.get(name)}" for name in ("num_warps", "num_stages"))])


def main() -> None:
    forms: dict[str, None] = {}

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        forms[form_of(kernel, args, keywords)] = None

    JITFunction.run = note
    product.LEAST_BYTES = 0  # the matrices of this model are small
    sizes = BatchSizes(MAX_NUM_SEQS, MAX_MODEL_LEN, BLOCK_SIZE)
    # A step that only compiles computes with memory that no kernel has written: here that holds NaN and huge numbers.
    torch.use_deterministic_algorithms(True)
    with interpreted(), torch.inference_mode():  # CPU tensors to the launchers
        runner = make_runner()
        rehearse(runner, sizes, MAX_TOKENS, VOCAB_SIZE)
        graph_memory(runner, lambda: 0)
        rehearsed = list(forms)
        runner = make_runner()
        serve(runner, 3)
        while runner.prepare():
            pass
        serve(runner, 4)
        print(json.dumps(rehearsed))
        print(json.dumps([form for form in forms if form not in rehearsed]))
        forms.clear()
        stage = make_executor("host", Again()).runner
        assert isinstance(stage, ModelRunner)
        assert isinstance(stage._model, TorchModel)
        compile_stage(stage._model, OF_STAGE, NO_LINKS, 1)
        rehearsed = list(forms)
        stage._model.allocate_kv_cache(NUM_BLOCKS)
        serve(stage, 3)
        print(json.dumps(rehearsed))
        print(json.dumps([form for form in forms if form not in rehearsed]))


def make_runner() -> DeviceRunner:
    runner = make_executor("device", Again()).runner
    assert isinstance(runner, DeviceRunner)
    assert isinstance(runner._model, CausalLM)
    runner._model.to(torch.bfloat16)  # float32 logits are another form then
    return runner


def serve(runner: Runner, seed: int) -> None:
    """Steps of up to `MAX_NUM_SEQS` requests with any number of tokens each, wanting anything."""
    draw = random.Random(seed)
    for number in range(60):
        lengths = [draw.randint(1, 3) for _ in range(draw.randint(1, MAX_NUM_SEQS - 1))]
        lengths.append(draw.choice([1, 1, max(1, MAX_TOKENS - sum(lengths))]))
        requests = [
            new_request(
                f"{number}-{i}",
                [0] * (length + draw.randint(0, 40)),
                block_ids=[draw.randrange(NUM_BLOCKS) for _ in range(14)],
                **draw.choice(OPTIONS),
            )
            for i, length in enumerate(lengths)
        ]
        scheduled = {request.request_id: length for request, length in zip(requests, lengths, strict=True)}
        going_on = [request.request_id for request in requests if draw.random() < 0.3]
        runner.submit(plan_of(scheduled, new=requests, going_on=going_on)).result()
        runner.submit(plan_of(dict.fromkeys(scheduled, 1))).result()
        runner.submit(plan_of({}, removed=list(scheduled))).result()


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("Triton would interpret: unset TRITON_INTERPRET")
    main()
