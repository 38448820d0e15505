"""The device runner on the kernels: chunked prefill, mixed steps, graphs with padding, every logits processor."""

from __future__ import annotations

import msgspec
import pytest

from engine.messages import EngineCoreRequest
from tests.gpu.device_runners import Again, crowd, make_core, make_executor


def requests() -> list[EngineCoreRequest]:
    """Five of the crowd, greedy or not, and short: the interpreter takes a millisecond for a program."""
    mixed = [request for pair in zip(crowd(4), crowd(5, greedy=False), strict=True) for request in pair]
    return [
        msgspec.structs.replace(
            request,
            request_id=f"r{number}",
            prompt_token_ids=request.prompt_token_ids[: 2 + 4 * number],
            sampling=msgspec.structs.replace(request.sampling, max_tokens=2 + number % 3, min_tokens=0),
        )
        for number, request in enumerate(mixed[4:9])
    ]


def tokens_of_all() -> dict[str, list[int]]:
    """What a device runner with graphs gives all of them together, a step ahead."""
    executor = make_executor("device", Again())
    while executor.runner.prepare():
        pass
    core = make_core(executor, 2)
    for request in requests():
        core.add(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests()}
    while core.has_work:
        for output in core.step().outputs:
            assert output.error is None
            tokens[output.request_id] += output.new_token_ids
    return tokens


@pytest.fixture(scope="module")
def wanted() -> dict[str, list[int]]:
    """On the references, before any test has turned kernels on."""
    return tokens_of_all()


@pytest.mark.slow
def test_the_device_runner_gives_on_kernels_what_it_gives_on_their_references(wanted):
    assert tokens_of_all() == wanted
    assert all(wanted.values())
