"""An index of the prefixes in the prefix caches of several engines.

1. Engines publish the contents of their caches (`engine.kv_events.KVEvents`). The next sequence number, or the engine's
   heartbeat, reveals a lost message. Then the index forgets the engine until the engine has published everything again.
2. An engine that does not publish is assumed to hold the prompts it got lately. A wrong assumption costs a prefill.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from engine.kv_events import KVEvents, in_windows

MAX_CHUNKS = 2**20  # of all engines together: 128 million tokens, in some 200 MB
MAX_GUESSES = 2**15  # of prompts that were given to engines lately: four million tokens, in about 5 MB
_BYTES_PER_INT = 32


class PrefixIndex:
    """The engines that hold each chunk of a prompt, as bits. Owned by a Router."""

    def __init__(self, max_chunks: int = MAX_CHUNKS, max_guesses: int = MAX_GUESSES) -> None:
        self.window_chunks = 0  # chunks that the next token sees in KV groups with windows; 0 without such groups
        self.num_gaps = 0  # times that a message was lost
        self.num_dropped = 0  # chunks without room in the index
        self._max_chunks, self._max_guesses = max_chunks, max_guesses
        self._known: dict[int, int] = {}
        self._chunks: dict[int, set[int]] = {}  # of each engine that publishes
        self._positions: dict[int, tuple[int, int]] = {}  # by engine: epoch and sequence number of the latest message
        self._lost: set[int] = set()  # engines with a lost message
        self._guesses: OrderedDict[int, int] = OrderedDict()

    def publishes(self, engine: int) -> bool:
        """Return True if this engine publishes the contents of its cache."""
        return engine in self._positions or engine in self._lost

    @property
    def num_bytes(self) -> int:
        tables = [self._known, self._guesses, *self._chunks.values()]
        num_ints = 2 * len(self._known) + 2 * len(self._guesses)
        return sum(map(sys.getsizeof, tables)) + num_ints * _BYTES_PER_INT

    def num_chunks_only_in(self, engine: int) -> int:
        """Return the number of chunks that no other engine is known to hold."""
        return sum(self._known[chunk] == 1 << engine for chunk in self._chunks.get(engine, ()))

    def apply(self, engine: int, events: KVEvents) -> bool:
        """Apply a message of an engine. Return False if a message was lost or this one is invalid: then the engine has
        to be asked for everything."""
        epoch, latest = self._positions.get(engine, (events.epoch, 0))
        is_late = events.epoch == epoch and events.sequence <= latest
        if events.is_whole and (engine in self._lost or not is_late):
            self.forget(engine)
        elif engine in self._lost:
            return False
        elif is_late:
            return True  # a complete state that arrived earlier includes it
        elif events.epoch != epoch or events.sequence != latest + 1 or (len(events.stored) | len(events.removed)) % 8:
            self._lose(engine)
            return False
        self._positions[engine] = (events.epoch, events.sequence)
        chunks = self._chunks.setdefault(engine, set())
        self._remove(engine, chunks, _numbers(events.removed))
        known, bit = self._known, 1 << engine
        for chunk in _numbers(events.stored):
            bits = known.get(chunk)
            if bits is None and len(known) >= self._max_chunks:
                self.num_dropped += 1
                continue
            known[chunk] = (bits or 0) | bit
            chunks.add(chunk)
        return True

    def lacks(self, engine: int, sequence: int) -> bool:
        """Return True if a message of this engine up to this sequence number was lost."""
        _, latest = self._positions.get(engine, (0, 0))
        if engine not in self._lost and latest < sequence:
            self._lose(engine)
        return engine in self._lost

    def _lose(self, engine: int) -> None:
        self.forget(engine)
        self._lost.add(engine)
        self.num_gaps += 1

    def forget(self, engine: int) -> None:
        """Remove all knowledge of an engine's cache."""
        self._positions.pop(engine, None)
        self._lost.discard(engine)
        chunks = self._chunks.pop(engine, set())
        self._remove(engine, chunks, list(chunks))
        self.unguess(engine, list(self._guesses))

    def _remove(self, engine: int, chunks: set[int], gone: Iterable[int]) -> None:
        known, bit = self._known, 1 << engine
        for chunk in gone:
            if chunk in chunks:
                chunks.remove(chunk)
                if rest := known[chunk] & ~bit:
                    known[chunk] = rest
                else:
                    del known[chunk]

    def guess(self, engine: int, chunks: Sequence[int]) -> None:
        """Assume that the engine holds these chunks, because it got a prompt with them."""
        guesses, bit = self._guesses, 1 << engine
        for chunk in reversed(chunks):  # the first chunk last, so that it is dropped after those that depend on it
            guesses[chunk] = guesses.pop(chunk, 0) | bit
        while len(guesses) > self._max_guesses:
            guesses.popitem(last=False)

    def unguess(self, engine: int, chunks: Sequence[int]) -> None:
        """Assume no longer that the engine holds these chunks."""
        guesses, bit = self._guesses, 1 << engine
        for chunk in chunks:
            if rest := guesses.get(chunk, 0) & ~bit:
                guesses[chunk] = rest
            else:
                guesses.pop(chunk, None)

    def find(self, chunks: Iterator[int], among: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Find which of the engines in `among` (bits) hold how many chunks of a prompt, from its beginning.

        Return the chunks read, up to the first that no engine holds; and pairs of engines (bits) and the number of
        chunks that they hold, most first. Each engine that holds a chunk is in exactly one pair.
        """
        known, guesses = self._known.get, self._guesses.get
        walked: list[int] = []
        seen: list[int] = []  # the engines that hold each chunk in groups with windows
        holders = [among]
        for chunk in chunks:
            walked.append(chunk)
            guessed = guesses(chunk, 0)
            among &= known(chunk, 0) | guessed
            if not among:
                break
            holders.append(among)
            if self.window_chunks:
                seen.append(known(in_windows(chunk), 0) | guessed)
        found: list[tuple[int, int]] = []
        done = 0
        for number in range(len(holders) - 1, 0, -1):
            ends = holders[number] & ~done
            for bits in seen[max(0, number - self.window_chunks) : number] if ends else ():
                ends &= bits
            if ends:
                found.append((ends, number))
                done |= ends
        return walked, found


def _numbers(data: bytes) -> array[int]:
    return array("Q", data[: len(data) // 8 * 8])
