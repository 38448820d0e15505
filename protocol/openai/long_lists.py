"""Long lists of an answer as JSON, a piece at a time.

The objects of a hundred thousand log-probabilities, made all at once, are a hundred megabytes and long pauses: to write
them is one call that keeps the interpreter's lock, and the garbage collector visits them again and again. So only those
of a few hundred positions are there at a time, and what is kept of them is their JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import orjson

from engine.messages import TokenLogprobs
from protocol.openai.logprobs import LogprobsWriter

PIECE = 256  # positions


def pieces(entries: Sequence[TokenLogprobs]) -> Iterator[Sequence[TokenLogprobs]]:
    """`entries`, cut; one by one if they are of the whole vocabulary."""
    piece = PIECE if not entries or entries[-1].every is None else 1
    for begin in range(0, len(entries), piece):
        yield entries[begin : begin + piece]


def joined(lists: Iterable[Sequence[Any]]) -> orjson.Fragment:
    """The JSON of one list of all of these lists' entries."""
    return array_of(map(entries_of, lists))


def written(write: LogprobsWriter, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """What `write` makes of the entries, fed piece by piece: an object whose lists are joined."""
    if len(entries) <= PIECE and not (entries and entries[-1].every is not None):
        return write(entries)
    whole: dict[str, Any] = {}
    for piece in pieces(entries):
        for key, value in write(piece).items():
            if isinstance(value, list):
                whole.setdefault(key, []).append(entries_of(value))
            else:
                whole[key] = value
    return {key: array_of(value) if isinstance(value, list) else value for key, value in whole.items()}


def entries_of(values: Sequence[Any]) -> bytes:
    """The JSON of a list, without its brackets."""
    return orjson.dumps(values)[1:-1]


def array_of(written_entries: Iterable[bytes]) -> orjson.Fragment:
    """The list that has all of these entries, of which some may be none."""
    return orjson.Fragment(b"[" + b",".join(filter(None, written_entries)) + b"]")
