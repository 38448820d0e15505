"""Messages rendered as the text that the model was trained on.

1. A template is foreign code: it sees JSON values only and runs in Jinja's immutable sandbox; one that is not known to
   be harmless also runs in a process of its own (`TemplateProcesses`).
2. Messages are foreign text: the spelling of a control token (``<|im_end|>``) in one must not become that token, or a
   user could end the turn and speak as the system (CVE-2026-44222 in vLLM). Each spelling is put between random
   markers before rendering. The text is split there, and marked segments are encoded without special tokens.
3. Text without such a spelling is one segment, so its tokens agree with the reference implementation.

Not covered: a template that cuts text out of a message could join the halves of a control token. Rendering takes
milliseconds per 100k characters, so it does not belong on the event loop.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import jinja2
import markupsafe

from engine.child import ChildPool, ChildProcess
from engine.child_main import to_bytes
from engine.errors import HeadraceError, InvalidRequest
from protocol.errors import ApiError
from protocol.jinja_sandbox import MAX_RENDERED_CHARS, CompiledTemplate, Failure, RenderingFailed, too_long

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of models without one."""

Segment = tuple[str, bool]
"""Text, and whether it is plain, which means that no special tokens are recognized in it."""


class Markup(str):
    """Text of the server: control tokens spelled in it become control tokens."""

    __slots__ = ()


class Written(str):
    """Text made of pieces; pieces of type `Markup` keep their control tokens. String methods of it return plain text
    without control tokens."""

    __slots__ = ("pieces",)
    pieces: tuple[str, ...]

    def __new__(cls, *pieces: str) -> Written:
        written = super().__new__(cls, "".join(pieces))
        parts = (each.pieces if isinstance(each, Written) else (each,) for each in pieces)
        written.pieces = tuple(part for each in parts for part in each)
        return written

    @classmethod
    def joined(cls, separator: str, texts: Sequence[str]) -> Written:
        return cls(*[piece for text in texts for piece in (separator, text)][1:])


_MAX_TEMPLATE_COMPLAINT = 200  # characters of a template's error that reach the client

# sha256 of sources that are rendered in the server's process, because they only loop over messages.
_KNOWN = {
    hashlib.sha256(CHATML.encode()).hexdigest(),
    "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",  # the embedded model's
}


def is_known(source: str) -> bool:
    """Return True for a template that was reviewed and needs no process of its own."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest() in _KNOWN


class ChatTemplateError(HeadraceError):
    """The model's template does not parse, or does what the sandbox forbids. The request is not the cause."""


class Renderer(Protocol):
    """A template that can be rendered, in this process (`CompiledTemplate`) or in a child (`TemplateProcesses`)."""

    @property
    def variables(self) -> Set[str]: ...
    def render(self, context: dict[str, Any]) -> str:
        """Return the text. Raises `RenderingFailed`. Threads may render at the same time."""


