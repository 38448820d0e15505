"""Ollama's API: /api/chat, generate, embed, embeddings, tags, ps, show, version and pull."""

from __future__ import annotations

import math
import re
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import orjson
from anyio import to_thread

from app.http.scope import RequestScope
from app.routes import generation
from app.serving.generation import parse, warn_of_left_out
from app.serving.model_policy import ModelState
from app.serving.model_pool import Asked, ModelPool
from app.serving.model_server import ModelServer
from app.serving.server import Server
from engine.errors import HeadraceError
from protocol.answers import Version, encode
from protocol.body import parse_body
from protocol.errors import ApiError
from protocol.ollama import output
from protocol.ollama.dialect import OLLAMA_VERSION
from protocol.ollama.requests import OPTION_NAMES, EmbedRequest, NamedModelRequest, OllamaRequest
from protocol.tools.unsupported import IgnoredParts

if TYPE_CHECKING:
    from gpu.checkpoint import ModelFiles, Progress


async def answer(kind: type[OllamaRequest], pool: ModelPool, request: RequestScope) -> None:
    """POST /api/chat and /api/generate: JSON lines, or with `stream` false one object. No prompt: load or unload."""
    given = await pool.server.workload.read(request, lambda: parse_body(kind, request.body))
    model = pool.find(given.model, request.tenant)
    if given.only_loads:
        given.check_fields()
    if given.only_loads and given.keep_alive == 0:
        await _unload(pool, model)
        await request.send_json(200, output.load_body(given, given.model or model.name, time.time(), "unload"))
        return
    asked = Asked(stream=given.stream, timeout=given.timeout, ttft_timeout=given.ttft_timeout)
    async with pool.use(model, request, asked, streams=not given.only_loads):
        await _answer(given, model, request)


async def _answer(given: OllamaRequest, server: ModelServer, request: RequestScope) -> None:
    model, name = server.model, server.check_model_name(given.model)
    given.check_model(model.engine_info.max_model_len, can_think=model.prompts.syntax.can_think)
    _keep(given.keep_alive, server, request)
    if given.only_loads:
        await warn_of_left_out(server, request, given)
        await request.send_json(200, output.load_body(given, name, time.time(), "load"))
        return
    await generation.answer(
        given, server, request, "ollama-", output.LinesWriter, output.ObjectWriter, cuts_to_fit=given.truncate
    )


async def embed(kind: type[EmbedRequest], server: ModelServer, request: RequestScope) -> None:
    """POST /api/embed and /api/embeddings."""
    given = await parse(server, kind, request)
    name = server.check_model_name(given.model)
    given.options.check_context(server.model.engine_info.max_model_len)
    _keep(given.keep_alive, server, request)
    await warn_of_left_out(server, request, given)
    if not given.texts:
        await request.send_json(200, output.vectors_body(given, name))
        return
    await generation.embed(server, request, given.translate(), partial(output.VectorsWriter, given))


def _keep(seconds: float | None, model: ModelServer, request: RequestScope) -> None:
    """Set the idle time after which the model is unloaded, if clients may set it; else warn."""
    if _is_kept(model):
        if seconds is not None and seconds >= 0:
            request.warn(IgnoredParts(fields=("keep_alive",)).warning())
    elif seconds is not None:
        model.idle_unload = seconds if seconds >= 0 else math.inf


def _is_kept(model: ModelServer) -> bool:
    """Return True for a model that clients cannot unload: the only one, a pinned one, or any on a server with keys,
    because other tenants use it too."""
    return not model.server.settings.has_several_models or model.pinned or model.server.tenants.required


async def _unload(pool: ModelPool, model: ModelServer) -> None:
    """Unload a model now, or when it has no requests. Raises ApiError 400."""
    if _is_kept(model):
        raise ApiError(
            400, "keep_alive must not be 0: clients cannot unload this model here. Leave it out.", param="keep_alive"
        )
    model.idle_unload = 0.0
    if model.is_open and not model.in_use:
        await pool.unload([model])


# ------------------------------------------------------------------------------------------------------------ catalogue


FOR_EVER = "9999-12-31T23:59:59Z"
_LONGEST = 1e10  # seconds; a longer keep_alive is shown as `FOR_EVER`, because years have four digits in dates


async def tags(pool: ModelPool, request: RequestScope) -> None:
    """GET /api/tags: all served models."""
    await pool.refresh()
    models = [each for model in pool.models_of(request.tenant) for each in await _named(model)]
    await request.send_json(200, orjson.dumps({"models": models}))


async def loaded_models(pool: ModelPool, request: RequestScope) -> None:
    """GET /api/ps: the models in memory."""
    shown = []
    for model in pool.models_of(request.tenant):
        if model.state is ModelState.LOADED or pool.only is not None:
            info = model.model.engine_info
            more: dict[str, Any] = {"expires_at": FOR_EVER, "context_length": info.max_model_len}
            if model.idle_unload < _LONGEST and not model.pinned:
                idle = 0.0 if model.in_use else time.monotonic() - model.last_used
                more["expires_at"] = output.timestamp(time.time() + model.idle_unload - idle)
            if info.facts.compute_form.startswith("cpu"):
                more["size_vram"] = 0
            shown += [each | more for each in await _named(model)]
    await request.send_json(200, orjson.dumps({"models": shown}))


async def _named(model: ModelServer) -> list[dict[str, Any]]:
    """Return the entry of a model under each of its names."""
    if (facts := model.facts) is None:
        facts = await to_thread.run_sync(_facts, model)
    if facts["size"]:
        model.facts = facts
    names = (name if ":" in name.rpartition("/")[2] else f"{name}:latest" for name in model.settings.model_names)
    return [{"name": name, "model": name, **facts, "size_vram": facts["size"]} for name in dict.fromkeys(names)]


