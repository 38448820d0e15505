"""The pool's own steps, without engines: what unloading, a folder read again and a client's numbers leave behind."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import numpy as np
import pytest
from safetensors.numpy import save_file

from app.admission.tenants import Tenant, Tenants
from app.config.settings import Settings
from app.config.several import models_in
from app.http.connections import PER_ENGINE_PROCESS
from app.routes import ollama
from app.serving import loading
from app.serving.model_policy import ModelState
from app.serving.model_pool import ModelPool, _asked
from app.serving.model_server import ModelServer
from app.serving.server import Server, ServerPhase
from engine.child import ForkServer
from engine.errors import HeadraceError
from gpu.checkpoint import open_model
from gpu.checkpoint.hf_config import config_from_hf
from gpu.checkpoint.tensors import tensor_shapes
from protocol.errors import ApiError
from tests.support.tiny_model import CONFIG, write_tiny_model


@pytest.fixture
def pool(tmp_path: Path) -> ModelPool:
    """A pool of two loaded models."""
    server = Server(Settings(models={"one": {"path": str(tmp_path)}, "two": {"path": str(tmp_path)}}))
    server.phase = ServerPhase.READY
    pool = ModelPool(server, on_fatal=print)
    for model in pool.models:
        model.state, model.need, model.loaded_at = ModelState.LOADED, 1, time.monotonic()
    return pool


def test_a_tenant_finds_only_the_models_that_it_may_use(pool: ModelPool) -> None:
    limited, other = Tenant(name="limited", models=("two", "later")), Tenant(name="other", models=("later",))
    assert pool.names() == ["one", "two"]
    assert pool.names(limited) == ["two"]
    assert pool.find(None, limited).name == pool.find("two:latest", limited).name == "two"
    with pytest.raises(ApiError, match=r"`one` does not exist. Served here: two\."):
        pool.find("one", limited)
    with pytest.raises(ApiError, match="No model is served here that this client may use"):
        pool.find(None, other)


def test_a_misspelt_model_of_a_tenant_is_warned_of(
    pool: ModelPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[tenants.limited]\nkeys = ["limited"]\nmodels = ["two", "tow"]\n')
    pool.check_tenants()
    assert not caplog.messages
    pool.server.tenants.replace(Tenants(Settings(api_keys_file=keys)))
    pool.check_tenants()
    assert "api_keys_file: models of tenants.limited names tow, not served here. Served are one, two" in caplog.messages


@pytest.mark.anyio
async def test_models_before_one_that_cannot_go_are_unloaded_all_the_same(pool: ModelPool) -> None:
    one, two = pool.models
    one.scope = anyio.CancelScope()
    two.hold()
    with pytest.raises(ApiError, match="two has 1 requests"):
        await pool.unload([one, two])
    assert one.state is ModelState.UNLOADING
    assert one.scope.cancel_called, "or it would be unloading for ever"


@pytest.mark.anyio
async def test_a_model_that_is_being_unloaded_is_waited_for(pool: ModelPool) -> None:
    one, _ = pool.models
    one.state = ModelState.UNLOADING
    async with anyio.create_task_group() as task_group:
        task_group.start_soon(pool.unload, [one])
        await anyio.sleep(0.03)
        pool.policy.unloaded(one)


def test_a_model_goes_from_the_folder_only_when_no_request_waits_for_it(pool: ModelPool) -> None:
    one, two = pool.models
    one.state = two.state = ModelState.UNLOADED
    waiter = pool.policy.enter(one, time.monotonic(), time.monotonic() + 60)
    pool._take([])
    assert pool.models == [one], "or its engine would run without counting"
    pool.policy.leave(waiter, time.monotonic())
    pool._take([])
    assert not pool.models


@pytest.mark.anyio
async def test_a_model_that_is_unloaded_before_it_is_loaded_does_not_come_back(
    pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pool.models

    async def run(model: ModelServer, on_loaded: Callable[[int], None]) -> None:
        model.state = ModelState.UNLOADING
        on_loaded(1)
        assert model.state is ModelState.UNLOADING

    monkeypatch.setattr(ModelServer, "run", run)
    one.state, one.scope = ModelState.LOADING, anyio.CancelScope()
    await pool._serve(one)
    assert one.state is ModelState.UNLOADED


@pytest.mark.anyio
async def test_a_model_whose_engine_is_stuck_is_loaded_again_only_when_that_engine_has_ended(
    pool: ModelPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = pool.models
    ended = anyio.Event()

    async def run(model: ModelServer, on_loaded: Callable[[int], None]) -> None:
        on_loaded(1)
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await ended.wait()

    monkeypatch.setattr(ModelServer, "run", run)
    monkeypatch.setattr(ModelServer, "is_alive", property(lambda model: model is not one))
    one.state, one.scope = ModelState.LOADING, anyio.CancelScope()
    async with anyio.create_task_group() as task_group:
        task_group.start_soon(pool._serve, one)
        await anyio.sleep(0.01)
        pool._look()
        waiter = pool.policy.enter(one, time.monotonic(), time.monotonic() + 60)
        assert not pool.policy.plan(time.monotonic()).load, "two engines of one model"
        ended.set()
    assert one.state is ModelState.FAILED
    assert "no progress" in str(waiter.error)


@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 400, "true", "1e308"])
def test_a_deadline_of_any_number_is_a_time(pool: ModelPool, number: str) -> None:
    class Request:
        arrival_time, headers = 1.0, {"x-request-timeout": number}

    asked = _asked(f'{{"timeout": {number}}}'.encode())
    assert pool._deadline(pool.models[0], Request(), asked) <= 1.0 + pool.settings.max_timeout  # type: ignore[arg-type]


def test_a_lack_of_descriptors_leaves_the_server_without_a_spare_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> ForkServer:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(loading, "ForkServer", fail)
    spare = loading.SpareEngine()
    spare.prepare()
    assert spare.take(Settings()) is None
    spare.close()


LIMITS = """
import os, resource
from app.config.settings import Settings
from app.http.connections import connection_limits
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
limits = connection_limits(Settings(models={"a": {}, "b": {}}))
print(1024 - len(os.listdir("/dev/fd")) - limits.connections - limits.refusals - limits.newcomers)
"""


def test_a_flood_of_connections_leaves_descriptors_for_the_engines_of_several_models() -> None:
    left = subprocess.run([sys.executable, "-c", LIMITS], capture_output=True, text=True, check=True).stdout
    assert int(left) >= 8 * PER_ENGINE_PROCESS


def test_a_loaded_model_whose_files_were_deleted_stays_in_lists(
    pool: ModelPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_tiny_model(tmp_path / "tiny", vocab_size=512) / "model.safetensors"
    shapes = tensor_shapes(config_from_hf(CONFIG | {"vocab_size": 512}, source="tiny"))
    save_file({name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, weights)
    files = open_model(str(weights.parent))
    assert ollama._facts_of(files)["size"] > 512 * 32
    weights.unlink()
    monkeypatch.setattr(ollama, "_files_of", lambda model: files)
    assert ollama._facts(pool.models[0])["size"] == 0


def test_clients_do_not_read_where_a_broken_model_is(pool: ModelPool) -> None:
    one, _ = pool.models
    one.retry_at, one.error = 0.0, HeadraceError(f"model: got '{one.settings.model}', which is empty.")
    assert "got 'test_clients" in pool._failure(one).message


def test_an_entry_of_the_folder_that_cannot_be_read_hides_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "good.gguf").touch()
    (tmp_path / "long.gguf").symlink_to("x" * 300)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "no-unicode-\udcff.gguf").touch()
    assert list(models_in(tmp_path)) == ["good"]
    assert "long.gguf" in caplog.text
    models_in(tmp_path)
    assert caplog.text.count("long.gguf' is left out") == 1
