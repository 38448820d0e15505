"""Requests of a workload: lengths, shared prefixes, conversations, arrival times, recorded traces.

The same flags and seed give the same list of `WorkloadRequest`s, in sending order. A prompt is described by pieces, not
by text: a benchmark makes words of them (`text_of`), the library token ids (`token_ids_of`); equal pieces stay equal.
"""

from __future__ import annotations

import json
import math
import random
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from app.config.settings import SettingsError
from engine.messages import MAX_N

# Plain English words that are one token each with a space before them in most vocabularies.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
)
WORDS = _TEXT.split()
CHARACTERS_PER_TOKEN = 4  # an estimate for English text


class Piece(NamedTuple):
    """A part of a prompt. Two pieces with the same key begin with the same text."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request that a run sends."""

    pieces: tuple[Piece, ...]  # the prompt; in a conversation, only what this turn adds
    num_output_tokens: int
    arrival: float | None = 0.0  # seconds after the start of the run; None: `think_time` after the previous answer
    conversation: int | None = None
    think_time: float = 0.0  # seconds
    text: str | None = None  # the recorded prompt; the length of its pieces is then an estimate
    n: int = 1  # choices, each with `num_output_tokens`

    @property
    def num_new_tokens(self) -> int:
        return sum(piece.num_tokens for piece in self.pieces)


def text_of(request: WorkloadRequest) -> str:
    """Return the prompt as words, about one token each."""
    if request.text is not None:
        return request.text
    return " ".join(word for key, length in request.pieces for word in random.Random(key).choices(WORDS, k=length))


