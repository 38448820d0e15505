"""`LLM` and `AsyncLLM`: a model by its name, without a server. docs/library.md has examples.

from headrace import LLM, SamplingParams

llm = LLM()  # the embedded model; or LLM("path/to/model.gguf", max_model_len=2048)
for result in llm.generate(["The sea is", "The sky is"], SamplingParams(max_tokens=16)):
    print(result.choices[0].text)
(answer,) = llm.chat([{"role": "user", "content": "What is a headrace?"}])
(vector,) = llm.embed("The sea is")
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import msgspec
from anyio import to_thread

import engine.frontend.llm
from app.config.settings import Settings, SettingsError
from app.config.sources import load_settings
from app.serving.loading import (
    core_factory,
    default_sampling,
    end_token_ids,
    label_set,
    make_client,
    make_grammar_compiler,
    open_files,
)
from engine import messages
from engine.detokenizer import Vocabulary
from engine.errors import EngineNotReady, HeadraceError, InvalidRequest
from engine.frontend.llm import Generation, Prompt, Prompts, read_prompt, read_prompts
from engine.frontend.shared_engine import OnStep
from engine.messages import SPECIAL_MARK, EngineCoreRequest, Pooling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    import engine.frontend.async_llm
    from app.serving.prompts import PromptEncoder
    from engine.frontend.request_stream import RequestStream
    from gpu.checkpoint import ModelFiles, Progress
    from protocol.body import ClientModel
    from protocol.openai.chat import ChatCompletionRequest


_NAMES = list(Settings.model_fields)
SERVER_SETTINGS = frozenset(_NAMES[_NAMES.index("models") :]) | {*("engine", "served_model_name", "check_model_name")}
"""The settings that only a server reads."""
_ANY_VOCABULARY = 2**31


class StructuredOutputsParams:
    """The form of an answer, by vLLM's names: exactly one of `json` (a JSON Schema as a dict or text, or a pydantic
    model), `regex`, `choice` (a list of texts), `grammar` (Lark or GBNF), `json_object` and `structural_tag`.

    Raises InvalidRequest.
    """

    def __init__(self, **fields: Any) -> None:
        from protocol.openai.structured import StructuredOutputs

        known = [field.alias or name for name, field in StructuredOutputs.model_fields.items()]
        if unknown := [name for name in fields if name not in known]:
            raise InvalidRequest(f"There is no field {unknown[0]}. Allowed: {', '.join(known)}.", param=unknown[0])
        if (of_pydantic := getattr(fields.get("json"), "model_json_schema", None)) is not None:
            fields["json"] = of_pydantic()
        self.grammar = _validated(StructuredOutputs, fields).to_structured_output()


class SamplingParams(messages.SamplingParams, frozen=False, kw_only=True):  # type: ignore[misc]
    """The sampling parameters of prompts. Every value is checked when the object is made, and again when it is
    submitted: until then it may be changed. Raises `InvalidRequest` naming the field.

    temperature 0 means greedy. `top_k` 0 or -1, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the other penalties 0
    mean off. `max_tokens` None means up to the end of the context. `logprobs` None means none, 0 those of sampled
    tokens, k also those of the k most likely tokens, -1 those of all; `prompt_logprobs` is the same for the prompt.
    `seed` None draws one. `structured_outputs` prescribes the form of the answer.
    """

    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self.submitted()

    def submitted(self) -> messages.SamplingParams:
        """Return the checked parameters of a request, which later changes of this object leave alone."""
        fields = {name: getattr(self, name) for name in messages.SamplingParams.__struct_fields__}
        fields["top_k"] = 0 if self.top_k == -1 else self.top_k
        wanted: object = self.structured_outputs
        if wanted is not None:
            if not isinstance(wanted, StructuredOutputsParams) or self.structured_output is not None:
                raise InvalidRequest(
                    "structured_outputs must be StructuredOutputsParams, without structured_output.",
                    param="structured_outputs",
                )
            fields["structured_output"] = wanted.grammar
        params = messages.SamplingParams(**fields)
        params.check(_ANY_VOCABULARY)
        return params


Sampling = messages.SamplingParams | Sequence[messages.SamplingParams] | None
M = TypeVar("M", bound="ClientModel")


class LLM(engine.frontend.llm.LLM):
    """A loaded model. Threads may share it: calls of `generate` that overlap run together, as one batch.

    As a context manager it ends the engine at the end of the block.
    """

    def __init__(self, model: str | PathLike[str] | None = None, *, progress: bool = True, **settings: Any) -> None:
        """Fetch the model if it is missing, and load it. `settings` are the server's, by name; the others come from the
        environment and the settings file, as for the server.

        Raises SettingsError naming the setting, and ModelError for files that cannot be run.
        """
        self._open(_settings(model, settings), progress)

    @classmethod
    def of(cls, settings: Settings, *, progress: bool = True) -> Self:
        """Load the model with complete settings: the environment and the settings file are not read again."""
        llm = cls.__new__(cls)
        llm._open(settings, progress)
        return llm

    def _open(self, chosen: Settings, progress: bool) -> None:
        self._progress = progress
        if chosen.data_parallel_size > 1:
            raise SettingsError(f"data_parallel_size: got {chosen.data_parallel_size}; LLM runs one engine; set 1")
        with loading() if progress else nullcontext() as report:
            files = open_files(chosen, report)
            core = core_factory(chosen, files)()
            sampling = msgspec.convert(default_sampling(chosen, files), messages.SamplingParams)
        super().__init__(core, files.tokenizer, seed=chosen.seed, default_sampling=sampling)
        weakref.finalize(self, self._engine.close)  # garbage collection alone would leave worker processes
        self._prompts = _Prompts(chosen, files, core.config.max_model_len)
        self._files = files

    def get_default_sampling_params(self) -> SamplingParams:
        """Return a copy of the default of `generate`: the recommendation of the model's authors."""
        return SamplingParams(**msgspec.structs.asdict(self._default_sampling))

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer, with the methods that programs use of one of `transformers`."""
        return Tokenizer(self._prompts)

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling = None,
        *,
        sampling_params: Sampling = None,
        on_step: OnStep | None = None,
        progress: bool | None = None,
        use_tqdm: bool | None = None,
        begins_message: bool = False,
        pooling: Pooling | None = None,
        second_segments: Sequence[int] = (),
    ) -> list[Generation]:
        """Generate as the engine's `LLM` does, with a progress bar in the terminal. `on_step` and `progress=False`,
        here or when the model was loaded, turn the bar off. `sampling_params` and `use_tqdm` are vLLM's names of
        `sampling` and `progress`."""
        if sampling is not None and sampling_params is not None:
            raise InvalidRequest("sampling and sampling_params are the same: give one.", param="sampling_params")
        prompts = list(prompts) if isinstance(prompts, Iterator) else prompts
        wanted = next((each for each in (progress, use_tqdm) if each is not None), self._progress)
        bar = generating(len(read_prompts(prompts))) if wanted and on_step is None else nullcontext(on_step)
        given = sampling_params if sampling is None else sampling
        more: dict[str, Any] = {"begins_message": begins_message, "pooling": pooling}
        with bar as report:
            return super().generate(prompts, given, on_step=report, second_segments=second_segments, **more)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Sampling = None,
        use_tqdm: bool | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> list[Generation]:
        """Answer a conversation, or each of a list of conversations, as `generate` completes prompts.

        Messages and tools have the form of the chat API. The text of an answer is what the model writes, with its
        reasoning and calls. `use_tqdm` is the `progress` of `generate`. Raises InvalidRequest, which names the field.
        """
        if not isinstance(messages, list | tuple):
            raise InvalidRequest("messages must be a list of messages, or of such lists.", param="messages")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        options: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        options |= {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        of_each = zip(conversations, self._per_prompt(sampling_params, len(conversations)), strict=True)
        read = [self._prompts.of_chat(*each, **options) for each in of_each]
        prompts, sampling = [each.token_ids for each in read], [each.sampling for each in read]
        answers = self.generate(prompts, sampling, progress=use_tqdm, begins_message=not continue_final_message)
        for answer in answers:
            _unmark(answer)
        return answers

    def embed(
        self,
        prompts: Prompts,
        *,
        prompt_name: str | None = None,
        pooling: str | None = None,
        dimensions: int | None = None,
        normalize: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[NDArray[np.float32]]:
        """Return the vector of every prompt, text or token ids, as `/v1/embeddings` does: `pooling` is mean or last, by
        default the model's. Raises InvalidRequest."""
        from protocol.openai.embeddings import EmbeddingRequest, finished_vector

        given: Any = [text if ids is None else ids for text, ids in read_prompts(prompts)]
        config, embedder = self._files.config, self._files.embedder
        fields: Any = {"prompt_name": prompt_name, "dimensions": dimensions, "pooling": pooling}
        asked = _validated(EmbeddingRequest, fields | {"input": "?"})
        asked.input = given  # as many as one likes
        inputs = asked.inputs(config.vocab_size, embedder.prompts, embedder.default_prompt) if given else []
        asked.check_dimensions(config.embedding_size)
        if not embedder.pools_prompt and asked.prompt(embedder.prompts, embedder.default_prompt):
            raise InvalidRequest(
                "prompt_name: this model leaves the prompt out of the mean, which only a server does.",
                param="prompt_name",
            )
        kind = asked.kind(embedder.pooling or "mean", is_encoder=config.encoder is not None)
        nothing = messages.SamplingParams(max_tokens=0)
        found = self.generate(inputs, nothing, progress=use_tqdm, pooling=kind)
        return [finished_vector(each.choices[0].hidden_state or b"", dimensions, normalize) for each in found]

    def score(
        self,
        text_1: str | list[str],
        text_2: str | list[str],
        *,
        instruction: str | None = None,
        raw_scores: bool = False,
        truncate: bool = False,
        use_tqdm: bool | None = None,
    ) -> list[float]:
        """Return the score of every pair, as `/v1/score` does: one `text_1` for each `text_2`, or as many of both. The
        model must be a reranker, or a classifier with one or two labels. Raises InvalidRequest."""
        import numpy as np

        from protocol.scoring.requests import QWEN3_INSTRUCTION, PairPrompts, ScoreRequest

        fields = {"text_1": text_1, "text_2": text_2, "instruction": instruction, "truncate": truncate}
        body = _validated(ScoreRequest, fields)
        if (labels := label_set(self._files)) is None:
            raise InvalidRequest(f"{self._files.name} gives no scores: it is no reranker and no classifier.")
        labels.check_scores_pairs()
        wanted = instruction or labels.instruction or QWEN3_INSTRUCTION
        pairs = PairPrompts(body, body.pairs(), bool(labels.token_ids), wanted)
        prompts = self._prompts.encoder.encode_pairs_here(pairs, self.core.config.max_model_len)
        options: dict[str, Any] = {"progress": use_tqdm, "second_segments": pairs.second_segments}
        if ids := labels.token_ids:
            sampling = messages.SamplingParams(max_tokens=1, ignore_eos=True, logprobs=0, logprob_token_ids=ids)
            found = self.generate(prompts, sampling, **options)
        else:
            found = self.generate(prompts, messages.SamplingParams(max_tokens=0), pooling=Pooling.CLASSIFY, **options)
        choices = [each.choices[0] for each in found]
        rows = [labels.logits_of(choice.hidden_state, choice.logprobs) for choice in choices]
        scores: list[float] = labels.scores(np.stack([row for row in rows if row is not None]), raw=raw_scores).tolist()
        return scores

    def close(self) -> None:
        """End the engine and all calls. The object cannot be used afterwards."""
        super().close()
        self._prompts.close()

    def _per_prompt(self, sampling: object, num_prompts: int) -> Sequence[messages.SamplingParams]:
        return _submitted(super()._per_prompt(sampling, num_prompts))


