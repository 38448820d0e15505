"""Who runs in the next step, for how many tokens, in which blocks. Pure bookkeeping: no clock, no thread, no device.

Used by `engine.core` on the engine's thread. Reading order:

request           live state of one request: tokens, how many are computed, status, block table
plan              what a step computes, and what it gave
plan_draft        a plan while it is being made
in_flight         what has been planned and not yet accounted for
kv_groups         what the layers of a model keep, and what a block table is
block_pool        KV blocks: reference counts, the free list, the index by hash
tiers             prefixes kept beside the KV cache: loaded from there, stored there
kv_event_log      what has come into the prefix cache and gone from it, for a router
kv_cache_manager  which blocks a request has, needs and shares
fairness          what each tenant was served, and who is owed
waiting_queue     requests that wait for a running slot
changing_prefix   prompts that the prefix cache misses because their beginning changes
request_table     all living requests, and what changes when one starts, gives way or leaves
preemption        who gives way when blocks or running slots run out
admission         which waiting requests start
deadlines         who is out of time
step_cost         what a step costs, by what it computes
cost_tracker      keeps that true, by the steps that are made
expected_work     how much work a request is, before it is known how long its answer gets
step_budget       how much prefill a step can afford beside running streams
scheduler         all of it together: `schedule` and `update`
"""
