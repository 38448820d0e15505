"""Recorded loads: files of what was asked when, as workloads.

own       JSON lines: {"time": 0.5, "input_tokens": 300, "output_tokens": 40}, with any of "prefix": [["name", 100],
          ...] (how the prompt begins: equal names are equal tokens), "conversation" (a number; its later lines need
          no "time" but wait for the answer before) and "think_time". Times are seconds
Mooncake  JSON lines: timestamp (ms), input_length, output_length, hash_ids (blocks of 512 tokens)
vLLM      the JSON of `bench serve --save-detailed`: start_times, input_lens, output_lens
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeGuard

from app.bench.workloads import Piece, WorkloadRequest
from app.settings import SettingsError

MAX_BYTES = 2**30
MAX_REQUESTS = 10**6
MAX_TOKENS = 2**20  # of a prompt or an answer
MAX_NUMBER = 1e15  # of seconds or milliseconds: finer than a microsecond as a float
MAX_SECONDS = 10 * 365 * 86400
MOONCAKE_BLOCK = 512  # tokens


def read_trace(path: Path) -> list[WorkloadRequest]:
    """The requests of a file, in its order; the first comes at 0. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise SettingsError(f"--trace: {path} has more than {MAX_BYTES} bytes, which is what is read")
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
        requests = list(_of_vllm(entries[-1]))  # the latest of a file to which results were appended
    else:
        requests = [_of_mooncake(entry) if "hash_ids" in entry.fields else _own(entry) for entry in entries]
    return _from_zero(requests, entries)


def scaled(requests: list[WorkloadRequest], rate: float) -> list[WorkloadRequest]:
    """The same at so many requests per second on average."""
    span = max((request.arrival or 0.0 for request in requests), default=0.0)
    factor = len(requests) / rate / span if span else 1.0
    return [
        request if request.arrival is None else replace(request, arrival=request.arrival * factor)
        for request in requests
    ]


class _Entry:
    """One JSON object, whose fields are checked as they are read."""

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
    known = ("time", "input_tokens", "output_tokens", "prefix", "conversation", "think_time")
    if unknown := [name for name in fields if name not in known]:
        raise entry.wrong(unknown[0], f"the fields {', '.join(known)}")
    prefix = [
        Piece(f"prefix {name}", length)
        for name, length in entry.items("prefix", _is_piece, "pairs of a name and a number of tokens")
    ]
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
    for number, (start, num_inputs, num_outputs) in enumerate(zip(starts, inputs, outputs, strict=True)):
        if num_inputs and num_outputs:  # nothing is known of those that failed
            yield WorkloadRequest((Piece(f"prompt {number}", num_inputs),), num_outputs, arrival=start)


def _from_zero(requests: list[WorkloadRequest], entries: list[_Entry]) -> list[WorkloadRequest]:
    """The first comes at 0. Conversations begin with a line that has a time, their only one."""
    first = min((request.arrival for request in requests if request.arrival is not None), default=0.0)
    begun: set[int | None] = {None}
    for entry, request in zip(entries, requests, strict=False):
        if (request.arrival is None) != (request.conversation in begun) and request.conversation is not None:
            allowed = "none after the first line of a conversation" if request.arrival is not None else "a number"
            raise entry.wrong("time", allowed)
        begun.add(request.conversation)
    return [
        request if request.arrival is None else replace(request, arrival=request.arrival - first)
        for request in requests
    ]


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _is_count(value: Any, low: int, high: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_piece(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and _is_count(value[1], 1, MAX_TOKENS)
    )
