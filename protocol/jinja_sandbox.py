"""Chat templates compiled and rendered in a sandbox, in a child process if they are unknown.

The sandbox keeps a template from forbidden objects and bounds its output, but not its time and memory: one call in C
(the `repr` of a list, the width of a field, a folded constant) can take everything. So known templates run in the
server, others in a child that runs this module. It imports the standard library and Jinja only.
"""

from __future__ import annotations

import enum
import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.child_main import serve, to_bytes, to_text

MAX_RENDERED_CHARS = 32 * 2**20
"""The most characters of a rendering: more than any context holds, and little enough for the server's memory."""


class Failure(enum.IntEnum):
    """The reasons why a rendering failed."""

    SYNTAX = 1  # the template cannot be compiled
    UNSAFE = 2  # the template does what the sandbox forbids
    UNFIT = 3  # the template fails on these messages, or raises an error
    TOO_LONG = 4  # more than MAX_RENDERED_CHARS
    MEMORY = 5
    TIME = 6
    GONE = 7  # its process has ended


class RenderingFailed(Exception):
    """A rendering failed. `words` give the reason and may quote the messages."""

    def __init__(self, kind: Failure, words: str) -> None:
        super().__init__(kind, words)
        self.kind = kind
        self.words = words


class CompiledTemplate:
    """Immutable: any number of threads may render at once. `variables` are the names that the source reads. Raises
    `RenderingFailed`."""

    def __init__(self, source: str) -> None:
        try:
            names = _ENVIRONMENT.parse(source).find_all(nodes.Name)
            self.variables = frozenset(node.name for node in names if node.ctx == "load")
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as exc:
            raise RenderingFailed(Failure.SYNTAX, f"{exc.message} (line {exc.lineno})") from exc
        except Exception as exc:  # Python's compiler fails, or the source is nested too deeply
            raise _failed(exc, Failure.SYNTAX) from exc

    def render(self, context: dict[str, Any]) -> str:
        """Return the text. `context` has the template's variables, which are JSON values."""
        pieces, size = [], 0
        try:
            for piece in self._template.generate(context):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise too_long()
                pieces.append(piece)
        except SecurityError as exc:
            raise RenderingFailed(Failure.UNSAFE, str(exc)) from exc
        except RenderingFailed:
            raise
        except (jinja2.TemplateError, TypeError) as exc:
            # The template's own error. Other exceptions may quote a message.
            raise RenderingFailed(Failure.UNFIT, str(exc)) from exc
        except Exception as exc:
            raise _failed(exc, Failure.UNFIT) from exc
        return "".join(pieces)


def too_long() -> RenderingFailed:
    """Return the failure of a text that is longer than `MAX_RENDERED_CHARS`."""
    return RenderingFailed(
        Failure.TOO_LONG, f"they may make at most {MAX_RENDERED_CHARS} characters; send a shorter conversation"
    )


def _failed(exc: Exception, kind: Failure) -> RenderingFailed:
    if isinstance(exc, MemoryError):
        return RenderingFailed(Failure.MEMORY, "it takes more memory than it may have")
    if isinstance(exc, RecursionError):  # in Jinja's parser, in Python's, or in the template's macros
        return RenderingFailed(kind, "it is nested too deeply (RecursionError)")
    return RenderingFailed(kind, type(exc).__name__)


class _Sandbox(ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        # Jinja's own answer is an undefined value, which prints as nothing: an attack would go unnoticed.
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} is not allowed")


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012 - as in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML; models were trained on plain JSON.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_ENVIRONMENT = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = _strftime_now


# ------------------------------------------------------------------------------------------------------- template child
# The main function of a process that renders one unknown chat template under the limits of `engine.child_main`.
# `protocol.chat_template` starts it, in a tenth of a second.
#
#     parent → child   first the template's source, then the variables of one rendering each (JSON)
#     child → parent   0 and the text (first: the names of its variables, as JSON), or a `Failure` and words


_MOST_WORDS = 2**16  # characters of an error, markers included


def main(timeout: float) -> None:
    """Serve the parent until it closes the socket. `timeout`: CPU seconds that a rendering may take."""
    template: CompiledTemplate | None = None

    def answer(message: bytearray) -> tuple[int, bytes]:
        nonlocal template
        try:
            text = to_text(message)
            if template is None:
                template = CompiledTemplate(text)
                return 0, json.dumps(sorted(template.variables)).encode()
            return 0, to_bytes(template.render(json.loads(text)))
        except RenderingFailed as failure:
            return failure.kind, to_bytes(failure.words[:_MOST_WORDS])
        except MemoryError:
            return Failure.MEMORY, b"it takes more memory than it may have"
        except Exception as error:
            return Failure.UNFIT, type(error).__name__.encode()

    serve(answer, timeout)