class AsyncLLM:
    """A loaded model for programs with an event loop, asyncio or trio: many requests at once.

    async with AsyncLLM() as llm:
        async with llm.generate("The sea is", SamplingParams(max_tokens=16)) as outputs:
            async for output in outputs:
                print(output.choices[0].new_text, end="")

    The engine runs while the outer block does. A request is a scope: leaving the inner block, for any reason, aborts
    it. Settings are those of `LLM`, and `engine` and `data_parallel_size`.
    """

    def __init__(self, model: str | PathLike[str] | None = None, *, progress: bool = True, **settings: Any) -> None:
        self._settings = _settings(model, settings, more={"engine"})
        self._progress = progress
        self._stack = AsyncExitStack()
        self._opened: _Prompts | None = None

    @property
    def _prompts(self) -> _Prompts:
        if self._opened is None:
            raise EngineNotReady("AsyncLLM loads its model when its block begins: async with AsyncLLM(...) as llm")
        return self._opened

    async def __aenter__(self) -> Self:
        from engine.frontend.async_llm import AsyncLLM as Engine

        if self._opened is not None:
            raise InvalidRequest("This AsyncLLM is open already: use it within its block, or make another one.")
        settings = self._settings
        async with AsyncExitStack() as stack:
            report = stack.enter_context(loading()) if self._progress else None
            files = await to_thread.run_sync(open_files, settings, report)
            grammars = make_grammar_compiler(files)
            client = make_client(settings, files, report or (lambda *_: None), grammars)
            self._llm = Engine(client, files.tokenizer, grammars=grammars, seed=settings.seed)
            failure: HeadraceError | None = None
            async with AsyncExitStack() as running:
                await running.enter_async_context(self._llm.running())
                try:
                    info = await self._llm.wait_ready()
                    self._opened = _Prompts(settings, files, info.max_model_len)
                    running.callback(self._opened.close)
                    self._stack = running.pop_all()
                except HeadraceError as error:  # raised after the block: its task group would make a group of it
                    failure = error
            if failure is not None:
                raise failure
        self._default_sampling = msgspec.convert(default_sampling(settings, files), messages.SamplingParams)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._opened = None
        await self._stack.aclose()  # without the error, which a task group would put into a group

    def get_tokenizer(self) -> Tokenizer:
        return Tokenizer(self._prompts)

    def generate(
        self, prompt: Prompt, sampling_params: messages.SamplingParams | None = None, request_id: str = "request"
    ) -> Outputs:
        """Complete a prompt: a text, token ids, or a dict with either."""
        return self._outputs(partial(self._prompts.of_prompt, prompt), sampling_params, request_id)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: messages.SamplingParams | None = None,
        request_id: str = "request",
        **options: Any,
    ) -> Outputs:
        """Answer a conversation, with the `options` of `LLM.chat`: tools, chat_template_kwargs and so on."""
        return self._outputs(partial(self._prompts.of_chat, messages, **options), sampling_params, request_id)

    def _outputs(
        self, read: Callable[..., _Read], sampling: messages.SamplingParams | None, request_id: str
    ) -> Outputs:
        if not isinstance(sampling, messages.SamplingParams | None):
            raise InvalidRequest("sampling_params must be SamplingParams.", param="sampling_params")
        (submitted,) = _submitted([sampling or self._default_sampling])
        return Outputs(self._llm, partial(read, submitted), request_id)


