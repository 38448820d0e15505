"""Compare the step times of tensor ranks of one thread each and of one rank with as many threads, by turns.

    python -m loadtest.tensor_parallel [--ranks 2] [--rounds 15] [--model NAME]

Steps of 1, 8 and 32 requests that decode behind 192 tokens, with the head and the greedy choice, and one of 512 tokens
of a prompt. Both take turns, and the ratio is of the best rounds: other work on the machine makes a round slower, and
no round faster. On a busy machine the figures mean nothing: a descheduled rank stops all others, a thread does not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from dataclasses import replace
from multiprocessing.connection import Connection

from gpu.checkpoint import open_model
from gpu.cpu.communicator import SharedMemoryCommunicator, make_segment
from gpu.cpu.decoder import CPUCausalLM
from gpu.cpu.library import load_library
from gpu.model_loader import rank_spec
from gpu.runner.runner import ModelInputs, WorkerOptions
from gpu.sharding import Layout
from gpu.weights.reading import read_weights
from loadtest.cpu_builds import BLOCK_SIZE, CONTEXT, PROMPT, ROWS, inputs_of


def make_model(name: str, layout: Layout, segment: int, num_threads: int) -> CPUCausalLM:
    library, files = load_library(), open_model(name)
    assert library is not None
    size = layout.tensor_parallel_size
    communicator = SharedMemoryCommunicator(library, segment, layout.tp_rank, size) if size > 1 else None
    spec = rank_spec(files.config, WorkerOptions(), "cpu", layout)
    model = CPUCausalLM(
        library,
        files.config,
        read_weights(files, spec),
        block_size=BLOCK_SIZE,
        max_model_len=1024,
        num_threads=num_threads,
        spec=spec,
        communicator=communicator,
        max_num_batched_tokens=PROMPT,
    )
    model.allocate_kv_cache(max(ROWS) * (CONTEXT // BLOCK_SIZE + 1))
    return model


def serve(name: str, layout: Layout, segment: int, num_threads: int, pipe: Connection) -> None:
    """Steps as they are asked for, each answered by its seconds."""
    model = make_model(name, layout, segment, num_threads)
    while True:
        inputs: ModelInputs = pipe.recv()
        began = time.perf_counter()
        hidden = model.forward(inputs)
        if inputs.num_decodes:
            model.most_likely(hidden)
        pipe.send(time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    context, segment = multiprocessing.get_context("fork"), make_segment()
    layout, threads = Layout(tensor_parallel_size=options.ranks), options.ranks
    groups: list[list[Connection]] = [[], []]
    jobs = [(0, Layout(), threads), *((1, replace(layout, rank=rank), 1) for rank in range(options.ranks))]
    for group, own, num_threads in jobs:
        ours, theirs = context.Pipe()
        arguments = (options.model, own, segment, num_threads, theirs)
        context.Process(target=serve, args=arguments, daemon=True).start()
        groups[group].append(ours)

    def step(pipes: list[Connection], inputs: ModelInputs) -> float:
        for pipe in pipes:
            pipe.send(inputs)
        return float(max(pipe.recv() for pipe in pipes))

    print(f"{options.model}, {os.cpu_count()} cores; ms, best (median) of {options.rounds}")
    print(
        "step".ljust(12), f"1 x {threads} threads".rjust(20), f"{options.ranks} x 1 thread".rjust(20), "ratio".rjust(8)
    )
    for label, inputs in (
        *((f"{rows} decoding", inputs_of(rows, 1, CONTEXT)) for rows in ROWS),
        (f"{PROMPT} prefill", inputs_of(1, PROMPT, PROMPT)),
    ):
        times: list[list[float]] = [[], []]
        for _ in range(options.rounds + 1):
            for pipes, seconds in zip(groups, times, strict=True):
                seconds.append(step(pipes, inputs) * 1e3)
        bests = [min(seconds[1:]) for seconds in times]
        shown = [f"{best:.2f} ({statistics.median(each[1:]):.2f})" for best, each in zip(bests, times, strict=True)]
        print(label.ljust(12), *(text.rjust(20) for text in shown), f"{bests[0] / bests[1]:.2f}".rjust(8), flush=True)


if __name__ == "__main__":
    main()
