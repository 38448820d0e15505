"""Requests, outputs and stats as structs, passed between threads as they are and between processes as msgpack.

`protocol` imports this module, `engine.errors` and the child processes, and nothing else of the engine. Times are
seconds of `time.monotonic()`, which on Linux is one clock for all processes of a machine.
"""

from __future__ import annotations

import enum
import math
import numbers
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, NamedTuple, TypeGuard

import msgspec
from msgspec import structs

from engine.errors import InvalidRequest
from engine.kv_events import KVEvents

# ---------------------------------------------------------------------------------------------------------------- stats
# The stats that an engine sends with the outputs of every step.


class TierStats(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """The counts of a tier of the KV cache since the previous stats; `num_bytes` is a level."""

    tier: str  # "ram" or "disk"
    hit_tokens: int = 0  # loaded into the prefix cache
    failed_loads: int = 0  # chunks that were damaged, of another model, or missing
    loaded_bytes: int = 0
    load_seconds: float = 0.0  # of reading, checking and copying
    stored_bytes: int = 0
    store_seconds: float = 0.0  # of writing, in parallel to the steps
    num_bytes: int = 0  # held


class CheckpointStats(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The copies of requests' states that are kept (`engine.scheduler.checkpoints`)."""

    count: int = 0
    num_bytes: int = 0
    hits: int = 0  # since the start: requests that began from one


class SchedulerStats(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """The stats after one step: levels, and from `num_preemptions` on what this step added."""

    step: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float  # 0..1: share of blocks that requests own
    num_preemptions: int
    prompt_tokens: int  # prefilled: of prompts, and of answers that are computed again after a preemption
    prefix_cache_queries: int  # in tokens
    prefix_cache_hits: int  # in tokens
    tiers: list[TierStats] | None = None  # None without new counts
    step_costs: bytes | None = None  # now and then, an `engine.costs.table.StepCostTable` as JSON
    # Set now and then. For each layer with experts, since the previous report: the tokens of all experts, and the
    # tokens of the most loaded expert divided by the mean.
    expert_load: list[tuple[int, float]] | None = None
    computed_tokens: int = 0  # of the step, including requests that ended or were preempted while it ran
    checkpoints: CheckpointStats | None = None  # None of a model without states
    num_deferred: int = 0  # of the waiting: those that wait for a grammar or for a load from a tier
    tier_misses: int = 0  # in tokens: of starting requests, neither in the prefix cache nor in a tier; 0 without tiers


# ------------------------------------------------------------------------------------------------------------- messages


MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 16384
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 128
MAX_LOGPROBS = 20
ALL_LOGPROBS = -1  # of the whole vocabulary
MAX_LOGPROB_TOKEN_IDS = 128
MAX_N = 128
MAX_READ_OFTEN = 1024  # ids in a tuple; of a longer tuple only `check` looks at the types, once
MAX_GRAMMAR_CHARACTERS = 128 * 1024
MAX_LENIENT_CHARACTERS = 2 * 1024 * 1024  # including annotations; without them, the limit above holds
MAX_WHITESPACE_PATTERN_CHARACTERS = 1024
_INT32, _INT64 = 2**31 - 1, 2**63 - 1
RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),  # a logit divided by less may overflow
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "top_k": (0, _INT32),
    "min_tokens": (0, _INT32),
    "max_tokens": (0, _INT64),  # reduced to the context
    "seed": (-_INT64 - 1, _INT64),
    "logprobs": (ALL_LOGPROBS, MAX_LOGPROBS),
    "prompt_logprobs": (ALL_LOGPROBS, MAX_LOGPROBS),
    "thinking_token_budget": (0, _INT32),
}  # the minimum and maximum of sampling parameters
LOW_END_EXCLUDED = frozenset({"top_p"})

GRAMMAR_TOO_COMPLEX = "grammar_too_complex"  # the code of a refusal


class FinishReason(enum.StrEnum):
    """The reason for the end of a request, as in metrics; the APIs have fewer reasons."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class StructuredOutputKind(enum.StrEnum):
    """The kind of the `value` of a `StructuredOutput`."""

    JSON_SCHEMA = "json_schema"  # a JSON Schema, as JSON
    JSON_OBJECT = "json_object"  # empty: any JSON object
    REGEX = "regex"  # a regular expression, matched against the whole output
    CHOICE = "choice"  # a JSON array of strings, one of which is the output
    GRAMMAR = "grammar"  # a context-free grammar in Lark's notation, or in GBNF's
    STRUCTURAL_TAG = "structural_tag"  # text with JSON between tags: `protocol.syntax.grammars.tagged_json`


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grammar that the output of a request has to follow, as text."""

    kind: StructuredOutputKind
    value: str
    any_whitespace: bool = True  # allow blanks and line breaks between the tokens of JSON
    closed: bool = False  # allow only declared properties in objects, unless the schema says otherwise
    lenient: bool = False  # ignore schema keywords that no grammar enforces (tags: in those with `lenient`)
    whitespace_pattern: str | None = None  # a regular expression; replaces `any_whitespace`
    reasoning: tuple[str, str] | None = None  # tags around free text that may come first; "" as first: already opened
    answer_opening: str = ""  # text before the answer, after the reasoning if there is any

    @property
    def size(self) -> int:
        """The number of characters in all its texts."""
        texts = (self.value, self.whitespace_pattern or "", self.answer_opening, *(self.reasoning or ()))
        return sum(map(len, texts))

    def check(self) -> None:
        """Raise `InvalidRequest` for a grammar that is too large."""
        length = len(self.whitespace_pattern or "")
        if length > MAX_WHITESPACE_PATTERN_CHARACTERS:
            raise InvalidRequest(
                f"structured_output takes at most {MAX_WHITESPACE_PATTERN_CHARACTERS} characters in its whitespace"
                f" pattern, got {length}.",
                param="structured_output",
            )
        limit = MAX_LENIENT_CHARACTERS if self.lenient else MAX_GRAMMAR_CHARACTERS
        if len(self.value) > limit:
            raise InvalidRequest(
                f"structured_output takes at most {limit} characters, got {len(self.value)}.",
                param="structured_output",
            )


SPECIAL_MARK = "\ud800"
"""The mark in `RequestOutput.text` before the text of each token of `SamplingParams.shown_special_tokens`.

The same characters from other tokens have no mark. No decoded text contains this character.
"""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The sampling parameters of one request.

    temperature 0 means greedy. `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1 and the other penalties 0 mean
    off. `max_tokens` None means up to the end of the context; 0 means that the prompt is computed and no token is
    generated. `logprobs` None means none, 0 those of sampled tokens, k also those of the k most likely tokens at each
    position, -1 those of all tokens: 200 KB per position for 50,000 tokens. `prompt_logprobs` is the same for the
    tokens of the prompt. `seed` None draws one. `stop` and `bad_words` may be one string instead of a list.

    The constructor checks types, `check` the ranges. Raises `InvalidRequest` naming the field.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()  # return their log-probabilities, not the most likely; needs `logprobs`
    skip_special_tokens: bool = True
    shown_special_tokens: tuple[int, ...] = ()  # special tokens that become text all the same, after `SPECIAL_MARK`
    structured_output: StructuredOutput | None = None
    allowed_token_ids: tuple[int, ...] | None = None  # no other token is generated, not even EOS
    bad_words: tuple[str, ...] = ()  # never generated
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # the same as tokens, filled in by `InputProcessor`
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None  # maximum of reasoning tokens; None: no limit
    reasoning_tags: tuple[str, str] | None = None  # around the reasoning; "" as first: already opened
    reasoning_end_token_ids: tuple[int, ...] = ()  # the second tag as tokens, filled in by `InputProcessor`

    def __post_init__(self) -> None:
        for name, default, read in _READERS:
            given = getattr(self, name)
            if given is not default and (value := read(name, given)) is not given:
                structs.force_setattr(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def restricts_tokens(self) -> bool:
        """True if each step needs a mask of the tokens that may follow."""
        return (
            self.structured_output is not None
            or self.allowed_token_ids is not None
            or bool(self.bad_words)
            or self.closes_reasoning
        )

    @property
    def closes_reasoning(self) -> bool:
        """True if the reasoning is ended at a budget."""
        return self.thinking_token_budget is not None and bool(self.reasoning_end_token_ids)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` naming the first field that is out of range. Called once per request."""
        for name, (low, high) in RANGES.items():
            if (value := getattr(self, name)) is not None:
                _in_range(name, value, low, high, low_open=name in LOW_END_EXCLUDED)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}.", param="min_tokens"
            )
        _at_most("stop", self.stop, MAX_STOP_STRINGS)
        if any(not s for s in self.stop):
            raise InvalidRequest("stop must not contain an empty string. Leave it out.", param="stop")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(
                f"stop takes at most {MAX_STOP_CHARACTERS} characters in each string, got {longest}.", param="stop"
            )
        _at_most("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        _all_in_range("stop_token_ids", self.stop_token_ids, 0, vocab_size - 1)
        if self.logit_bias:
            _at_most("logit_bias", self.logit_bias, MAX_LOGIT_BIAS)
            _all_in_range("logit_bias", self.logit_bias, 0, vocab_size - 1)
            _all_in_range("logit_bias", self.logit_bias.values(), -100.0, 100.0)
        if self.logprob_token_ids:
            if self.logprobs is None:
                raise InvalidRequest(
                    "logprob_token_ids needs logprobs: set it to 0 or more.", param="logprob_token_ids"
                )
            _at_most("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
            _all_in_range("logprob_token_ids", self.logprob_token_ids, 0, vocab_size - 1)
        if self.structured_output is not None:
            self.structured_output.check()
        if self.allowed_token_ids is not None:
            _at_most("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not set(map(type, self.allowed_token_ids)) <= {int}:
                raise _wrong_type("allowed_token_ids", "a list of token ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids must name at least one token.", param="allowed_token_ids")
            _all_in_range("allowed_token_ids", self.allowed_token_ids, 0, vocab_size - 1)
        _at_most("bad_words", self.bad_words, MAX_BAD_WORDS)
        for word in self.bad_words:
            if not word.strip() or len(word) > MAX_BAD_WORD_CHARACTERS:
                raise InvalidRequest(
                    f"bad_words must have 1 to {MAX_BAD_WORD_CHARACTERS} characters each and not be blank.",
                    param="bad_words",
                )


def _in_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    # Written so that NaN, for which all comparisons are false, is refused.
    if not math.isfinite(value) or not (low < value if low_open else low <= value) or not value <= high:
        bracket = "(" if low_open else "["
        raise InvalidRequest(f"{name} must be in {bracket}{low}, {high}], got {value}.", param=name)


def _wrong_type(name: str, expected: str, value: object) -> InvalidRequest:
    shown = repr(value)
    given = shown if len(shown) <= 40 else f"a {type(value).__name__}"
    return InvalidRequest(f"{name} must be {expected}, got {given}.", param=name)


def _number(name: str, value: object) -> float:
    if type(value) is float or type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise _wrong_type(name, "a number", value)
    return float(value)


def _is_whole(value: object) -> TypeGuard[numbers.Integral]:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _whole_number(name: str, value: object) -> int:
    if type(value) is int:
        return value
    if not _is_whole(value):
        raise _wrong_type(name, "a whole number", value)
    return int(value)  # for example a numpy integer


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong_type(name, "True or False", value)
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    found = () if value is None else value
    if not isinstance(found, list | tuple) or not all(isinstance(each, str) for each in found):
        raise _wrong_type(name, "a string or a list of strings", value)
    return found if isinstance(found, tuple) else tuple(found)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if type(value) is tuple and len(value) > MAX_READ_OFTEN:
        return value
    found = () if value is None else value
    if not isinstance(found, list | tuple):
        raise _wrong_type(name, "a list of token ids", value)
    if set(map(type, found)) <= {int}:
        return found if isinstance(found, tuple) else tuple(found)
    if not all(map(_is_whole, found)):
        raise _wrong_type(name, "a list of token ids", value)
    return tuple(map(int, found))


def _or_none(read: Callable[[str, object], object]) -> Callable[[str, object], object]:
    return lambda name, value: None if value is None else read(name, value)


def _biases(name: str, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong_type(name, "a dict of token ids to numbers", value)
    if set(map(type, value)) <= {int} and set(map(type, value.values())) <= {int, float}:
        return value
    if not all(map(_is_whole, value)):
        raise _wrong_type(name, "a dict of token ids to numbers", value)
    return {int(token_id): _number(name, bias) for token_id, bias in value.items()}


def _grammar(name: str, value: object) -> object:
    if value is not None and not isinstance(value, StructuredOutput):
        raise _wrong_type(name, "a StructuredOutput", value)
    return value


_READER_OF: dict[str, Callable[[str, object], object]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), _number),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), _number),
    **dict.fromkeys(("n", "top_k", "min_tokens"), _whole_number),
    **dict.fromkeys(("seed", "max_tokens", "logprobs", "prompt_logprobs"), _or_none(_whole_number)),
    "thinking_token_budget": _or_none(_whole_number),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"), _flag),
    **dict.fromkeys(("stop", "bad_words"), _texts),
    **dict.fromkeys(("stop_token_ids", "logprob_token_ids"), _token_ids),
    "allowed_token_ids": _or_none(_token_ids),
    "logit_bias": _biases,
    "structured_output": _grammar,
}
_READERS: list[tuple[str, object, Callable[[str, object], object]]] = []
_NEUTRAL = SamplingParams()
_READERS += [(name, getattr(_NEUTRAL, name), read) for name, read in _READER_OF.items()]


def _all_in_range(name: str, values: Collection[float], low: float, high: float) -> None:
    """Check each value as `_in_range` does, at a twentieth of the cost: the sum is finite if all values are."""
    if values and not (math.isfinite(sum(values)) and low <= min(values) and max(values) <= high):
        for value in values:
            _in_range(name, value, low, high)


def _at_most(name: str, values: Collection[object], limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequest(f"{name} takes at most {limit} entries, got {len(values)}.", param=name)


class Pooling(enum.StrEnum):
    """The reduction of a prompt's hidden states to one vector, or none."""

    MEAN = "mean"
    LAST = "last"  # of the last token, which has seen all others
    TOKENS = "tokens"  # the vector of every token, one after the other
    CLS = "cls"  # of the first token; this and the following are for encoders only
    WEIGHTED_MEAN = "weighted_mean"  # the n-th token counts n times
    CLASSIFY = "classify"  # the logits of the classification head


BATCH_PRECEDENCE = 2**31
"""The precedence of rows of batches: behind every priority of a request."""


class EngineCoreRequest(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """One tokenized request for the core. A request with `sampling.n` > 1 becomes n of these."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0  # among the tenant's own requests: lower runs first
    precedence: int = 0  # among the requests of all tenants: lower runs first, regardless of shares
    deadline: float | None = None  # time by which it must have ended
    first_token_deadline: float | None = None
    tenant: str = ""  # salts the prefix cache: no hits across tenants
    tenant_weight: float = 1.0  # share of the engine relative to other tenants
    tenant_max_running: int = 0  # maximum of running slots of the tenant; 0 is no limit
    cache_salt: str = ""  # salts the prefix cache further: hits only among requests with the same salt
    pooling: Pooling | None = None
    keeps_prefix: bool = False  # its conversation may go on, so the prefix cache keeps its blocks longer
    is_private: bool = False  # its KV blocks are never copied to a tier
    second_segment: int = 0  # index of the first token of the second of two texts, for encoders; 0: there is one text
    num_unpooled: int = 0  # tokens at the start that pooling by mean leaves out, for encoders


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities (natural) at one position, from the raw logits before penalties and temperature."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: list[tuple[int, float]]  # the most likely first, or the tokens that the request names
    every: bytes | None = None  # instead of `top`: float32 of all tokens, by id, in native byte order


class EventKind(enum.StrEnum):
    """An event in a request's timeline, with the meaning of `RequestEvent.tokens`."""

    SCHEDULED = "scheduled"  # got a running slot; tokens from the prefix cache
    PREFILL = "prefill"  # a chunk was computed; its tokens
    WAITS_FOR_GRAMMAR = "waits_for_grammar"
    GRAMMAR_READY = "grammar_ready"
    PREEMPTED = "preempted"  # lost its running slot; tokens to compute again
    LOADING = "loading"  # waits for a tier of the KV cache; tokens that may be loaded
    LOADED_FROM_RAM = "loaded_from_ram"  # its prefix was loaded while it waited; tokens loaded
    LOADED_FROM_DISK = "loaded_from_disk"
    FINISHED = "finished"  # a choice ended before the others of its request; output tokens


class RequestEvent(msgspec.Struct, array_like=True, gc=False):
    """One event of a request in the engine."""

    kind: EventKind
    time: float
    tokens: int


class Refusal(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An `InvalidRequest` that was found while the request ran, as data."""

    message: str
    param: str | None = None
    code: str | None = None

    @classmethod
    def of(cls, error: InvalidRequest) -> Refusal:
        return cls(str(error), error.param, error.code)

    def as_error(self) -> InvalidRequest:
        return InvalidRequest(self.message, param=self.param, code=self.code)


class EngineCoreOutput(msgspec.Struct, kw_only=True, array_like=True, gc=False):
    """The output of one request in one step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token id or string that matched; None for EOS
    logprobs: list[TokenLogprobs] | None = None  # parallel to new_token_ids
    num_cached_tokens: int = 0  # prompt tokens from the prefix cache
    error: str | None = None  # set with FinishReason.ERROR
    is_complete: bool = False  # ended by a grammar: the last token is no stop token but belongs to the text
    events: list[RequestEvent] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the next prompt tokens; the first has none
    embedding: bytes | None = None  # the pooled hidden states, float32 in native byte order
    refusal: Refusal | None = None  # set with FinishReason.ERROR if the client caused the error
    rank_lost: str | None = None  # set with FinishReason.ERROR: which rank of the engine ended, and how


class EngineCoreOutputs(msgspec.Struct, tag=True, kw_only=True, array_like=True, gc=False):
    """The outputs of one step. At most one such message is sent per step."""

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats
    timestamp: float
    kv_events: KVEvents | None = None  # if they are published


class RequestOutput(msgspec.Struct, kw_only=True, gc=False):
    """A delta of one choice for the caller of `AsyncLLM.stream`. It covers several steps if the caller is slow.

    `text`, `token_ids` and `logprobs` are deltas. Text may lag behind the token ids: text that could become part of a
    stop string or of an unfinished character is held back.
    """

    request_id: str
    index: int  # of the choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int  # of this choice so far
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of all prompt tokens except the first; with the first output
    embedding: bytes | None = None
    refusal: Refusal | None = None
    rank_lost: str | None = None


_Size = Annotated[int, msgspec.Meta(ge=1)]


class ModelFacts(msgspec.Struct, kw_only=True, frozen=True):
    """The facts of a model on a device that the engine must know. The worker of the device sets them, once."""

    kv_windows: tuple[int | None, ...] = (None,)  # of each KV group (`engine.plan`)
    prompt_form_differs: bool = False  # keys and values of a token have other bits in a prompt than in an answer
    compute_form: str = ""  # device and form of the weights, in words: with another one, logits differ
    is_batch_invariant: bool = False  # a token's bits depend only on its request
    state_bytes: int = 0  # of one request, in all layers with a state instead of keys and values
    num_checkpoints: int = 0  # copies of states that there is memory for
    is_encoder: bool = False  # every prompt is computed whole, in one step; nothing is cached and nothing generated


FACTS_OF_PLANS = ("prompt_form_differs", "kv_windows", "state_bytes", "num_checkpoints")  # a simulation needs them


class EngineReady(msgspec.Struct, tag=True, kw_only=True, array_like=True, gc=False):
    """The first event after loading: the sizes and the model's facts."""

    vocab_size: _Size
    num_blocks: _Size
    block_size: _Size
    max_model_len: _Size
    facts: ModelFacts = ModelFacts()
    step_costs: bytes = b""  # a `StepCostTable` as JSON, if step costs are known
    pipeline_depth: int = 1  # as `EngineConfig` has it


# ---------------------------------------------------------------------------------------------------------------- stats


class RoutingStats(NamedTuple):
    """The routing among several engines: levels of this moment, and counts since the start."""

    loads: Sequence[float] = ()  # seconds of work of each engine
    num_by_prefix: int = 0  # prompts that went to the engine with most of them in its cache
    num_by_load: int = 0  # prompts that went to another engine
    num_placed_again: int = 0  # waiting choices that were given to another engine because theirs had died
    num_deaths: int = 0  # of engines
    num_engines: int = 1  # that live
    num_guessed: int = 0  # live engines that do not publish the contents of their caches
    num_gaps: int = 0  # times that published events were lost
    num_bytes: int = 0  # of memory for the index of prefixes
