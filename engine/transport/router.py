"""Which of several engines runs a request: the one that knows the beginning of its prompt, unless it has much to do.

Pure bookkeeping on the front end's thread, without clock or chance. `engine.transport.data_parallel` owns the one there
is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from engine.commands import AddRequests
from engine.messages import FinishReason
from engine.scheduler.expected_work import TypicalRequest
from engine.scheduler.step_cost import StepCostTable

CHUNK = 64  # tokens: a shared beginning shorter than this is not worth a detour
MAX_CHUNKS = 2**15  # remembered; two million tokens of prompts, in about 5 MB
# Before any answer has ended, and before any engine has told what its steps cost: so long is an answer, and so many
# tokens of a prompt weigh as much as one.
UNKNOWN_ANSWER = 256
TOKENS_PER_ANSWER = 512
# A prefix in the cache saves prefill once, a queue is paid for in every token: so many typical answers is it worth, and
# no more.
EXTRA_ANSWERS = 4.0
EXTRA_SHARE = 0.25
WHOLE = (FinishReason.STOP, FinishReason.LENGTH)  # of answers that tell how long answers get


class Work(msgspec.Struct, gc=False):
    """What a choice still has to have computed, as far as can be told, in tokens."""

    engine: int
    prompt_tokens: int  # that no cache is thought to hold
    answer_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int = 0


class Router:
    """What each engine has to do, in seconds, and which of them has seen which beginnings of prompts.

    Seconds are by what the engine itself says of its steps, those of full batches: where one is empty, it does not
    matter. The memory is a guess at what the engines' prefix caches hold, kept by last use as theirs is. A wrong guess
    costs a prefill and nothing else, so Python's own hash is good enough here.
    """

    def __init__(self, size: int, max_num_seqs: int, max_chunks: int = MAX_CHUNKS) -> None:
        """`max_num_seqs`: running slots of each engine."""
        self._max_num_seqs = max_num_seqs
        self._num_choices = [0] * size
        self._typical = TypicalRequest()
        self._costs: list[StepCostTable | None] = [None] * size
        self._prompt_tokens = [0] * size
        self._answer_tokens = [0] * size
        self._work: dict[str, Work] = {}
        self._max_chunks = max_chunks
        self._seen: OrderedDict[int, int] = OrderedDict()  # hash of a beginning → bits of the engines that computed it

    @property
    def loads(self) -> list[float]:
        """Seconds of work that wait or run in each engine."""
        both = zip(self._prompt_tokens, self._answer_tokens, map(self._prices, self._costs), strict=True)
        return [prompt * prices[0] + answer * prices[1] for prompt, answer, prices in both]

    def set_costs(self, engine: int, costs: StepCostTable) -> None:
        """The engine says what its steps cost."""
        self._costs[engine] = costs

    def choose(self, added: AddRequests, alive: Sequence[int]) -> int:
        """The engine, one of `alive`, for all choices of one prompt. Its work until they have `ended`."""
        first = added.choices[0]
        chunks = list(_chunks((first.tenant, first.cache_salt), added.prompt_token_ids))
        loads = self.loads
        # Prices are measured, and may be wrong: nobody waits for one engine while another has slots to spare.
        most = self._max_num_seqs - len(added.choices)
        least = min(alive, key=lambda engine: (self._num_choices[engine] > most, loads[engine]))
        answer_price = self._prices(self._costs[least])[1]
        limit = loads[least] * (1 + EXTRA_SHARE) + EXTRA_ANSWERS * answer_price * self._typical_answer
        knowing = self._who_knows_most(chunks, alive)
        best = min(knowing, key=loads.__getitem__) if knowing else least
        chosen = best if loads[best] <= limit else least
        uncached = len(added.prompt_token_ids) - CHUNK * self._num_known(chunks, chosen)
        self._remember(chunks, chosen)
        for choice in added.choices:
            longest, typical = choice.sampling.max_tokens, round(self._typical_answer)
            answer = typical if longest is None else min(typical, longest)
            self._work[choice.request_id] = Work(chosen, uncached, answer, len(added.prompt_token_ids))
            self._num_choices[chosen] += 1
            self._prompt_tokens[chosen] += uncached
            self._answer_tokens[chosen] += answer
            uncached = 0  # the first stands for the prompt, which is computed once for all
        return chosen

    def advanced(self, request_id: str, num_tokens: int) -> None:
        """A choice got so many tokens. With the first, its prompt has been computed; its answer has as many less to
        come."""
        work = self._work.get(request_id)
        if work is not None and num_tokens:
            work.num_output_tokens += num_tokens
            self._leave(work, max(work.answer_tokens - num_tokens, min(work.answer_tokens, 1)))

    def ended(self, request_id: str, *, by_itself: bool) -> None:
        """A choice is no work any more. Those that were not broken off tell how long answers get."""
        work = self._work.pop(request_id, None)
        if work is not None:
            self._leave(work, 0)
            self._num_choices[work.engine] -= 1
            if by_itself and work.num_output_tokens:
                self._typical.learn(work.num_prompt_tokens, work.num_output_tokens)

    def _leave(self, work: Work, answer_tokens: int) -> None:
        """Nothing of the prompt and so much of the answer."""
        self._prompt_tokens[work.engine] -= work.prompt_tokens
        self._answer_tokens[work.engine] -= work.answer_tokens - answer_tokens
        work.prompt_tokens, work.answer_tokens = 0, answer_tokens

    @property
    def _typical_answer(self) -> float:
        return self._typical.num_output_tokens or UNKNOWN_ANSWER

    def _prices(self, own: StepCostTable | None) -> tuple[float, float]:
        """Seconds for a token of a prompt and for one of an answer. An engine that has not told is like another."""
        costs = next((each for each in (own, *self._costs) if each is not None and each.is_known), None)
        if costs is None:
            return 1 / TOKENS_PER_ANSWER, 1 / self._typical_answer
        rows = costs.decode.sizes[-1]
        prices = self._typical.prices(costs, rows)
        return prices.prompt_token, prices.step / rows

    def _num_known(self, chunks: list[int], engine: int) -> int:
        """How many chunks the engine has computed, from the beginning on."""
        bit = 1 << engine
        return next((index for index, chunk in enumerate(chunks) if not self._seen.get(chunk, 0) & bit), len(chunks))

    def forget(self, engine: int) -> None:
        """The engine has gone, and its cache with it."""
        for request_id in [each for each, work in self._work.items() if work.engine == engine]:
            self.ended(request_id, by_itself=False)
        self._costs[engine] = None
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


def _chunks(owner: tuple[str, str], token_ids: list[int]) -> Iterator[int]:
    """A hash for each whole chunk, chained from all before it and from its owner (tenant and salt): none shares a cache
    with another."""
    chain = hash(owner)
    for end in range(CHUNK, len(token_ids) + 1, CHUNK):
        chain = hash((chain, *token_ids[end - CHUNK : end]))
        yield chain
