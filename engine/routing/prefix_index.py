"""Which engines can find which beginnings of prompts in their prefix caches.

Known by what each engine publishes (`engine.kv_events.KVEvents`). What is lost on the way is missed by its sequence
number, which the next one shows, or the engine's heartbeat: then nothing is believed of that engine until it has told
everything. An engine that publishes nothing is believed to hold what it was given lately. A belief that is wrong costs
a prefill and nothing else.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from engine.kv_events import KVEvents, in_windows

MAX_CHUNKS = 2**20  # known of all engines together: 128 million tokens, in some 200 MB
MAX_GUESSES = 2**15  # four million tokens of prompts that were given to engines lately, in about 5 MB
_BYTES_PER_INT = 32


class PrefixIndex:
    """Bits of engines by chunk. Owned by a Router."""

    def __init__(self, max_chunks: int = MAX_CHUNKS, max_guesses: int = MAX_GUESSES) -> None:
        self.window_chunks = 0  # that the next token sees of what groups with windows hold; 0: there are none
        self.num_gaps = 0  # times that something was missing
        self.num_dropped = 0  # chunks for which there was no room
        self._max_chunks, self._max_guesses = max_chunks, max_guesses
        self._known: dict[int, int] = {}
        self._chunks: dict[int, set[int]] = {}  # of each engine that publishes
        self._positions: dict[int, tuple[int, int]] = {}  # of the same: epoch, and sequence number of the latest
        self._lost: set[int] = set()  # engines of which something is missing
        self._guesses: OrderedDict[int, int] = OrderedDict()

    def publishes(self, engine: int) -> bool:
        """Whether this engine says what it holds."""
        return engine in self._positions or engine in self._lost

    @property
    def num_bytes(self) -> int:
        """Of memory, about."""
        tables = [self._known, self._guesses, *self._chunks.values()]
        num_ints = 2 * len(self._known) + 2 * len(self._guesses)
        return sum(map(sys.getsizeof, tables)) + num_ints * _BYTES_PER_INT

    def num_chunks_only_in(self, engine: int) -> int:
        """Chunks that no other engine is known to hold."""
        return sum(self._known[chunk] == 1 << engine for chunk in self._chunks.get(engine, ()))

    def apply(self, engine: int, events: KVEvents) -> bool:
        """Take in what an engine publishes. Returns False if something is missing, or makes no sense: then it has to be
        asked for everything."""
        epoch, latest = self._positions.get(engine, (events.epoch, 0))
        is_late = events.epoch == epoch and events.sequence <= latest
        if events.is_whole and (engine in self._lost or not is_late):
            self.forget(engine)
        elif engine in self._lost:
            return False
        elif is_late:
            return True  # a part of what has come since
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
        """Whether something is missing of what this engine has published up to this number."""
        _, latest = self._positions.get(engine, (0, 0))
        if engine not in self._lost and latest < sequence:
            self._lose(engine)
        return engine in self._lost

    def _lose(self, engine: int) -> None:
        self.forget(engine)
        self._lost.add(engine)
        self.num_gaps += 1

    def forget(self, engine: int) -> None:
        """Nothing is known of this engine any more."""
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
        """The engine was given a prompt of these chunks, and will hold them."""
        guesses, bit = self._guesses, 1 << engine
        for chunk in reversed(chunks):  # the beginning last: it outlives what depends on it
            guesses[chunk] = guesses.pop(chunk, 0) | bit
        while len(guesses) > self._max_guesses:
            guesses.popitem(last=False)

    def unguess(self, engine: int, chunks: Sequence[int]) -> None:
        """What the engine holds of these is known otherwise now, or not at all."""
        guesses, bit = self._guesses, 1 << engine
        for chunk in chunks:
            if rest := guesses.get(chunk, 0) & ~bit:
                guesses[chunk] = rest
            else:
                guesses.pop(chunk, None)

    def find(self, chunks: Iterator[int], among: int) -> tuple[list[int], list[tuple[int, int]]]:
        """Walk along a prompt for as long as any of these engines can find its beginning.

        Returns the chunks that were walked, the last of which nobody can find, and which engines find how many: bits
        and a number, most first, each engine once and none that finds nothing.
        """
        known, guesses = self._known.get, self._guesses.get
        walked: list[int] = []
        seen: list[int] = []  # by whom the windows up to each chunk can be found
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
