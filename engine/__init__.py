"""The engine: plan, run, pick, bookkeep.

This room knows requests, token budgets and KV blocks. It imports neither torch nor starlette and none of the
other rooms, so a scheduler is tested without a model and a model without a server. What runs a plan is an
`Executor` (`engine.executor`), which the application chooses and hands in.

Reading order: `messages` and `commands` (what crosses the thread), `plan`, `request`, `block_pool`, `kv_cache_manager`,
`fairness`, `waiting_queue`, `deadlines`, `scheduler`, `step_budget`, `quarantine`, `core`, `channel`, `client`,
`detokenizer`, `output_processor`, `async_llm`, `llm`.
"""
