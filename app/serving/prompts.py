"""Tokenization of prompts and conversations.

1. Short prompts are tokenized on the event loop, long ones on a worker thread. An unknown tokenizer always runs on a
   thread, because its regular expressions may take seconds for a short text.
2. A chat template that Headrace does not know is rendered in a process of its own, for two callers at a time, on
   threads that tokenization does not use.
3. A text with more characters than any tokens that fit into the context is refused before it is tokenized, because
   tokenizing the largest body would take many seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import orjson
from tokenizers import Encoding, Tokenizer

from app.config.settings import Settings
from engine.errors import InvalidRequest, PromptTooLong
from engine.fairness import FairThreads
from gpu.checkpoint import ModelFiles, is_known_tokenizer
from protocol.chat_template import CHATML, ChatTemplate, Segment, TemplateProcesses, encode_segments, is_known
from protocol.jinja_sandbox import CompiledTemplate
from protocol.openai.chat import ChatCompletionRequest, ChatMessage
from protocol.openai.generation import GenerationRequest
from protocol.responses.request import fit
from protocol.scoring.requests import QWEN3_END, QWEN3_START, Pair, PairPrompts, qwen3_head
from protocol.syntax.history import content_text
from protocol.syntax.model_syntax import ModelSyntax
from protocol.syntax.reasoning import ReasoningParser, ToolParser

T = TypeVar("T")
Dicts = list[dict[str, Any]]
Prompts = Sequence[str | list[int] | ChatCompletionRequest] | PairPrompts
"""Texts and token ids, one conversation, or pairs of texts."""

# Rendering and tokenizing 8,192 characters takes 1 to 3 ms, about as long as a hop to another thread and back under
# load. Longer work would delay other streams.
INLINE_CHARACTERS = 8192
TOKENIZER_THREADS = 2
RENDERING_PROCESSES = 2
CHARACTERS_PER_MESSAGE = 64  # the cost of rendering a message
TOOL_AS_MESSAGES = 8  # the estimated cost of a tool, before the length of its schema is known


def open_prompts(settings: Settings, files: ModelFiles) -> PromptEncoder:
    """Make the encoder that the settings ask for. Raises ChatTemplateError for a template that renders no
    conversation."""
    return PromptEncoder(
        files,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        template_timeout=settings.template_timeout,
    )


class PromptEncoder:
    """Tokenizer and chat template of the served model. Made on a worker thread, used on the event loop.

    `template_timeout` limits, in seconds, one rendering in a template's process. `close` ends the processes.
    """

    def __init__(
        self,
        files: ModelFiles,
        *,
        tool_parser: ToolParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
        template_timeout: float = 10.0,
    ) -> None:
        self._tokenizer = files.tokenizer
        self._plain_tokenizer = without_special(files.tokenizer)
        added = files.tokenizer.get_added_tokens_decoder()
        special = {token.content: token_id for token_id, token in added.items() if token.special}
        source = files.chat_template or CHATML
        self._processes: TemplateProcesses | None = None

        def make_renderer(source: str) -> CompiledTemplate | TemplateProcesses:
            if is_known(source):
                return CompiledTemplate(source)
            self._processes = TemplateProcesses(source, template_timeout)
            return self._processes

        self._template = ChatTemplate(source, files.special_tokens, special, make_renderer)
        try:
            self._template.find_content_form(files.name)
            self.syntax = ModelSyntax(
                self._template, special, name=files.name, tool_parser=tool_parser, reasoning_parser=reasoning_parser
            )
        except BaseException:
            self.close()
            raise
        self._longest_token = max(map(len, files.tokenizer.get_vocab()))
        self._tokenizer_is_known = is_known_tokenizer(files.tokenizer)
        self._tokenizing = FairThreads(TOKENIZER_THREADS)
        self._rendering = FairThreads(RENDERING_PROCESSES)

    def close(self) -> None:
        """End the template's processes. No conversation can be encoded afterwards."""
        if self._processes is not None:
            self._processes.close()

    async def encode(
        self, body: GenerationRequest, prompts: Prompts, max_model_len: int, *, cuts_to_fit: bool = False
    ) -> list[list[int]]:
        """Tokenize the prompts of a request and truncate them as `body` asks. `cuts_to_fit` leaves out the oldest turns
        of a conversation that is too long. Raises InvalidRequest."""
        match prompts:
            case [ChatCompletionRequest() as chat]:
                for room in (chat.answer_room(max_model_len), 1) if cuts_to_fit else ():
                    if (prompt := await self._encode_end(chat, max_model_len - room)) is not None:
                        return [prompt]
                token_ids = [await self.encode_chat(chat, max_model_len)]
            case PairPrompts():
                return await self._encode_pairs(prompts, max_model_len)
            case _:
                texts = cast("Sequence[str | list[int]]", prompts)
                around = (0, 0)
                if body.keeps_special_tokens and body.truncate_prompt_tokens is not None:
                    if body.truncation_side == "right":  # what follows the longest prompt is cut off anyway
                        longest = self._longest_token * max_model_len - 1
                        texts = [each[:longest] if isinstance(each, str) else each for each in texts]
                    if body.add_special_tokens:
                        before, after = self._special_tokens_around
                        around = len(before), len(after)
                token_ids = await self.encode_texts(
                    texts, max_model_len, param=body.prompt_field, add_special_tokens=body.add_special_tokens
                )
                are_texts = [isinstance(each, str) for each in texts]
                kept = [around if is_text else (0, 0) for is_text in are_texts]
                pairs = zip(token_ids, kept, strict=True)
                return [body.truncated(each, max_model_len, *ends) for each, ends in pairs]
        return [body.truncated(each, max_model_len) for each in token_ids]

    async def _encode_pairs(self, prompts: PairPrompts, max_model_len: int) -> list[list[int]]:
        """Tokenize pairs in the form that the model was trained on. Text never becomes special tokens."""
        body = prompts.body
        limit = max_model_len - prompts.is_decoder  # a decoder generates a token
        longest = body.longest(limit)
        pairs = prompts.pairs
        if longest is None:
            for pair in pairs:
                num_characters = len(pair.query) + len(pair.document) * (body.max_tokens_per_doc is None)
                self._check_length(self._fewest_tokens(num_characters), max_model_len, pair.param)
        most = limit * self._longest_token  # longer texts have more tokens than the context
        pairs = [pair._replace(query=pair.query[:most], document=pair.document[:most]) for pair in pairs]
        size = sum(len(each.query) + len(each.document) for each in pairs)
        return await self._run(lambda: self._encode_each(prompts, pairs, limit, longest), size)

    def encode_pairs_here(self, prompts: PairPrompts, max_model_len: int) -> list[list[int]]:
        """Tokenize pairs on the caller's thread, without an event loop. Raises InvalidRequest."""
        limit = max_model_len - prompts.is_decoder
        return self._encode_each(prompts, prompts.pairs, limit, prompts.body.longest(limit))

    def _encode_each(
        self, prompts: PairPrompts, pairs: Sequence[Pair], limit: int, longest: int | None
    ) -> list[list[int]]:
        encode = self._instructed if prompts.is_decoder else self._paired
        return [encode(prompts, pair, limit, longest) for pair in pairs]

    def _instructed(self, prompts: PairPrompts, pair: Pair, limit: int, longest: int | None) -> list[int]:
        body = prompts.body
        head = qwen3_head(pair.query, prompts.instruction)
        start, end = (tokenize(self._tokenizer, text, param=pair.param) for text in (QWEN3_START, QWEN3_END))
        token_ids = tokenize(self._plain_tokenizer, f"{head} {pair.document}", param=pair.param)
        if body.max_tokens_per_doc is not None:
            num_head = len(tokenize(self._plain_tokenizer, head, param=pair.param))
            token_ids = token_ids[: num_head + body.max_tokens_per_doc]
        allowed = limit if longest is None else longest
        room = allowed - len(start) - len(end)
        if longest is None and len(token_ids) > room:
            raise PromptTooLong(limit - room + len(token_ids), limit, param=pair.param, needs_answer=False)
        if room < 1:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at least {allowed - room + 1} for this model, got {allowed}.",
                param="truncate_prompt_tokens",
            )
        return [*start, *token_ids[:room], *end]

    def _paired(self, prompts: PairPrompts, pair: Pair, limit: int, longest: int | None) -> list[int]:
        query, document = (_encoding(self._plain_tokenizer, text, param=pair.param) for text in pair[:2])
        if prompts.body.max_tokens_per_doc is not None:
            document.truncate(prompts.body.max_tokens_per_doc)
        num_special = self._tokenizer.num_special_tokens_to_add(True)
        total = len(query) + len(document) + num_special
        if longest is None and total > limit:
            raise PromptTooLong(total, limit, param=pair.param, needs_answer=False)
        if longest is not None and total > longest:  # the longer one first, as transformers does
            room = max(longest - num_special, 0)
            short, long = sorted((query, document), key=len)
            short.truncate(min(len(short), room // 2))
            long.truncate(room - len(short))
        merged = self._plain_tokenizer.post_process(query, document)
        types = merged.type_ids
        prompts.second_segments.append(types.index(1) if 1 in types else 0)
        return merged.ids

    async def _encode_end(self, chat: ChatCompletionRequest, limit: int) -> list[int] | None:
        """Tokenize as many of the last turns as have at most `limit` tokens. Return None if the last turn has more."""

        async def encode(messages: list[ChatMessage]) -> list[int] | None:
            try:
                prompt = await self.encode_chat(chat.model_copy(update={"messages": messages}), limit + 1)
            except PromptTooLong:
                return None
            return prompt if len(prompt) <= limit else None

        return await fit(chat.messages, encode)

    async def encode_chat(self, body: ChatCompletionRequest, max_model_len: int) -> list[int]:
        """Render the conversation and tokenize it. Raises InvalidRequest, param "messages"."""
        num_parts = sum(len(each.content) if isinstance(each.content, list) else 1 for each in body.messages)
        rough_size = CHARACTERS_PER_MESSAGE * (num_parts + TOOL_AS_MESSAGES * len(body.tools))
        messages, tools, num_characters, num_beside = await self._run(
            lambda: self._conversation(body), rough_size, tokenizes=False
        )
        size = num_characters + num_beside + CHARACTERS_PER_MESSAGE * len(messages)
        if body.documents:
            size = INLINE_CHARACTERS + 1  # the length of their rendering is not known
        self._check_length(max(self._fewest_tokens(num_characters), len(messages)), max_model_len, "messages")
        render = partial(self._render, body, messages, tools, max_model_len)
        if self._processes is None:
            return await self._run(lambda: self._encode(body, render()), size)
        segments = await self._rendering.run(render)
        return await self._run(lambda: self._encode(body, segments), sum(len(text) for text, _ in segments))

    def encode_chat_here(self, body: ChatCompletionRequest, max_model_len: int) -> list[int]:
        """Render the conversation and tokenize it on the caller's thread, without an event loop. Threads may call it at
        once. Raises InvalidRequest."""
        return self._encode(body, self.render_here(body, max_model_len))

    def render_here(self, body: ChatCompletionRequest, max_model_len: int) -> list[Segment]:
        """Render the conversation on the caller's thread. Raises InvalidRequest."""
        messages, tools, *_ = self._conversation(body)
        return self._render(body, messages, tools, max_model_len)

    def _render(self, body: ChatCompletionRequest, messages: Dicts, tools: Dicts | None, limit: int) -> list[Segment]:
        segments = self._template.render(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=body.continue_final_message,
            tools=tools,
            documents=body.documents,
            variables=self.syntax.thinking_variables(body.template_variables()),
        )
        # Checked again, because a template adds text to the messages.
        num_rendered = sum(len(text) for text, _ in segments)
        self._check_length(self._fewest_tokens(num_rendered), limit, "messages")
        return segments

    def _encode(self, body: ChatCompletionRequest, segments: list[Segment]) -> list[int]:
        token_ids = encode_segments(segments, self._encode_template, self._encode_plain)
        if body.add_special_tokens:
            before, after = self._special_tokens_around
            return [*before, *token_ids, *after]
        return token_ids

    def _conversation(self, body: ChatCompletionRequest) -> tuple[Dicts, Dicts | None, int, int]:
        """Return the messages and tools for the template, the number of characters in the messages, and that of tools
        and their calls."""
        given = body.messages_for_template(as_parts=self._template.takes_parts)
        messages, tools = self.syntax.for_template(given, body.tool_use)
        num_characters = sum(len(content_text(message["content"])) for message in messages)
        # An estimate: a template's rendering of tools and calls is longer than their JSON.
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        return messages, tools, num_characters, len(orjson.dumps([tools, calls])) if tools or calls else 0

    async def encode_texts(
        self,
        prompts: Sequence[str | list[int]],
        max_model_len: int,
        *,
        param: str = "prompt",
        add_special_tokens: bool = True,
    ) -> list[list[int]]:
        """Tokenize texts, with the BOS token if the model wants one; leave token ids as they are.

        Raises InvalidRequest.
        """
        size = 0
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_length(self._fewest_tokens(len(prompt)), max_model_len, param)
                size += len(prompt) + CHARACTERS_PER_MESSAGE

        def encode() -> list[list[int]]:
            return [
                tokenize(self._tokenizer, each, param=param, add_special_tokens=add_special_tokens)
                if isinstance(each, str)
                else each
                for each in prompts
            ]

        return await self._run(encode, size)

    async def count_prompt(self, prompt: str, body: GenerationRequest) -> int:
        """Return the number of tokens that a prompt before a text takes, with the special tokens before it; 0 for an
        empty one."""
        if not prompt:
            return 0
        special = self._special_tokens_around[0] if body.add_special_tokens else []
        (token_ids,) = await self.encode_texts([prompt], len(prompt) + 1, add_special_tokens=False)
        return len(special) + len(token_ids)

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of a prompt, with its special tokens. Unknown ids have no text."""
        (text,) = self._tokenizer.decode_batch([token_ids], skip_special_tokens=False)  # see `tokenize`
        return text

    def token_strings(self, token_ids: list[int]) -> list[str]:
        """Return each token as the vocabulary spells it."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    @cached_property
    def _special_tokens_around(self) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer puts before a text and after it."""
        probe = self._tokenizer.encode("a")
        inside = [place for place, special in enumerate(probe.special_tokens_mask) if not special]
        return probe.ids[: inside[0]], probe.ids[inside[-1] + 1 :]

    def _fewest_tokens(self, num_characters: int) -> int:
        """Return a lower bound, which holds if every token is the longest one of the vocabulary."""
        return num_characters // self._longest_token

    @staticmethod
    def _check_length(num_tokens: int, max_model_len: int, param: str) -> None:
        if num_tokens >= max_model_len:
            raise PromptTooLong(num_tokens, max_model_len, param=param, is_exact=False)

    def _encode_template(self, text: str) -> list[int]:
        return tokenize(self._tokenizer, text, param="messages")

    def _encode_plain(self, text: str) -> list[int]:
        return tokenize(self._plain_tokenizer, text, param="messages")

    async def _run(self, function: Callable[[], T], size: int, *, tokenizes: bool = True) -> T:
        if size <= INLINE_CHARACTERS and (self._tokenizer_is_known or not tokenizes):
            return function()
        return await self._tokenizing.run(function)


def without_special(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer with the same vocabulary in memory, which encodes special tokens in a text as plain text."""
    plain = Tokenizer(tokenizer.model)
    for step in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        setattr(plain, step, getattr(tokenizer, step))
    added = tokenizer.get_added_tokens_decoder()
    plain.add_tokens([added[token_id] for token_id in sorted(added)])
    plain.encode_special_tokens = True
    return plain


def tokenize(tokenizer: Tokenizer, text: str, *, param: str, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of a text. Raises `InvalidRequest` if the tokenizer fails."""
    return _encoding(tokenizer, text, param=param, add_special_tokens=add_special_tokens).ids


def _encoding(tokenizer: Tokenizer, text: str, *, param: str, add_special_tokens: bool = False) -> Encoding:
    """Tokenize a text, without the offsets. Raises `InvalidRequest` if the tokenizer fails.

    This encodes a batch of one, because `encode` holds the interpreter lock until its end, which stops the event loop
    even from a worker thread, and spends half of its time on offsets.
    """
    try:
        (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        # A regular expression of tokenizer.json that fails on a text is a panic in Rust, which is no Exception.
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest(f"The model's tokenizer fails on {param}. Send another text.", param=param) from error
    return encoding
