"""Wires settings, server, routes, middleware and lifespan into one ASGI application."""

from __future__ import annotations

import difflib
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

import anyio
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.config.settings import Settings, SettingsError
from app.dashboard.feed import Feed
from app.dashboard.history import History
from app.dashboard.simulator import Simulator
from app.http.connections import ConnectionGuard
from app.http.hypercorn import (
    drain_before_shutdown,
    end_parent,
    end_with_parent,
    patch_hypercorn,
)
from app.http.listening import Certificate, outlive_lack_of_descriptors, stop_listening
from app.http.middleware import UPLOAD_PATH, Access, Authentication, BrowserCheck, CrossOrigin, HeadCheck
from app.http.scope import Handler
from app.observability.logs import configure_logging
from app.routes import generation, ollama, operations, pages, responses
from app.routes.generation import dialect_handlers
from app.routes.scoring import scoring_handlers
from app.runtime import SWITCH_SECONDS, measure_lag
from app.serving.endpoint import Endpoint, refuse_with
from app.serving.model_pool import ModelPool, PoolHandler
from app.serving.model_server import ModelHandler
from app.serving.process import Shutdown, keep_informed, reload_on_hangup
from app.serving.server import Server, ServerHandler
from engine.errors import ConfigError, HeadraceError
from protocol.errors import ApiError
from protocol.ollama.requests import EmbedRequest, GenerateRequest, OllamaChatRequest, PromptEmbedRequest
from protocol.openai.batches import ENDPOINTS
from protocol.registry import ADMINISTRATION

if TYPE_CHECKING:
    from app.serving.batches import BatchRunner

logger = logging.getLogger(__name__)

# Paths that are not served, but would match a route with another method, or are served with a setting.
_NO_FILES = "This server keeps no files and runs no batches: start it with the setting files_dir (--files-dir FOLDER)."
NOT_OFFERED = {
    "/v1/responses/compact": "Responses are not compacted here: send a shorter conversation, or truncation: auto.",
    **dict.fromkeys(
        ("/api/create", "/api/copy", "/api/push", "/api/delete"),
        "Models are not created, copied, pushed or deleted over the API: change the files and the server's settings.",
    ),
    "/v1/files": _NO_FILES,
    "/v1/batches": _NO_FILES,
}
MEDIA = ("/v1/images", "/v1/audio", "/v1/videos")
NO_MEDIA = "Models are served for text: there are no images, audio or video here. /docs lists the routes."
ENGINE_END_SECONDS = 3.0  # after the drain, for the step in progress