class Outputs:
    """The outputs of one request of an `AsyncLLM`: a block that aborts the request at its end, and an iterator.

    Each output is the same `Generation`, which has grown: `text` is everything so far, `new_text` what is new.
    """

    def __init__(self, llm: engine.frontend.async_llm.AsyncLLM, read: Callable[[], _Read], request_id: str) -> None:
        self._llm = llm
        self._read = read
        self._id = request_id
        self._stack = AsyncExitStack()
        self._stream: RequestStream | None = None

    async def __aenter__(self) -> Self:
        read = await to_thread.run_sync(self._read)
        request = EngineCoreRequest(
            request_id=self._id, prompt_token_ids=read.token_ids, sampling=read.sampling, arrival_time=time.monotonic()
        )
        opened = self._llm.stream(request, begins_message=read.begins_message)
        self._stream = await self._stack.enter_async_context(opened)
        self._generation = Generation.begun(request, read.text)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def __aiter__(self) -> AsyncIterator[Generation]:
        if self._stream is None:  # without a block
            async with self:
                async for generation in self:
                    yield generation
            return
        async for output in self._stream:
            self._generation.add(self._stream, [output])
            _unmark(self._generation)
            yield self._generation


class Tokenizer:
    """A model's tokenizer with the methods that programs use of one of `transformers`."""

    def __init__(self, prompts: _Prompts) -> None:
        self._prompts = prompts
        self._tokenizer = prompts.files.tokenizer
        self.vocab_size = prompts.files.config.vocab_size
        self.eos_token_ids = end_token_ids(prompts.files)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Any], *, tokenize: bool = True, add_generation_prompt: bool = False, **options: Any
    ) -> list[int] | str:
        """Return the prompt of a conversation, as token ids or as text, with the `options` of `LLM.chat`."""
        body = self._prompts.body(messages, add_generation_prompt=add_generation_prompt, **options)
        encoder, limit = self._prompts.encoder, self._prompts.max_model_len
        if tokenize:
            return encoder.encode_chat_here(body, limit)
        return "".join(text for text, _ in encoder.render_here(body, limit))


