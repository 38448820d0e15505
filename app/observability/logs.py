"""The log on standard error: readable lines in a terminal, JSON elsewhere, one line per request.

1. No prompt, output text or key is logged: an `AccessRecord` has no field for them, and tracebacks have no local
   variables.
2. Text of a client (a path, a model name) cannot forge a line or move the cursor of a terminal.
3. Lines that libraries log by the standard library, such as Hypercorn's, have the same form.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from app.http.record import AccessRecord, Seldom

# structlog imports rich, if it is installed, which takes a tenth of the time until the server answers. Its tracebacks
# are not wanted: they print local variables, which hold prompts.
_rich = sys.modules.get("rich")
sys.modules["rich"] = None  # type: ignore[assignment]  # as if it were not installed
import structlog  # noqa: E402
from structlog.typing import EventDict, Processor  # noqa: E402

if _rich is None:
    del sys.modules["rich"]
else:
    sys.modules["rich"] = _rich

if TYPE_CHECKING:
    from protocol.errors import ApiError

request_logger = structlog.stdlib.get_logger("headrace.request")


class LogSettings(Protocol):
    """The settings of the log, named as in `app.config.settings`."""

    @property
    def log_level(self) -> str: ...
    @property
    def log_format(self) -> str: ...


def configure_logging(settings: LogSettings, stream: TextIO | None = None) -> None:
    """Write every log line of this process to `stream`, by default standard error, in the form that the settings ask
    for. A later call replaces an earlier one."""
    stream = stream if stream is not None else sys.stderr
    readable = settings.log_format == "console" or (settings.log_format == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S" if readable else "iso", utc=not readable),
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta]
            + (_console(stream) if readable else _json()),
        )
    )
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h.formatter, structlog.stdlib.ProcessorFormatter)]:
        root.removeHandler(old)
    root.addHandler(handler)
    set_level(settings.log_level)
    logging.getLogger("hpack").setLevel(logging.INFO)  # of HTTP/2: it would log every header, keys as well
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # of the hub: it would log every address, signed ones as well
    _adopt(logging.getLogger("hypercorn.error"), handler)
    _served.clear()
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def set_level(level: str) -> None:
    """Set the least severity that is logged, such as ``"debug"``."""
    logging.getLogger().setLevel(level.upper())


def change_level(level: str) -> None:
    """Set the level as `set_level` does, and log the change."""
    root = logging.getLogger()
    before = root.level
    set_level(level)
    after = root.level
    root.setLevel(min(before, after))
    logging.getLogger(__name__).warning("The log level is %s from now on", level)
    root.setLevel(after)


def bind(**fields: object) -> None:
    """Add fields to every later line of this task and of tasks that it starts."""
    structlog.contextvars.bind_contextvars(**fields)


def bound() -> dict[str, Any]:
    """Return the fields that were bound in this task."""
    return structlog.contextvars.get_contextvars()


def log_request(record: AccessRecord) -> None:
    """Log one request that has ended. Fields that are None are left out."""
    to_first_token = record.seconds_to_first_token
    fields: dict[str, Any] = {
        "method": record.method,
        "path": record.path,
        "status": record.status,
        "seconds": round(record.ended_time - record.arrival_time, 3),
        "finish_reason": record.finish_reason,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "output_tokens": record.num_output_tokens,
        "ttft_seconds": None if to_first_token is None else round(to_first_token, 3),
        "error": record.error,
        "param": record.param,
        "request_id": record.request_id,
    }
    # 5xx is the server's fault, all else is no error in its log.
    request_logger.log(
        logging.ERROR if record.status >= 500 else logging.INFO,
        _REQUEST,
        **{name: value for name, value in fields.items() if value is not None},
    )


def log_ready(seconds: float) -> None:
    """Log that the models are loaded, after these seconds, with the address if the server listens already."""
    logging.getLogger(__name__).info("Ready after %.1f s%s", seconds, _served.get("where", ""))
    _served["ready"] = ""


_refusals = Seldom(20)


def log_refusal(scope: Mapping[str, Any], error: ApiError) -> None:
    """Log a request without a valid key, with the address of its client. Of a flood, some are logged and all counted;
    no line has a part of a key."""
    client, left_out = scope.get("client"), _refusals.left_out()
    if left_out is None:
        return
    if left_out:
        logging.getLogger(__name__).info("%d more requests without a valid key were not logged", left_out)
    request_logger.info(
        _REQUEST,
        method=scope["method"],
        path=scope["path"][:_MOST_OF_A_PATH],
        status=error.status,
        error=error.code,
        client=None if client is None else client[0],
    )


_REQUEST = "request"
_RUNNING = re.compile(r"Running on (?:https?://(?=unix:))?(\S+)")  # Hypercorn's line
_served: dict[str, str] = {}  # "where" the server listens and whether it is "ready", as far as they are known
_MOST_OF_A_PATH = 200  # characters; any client chooses them


def _console(stream: TextIO) -> list[Processor]:
    return [
        _title_requests,
        _escape_control_characters,  # which JSON does anyway
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(),
            sort_keys=False,
            pad_event_to=28,
            pad_level=False,
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _json() -> list[Processor]:
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(sort_keys=False)]


def _title_requests(_: Any, __: str, event: EventDict) -> EventDict:
    """Make method and path the title of a request's line. JSON lines keep them in two fields."""
    if event["event"] == _REQUEST:
        event["event"] = f"{event.pop('method')} {event.pop('path')}"
        event.pop("logger", None)
    return event


def _escape_control_characters(_: Any, __: str, event: EventDict) -> EventDict:
    for name, value in event.items():
        if isinstance(value, str) and not value.isprintable():
            event[name] = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    return event


def _adopt(logger: logging.Logger, handler: logging.Handler) -> None:
    """Route a logger's records to `handler` only, even if it gets other handlers later.

    Hypercorn installs its own handler at its first log line, after the application was loaded, and leaves propagation
    on, so every line would appear twice. A filter of the logger runs before all its handlers. The line with the address
    waits until the models are loaded: a wrong model is refused without it.
    """

    def route(record: logging.LogRecord) -> bool:
        record.name = record.name.removesuffix(".error")  # of its log of errors, which has all lines
        if (running := _RUNNING.match(record.getMessage())) is not None:
            page = f", with the dashboard at {running[1]}/dashboard" if running[1].startswith("http") else ""
            _served["where"] = f" at {running[1]}{page}"
            if "ready" in _served:  # with a shared port, the server listens later
                logging.getLogger(__name__).info("Listening%s", _served["where"])
        elif record.levelno >= logging.getLogger().level:
            handler.handle(record)
        return False

    for old in list(logger.filters):
        logger.removeFilter(old)
    logger.addFilter(route)