class ChatTemplate:
    """A chat template. Any number of threads may render at once.

    `special_tokens` are variables that templates read (``bos_token``...). `control_tokens` are further strings that the
    tokenizer turns into control tokens; user text that spells one stays text. `make_renderer` compiles the source.
    `variables` are the names that it reads; `knows_tools` is true if they include tools. With `takes_parts`, the
    template reads content as a list of parts, to which strings are converted. Raises `ChatTemplateError`.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control_tokens: Iterable[str] = (),
        make_renderer: Callable[[str], Renderer] = CompiledTemplate,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self.takes_parts = False  # see `find_content_form`
        self._control = _runs_of({*control_tokens, *special_tokens.values()} - {""})
        try:
            self._renderer = make_renderer(source)
        except RenderingFailed as exc:
            what = "does not parse" if exc.kind is Failure.SYNTAX else "cannot be compiled"
            raise ChatTemplateError(f"The chat template {what}: {exc.words}.") from exc
        self.variables = self._renderer.variables
        self.knows_tools = "tools" in self.variables

    def find_content_form(self, name: str) -> None:
        """Set `takes_parts`: whether the template reads a list of parts or a string. Call before threads share it.

        A template that loops over parts shows nothing of a string, and one for strings prints a list as Python does, so
        the right form shows a marker exactly once. Raises `ChatTemplateError` with the model's `name` if neither shows
        it. If the template fails on the marker's conversation, requests get its error.
        """
        counts = []
        for content in (marker := _random_marker(), _as_parts(marker)):
            context = {
                **self._special_tokens,
                "messages": [{"role": "user", "content": content}],
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
            }
            try:
                counts.append(self._renderer.render(context).count(marker))
            except RenderingFailed as failure:
                if failure.kind is not Failure.UNFIT:
                    return
                counts.append(-1)
        if max(counts) == 0:
            raise ChatTemplateError(
                f"The chat template of {name} does not show the text of a user's message, neither as a string nor as a "
                "list of parts, so the model would never read it. Serve a model with another template."
            )
        self.takes_parts = counts[0] != 1 and (counts[1] == 1 or counts[0] < counts[1])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Segment]:
        """Return the prompt in order, as (text, is_plain) segments for `encode_segments`.

        With `continue_final_message` it ends with the last message's content. `variables` cannot replace those set
        here. The role ``developer`` becomes ``system`` for templates that do not know it. Raises `InvalidRequest`
        (param ``messages``) if the template cannot render these messages or they grow too long, `ChatTemplateError` if
        it does something forbidden, `ApiError` 503 if its process was killed twice from outside.
        """
        if not self._knows_developer:
            messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        if self.takes_parts:
            messages = [
                {**m, "content": _as_parts(m["content"])} if isinstance(m.get("content"), str) else m for m in messages
            ]
        shield = _Shield(self._control)
        end = _EndMark() if continue_final_message else None
        try:
            context = {
                **shield.protect(variables or {}),
                **self._special_tokens,
                "messages": shield.protect(messages if end is None else end.put(messages)),
                "tools": shield.protect(tools),
                "documents": shield.protect(documents),
                "add_generation_prompt": add_generation_prompt and end is None,
            }
            text = self._renderer.render(context)
            if not text.isascii():
                text.encode()  # lone surrogates, which no tokenizer takes
            return shield.split(text if end is None else end.cut(text))
        except UnicodeEncodeError as exc:
            character = f"U+{ord(text[exc.start]):04X}"
            raise _cannot_render(f"it makes the lone surrogate {character}, which is no text") from exc
        except RenderingFailed as exc:
            if exc.kind is Failure.GONE:
                raise ApiError(
                    503,
                    "The process that renders the chat template was ended. The request may be sent again.",
                    code="rendering_interrupted",
                    headers={"retry-after": "1"},
                ) from exc
            # A template's own error may quote a message: it is shortened, and our markers are removed.
            words = segments_text(shield.split(exc.words))[:_MAX_TEMPLATE_COMPLAINT]
            if exc.kind is Failure.UNSAFE:
                raise ChatTemplateError(f"The chat template of this model tries something unsafe: {words}.") from exc
            raise _cannot_render(words) from exc
        except (RecursionError, ValueError, TypeError) as exc:  # no JSON, or nested too deeply
            raise _cannot_render(type(exc).__name__) from exc


def segments_text(segments: Iterable[Segment]) -> str:
    """Return the rendered prompt as one string, as the reference implementation renders it."""
    return "".join(text for text, _ in segments)


def encode_segments(
    segments: Iterable[Segment], encode: Callable[[str], list[int]], encode_plain: Callable[[str], list[int]]
) -> list[int]:
    """Return the token ids of segments: `encode` recognizes special tokens and adds none, `encode_plain` knows none."""
    return [token_id for text, plain in segments for token_id in (encode_plain if plain else encode)(text)]


def _as_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _cannot_render(why: str) -> InvalidRequest:
    return InvalidRequest(f"The chat template of this model cannot render these messages: {why}", param="messages")


class _EndMark:
    """Marks the end of the final message, and cuts the rendered text there.

    The mark ends in a space. If the template trims it, the template trims messages, so the white space before the mark
    has to go too.
    """

    def __init__(self) -> None:
        self._mark = _random_marker()

    def put(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        *others, last = messages
        content, mark = last["content"], f"{self._mark} "
        if isinstance(content, str):
            return [*others, {**last, "content": content + mark}]
        *before, part = content
        return [*others, {**last, "content": [*before, {**part, "text": part["text"] + mark}]}]

    def cut(self, text: str) -> str:
        before, mark, after = text.rpartition(self._mark)
        if not mark:
            raise InvalidRequest(
                "The chat template of this model does not show the final message, so it cannot be continued.",
                param="continue_final_message",
            )
        return before if after.startswith(" ") else before.rstrip()


class _Shield:
    """Marks the spellings of control tokens in a client's text, and finds them again in the rendered text.

    Markers are 24 random digits, new ones for each request that has such a spelling, so no text holds one by chance or
    by intent. Digits survive `repr`, `tojson` and changes of case, which private-use characters do not.
    """

    def __init__(self, control: re.Pattern[str] | None) -> None:
        self._control = control
        self._open = ""
        self._close = ""

    def protect(self, value: Any) -> Any:
        """Return a JSON value with every spelling in its strings, keys included, between markers."""
        if self._control is None:
            return value
        match value:
            case Written():
                return "".join(each if isinstance(each, Markup) else self.protect(each) for each in value.pieces)
            case str():
                return self._control.sub(self._mark, value)
            case Mapping():
                return {self.protect(key): self.protect(item) for key, item in value.items()}
            case list() | tuple():
                return [self.protect(item) for item in value]
            case _:
                return value

    def split(self, rendered: str) -> list[Segment]:
        """Return the segments of the rendered text, without markers and empty ones."""
        if not self._open:
            return [(rendered, False)]
        segments: list[Segment] = []
        plain = False
        for piece in re.split(f"({self._open}|{self._close})", rendered):
            if piece in (self._open, self._close):
                plain = piece == self._open
            elif piece:
                segments.append((piece, plain))
        return segments

    def _mark(self, match: re.Match[str]) -> str:
        if not self._open:
            self._open, self._close = _random_marker(), _random_marker()
        return self._open + match[0] + self._close


def _runs_of(spellings: Iterable[str]) -> re.Pattern[str] | None:
    # The longest first, because the tokenizer takes the longer of two tokens that start alike.
    one = "|".join(re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True))
    # A run is one match, so that many tokens are one segment. `re` finds the first character of a plain group much
    # faster than that of a repeated one.
    return re.compile(f"(?:{one})(?:{one})*+") if one else None


def _random_marker() -> str:
    return f"{secrets.randbelow(10**24):024d}"


# ----------------------------------------------------------------------------------------------------- template process
# Renders a chat template in child processes, which the kernel bounds and which are killed at a deadline, because
# nothing inside an interpreter bounds the cost of an expression. A process that is too slow, takes too much memory or
# cannot be read ends, and the next rendering starts another. A process that died otherwise is replaced at once.


logger = logging.getLogger(__name__)

_PACKAGES = (jinja2.__file__, markupsafe.__file__)
_LONGEST_ANSWER = 4 * MAX_RENDERED_CHARS  # bytes
_JSON = json.JSONEncoder(ensure_ascii=False)
_SHUTTING_DOWN = "the server is shutting down"


class TemplateProcesses:
    """A `Renderer` with as many processes as concurrent callers. `close` ends them and their renderings.

    `timeout` bounds one rendering and the compilation, in seconds. The first process is started here, so a template
    that does not parse raises `RenderingFailed`.
    """

    def __init__(self, source: str, timeout: float) -> None:
        self._source = to_bytes(source)
        self._timeout = timeout
        self._pool = ChildPool("protocol.jinja_sandbox", _PACKAGES, timeout)
        self.close = self._pool.close  # renderings in progress and later ones fail
        try:
            first, answer = self._start()
        except BaseException:
            self.close()
            raise
        self.variables = frozenset[str](json.loads(answer))
        self._pool.give_back(first)

    def render(self, context: dict[str, Any]) -> str:
        """Return the text. Blocks for at most `timeout` and the start of a process. Threads may call it at once."""
        # In pieces, because `json.dumps` would keep the GIL, and with it the event loop, all the time.
        message = b"".join(map(to_bytes, _JSON.iterencode(context)))
        began = time.monotonic()
        process = self._pool.take_idle()
        if process is not None:
            try:
                return self._ask(process, message, self._timeout)
            except RenderingFailed as failure:
                # The process died after its last rendering, or that rendering left it too little memory.
                if failure.kind not in (Failure.GONE, Failure.MEMORY):
                    raise
        left = self._timeout - (time.monotonic() - began)
        process, _ = self._start()
        return self._ask(process, message, left)

    def _start(self) -> tuple[ChildProcess, str]:
        """Return a new process that has compiled the template, and its answer."""
        try:
            process = self._pool.start()
        except EOFError:
            raise RenderingFailed(Failure.GONE, _SHUTTING_DOWN) from None
        return process, self._ask(process, self._source, self._timeout, idle=False)

    def _ask(self, process: ChildProcess, message: bytes, seconds: float, *, idle: bool = True) -> str:
        """Return the process's answer. Then return the process to the pool if `idle`; if it failed, end it."""
        usable = False
        try:
            if self._pool.is_closed:
                raise RenderingFailed(Failure.GONE, _SHUTTING_DOWN)
            kind, text = process.exchange(message, seconds, _LONGEST_ANSWER)
            if len(text) > MAX_RENDERED_CHARS:
                raise too_long()
            if kind:
                raise RenderingFailed(Failure(kind), text)
            usable = True
            return text
        except TimeoutError:
            logger.warning("The chat template was ended after %g s (template_timeout)", self._timeout)
            words = f"it takes longer than {self._timeout:g} s; send a shorter conversation"
            raise RenderingFailed(Failure.TIME, words) from None
        except (OSError, EOFError, UnicodeDecodeError):
            raise RenderingFailed(Failure.GONE, "its process has ended") from None
        except RenderingFailed as failure:
            usable = failure.kind in (Failure.UNSAFE, Failure.UNFIT, Failure.TOO_LONG)
            raise
        finally:
            if not usable:
                self._pool.end(process)
            elif idle:
                self._pool.give_back(process)