class _Read(NamedTuple):
    """A prompt as the engine takes it. `text` is None for conversations and token ids."""

    token_ids: list[int]
    sampling: messages.SamplingParams
    text: str | None = None
    begins_message: bool = False


class _Prompts:
    """A model's tokenizer and chat template. The template's processes are started by the first conversation."""

    def __init__(self, settings: Settings, files: ModelFiles, max_model_len: int) -> None:
        self.files = files
        self.max_model_len = max_model_len
        self._settings = settings
        self._vocabulary = Vocabulary(files.tokenizer)

    @cached_property
    def encoder(self) -> PromptEncoder:
        from app.serving.prompts import open_prompts

        encoder = open_prompts(self._settings, self.files)
        weakref.finalize(self, encoder.close)
        return encoder

    def close(self) -> None:
        if "encoder" in self.__dict__:
            self.encoder.close()

    def of_prompt(self, prompt: Prompt, sampling: messages.SamplingParams) -> _Read:
        text, token_ids = read_prompt(prompt)
        return _Read(self.files.tokenizer.encode(text or "").ids if token_ids is None else token_ids, sampling, text)

    def of_chat(self, messages: Sequence[Any], sampling: messages.SamplingParams, **options: Any) -> _Read:
        """Return the prompt of a conversation, and `sampling` with what the model's syntax adds."""
        from protocol.syntax.reasoning import PROMPT_TAIL

        body = self.body(messages, **options)
        prompt = self.encoder.encode_chat_here(body, self.max_model_len)
        end = b"".join(map(self._vocabulary.token_bytes, prompt[-PROMPT_TAIL:]))
        sampling = body.with_syntax(sampling, self.encoder.syntax, end)
        return _Read(prompt, sampling, begins_message=not body.continue_final_message)

    @staticmethod
    def body(messages: Sequence[Any], **options: Any) -> ChatCompletionRequest:
        """Return the conversation as a request's body. Raises InvalidRequest, also for an unknown option."""
        from protocol.openai.chat import ChatCompletionRequest

        known = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        if unknown := [name for name in options if name not in known]:
            raise InvalidRequest(f"There is no option {unknown[0]}. Allowed: {', '.join(known)}.", param=unknown[0])
        given = {"messages": messages, **options}
        lists = {name: list(each) for name, each in given.items() if isinstance(each, tuple)}
        return _validated(ChatCompletionRequest, given | lists)


