"""Which of several engines runs a request: the one that knows the beginning of its prompt, unless it has much to do.

Pure bookkeeping on the front end's thread, without clock or chance. `engine.transport.data_parallel` owns the one there
is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from engine.commands import AddRequests

CHUNK = 64  # tokens: a shared beginning shorter than this is not worth a detour
MAX_CHUNKS = 2**15  # remembered; two million tokens of prompts, in about 5 MB
# A choice costs its engine a row in every step until it ends. A prompt costs steps: this many of its tokens weigh as
# much as a choice. How long an answer gets is not known when it begins, so it does not count.
TOKENS_PER_CHOICE = 512
# A prefix in the cache saves prefill once, a queue is paid for in every token: so much load is it worth, and no more.
EXTRA_LOAD = 4.0
EXTRA_SHARE = 0.25


class Router:
    """Loads of the engines, and which of them has seen which beginnings of prompts.

    The memory is a guess at what the engines' prefix caches hold, kept by last use as theirs is. A wrong guess costs a
    prefill and nothing else, so Python's own hash is good enough here.
    """

    def __init__(self, size: int, max_chunks: int = MAX_CHUNKS) -> None:
        self.loads = [0.0] * size
        self._max_chunks = max_chunks
        self._seen: OrderedDict[int, int] = OrderedDict()  # hash of a beginning → bits of the engines that computed it

    def choose(self, added: AddRequests, alive: Sequence[int]) -> int:
        """The engine, one of `alive`, for all choices of one prompt. Counts them as its load."""
        first = added.choices[0]
        chunks = list(_chunks((first.tenant, first.cache_salt), added.prompt_token_ids))
        least = min(alive, key=self.loads.__getitem__)
        limit = self.loads[least] * (1 + EXTRA_SHARE) + EXTRA_LOAD
        knowing = self._who_knows_most(chunks, alive)
        best = min(knowing, key=self.loads.__getitem__) if knowing else least
        chosen = best if self.loads[best] <= limit else least
        self._remember(chunks, chosen)
        self.loads[chosen] += sum(weights(added))
        return chosen

    def ended(self, engine: int, weight: float) -> None:
        """A choice of this weight is no load any more."""
        self.loads[engine] = max(0.0, self.loads[engine] - weight)

    def forget(self, engine: int) -> None:
        """The engine has gone, and its cache with it."""
        self.loads[engine] = 0.0
        for chunk, engines in list(self._seen.items()):
            self._seen[chunk] = engines & ~(1 << engine)

    def _who_knows_most(self, chunks: list[int], alive: Sequence[int]) -> list[int]:
        """The engines that have computed the longest beginning."""
        knowing = 0
        candidates = sum(1 << engine for engine in alive)
        for chunk in chunks:
            candidates &= self._seen.get(chunk, 0)
            if not candidates:
                break
            knowing = candidates
        return [engine for engine in alive if knowing >> engine & 1]

    def _remember(self, chunks: list[int], engine: int) -> None:
        for chunk in reversed(chunks):  # the beginning last: it outlives what depends on it
            self._seen[chunk] = self._seen.pop(chunk, 0) | 1 << engine
        while len(self._seen) > self._max_chunks:
            self._seen.popitem(last=False)


def weights(added: AddRequests) -> list[float]:
    """The load of each choice of one prompt. The first stands for the prompt, which is computed once for all."""
    prompt = len(added.prompt_token_ids) / TOKENS_PER_CHOICE
    return [1.0 + prompt * (index == 0) for index in range(len(added.choices))]


def _chunks(owner: tuple[str, str], token_ids: list[int]) -> Iterator[int]:
    """A hash for each whole chunk, chained from all before it and from its owner (tenant and salt): none shares a cache
    with another."""
    chain = hash(owner)
    for end in range(CHUNK, len(token_ids) + 1, CHUNK):
        chain = hash((chain, *token_ids[end - CHUNK : end]))
        yield chain
