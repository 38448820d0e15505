"""Compare the step times of torch and of all builds of the CPU library that this processor runs, in one process.

    python -m loadtest.cpu_builds [--builds _kernels_avx2,bfloat16,float32] [--threads 1] [--rounds 15] [--model NAME]

Steps of 1, 8 and 32 requests that decode behind 192 tokens, with the head and the greedy choice, and one of 512 tokens
of a prompt. All servers of a row take turns, and the best of the rounds counts, in time of this thread: other work on
the machine makes a round slower and no round faster. With one thread that is all the time that a step takes. The
builds called bfloat16 and float32 are torch, which takes what the processor has, unless the environment says
ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from gpu.checkpoint import open_model
from gpu.cpu.decoder import CPUCausalLM
from gpu.cpu.library import usable
from gpu.model_loader import ServedModel
from gpu.models.torch_model import load_torch_model
from gpu.runner.runner import LanguageModel, ModelInputs
from gpu.weights.reading import read_weights

BLOCK_SIZE, CONTEXT, PROMPT = 16, 192, 512
ROWS = (1, 8, 32)
TORCH = ("bfloat16", "float32")


def inputs_of(num_requests: int, query_len: int, seq_len: int) -> ModelInputs:
    blocks = -(-seq_len // BLOCK_SIZE)
    tokens = np.arange(num_requests * query_len, dtype=np.int64)
    return ModelInputs(
        input_ids=tokens * 37 % 1000,
        positions=np.tile(np.arange(seq_len - query_len, seq_len), num_requests),
        query_start_loc=np.arange(num_requests + 1, dtype=np.int32) * query_len,
        seq_lens=np.full(num_requests, seq_len, dtype=np.int32),
        block_tables=np.arange(num_requests * blocks, dtype=np.int32).reshape(1, num_requests, blocks),
        num_decodes=num_requests if query_len == 1 else 0,
        num_prompt_tokens=np.full(num_requests, CONTEXT if query_len == 1 else PROMPT, dtype=np.int32),
    )


def step(model: LanguageModel, inputs: ModelInputs) -> float:
    """Seconds of this thread."""
    begin = time.thread_time()
    hidden = model.forward(inputs)
    if inputs.num_decodes:
        model.most_likely(hidden)
    return time.thread_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--builds", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    libraries = {library.name: library for library in usable()}
    models: dict[str, ServedModel] = {}
    shape = {"block_size": BLOCK_SIZE, "max_model_len": 1024, "num_threads": options.threads}
    for name in options.builds.split(",") if options.builds else [*libraries, *TORCH]:
        files = open_model(options.model)
        weights = read_weights(files)
        if name in TORCH:
            models[name] = load_torch_model(files.config, weights, dtype=name, device="cpu", **shape)
        else:
            models[name] = CPUCausalLM(libraries[name], files.config, weights, **shape)
        models[name].allocate_kv_cache(max(ROWS) * (CONTEXT // BLOCK_SIZE + 1))
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; {options.threads} thread(s); ms")
    print("step".ljust(12), *(name.rjust(20) for name in models))
    for label, inputs in (
        *((f"{rows} decoding", inputs_of(rows, 1, CONTEXT)) for rows in ROWS),
        (f"{PROMPT} prefill", inputs_of(1, PROMPT, PROMPT)),
    ):
        rounds = options.rounds if inputs.num_decodes else max(3, options.rounds // 5)
        taken = [[step(model, inputs) for model in models.values()] for _ in range(rounds)]
        print(label.ljust(12), *(f"{best * 1e3:.1f}".rjust(20) for best in map(min, zip(*taken, strict=True))))


if __name__ == "__main__":
    main()
