"""`--predict`: what the simulator says of the same workload, and how far from the truth each figure is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.bench.workloads import WorkloadRequest
from app.settings import Settings, SettingsError
from app.simulate.machine import Machine, machine_of, read_machine
from app.simulate.run import simulate

COMPARED = (
    *("duration", "request_throughput", "output_throughput", "max_concurrent_requests", "total_cached_tokens"),
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("median", "p90", "p99")),
)


def simulated_machine(server_info: Any, file: str) -> tuple[Machine, Settings]:
    """What is simulated: of the file, else what the server says of itself. Raises SettingsError."""
    if file:
        return read_machine(Path(file), Settings(), flag="--predict")
    if not isinstance(server_info, dict) or not server_info.get("step_cost"):
        raise SettingsError(
            "--predict: the server does not tell what its steps cost. Headrace does at /server_info, to one of its "
            "admin_keys: put it into HEADRACE_ADMIN_KEYS. Or name a file with the answer: --predict FILE"
        )
    try:
        return machine_of(server_info, Settings())
    except ValueError as error:
        raise SettingsError(f"--predict: what the server says of itself is wrong: {error}") from None


def predict(
    requests: Sequence[WorkloadRequest],
    machine: Machine,
    settings: Settings,
    result: Mapping[str, Any],
    max_concurrency: int | None,
) -> dict[str, Any]:
    """`predicted`, by key of the result, and `prediction_error`: predicted over measured, minus 1."""
    told = simulate(requests, machine, settings, max_concurrency=max_concurrency).result(
        percentiles=(90, 99), began=0.0
    )
    predicted = {key: told[key] for key in COMPARED}
    errors = {key: value / result[key] - 1 for key, value in predicted.items() if result.get(key)}
    return {"predicted": predicted, "prediction_error": errors}
