"""Ollama's API: /api/chat, generate, embed, embeddings, tags, ps, show, version and pull."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import orjson
from anyio import to_thread

from app.http.scope import RequestScope
from app.routes import generation
from app.routes.generation import translated
from app.serving.generation import GenerationTask, generate, new_head, parse, warn_of_left_out
from app.serving.model_policy import ModelState
from app.serving.model_pool import ModelPool
from app.serving.model_server import ModelServer
from app.serving.server import Server
from protocol.answers import Version, encode
from protocol.body import parse_body
from protocol.errors import ApiError
from protocol.ollama.dialect import OLLAMA_VERSION
from protocol.ollama.output import (
    STREAM_TYPE,
    LinesWriter,
    ObjectWriter,
    VectorsWriter,
    json_line,
    load_body,
    timestamp,
    vectors_body,
)
from protocol.ollama.requests import OPTION_NAMES, EmbedRequest, NamedModelRequest, OllamaRequest
from protocol.tools.unsupported import IgnoredParts

if TYPE_CHECKING:
    from gpu.checkpoint import ModelFiles


async def answer(kind: type[OllamaRequest], server: ModelServer, request: RequestScope) -> None:
    """POST /api/chat and /api/generate: lines, or with `stream` false an object. Without a prompt, load the model."""
    given = await parse(server, kind, request)
    model, name = server.model, server.check_model_name(given.model)
    given.check_model(model.engine_info.max_model_len, can_think=model.prompts.syntax.can_think)
    _keep(given.keep_alive, server, request)
    if given.only_loads:
        await warn_of_left_out(server, request, given)
        await request.send_json(200, load_body(given, name, time.time(), "load"))
        return
    body = await translated(server, request, given)
    body.check_template_kwargs(server.settings.template_kwargs)
    task = GenerationTask(
        head=new_head(server, request, "ollama-", given.model, given.request_id),
        body=body,
        prompts=await server.workload.read(request, partial(body.prompts, model.engine_info.vocab_size)),
        cuts_to_fit=given.truncate,
        stream_writer=partial(LinesWriter, given),
        body_writer=partial(ObjectWriter, given),
    )
    await generate(server, request, task)


async def embed(kind: type[EmbedRequest], server: ModelServer, request: RequestScope) -> None:
    """POST /api/embed and /api/embeddings."""
    given = await parse(server, kind, request)
    name = server.check_model_name(given.model)
    given.options.check_context(server.model.engine_info.max_model_len)
    _keep(given.keep_alive, server, request)
    await warn_of_left_out(server, request, given)
    if not given.texts:
        await request.send_json(200, vectors_body(given, name))
        return
    await generation.embed(server, request, given.translate(), partial(VectorsWriter, given))


def _keep(seconds: float | None, server: ModelServer, request: RequestScope) -> None:
    """Obey `keep_alive`: unload the model after so long without a request, as far as it is one of several."""
    if seconds is None:
        return
    if server.server.settings.has_several_models:
        server.idle_unload = seconds if seconds >= 0 else math.inf
    elif seconds == 0:
        raise ApiError(400, "keep_alive must not be 0: this server serves one model, and keeps it.", param="keep_alive")
    elif seconds > 0:
        request.warn(IgnoredParts(fields=("keep_alive",)).warning())


# ------------------------------------------------------------------------------------------------------------ catalogue


FOR_EVER = "9999-12-31T23:59:59Z"


async def tags(pool: ModelPool, request: RequestScope) -> None:
    """GET /api/tags: all served models."""
    await pool.refresh()
    await _list(pool.models if pool.only is None else [pool.only], request)


async def loaded_models(pool: ModelPool, request: RequestScope) -> None:
    """GET /api/ps: the models in memory."""
    loaded = [each for each in pool.models if each.state is ModelState.LOADED]
    await _list([pool.only] if pool.only is not None else loaded, request, in_memory=True)


async def _list(models: Iterable[ModelServer], request: RequestScope, *, in_memory: bool = False) -> None:
    shown = []
    for each in models:
        facts = await _facts_of(each)
        more: dict[str, Any] = {"size_vram": facts["size"]}
        if in_memory:
            info = each.model.engine_info
            more |= {"expires_at": FOR_EVER, "context_length": info.max_model_len}
            more |= {"size_vram": 0} if info.facts.compute_form.startswith("cpu") else {}
        for name in each.settings.model_names:
            tagged = name if ":" in name.rpartition("/")[2] else f"{name}:latest"
            shown.append({"name": tagged, "model": tagged, **facts, **more})
    await request.send_json(200, orjson.dumps({"models": shown}))


async def show(server: ModelServer, request: RequestScope) -> None:
    """POST /api/show: one model."""
    given = await parse(server, NamedModelRequest, request)
    server.check_model_name(given.named)
    model, config = server.model, server.model.files.config
    facts = await _facts_of(server)
    family = facts["details"]["family"]
    numbers = {
        "context_length": model.engine_info.max_model_len,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "vocab_size": config.vocab_size,
    }
    count = {"general.architecture": family, "general.parameter_count": model.files.num_parameters}
    can = {"completion": True, "tools": model.prompts.syntax.name != "none", "thinking": model.prompts.syntax.can_think}
    sampling = {OPTION_NAMES.get(name, name): value for name, value in model.default_sampling.items()}
    shown = {
        "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items() if value is not None),
        "template": model.files.chat_template or "",
        "details": facts["details"],
        "model_info": count | {f"{family}.{name}": value for name, value in numbers.items()},
        "capabilities": [name for name, has_it in can.items() if has_it],
        "modified_at": facts["modified_at"],
    }
    await request.send_json(200, orjson.dumps(shown))


async def show_version(server: Server, request: RequestScope) -> None:
    """GET /api/version: the version of Ollama that the API is like."""
    await request.send_json(200, encode(Version(OLLAMA_VERSION)))


async def _facts_of(model: ModelServer) -> dict[str, Any]:
    """Return what lists show of a model; little, if it was not loaded yet and is not on this machine."""
    from app.serving.loading import open_files
    from gpu.checkpoint import EMBEDDED_MODEL

    if model.facts is None:
        source = model.settings.model_source
        is_loaded = model.state is ModelState.LOADED or not model.server.settings.has_several_models
        is_here = source == EMBEDDED_MODEL or await (await anyio.Path(source).expanduser()).exists()
        if not is_loaded and not is_here:
            return {"size": 0, "digest": "", "modified_at": timestamp(0.0), "details": {}}
        files = model.model.files if is_loaded else await to_thread.run_sync(open_files, model.settings, None)
        model.facts = await to_thread.run_sync(_facts, files)
    return model.facts


def _facts(files: ModelFiles) -> dict[str, Any]:
    """Return what lists show of a model. Reads parts of its files."""
    from gpu.checkpoint import model_digest, weight_paths

    count = files.num_parameters
    states = [path.stat() for path in weight_paths(files)]
    family = re.sub(r"For[A-Z]\w+$", "", files.config.architecture).lower()
    return {
        "size": sum(state.st_size for state in states),
        "digest": model_digest(files).hex(),
        "modified_at": timestamp(max((state.st_mtime for state in states), default=0.0)),
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
    """POST /api/pull: fetch a model of the hub, with lines of its progress. A model that is served is there already."""
    from gpu.checkpoint import ModelError, fetch_repository

    server = pool.server
    given = await server.workload.read(request, lambda: parse_body(NamedModelRequest, request.body))
    name = _PREFIX.sub("", given.named).removesuffix(":latest")
    ended = anyio.Event()
    status: dict[str, Any] = {"status": "pulling manifest"}
    failed: list[ApiError] = []

    def report(phase: str, done: int, total: int | None) -> None:
        nonlocal status
        if ended.is_set():
            raise ModelError("The client that asked for the download has left.")
        status = {"status": phase, "digest": name, "completed": done, **({"total": total} if total else {})}

    async def fetch() -> None:
        try:
            if name not in pool.names:
                await to_thread.run_sync(fetch_repository, name, report, abandon_on_cancel=True, limiter=_PULLS)
        except ModelError as error:
            failed.append(ApiError(400, str(error), param="model"))
        finally:
            ended.set()

    async def last_line(error: ApiError) -> bytes:
        return json_line({"error": error.message})

    if given.stream:
        keep_alive = server.settings.sse_keep_alive or math.inf, json_line({"status": "pulling"})
        await request.start_stream(STREAM_TYPE, error_frame=last_line, keep_alive=keep_alive)
        request.start_soon(fetch)
        shown = None
        while status != shown or not ended.is_set():
            if status != shown:
                await request.send_chunk(json_line(shown := status))
            with anyio.move_on_after(_LOOK_EVERY):
                await ended.wait()
    else:
        await fetch()
    if failed:
        raise failed[0]
    if given.stream:
        await request.end_stream(json_line({"status": "success"}))
    else:
        await request.send_json(200, orjson.dumps({"status": "success"}))