def _settings(
    model: str | PathLike[str] | None, settings: dict[str, Any], more: set[str] | frozenset[str] = frozenset()
) -> Settings:
    if useless := [name for name in settings if name in SERVER_SETTINGS - more]:
        raise SettingsError(f"{useless[0]}: only a server reads this setting, and an LLM has none; leave it out")
    named = {} if model is None else {"model": str(model) if isinstance(model, PathLike) else model}
    chosen = load_settings(settings | named, spelled=str)
    # The processes of an engine write their log to the program's standard error.
    return chosen if "log_level" in chosen.model_fields_set else chosen.model_copy(update={"log_level": "warning"})


def _submitted(given: Sequence[messages.SamplingParams]) -> Sequence[messages.SamplingParams]:
    """Return the parameters of requests. Those that prompts share are copied and checked once."""
    different = {id(each): each for each in given}
    copies = {key: each.submitted() if isinstance(each, SamplingParams) else each for key, each in different.items()}
    return [copies[id(each)] for each in given]


def _validated(model: type[M], fields: Mapping[str, Any]) -> M:
    """Check fields as those of a request's body. Raises InvalidRequest."""
    from protocol.body import validate
    from protocol.errors import ApiError

    try:
        return validate(model, fields)
    except ApiError as error:
        raise InvalidRequest(error.message.replace("The request body", model.__name__), param=error.param) from None


def _unmark(answer: Generation) -> None:
    for choice in answer.choices:  # special tokens that are tags have a mark
        choice.text, choice.new_text = (text.replace(SPECIAL_MARK, "") for text in (choice.text, choice.new_text))


# ------------------------------------------------------------------------------------------------------------- progress
# Progress bars in a terminal, for fetching and loading a model and for generating.


@contextmanager
def loading() -> Iterator[Progress]:
    """Show slow steps as bars in a terminal, and as one line per step elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=console, disable=not console.is_terminal) as bars:

        def report(phase: str, done: int, total: int | None) -> None:
            if phase not in tasks:
                tasks[phase] = bars.add_task(phase, total=total)
                if not console.is_terminal:
                    print(phase, file=sys.stderr)
            bars.update(tasks[phase], completed=done, total=total)

        yield report


@contextmanager
def generating(num_prompts: int) -> Iterator[OnStep]:
    """Show a bar of finished prompts with the speed. Yields a function to call after each step."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns) as bars:
        task = bars.add_task("prompts", total=num_prompts)
        started = time.monotonic()

        def report(num_finished: int, num_tokens: int) -> None:
            speed = num_tokens / (time.monotonic() - started)
            bars.update(task, completed=num_finished, description=f"{speed:.0f} tok/s")

        yield report
