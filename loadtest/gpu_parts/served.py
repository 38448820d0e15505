"""The nano-vllm workload over HTTP: the same requests, streamed, by clients in this process."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenizers
import torch

from app.client import ConnectionPool, read_answer
from app.workload.report import RequestRecord
from loadtest.gpu_parts.engine_runs import Sizes, nano_lengths
from loadtest.gpu_parts.models import PUBLISHED, TINY
from loadtest.gpu_parts.report import Report
from loadtest.servers import headrace

NAME = "bench"


def nano_served(report: Report, name: str, device: torch.device, sizes: Sizes, timeout: float) -> None:
    """Start a server with random weights, send all requests at once, and count what comes back."""
    values: dict[str, Any] = TINY if name == "tiny" else PUBLISHED[name]
    with tempfile.TemporaryDirectory() as directory:
        model = write_model(Path(directory), values)
        settings: dict[str, Any] = {
            "model": model,
            "served_model_name": NAME,
            "load_format": "dummy",
            "engine": "process",
            "device": device,
            "max_model_len": sizes.max_model_len,
            "max_num_seqs": max(sizes.batches),
            "max_num_batched_tokens": sizes.max_num_batched_tokens,
            "max_queued_requests": 4096,
        }
        if device.type == "cpu":
            settings |= {"kv_cache_memory": "32MiB", "dtype": "float32"}
        server = headrace("headrace", **settings)
        server._timeout = timeout
        with server as target:
            report.add(name, "start of the server to ready", server.seconds_to_ready, "s")
            requests = [
                ([token % values["vocab_size"] for token in prompt], max_tokens)
                for prompt, max_tokens in nano_lengths(sizes)
            ]
            asyncio.run(_send_all(target.url, requests[: len(requests) // 8]))  # a warm-up
            started = time.perf_counter()
            num_tokens = asyncio.run(_send_all(target.url, requests))
            seconds = time.perf_counter() - started
    wanted = sum(max_tokens for _, max_tokens in requests)
    if num_tokens != wanted:
        report.fail(f"{name}: the served workload gave {num_tokens} tokens instead of {wanted}")
    offline = report.value(name, "nano-vllm workload, offline")
    report.add(name, "nano-vllm workload, over HTTP (against offline)", num_tokens / seconds, "tok/s", offline)


def write_model(directory: Path, values: dict[str, object]) -> Path:
    """Write a Hugging Face directory without weights; its tokenizer knows bytes and made-up words."""
    (directory / "config.json").write_text(json.dumps(values))
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [f"<{number}>" for number in range(int(str(values["vocab_size"])) - len(letters))]
    vocabulary = {token: number for number, token in enumerate([*letters, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


async def _send_all(url: str, requests: list[tuple[list[int], int]]) -> int:
    """All completions at once, read to their ends. Returns the tokens that their usages count."""
    pool = ConnectionPool(url, {})
    body = {"model": NAME, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}

    async def stream(prompt: list[int], max_tokens: int) -> int:
        content = json.dumps(body | {"prompt": prompt, "max_tokens": max_tokens}).encode()
        exchange = await pool.exchange(pool.message("POST", "/v1/completions", content))
        record = RequestRecord(0.0)
        for _ in read_answer(exchange, record):
            await asyncio.sleep(0)
        return 0 if record.error else record.num_output_tokens

    return sum(await asyncio.gather(*(stream(*request) for request in requests)))