async def show(pool: ModelPool, request: RequestScope) -> None:
    """POST /api/show: one model, without loading it."""
    given = await pool.server.workload.read(request, lambda: parse_body(NamedModelRequest, request.body))
    model = pool.find(given.named, request.tenant)
    facts, described = (await _named(model))[0], await to_thread.run_sync(_described, model)
    shown = described | {name: facts[name] for name in ("details", "modified_at")}
    await request.send_json(200, orjson.dumps(shown))


# The following functions run on a thread, because they read files and may import the engine.


def _files_of(model: ModelServer) -> ModelFiles | None:
    """Return the files of a model, which need not be loaded; None if they are not on this machine or not usable."""
    from app.serving.loading import open_files
    from gpu.checkpoint import EMBEDDED_MODEL

    if model.state is ModelState.LOADED or not model.server.settings.has_several_models:
        return model.model.files
    source = model.settings.model_source
    try:
        is_here = source == EMBEDDED_MODEL or Path(source).expanduser().exists()
        return open_files(model.settings, None) if is_here else None
    except (HeadraceError, OSError):
        return None  # loading it will log the reason


def _described(model: ModelServer) -> dict[str, Any]:
    from protocol.chat_template import CHATML
    from protocol.syntax.model_syntax import abilities

    if (files := _files_of(model)) is None:
        return {"template": "", "model_info": {}, "capabilities": ["completion"]}
    config, family, template = files.config, _family(files), files.chat_template or CHATML
    special = {token.content for token in files.tokenizer.get_added_tokens_decoder().values() if token.special}
    numbers = {
        "context_length": min(config.max_position_embeddings, model.settings.max_model_len or math.inf),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }
    count = {"general.architecture": family, "general.parameter_count": files.num_parameters}
    can = {"completion": True, **abilities(template, special)} if config.encoder is None else {"embedding": True}
    sampling = files.sampling if model.settings.sampling_defaults == "model" else {}
    return {
        "parameters": "\n".join(f"{OPTION_NAMES.get(name, name)} {value}" for name, value in sampling.items()),
        "template": files.chat_template or "",
        "model_info": count | {f"{family}.{name}": value for name, value in numbers.items()},
        "capabilities": [name for name, has_it in can.items() if has_it],
    }


async def show_version(server: Server, request: RequestScope) -> None:
    """GET /api/version: the version of Ollama that this API follows."""
    await request.send_json(200, encode(Version(OLLAMA_VERSION)))


def _family(files: ModelFiles) -> str:
    return re.sub(r"For[A-Z]\w+$", "", files.config.architecture).lower()


def _facts(model: ModelServer) -> dict[str, Any]:
    """Return the facts of a model for lists; empty ones if its files are not on this machine."""
    with suppress(FileNotFoundError):  # they may be deleted while it is loaded
        if (files := _files_of(model)) is not None:
            return _facts_of(files)
    return {"size": 0, "digest": "", "modified_at": output.timestamp(0.0), "details": {}}


def _facts_of(files: ModelFiles) -> dict[str, Any]:
    from gpu.checkpoint import model_digest, weight_paths

    family, count = _family(files), files.num_parameters
    states = [path.stat() for path in weight_paths(files)]
    return {
        "size": sum(state.st_size for state in states),
        "digest": model_digest(files).hex(),
        "modified_at": output.timestamp(max((state.st_mtime for state in states), default=0.0)),
        "details": {
            "parent_model": "",
            "format": "safetensors" if isinstance(files.tensors, tuple | None) else "gguf",
            "family": family,
            "families": [family],
            "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M",
            "quantization_level": files.weight_type,
        },
    }


# ----------------------------------------------------------------------------------------------------------------- pull


_PULLS = anyio.CapacityLimiter(2)  # downloads at once
_LOOK_EVERY = 0.25  # seconds
_PREFIX = re.compile(r"^(https://)?(hf\.co|huggingface\.co)/")


async def pull(pool: ModelPool, request: RequestScope) -> None:
    """POST /api/pull: download a model of the hub, and report progress in lines. Nothing is done for a served model."""
    server = pool.server
    given = await server.workload.read(request, lambda: parse_body(NamedModelRequest, request.body))
    name = _PREFIX.sub("", given.named).removesuffix(":latest")
    ended = anyio.Event()
    status: dict[str, Any] = {"status": "pulling manifest"}
    failed: list[ApiError] = []

    def report(phase: str, done: int, total: int | None) -> None:
        nonlocal status
        if ended.is_set():
            raise HeadraceError("The client that asked for the download has left.")
        status = {"status": phase, "digest": name, "completed": done, **({"total": total} if total else {})}

    async def fetch() -> None:
        try:
            if name not in pool.names():
                await to_thread.run_sync(_fetch, name, report, abandon_on_cancel=True, limiter=_PULLS)
        except HeadraceError as error:
            failed.append(ApiError(400, str(error), param="model"))
        finally:
            ended.set()

    if given.stream:
        keep_alive = server.settings.sse_keep_alive or math.inf, output.json_line({"status": "pulling"})
        await request.start_stream(output.STREAM_TYPE, error_frame=request.error_event, keep_alive=keep_alive)
        request.start_soon(fetch)
        shown = None
        while status != shown or not ended.is_set():
            if status != shown:
                await request.send_chunk(output.json_line(shown := status))
            with anyio.move_on_after(_LOOK_EVERY):
                await ended.wait()
    else:
        await fetch()
    if failed:
        raise failed[0]
    if given.stream:
        await request.end_stream(output.json_line({"status": "success"}))
    else:
        await request.send_json(200, orjson.dumps({"status": "success"}))


def _fetch(name: str, progress: Progress) -> None:
    from gpu.checkpoint import fetch_repository

    fetch_repository(name, progress)
