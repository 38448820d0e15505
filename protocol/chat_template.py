"""Messages to the text that the model was trained on.

A template is foreign code: it sees JSON values only, and runs in Jinja's immutable sandbox and, unless it is one that
is known to do no harm, in a process of its own (`TemplateProcesses`). Messages are foreign text: where one
spells a control token (``<|im_end|>``) it must not become that token, or a user could end their turn and speak as the
system (CVE-2026-44222 in vLLM). Before rendering, each such spelling is put between markers nobody can guess; after it,
the text is split there, and the caller encodes the marked segments without special tokens. Text that spells no control
token, which is nearly all text, passes untouched as one segment, so tokens agree with the reference implementation.

What this cannot see: a template that itself cuts text out of the middle of a message could join the halves of a
control token. Rendering runs for milliseconds per 100k characters: off the event loop, please.
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
"""For models that bring no template of their own."""

Segment = tuple[str, bool]
"""Text, and whether it is plain: to be encoded without recognizing special tokens."""

_MAX_TEMPLATE_COMPLAINT = 200  # characters of it that reach the client

# sha256 of sources that are rendered in the server: they loop over messages and nothing else.
_KNOWN = {
    hashlib.sha256(CHATML.encode()).hexdigest(),
    "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",  # the embedded model's
}


def is_known(source: str) -> bool:
    """Whether a template is one that Headrace was tested with, and needs no process of its own."""
    return hashlib.sha256(source.encode("utf-8", "surrogatepass")).hexdigest() in _KNOWN


class ChatTemplateError(HeadraceError):
    """The model's template is at fault, not the request: it does not parse, or tries what the sandbox forbids."""


class Renderer(Protocol):
    """A template that can be rendered, in this process (`CompiledTemplate`) or in a child (`TemplateProcesses`)."""

    @property
    def variables(self) -> Set[str]:
        """The names of the variables that the source reads."""
        ...

    def render(self, context: dict[str, Any]) -> str:
        """Raises `RenderingFailed`. Threads may render at once."""