def create_app(settings: Settings, *, inherited: bool = False, certificate: Certificate | None = None) -> Starlette:
    """Make the server's ASGI application. It answers at once; the model loads in the background of its lifespan.

    If the port is shared with other servers, by a socket that was `inherited` or by `reuse_port`, it is opened when the
    model is loaded and closed when the drain begins. `certificate` is read again at SIGHUP.
    """
    configure_logging(settings)
    server = Server(settings)
    pool = ModelPool(server, on_fatal=end_process)
    past = History(pool)
    shares_port = inherited or settings.reuse_port
    guard = ConnectionGuard(settings, server.longest_stalled_connection)
    refuse = refuse_with(server)

    async def leave_port() -> None:
        guard.drain()
        with anyio.CancelScope(shield=True):
            await stop_listening(inherited=inherited)
        await guard.wait_empty()

    shutdown = Shutdown(partial(server.drain, leave_port if shares_port else None))

    def add(method: str, path: str, handler: Handler, **options: Any) -> Route:
        return Route(path, Endpoint(server, path, handler, **options), methods=[method])

    def route(method: str, path: str, handler: ServerHandler, **options: Any) -> Route:
        return add(method, path, partial(handler, server), **options)

    def pool_route(method: str, path: str, handler: PoolHandler, **options: Any) -> Route:
        return add(method, path, partial(handler, pool), **options)

    def model_route(method: str, path: str, handler: ModelHandler, *, streams: bool = False, **options: Any) -> Route:
        return add(method, path, partial(pool.answer, handler, streams=streams), **options)

    def query_route(method: str, path: str, handler: ModelHandler, **options: Any) -> Route:
        return add(method, path, partial(pool.answer_query, handler), **options)

    open_route = partial(route, quiet=True, access=Access.OPEN)
    probe = partial(pool_route, quiet=True, access=Access.OPEN)
    admin_route = partial(route, access=Access.ADMIN)
    admin_pool_route = partial(pool_route, access=Access.ADMIN)
    admin_query_route = partial(query_route, access=Access.ADMIN)

    async def answer_http_exception(request: Request, error: Exception) -> Response:
        # Starlette requires only that a response is an ASGI application.
        return cast(Response, refuse(_starlette_error(request, error)))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        sys.setswitchinterval(SWITCH_SECONDS)
        # Not earlier: Hypercorn imports the worker that serves this application just before the lifespan.
        patch_hypercorn(guard)
        outlive_lack_of_descriptors()
        drain_before_shutdown(shutdown.wait_and_drain, guard)
        end_with_parent()
        try:
            async with anyio.create_task_group() as task_group:
                server.task_group = task_group
                task_group.start_soon(pool.run)
                task_group.start_soon(server.watch_requests)
                task_group.start_soon(guard.watch)
                task_group.start_soon(measure_lag, server.metrics.on_loop_lag)
                task_group.start_soon(past.run)
                task_group.start_soon(shutdown.listen_for_signals)
                task_group.start_soon(reload_on_hangup, pool, certificate)
                task_group.start_soon(keep_informed, pool)
                if runner is not None:
                    task_group.start_soon(runner.run)
                if shares_port:
                    await _loaded_or_ended(server, shutdown)
                yield
                # A step or a loading thread cannot be interrupted, and must not keep the process alive if it hangs.
                last_resort = threading.Timer(ENGINE_END_SECONDS, _end_without_engine)
                last_resort.daemon = True
                last_resort.start()
                task_group.cancel_scope.cancel()
        except Exception as error:  # a task that the server needs has failed
            end_process(error)
        last_resort.cancel()
        await to_thread.run_sync(server.tracer.close)

    routes = [
        *(model_route("POST", path, handler, streams=True) for path, handler in dialect_handlers()),
        model_route("POST", "/v1/embeddings", generation.embeddings),
        *(model_route("POST", path, handler) for path, handler in scoring_handlers()),
        model_route("POST", "/tokenize", generation.tokenize),
        model_route("POST", "/detokenize", generation.detokenize),
        model_route("POST", "/v1/tokenize", generation.tokenize),
        model_route("POST", "/v1/detokenize", generation.detokenize),
        *(
            [query_route("GET", "/tokenizer_info", generation.tokenizer_info)]
            if settings.enable_tokenizer_info_endpoint
            else ()
        ),
        model_route("POST", "/v1/responses", responses.create, streams=True),
        model_route("POST", "/v1/responses/input_tokens", responses.input_tokens),
        route("GET", "/v1/responses/{id}", responses.retrieve),
        route("DELETE", "/v1/responses/{id}", responses.delete),
        route("POST", "/v1/responses/{id}/cancel", responses.cancel),
        route("GET", "/v1/responses/{id}/input_items", responses.input_items),
        pool_route("POST", "/api/chat", partial(ollama.answer, OllamaChatRequest)),
        pool_route("POST", "/api/generate", partial(ollama.answer, GenerateRequest)),
        model_route("POST", "/api/embed", partial(ollama.embed, EmbedRequest)),
        model_route("POST", "/api/embeddings", partial(ollama.embed, PromptEmbedRequest)),
        pool_route("GET", "/api/tags", ollama.tags),
        pool_route("GET", "/api/ps", ollama.loaded_models),
        pool_route("POST", "/api/show", ollama.show),
        route("GET", "/api/version", ollama.show_version, quiet=True),
        admin_pool_route("POST", "/api/pull", ollama.pull),
        route("GET", "/v1/requests/{id}/timeline", operations.timeline, quiet=True),
        pool_route("GET", "/v1/models", operations.list_models),
        pool_route("GET", "/v1/models/{id:path}", operations.show_model),
        probe("GET", "/livez", operations.livez),
        probe("GET", "/readyz", operations.readyz),
        probe("GET", "/startupz", operations.startupz),
        probe("GET", "/health", operations.health),
        probe("GET", "/ping", operations.health),
        probe("POST", "/ping", operations.health),
        route("GET", "/load", operations.load, quiet=True),
        route("GET", "/version", operations.show_version, quiet=True),
        pool_route("GET", "/metrics", operations.metrics, quiet=True, access=Access.CLIENT_OR_ADMIN),
        pool_route("GET", "/openapi.json", pages.openapi, quiet=True),
        open_route("GET", "/docs", partial(pages.page, pages.DOCS)),
        open_route("GET", "/docs/files/{name}", partial(pages.page, pages.DOCS)),
        open_route("GET", "/", pages.home),
        open_route("GET", "/dashboard", partial(pages.page, pages.DASHBOARD)),
        open_route("GET", "/dashboard/files/{name}", partial(pages.page, pages.DASHBOARD)),
        admin_route("GET", "/dashboard/frames", partial(pages.frames, Feed(pool))),
        admin_route("GET", "/dashboard/history", partial(pages.history, past), quiet=True),
        admin_route("POST", "/dashboard/simulation", partial(pages.simulation, Simulator()), quiet=True),
    ]
    runner: BatchRunner | None = None
    if settings.files_dir is not None:
        from app.routes import batches  # with SQLite and a parser of forms, which other servers do not need
        from app.serving.batches import BatchRunner
        from app.serving.files import FileStore

        store = FileStore(settings.files_dir, settings)
        runner = BatchRunner(server, store, {each.path: each.endpoint for each in routes if each.path in ENDPOINTS})
        routes.append(route("POST", UPLOAD_PATH, partial(batches.upload_file, store), reads_body=True))
        routes += [route(*each) for each in batches.handlers(store, runner)]
    if server.tenants.administered:
        routes += [
            admin_query_route("GET", "/server_info", operations.server_info, quiet=True),
            admin_query_route("GET", "/engine_state", operations.engine_state, quiet=True),
            admin_query_route("POST", "/reset_prefix_cache", operations.reset_prefix_cache),
            admin_route("POST", "/abort_requests", operations.abort_requests),
            admin_query_route("POST", "/start_profile", operations.start_profile),
            admin_query_route("POST", "/stop_profile", operations.stop_profile),
            admin_pool_route("POST", "/v1/models/load", operations.load_model),
            admin_pool_route("POST", "/v1/models/unload", operations.unload_model),
            admin_pool_route("POST", "/sleep", operations.sleep),
            admin_pool_route("POST", "/wake_up", operations.wake_up),
            admin_pool_route("POST", "/configure_logging", operations.configure_logging),
        ]
    application = Starlette(
        routes=routes,
        middleware=[
            *([Middleware(CrossOrigin, origins=settings.allowed_origins)] if settings.allowed_origins else ()),
            Middleware(HeadCheck, refuse=refuse),
            Middleware(BrowserCheck, settings=settings, tenants=server.tenants, refuse=refuse),
            Middleware(Authentication, routes=routes, tenants=server.tenants, refuse=refuse, log=settings.log_requests),
        ],
        exception_handlers={HTTPException: answer_http_exception},
        lifespan=lifespan,
    )
    application.state.pool = pool  # for Ray Serve
    # A path with an extra slash is not found. Starlette would redirect to the address in the Host header.
    application.router.redirect_slashes = False
    return application


