"""The scheduler: it plans which requests run in the next step, for how many tokens, in which blocks.

It is pure bookkeeping on the engine's thread, without a clock, threads or a device.

In reading order:

request           The live state of one request: tokens, progress, status and block table.
steps             The plan under construction, and plans in flight.
block_pool        KV blocks: reference counts, the free list, and the index by hash.
checkpoints       Copies of the states of models that have them.
tiers             Prefixes outside the KV cache: their loading and storing.
kv_cache_manager  Allocation and sharing of blocks, and the events of the prefix cache.
waiting_queue     Requests that wait for a running slot, and fair shares of tenants.
request_table     All live requests, their transitions and their deadlines.
admission         The start of waiting requests, and preemption.
scheduler         `Scheduler.schedule` and `Scheduler.update`.
"""
