"""Which blocks a request gets, and which of them it can share.

Content is identified by a chain of hashes: a block's hash covers its own tokens, all tokens before it, the tenant, and
the salt that a client may have sent. The hash is BLAKE2b keyed with a secret of this process, so nobody can compute a
collision from outside (vLLM's CVE-2025-25183) and no tenant can probe what another has sent (CVE-2025-46570).

Where the device computes a prompt's tokens otherwise than the same ones generated (`prompt_form_differs`), the hash
also covers which of a block's tokens were generated. So an answer is computed once more as a part of the next turn's
prompt, and a request's bits still do not depend on who was here before.
"""

from __future__ import annotations

import secrets
from array import array
from hashlib import blake2b

from engine.scheduler.block_pool import BlockPool
from engine.scheduler.request import Request

_DIGEST_SIZE = 16


class KVCacheManager:
    """Block tables of the scheduler's requests over one BlockPool. Owned by the Scheduler."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        prompt_form_differs: bool = False,
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self._prompt_form_differs = prompt_form_differs
        self._key = secrets.token_bytes(32)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests own, 0 .. 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, request: Request) -> list[int]:
        """The cached blocks that hold the longest prefix of the request's tokens. Takes no references.

        At least one token is left to compute: without it there would be no logits to sample from.
        """
        found: list[int] = []
        if self.enable_prefix_caching and request.reads_prefix_cache:
            for index in range((request.num_tokens - 1) // self.block_size):
                block_id = self.pool.find(self.block_hash(request, index))
                if block_id is None:
                    break
                found.append(block_id)
        return found

    def can_admit(self, request: Request, prefix: list[int]) -> bool:
        """Whether all tokens known for the request would fit now, so that its prefill is not cut short at once."""
        unowned_prefix = sum(1 for block_id in prefix if self.pool.is_free(block_id))
        return self.blocks_for(request.num_tokens) - len(prefix) + unowned_prefix <= self.pool.num_free

    def adopt_prefix(self, request: Request, prefix: list[int]) -> None:
        """Start the request's block table with the blocks that `find_prefix` gave."""
        self.pool.share(prefix)
        request.block_ids = list(prefix)
        request.num_committed_blocks = len(prefix)
        request.num_computed_tokens = len(prefix) * self.block_size

    def extend(self, request: Request, num_tokens: int) -> list[int] | None:
        """Make room for the request's first `num_tokens` tokens. Returns the blocks added, None if too few are free."""
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        block_ids = self.pool.allocate(missing)
        request.block_ids += block_ids
        return block_ids

    def publish_computed(self, request: Request) -> None:
        """Make the request's full, computed blocks findable.

        Called after the step that computed them has succeeded: a step that fails leaves nothing wrong to be found.
        """
        if not self.enable_prefix_caching:
            return
        full = request.num_computed_tokens // self.block_size
        for index in range(request.num_committed_blocks, full):
            self.pool.publish(request.block_ids[index], self.block_hash(request, index))
        request.num_committed_blocks = max(full, request.num_committed_blocks)

    def withdraw(self, request: Request) -> None:
        """Make nothing of the request findable any more: what it computed cannot be trusted."""
        self.pool.withdraw(request.block_ids)

    def reset(self) -> None:
        """Make nothing findable any more that is there now."""
        self.pool.withdraw(range(self.pool.num_blocks))

    def free(self, request: Request) -> None:
        """Give back everything the request owns. What was published can still be found until it is overwritten."""
        self.pool.release(request.block_ids)
        request.block_ids = []
        request.num_committed_blocks = 0
        request.num_computed_tokens = 0

    def block_hash(self, request: Request, index: int) -> bytes:
        """Hash of the request's full block `index`, computed when first asked for."""
        hashes = request.block_hashes
        while len(hashes) <= index:
            start = len(hashes) * self.block_size
            tokens = array("I", request.token_ids[start : start + self.block_size])
            parent = hashes[-1] if hashes else self._root(request)
            content = parent + tokens.tobytes()
            if self._prompt_form_differs and start + self.block_size > request.num_prompt_tokens:
                content += max(request.num_prompt_tokens - start, 0).to_bytes(4, "big")
            hashes.append(blake2b(content, key=self._key, digest_size=_DIGEST_SIZE).digest())
        return hashes[index]

    def _root(self, request: Request) -> bytes:
        # The length keeps apart what a tenant's name and a client's salt could spell together.
        tenant, salt = request.tenant.encode(), request.cache_salt.encode()
        owner = len(tenant).to_bytes(4, "big") + tenant + salt
        return blake2b(owner, key=self._key, digest_size=_DIGEST_SIZE, person=b"tenant").digest()