class ChatTemplate:
    """A chat template. Any number of threads may render at once. If `takes_parts` is true, the template reads content
    as a list of parts, and strings are converted to such lists.

    `special_tokens` are variables that templates read (``bos_token``, ``eos_token``...). `control_tokens` are further
    strings that the tokenizer turns into control tokens; user text that spells one stays text.
    `make_renderer` compiles the source. `variables` are the names of the variables that it reads, `knows_tools`
    says whether tools are one of them. Raises `ChatTemplateError` if `source` does not parse.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        control_tokens: Iterable[str] = (),
        make_renderer: Callable[[str], Renderer] = CompiledTemplate,
    ) -> None:
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
        """Set `takes_parts`: find out whether the template reads content as a string or as a list of parts.

        Call it once, before threads share the template. A template that loops over parts shows nothing of a string, and
        a template for strings prints a list as Python does, so the right form shows a marker exactly once. Raises
        `ChatTemplateError`, naming the model by `name`, if neither form shows it. If the template fails on the marker's
        conversation, `takes_parts` stays false, and requests get the template's error.
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
        """The prompt in order, as (text, is_plain) segments for `encode_segments`.

        With `continue_final_message` it ends where the last message's content ends, for the model to go on there.
        `variables` reach the template too, but cannot replace what this class sets. A role ``developer`` becomes
        ``system`` for templates that do not know it. Raises `InvalidRequest` (param ``messages``) if the template
        cannot render these messages or they grow too long, `ChatTemplateError` if it tries something forbidden,
        ApiError 503 if its process was ended from outside, twice.
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
                raise _interrupted() from exc
            # A complaint in the template's words may quote a message: cut short, without our markers.
            words = segments_text(shield.split(exc.words))[:_MAX_TEMPLATE_COMPLAINT]
            if exc.kind is Failure.UNSAFE:
                raise ChatTemplateError(f"The chat template of this model tries something unsafe: {words}.") from exc
            raise _cannot_render(words) from exc
        except (RecursionError, ValueError, TypeError) as exc:  # no JSON, or nested too deeply
            raise _cannot_render(type(exc).__name__) from exc


def segments_text(segments: Iterable[Segment]) -> str:
    """The rendered prompt as one string, as the reference implementation renders it."""
    return "".join(text for text, _ in segments)


def encode_segments(
    segments: Iterable[Segment], encode: Callable[[str], list[int]], encode_plain: Callable[[str], list[int]]
) -> list[int]:
    """Token ids of rendered segments: `encode` recognizes special tokens and adds none, `encode_plain` knows none."""
    return [token_id for text, plain in segments for token_id in (encode_plain if plain else encode)(text)]


def _as_parts(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


def _cannot_render(why: str) -> InvalidRequest:
    return InvalidRequest(f"The chat template of this model cannot render these messages: {why}", param="messages")


class _EndMark:
    """Marks where the final message ends, and cuts there what a template made of it.

    The mark ends in a space. A template that trims messages trims that space, which tells that what it would have
    trimmed before the mark, had there been none, has to go too.
    """

    def __init__(self) -> None:
        self._mark = "".join(secrets.choice("0123456789") for _ in range(24))

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
    """Marks control-token spellings in what a client sent, and finds them again in what the template made of it.

    Markers are 24 random digits, new ones for each request, so no text holds one by chance or by intent. Digits,
    because templates print lists with `repr`, escape with `tojson` and change case, and a marker has to outlive that:
    private-use characters do not. They are drawn only when there is something to mark.
    """

    def __init__(self, control: re.Pattern[str] | None) -> None:
        self._control = control
        self._open = ""
        self._close = ""

    def protect(self, value: Any) -> Any:
        """`value` (any JSON value) with every spelling in every string, keys included, between markers."""
        if self._control is None:
            return value
        match value:
            case str():
                return self._control.sub(self._mark, value)
            case Mapping():
                return {self.protect(key): self.protect(item) for key, item in value.items()}
            case list() | tuple():
                return [self.protect(item) for item in value]
            case _:
                return value

    def split(self, rendered: str) -> list[Segment]:
        """Segments of the rendered text, without markers and without empty ones."""
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
    # The longest first: of two tokens that start alike the tokenizer takes the longer one.
    one = "|".join(re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True))
    # A run is one match, so that a flood of tokens is one segment; written as one and more because `re` looks for the
    # first character of a plain group much faster than for that of a repeated one.
    return re.compile(f"(?:{one})(?:{one})*+") if one else None


def _random_marker() -> str:
    return f"{secrets.randbelow(10**24):024d}"


def _interrupted() -> ApiError:
    """Neither the request nor the template is at fault."""
    return ApiError(
        503,
        "The process that renders the chat template was ended. The request may be sent again.",
        code="rendering_interrupted",
        headers={"retry-after": "1"},
    )


# ----------------------------------------------------------------------------------------------------- template process
# Renders a chat template in processes of its own, which the kernel bounds and which are killed at a deadline.
#
# A template comes with a model's files, from whoever wrote them, and no check inside an interpreter can bound what one
# expression of it takes. `protocol.jinja_sandbox` is the process. It lives as long as it behaves: a rendering that is
# too slow or takes too much memory, or whose caller cannot be answered, ends its process, and the next rendering starts
# another. A process that has died otherwise, by whatever hand, is replaced without anybody noticing.


logger = logging.getLogger(__name__)

_PACKAGES = (jinja2.__file__, markupsafe.__file__)
_LONGEST_ANSWER = 4 * MAX_RENDERED_CHARS  # bytes
_JSON = json.JSONEncoder(ensure_ascii=False)
_SHUTTING_DOWN = "the server is shutting down"


class TemplateProcesses:
    """A `Renderer`: as many processes as callers at once. `close` ends them, and the renderings in them.

    `timeout` bounds one rendering, in seconds, from its first byte to its last, and compiling the template. The first
    process is started here, so that a template which does not parse is known. Raises `RenderingFailed`.
    """

    def __init__(self, source: str, timeout: float) -> None:
        self._source = to_bytes(source)
        self._timeout = timeout
        self._pool = ChildPool("protocol.jinja_sandbox", _PACKAGES, timeout)
        self.close = self._pool.close  # renderings in progress fail, and so does whatever comes later
        try:
            first, answer = self._start()
        except BaseException:
            self.close()
            raise
        self.variables = frozenset[str](json.loads(answer))
        self._pool.give_back(first)

    def render(self, context: dict[str, Any]) -> str:
        """The text. Blocks, for `timeout` at most and, if need be, a process's start. Threads may call it at once."""
        # In pieces, as `json.dumps` does not: it would keep the interpreter, and with it the event loop, to itself.
        message = b"".join(map(to_bytes, _JSON.iterencode(context)))
        began = time.monotonic()
        process = self._pool.take_idle()
        if process is not None:
            try:
                return self._ask(process, message, self._timeout)
            except RenderingFailed as failure:
                # It had died since its last rendering, or that one had left too little of its memory.
                if failure.kind not in (Failure.GONE, Failure.MEMORY):
                    raise
        left = self._timeout - (time.monotonic() - began)
        process, _ = self._start()
        return self._ask(process, message, left)

    def _start(self) -> tuple[ChildProcess, str]:
        """A new process that has compiled the template, and what it said of it."""
        try:
            process = self._pool.start()
        except EOFError:
            raise RenderingFailed(Failure.GONE, _SHUTTING_DOWN) from None
        return process, self._ask(process, self._source, self._timeout, idle=False)

    def _ask(self, process: ChildProcess, message: bytes, seconds: float, *, idle: bool = True) -> str:
        """The answer. Afterwards the process is `idle`, or else its caller's, or has ended if it is of no more use."""
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
