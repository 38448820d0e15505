"""Detection of prompts that miss the prefix cache because only their beginning changes.

Some clients put a header, a date or a counter into the first lines of their system prompt, so that nothing behind it is
ever found in the cache. The detection samples short runs of tokens ("places"). Their own content selects them, so the
same text is sampled at any position. Owned by the RequestTable.
"""

from __future__ import annotations

from collections import OrderedDict

from engine.scheduler.request import Request

BEGINNING = 256  # tokens; a cached prefix shorter than this ended too early
LOOKED_AT = 2048  # tokens behind the beginning
SAMPLED = 32  # a place begins at one in so many tokens
LENGTH = 16  # tokens of a place
FEWEST = 8  # places that a prompt must have; half of them must have been seen before
MEMORY = 2**16  # places that are remembered


class ChangingPrefixes:
    """Hashes of the beginnings and places of the latest prompts."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()

    def is_one(self, request: Request) -> bool:
        """Return True if the starting request repeats an earlier prompt except for its beginning, so that the prefix
        cache missed it. Costs half a millisecond for a long prompt, and nothing if the beginning was cached."""
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
        # A prompt with a known beginning was in the cache once and was evicted since: that is no changed beginning.
        is_new = beginning not in self._seen
        for each in (beginning, *places):
            self._seen[each] = None
            self._seen.move_to_end(each)
        while len(self._seen) > MEMORY:
            self._seen.popitem(last=False)
        return is_new and len(places) >= FEWEST and 2 * num_seen >= len(places)