def end_process(error: BaseException) -> NoReturn:
    """Write the error as the last line, and end the process with status 1.

    Neither Hypercorn nor ASGI lets an application that has started end the server with a failure: an exception of the
    lifespan is logged, and the server goes on without it. A supervisor must see the failure.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, HeadraceError):
        logger.error("The server has failed", exc_info=error)
    elif error.__cause__ is not None:
        # A wrong setting needs no traceback: the last line explains it.
        level = logging.DEBUG if isinstance(error, SettingsError | ConfigError) else logging.ERROR
        logger.log(level, "%s", error, exc_info=error.__cause__)
    words = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__}: {error}"
    logging.shutdown()
    sys.stderr.write(f"error: {words}\n")
    sys.stderr.flush()
    end_parent()
    os._exit(1)


async def _loaded_or_ended(server: Server, shutdown: Shutdown) -> None:
    """Wait until the model is loaded. End the process if a shutdown is requested before."""

    async def end_when_asked() -> None:
        await shutdown.wait_asked()
        logger.info("Shutdown was requested before the model was loaded: the server ends")
        logging.shutdown()
        os._exit(0)

    async with anyio.create_task_group() as task_group:
        task_group.start_soon(end_when_asked)
        await server.loaded.wait()
        task_group.cancel_scope.cancel()


def _end_without_engine() -> None:
    """End the process with status 0: the shutdown was requested, and every client has its answer."""
    logger.warning("The engine did not end within %g s of the drain; the server ends without it", ENGINE_END_SECONDS)
    logging.shutdown()
    os._exit(0)


def _starlette_error(request: Request, error: Exception) -> ApiError:
    """Return the error for a request that Starlette refuses: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"][:200]
    if (words := NOT_OFFERED.get(path) or (NO_MEDIA if path.startswith(MEDIA) else None)) is not None:
        return ApiError(404, words)
    near = difflib.get_close_matches(path, [route.path for route in request.app.routes], n=1, cutoff=0.8)
    hint = f" Did you mean {near[0]}?" if near else " /docs lists the routes."
    if any(path == operation.path for operation in ADMINISTRATION):
        hint = " It is for administrators: start the server with the setting admin_keys."
    messages = {
        404: f"There is nothing at {path!r}.{hint}",
        405: f"{request.scope['method'][:20]} is not allowed at {path!r}; send {(error.headers or {}).get('Allow')}.",
    }
    return ApiError(error.status_code, messages.get(error.status_code, error.detail), headers=error.headers)
