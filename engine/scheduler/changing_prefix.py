"""Prompts that the prefix cache misses because their beginning changes, although the rest of them has been here.

Some clients put a header, a date or a counter into the first lines of their system prompt: then nothing of what follows
is ever found. It is told by the content: places in the text that are chosen by what stands there, wherever that is.
Owned by the RequestTable.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.scheduler.request import Request

BEGINNING = 256  # tokens within which a shared prefix ends too early
LOOKED_AT = 2048  # tokens behind them
SAMPLED = 32  # one in so many tokens is a place
LENGTH = 16  # tokens of a place
FEWEST = 8  # places that have to be there, and half of which were seen before
MEMORY = 2**16  # places that are remembered


class ChangingPrefixes:
    """What the latest prompts held, by hashes."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def is_one(self, request: Request) -> bool:
        """Whether the request, which starts now, repeats what the prefix cache did not find for its beginning alone.
        Half a millisecond for a long prompt, and nothing for one whose beginning was found: it has been here."""
        tokens = request.token_ids[: min(request.num_prompt_tokens, BEGINNING + LOOKED_AT)]
        if len(tokens) < 2 * BEGINNING or request.num_cached_tokens >= BEGINNING:
            return False
        owner = (request.tenant, request.cache_salt)
        beginning = hash((owner, *tokens[:BEGINNING]))
        places = {
            hash((owner, *tokens[start : start + LENGTH]))
            for start in range(BEGINNING, len(tokens) - LENGTH)
            if (tokens[start] + 7 * tokens[start + 1] + 31 * tokens[start + 2]) % SAMPLED == 0
        }
        num_seen = sum(place in self._seen for place in places)
        # What had the same beginning was found once and has been given up since.
        is_new = beginning not in self._seen
        for each in (beginning, *places):
            self._seen[each] = None
            self._seen.move_to_end(each)
        while len(self._seen) > MEMORY:
            self._seen.popitem(last=False)
        return is_new and len(places) >= FEWEST and 2 * num_seen >= len(places)