def token_ids_of(request: WorkloadRequest, vocab_size: int) -> list[int]:
    """Return the prompt as token ids. They skip the lowest thousand, where special tokens are, if the vocabulary is
    large enough."""
    ids = range(min(1000, vocab_size // 2), vocab_size)
    return [token for key, length in request.pieces for token in random.Random(key).choices(ids, k=length)]


def add_workload_flags(parser: ArgumentParser) -> None:
    """Add the flags that `workload` reads, spelled as in vLLM's benchmarks."""
    add_dataset_flags(parser)
    group = parser.add_argument_group("arrivals")
    add = partial(group.add_argument, default=None)
    add("--request-rate", type=float, default=math.inf, metavar="R",
        help="Requests per second. Default: inf, all at once.")  # fmt: skip
    add("--burstiness", type=float, default=1.0, metavar="B",
        help="Shape of the gamma distribution of gaps: 1 is Poisson, less comes in bursts, inf is even.")  # fmt: skip
    add("--ramp-up-strategy", choices=("linear", "exponential"), help="A rate that rises, instead of --request-rate.")
    add("--ramp-up-start-rps", type=float, metavar="R", help="Requests per second at the start of the ramp.")
    add("--ramp-up-end-rps", type=float, metavar="R", help="Requests per second at the end of the ramp.")


def add_dataset_flags(parser: ArgumentParser) -> None:
    """Add the flags of prompts and answer lengths."""
    group = parser.add_argument_group("workload")
    add = partial(group.add_argument, default=None)
    add("--dataset-name", choices=sorted(_DATASETS), default="random",
        help="The prompts. sharegpt without --dataset-path draws lengths like those of ShareGPT.")  # fmt: skip
    add("--dataset-path", type=Path, metavar="FILE", help="JSON of ShareGPT, or JSON lines with 'prompt' (custom).")
    add("--num-prompts", type=int, default=1000, metavar="N", help="Requests in all. Default: 1000.")
    add("--input-len", type=int, metavar="N", help="Prompt tokens. Overrides --random-input-len.")
    add("--output-len", type=int, metavar="N", help="Tokens of each answer. Default: the dataset's, or 128.")
    add("--random-input-len", type=int, default=1024, metavar="N", help="Default: 1024.")
    add("--random-output-len", type=int, default=128, metavar="N", help="Default: 128.")
    add("--random-range-ratio", default="0.0", metavar="R",
        help='Lengths vary by a factor of 1 - R to 1 + R; {"input": R, "output": R} sets them apart.')  # fmt: skip
    add("--random-prefix-len", type=int, default=0, metavar="N", help="Tokens of a prefix that all prompts share.")
    add("--sharegpt-output-len", type=int, metavar="N", help="Tokens of each answer of sharegpt.")
    add("--prefix-repetition-prefix-len", type=int, default=256, metavar="N", help="Default: 256.")
    add("--prefix-repetition-suffix-len", type=int, default=256, metavar="N", help="Default: 256.")
    add("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N", help="Default: 10.")
    add("--conversation-turns", type=int, default=4, metavar="N", help="Questions per conversation. Default: 4.")
    add("--conversation-think-time", type=float, default=1.0, metavar="S",
        help="Mean seconds from an answer to the next question, exponential. Default: 1.")  # fmt: skip


def workload(options: Namespace, *, seed: int) -> list[WorkloadRequest]:
    """Return the requests that the flags describe, with arrival times. Raises SettingsError."""
    check_positive(options, "burstiness", "request_rate")
    requests = draw_requests(options, seed=seed)
    starts = [number for number, request in enumerate(requests) if request.arrival is not None]
    times = arrival_times(len(starts), options, seed=seed, share=len(starts) / len(requests))
    for number, time in zip(starts, times, strict=True):
        requests[number] = replace(requests[number], arrival=time)
    return requests


def draw_requests(options: Namespace, *, seed: int) -> list[WorkloadRequest]:
    """Return the requests that the flags describe, all of them at time 0. Raises SettingsError."""
    check_positive(options, "num_prompts", "conversation_turns", "prefix_repetition_num_prefixes")
    lengths = ("input_len", "output_len", "random_input_len", "random_output_len", "sharegpt_output_len")
    check_positive(options, *(name for name in lengths if getattr(options, name, None) is not None))
    if options.dataset_path is not None and options.dataset_name not in ("sharegpt", "custom"):
        raise SettingsError(f"--dataset-path: the dataset {options.dataset_name} reads no file; sharegpt and custom do")
    return list(_DATASETS[options.dataset_name](options, random.Random(f"{seed} lengths"), f"{seed}"))


def check_positive(options: Namespace, *names: str) -> None:
    for name in names:
        if not getattr(options, name) > 0:
            raise SettingsError(f"--{name.replace('_', '-')}: got {getattr(options, name)}; allowed: more than 0")


def arrival_times(num_requests: int, options: Namespace, *, seed: int, share: float = 1.0) -> list[float]:
    """Return rising arrival times in seconds. Gaps are gamma-distributed with mean 1 / rate; without a ramp they are
    stretched so that the last request comes at `num_requests` / rate exactly, which makes seeds comparable.

    `share` is the part of all requests that do not wait for an answer; the rate is that of all requests.
    """
    draw = random.Random(f"{seed} arrivals")
    rates = [rate * share for rate in _rates(num_requests, options)]
    shape = options.burstiness
    gaps = [(draw.gammavariate(shape, 1 / shape) if shape != math.inf else 1.0) / rate for rate in rates]
    total = sum(gaps)
    stretch = num_requests / rates[0] / total if total and options.ramp_up_strategy is None else 1.0
    return list(accumulate(gap * stretch for gap in gaps))


def _rates(num_requests: int, options: Namespace) -> list[float]:
    """Return the rate at each gap, in requests per second."""
    if options.ramp_up_strategy is None:
        return [options.request_rate] * num_requests
    start, end = options.ramp_up_start_rps, options.ramp_up_end_rps
    if options.request_rate != math.inf:
        raise SettingsError("--request-rate and --ramp-up-strategy exclude each other. Give only one of them")
    if start is None or end is None or not 0 < start <= end:
        raise SettingsError("--ramp-up-strategy: give --ramp-up-start-rps more than 0 and --ramp-up-end-rps not below")
    shares = [number / max(num_requests - 1, 1) for number in range(num_requests)]
    if options.ramp_up_strategy == "linear":
        return [start + (end - start) * share for share in shares]
    return [start * (end / start) ** share for share in shares]


# Datasets: each draws `options.num_prompts` requests. `name` keeps the keys of different seeds apart.


def _random(options: Namespace, draw: random.Random, name: str) -> Iterator[WorkloadRequest]:
    around_input, around_output = _range_ratios(options.random_range_ratio)
    for number in range(options.num_prompts):
        prompt = _around(draw, options.input_len or options.random_input_len, around_input)
        output = _around(draw, options.output_len or options.random_output_len, around_output)
        yield WorkloadRequest(_with_prefix(options, name, Piece(f"{name} prompt {number}", prompt)), output)


def _sharegpt(options: Namespace, draw: random.Random, name: str) -> Iterator[WorkloadRequest]:
    """Yield the first questions of a file with the lengths of their answers. Without a file, lengths are log-normal
    with a mean of about 190 tokens for prompts and answers, like those of ShareGPT."""
    fixed = options.output_len or options.sharegpt_output_len
    if options.dataset_path is None:
        for number in range(options.num_prompts):
            prompt = Piece(f"{name} prompt {number}", _clipped(draw.lognormvariate(4.32, 1.46)))
            yield WorkloadRequest((prompt,), fixed or _clipped(draw.lognormvariate(4.87, 0.94)))
        return

    def pairs(text: str) -> Iterator[tuple[str, int]]:
        for entry in json.loads(text):
            turns = [str(turn["value"]) for turn in entry.get("conversations", ())[:2]]
            lengths = [_tokens_in(turn) for turn in turns]
            if len(turns) == 2 and min(lengths) >= 4 and lengths[0] <= 1024 and sum(lengths) <= 2048:
                yield turns[0], fixed or lengths[1]

    yield from _recorded(options, draw, pairs)


def _custom(options: Namespace, draw: random.Random, _name: str) -> Iterator[WorkloadRequest]:
    """Yield the prompts of a file of JSON lines, which may have the answer's length as "output_tokens"."""
    if options.dataset_path is None:
        raise SettingsError("--dataset-path: the dataset custom needs a file of JSON lines with 'prompt'")

    def pairs(text: str) -> Iterator[tuple[str, int]]:
        for entry in (json.loads(line) for line in text.split("\n") if line.strip()):
            yield str(entry["prompt"]), options.output_len or int(entry.get("output_tokens", 256))

    yield from _recorded(options, draw, pairs)


def _prefix_repetition(options: Namespace, draw: random.Random, name: str) -> Iterator[WorkloadRequest]:
    output = options.output_len or 128
    for number in range(options.num_prompts):
        shared = draw.randrange(options.prefix_repetition_num_prefixes)
        prefix = Piece(f"{name} prefix {shared}", options.prefix_repetition_prefix_len)
        yield WorkloadRequest((prefix, Piece(f"{name} prompt {number}", options.prefix_repetition_suffix_len)), output)


def _conversation(options: Namespace, draw: random.Random, name: str) -> Iterator[WorkloadRequest]:
    """Yield conversations of several turns; questions are as long as prompts of the random dataset."""
    around_input, around_output = _range_ratios(options.random_range_ratio)
    for number in range(options.num_prompts):
        conversation, turn = divmod(number, options.conversation_turns)
        prompt = _around(draw, options.input_len or options.random_input_len, around_input)
        question = Piece(f"{name} conversation {conversation} turn {turn}", prompt)
        output = _around(draw, options.output_len or options.random_output_len, around_output)
        if turn == 0:
            yield WorkloadRequest(_with_prefix(options, name, question), output, conversation=conversation)
            continue
        mean = options.conversation_think_time
        think_time = draw.expovariate(1 / mean) if mean else 0.0
        yield WorkloadRequest((question,), output, None, conversation, think_time)


_DATASETS = {
    "random": _random,
    "sharegpt": _sharegpt,
    "custom": _custom,
    "prefix_repetition": _prefix_repetition,
    "conversation": _conversation,
}


def _recorded(
    options: Namespace, draw: random.Random, pairs_of: Callable[[str], Iterator[tuple[str, int]]]
) -> Iterator[WorkloadRequest]:
    """Yield prompts and answer lengths of a file in random order, again from the first when they run out."""
    path = options.dataset_path
    try:
        pairs = list(pairs_of(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise SettingsError(f"--dataset-path: cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        allowed = "JSON of ShareGPT" if options.dataset_name == "sharegpt" else "JSON lines with 'prompt'"
        raise SettingsError(f"--dataset-path: {path} is wrong: {error!r}; allowed: {allowed}") from error
    if not pairs:
        raise SettingsError(f"--dataset-path: {path} holds no prompt that can be used")
    draw.shuffle(pairs)
    for number in range(options.num_prompts):
        text, num_output_tokens = pairs[number % len(pairs)]
        yield WorkloadRequest((Piece(text, _tokens_in(text)),), num_output_tokens, text=text)


def _with_prefix(options: Namespace, name: str, piece: Piece) -> tuple[Piece, ...]:
    length = options.random_prefix_len
    return (Piece(f"{name} prefix", length), piece) if length else (piece,)


def _range_ratios(text: str) -> tuple[float, float]:
    """Return the ratios of prompt and answer."""
    try:
        given = json.loads(text)
        ratios = (float(given["input"]), float(given["output"])) if isinstance(given, dict) else (float(given),) * 2
    except (ValueError, TypeError, KeyError):
        ratios = (-1.0, -1.0)
    if not all(0 <= ratio < 1 for ratio in ratios):
        raise SettingsError(f"--random-range-ratio: got {text!r}; allowed: 0 to below 1. A value that works: 0.2")
    return ratios


def _around(draw: random.Random, length: int, ratio: float) -> int:
    return draw.randint(max(1, math.floor(length * (1 - ratio))), max(1, math.ceil(length * (1 + ratio))))


def _clipped(length: float) -> int:
    return min(max(4, round(length)), 1024)


def _tokens_in(text: str) -> int:
    return max(1, len(text) // CHARACTERS_PER_TOKEN)


# --------------------------------------------------------------------------------------------------------------- traces
# Recorded workloads. Three formats:
#
# own       JSON lines: {"time": 0.5, "input_tokens": 300, "output_tokens": 40}, with any of "prefix": [["name", 100],
#           ...] (how the prompt begins: equal names are equal tokens), "conversation" (a number; its later lines have
#           no "time" but wait for the previous answer), "think_time" and "n" (choices). Times are seconds
# Mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens)
# vLLM      the JSON of `bench serve --save-detailed`: start_times, input_lens, output_lens; ours also has n


MAX_BYTES = 2**30
MAX_REQUESTS = 10**6
MAX_TOKENS = 2**20  # of a prompt or an answer
MAX_NUMBER = 1e15  # seconds or milliseconds; not more, so that a float keeps microseconds
MAX_SECONDS = 10 * 365 * 86400
MOONCAKE_BLOCK = 512  # tokens


def read_trace(path: Path) -> list[WorkloadRequest]:
    """Return the requests of a file in its order, shifted so that the first comes at 0. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise SettingsError(f"--trace: {path} is too large; allowed: {MAX_BYTES} bytes")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise SettingsError(f"--trace: cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise SettingsError(f"--trace: {path} is no text: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not 1 <= len(lines) <= MAX_REQUESTS:
        raise SettingsError(f"--trace: {path} has {len(lines)} lines; allowed: 1 to {MAX_REQUESTS}")
    entries = [_Entry(f"{path}, line {number}", _parse(path, number, line)) for number, line in lines]
    if "input_lens" in entries[-1].fields:
        requests = list(_of_vllm(entries[-1]))  # the last result of a file that has several
    else:
        requests = [_of_mooncake(entry) if "hash_ids" in entry.fields else _own(entry) for entry in entries]
    return _from_zero(requests, entries)


def scaled(requests: list[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """Return the requests with their times scaled to an average rate in requests per second."""
    span = max((request.arrival or 0.0 for request in requests), default=0.0)
    factor = len(requests) / rate / span if span else 1.0
    return [each if each.arrival is None else replace(each, arrival=each.arrival * factor) for each in requests]


class _Entry:
    """One JSON object. Fields are checked when they are read."""

    def __init__(self, place: str, fields: dict[str, Any]) -> None:
        self.place = place
        self.fields = fields

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self.fields.get(name, default)
        if not _is_number(value) or not low <= value <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return value

    def count(self, name: str, low: int = 1, high: int = MAX_TOKENS) -> int:
        value = self.fields.get(name)
        if not _is_count(value, low, high):
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def items(self, name: str, is_right: Callable[[Any], bool], allowed: str) -> list[Any]:
        value = self.fields.get(name, [])
        if not isinstance(value, list) or not all(map(is_right, value)):
            raise self.wrong(name, f"a list of {allowed}")
        return value

    def wrong(self, name: str, allowed: str) -> SettingsError:
        given = json.dumps(self.fields[name])[:80] if name in self.fields else "nothing"
        return SettingsError(f"--trace: {self.place}: {name}: got {given}; allowed: {allowed}")


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SettingsError(f"--trace: {path}, line {number}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise SettingsError(f"--trace: {path}, line {number}: got {line[:80]}; allowed: a JSON object")
    return fields


def _own(entry: _Entry) -> WorkloadRequest:
    fields = entry.fields
    known = ("time", "input_tokens", "output_tokens", "prefix", "conversation", "think_time", "n")
    if unknown := [name for name in fields if name not in known]:
        raise entry.wrong(unknown[0], f"the fields {', '.join(known)}")
    pairs = entry.items("prefix", _is_piece, "pairs of a name and a number of tokens")
    prefix = [Piece(f"prefix {name}", length) for name, length in pairs]
    num_inputs = entry.count("input_tokens")
    rest = num_inputs - sum(piece.num_tokens for piece in prefix)
    if rest < 0:
        raise entry.wrong("prefix", f"no more tokens than input_tokens ({num_inputs})")
    conversation = entry.count("conversation", 0, 2**53) if "conversation" in fields else None
    follows = conversation is not None and "time" not in fields
    return WorkloadRequest(
        (*prefix, *([Piece(f"rest of {entry.place}", rest)] if rest else [])),
        entry.count("output_tokens"),
        arrival=None if follows else entry.number("time", 0, MAX_SECONDS),
        conversation=conversation,
        think_time=entry.number("think_time", 0, MAX_SECONDS, 0.0),
        n=_choices(entry),
    )


def _of_mooncake(entry: _Entry) -> WorkloadRequest:
    hash_ids = entry.items("hash_ids", lambda value: _is_count(value, 0, 2**63), "whole numbers")
    left = entry.count("input_length")
    if len(hash_ids) < -(-left // MOONCAKE_BLOCK):
        raise entry.wrong("hash_ids", f"one for each {MOONCAKE_BLOCK} tokens of input_length ({left})")
    pieces = []
    for hash_id in hash_ids[: -(-left // MOONCAKE_BLOCK)]:
        pieces.append(Piece(f"block {hash_id}", min(left, MOONCAKE_BLOCK)))
        left -= MOONCAKE_BLOCK
    time = entry.number("timestamp", 0, MAX_SECONDS * 1e3) / 1e3
    return WorkloadRequest(tuple(pieces), entry.count("output_length"), arrival=time)


def _of_vllm(entry: _Entry) -> Iterator[WorkloadRequest]:
    inputs = entry.items("input_lens", lambda value: _is_count(value, 0, MAX_TOKENS), "whole numbers")
    outputs = entry.items("output_lens", lambda value: _is_count(value, 0, MAX_TOKENS), "whole numbers")
    starts = entry.items("start_times", _is_number, "seconds; --save-detailed writes them")
    for name, values in (("output_lens", outputs), ("start_times", starts)):
        if len(values) != len(inputs) or not values:
            raise entry.wrong(name, f"as many as input_lens has ({len(inputs)}), at least 1")
    n = _choices(entry)
    for number, (start, num_inputs, num_outputs) in enumerate(zip(starts, inputs, outputs, strict=True)):
        if num_inputs and num_outputs:  # a request that failed has no lengths
            yield WorkloadRequest((Piece(f"prompt {number}", num_inputs),), -(-num_outputs // n), arrival=start, n=n)


def _choices(entry: _Entry) -> int:
    return 1 if entry.fields.get("n") is None else entry.count("n", 1, MAX_N)


def _from_zero(requests: list[WorkloadRequest], entries: list[_Entry]) -> list[WorkloadRequest]:
    """Shift times so that the first request comes at 0. Raises SettingsError unless exactly the first line of each
    conversation has a time."""
    first = min((request.arrival for request in requests if request.arrival is not None), default=0.0)
    begun: set[int | None] = {None}
    for entry, request in zip(entries, requests, strict=False):
        if (request.arrival is None) != (request.conversation in begun) and request.conversation is not None:
            allowed = "none after the first line of a conversation" if request.arrival is not None else "a number"
            raise entry.wrong("time", allowed)
        begun.add(request.conversation)
    return [each if each.arrival is None else replace(each, arrival=each.arrival - first) for each in requests]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _is_count(value: Any, low: int, high: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_piece(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _is_count(value[1], 1, MAX_TOKENS)
    )
