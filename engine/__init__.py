"""The engine: it plans a step, submits it to an executor, picks tokens and updates its requests.

The engine imports neither torch nor Starlette nor any other package of Headrace, so the scheduler is tested without a
model, and a model without a server. An `Executor` runs the plans; the application chooses it.

In reading order:

errors       Errors that the engine raises to its callers, and their form between processes.
kv_events    Events of the prefix cache, and the hashes that name prompt prefixes.
child_main   The start of a bounded child process: limits, framing, and the watchdog that ends it with its parent.
messages     Requests, outputs and stats: the structs that threads and processes exchange.
config       The engine's configuration and the clock.
fairness     Fair sharing between tenants: a queue, threads and a cache.
child        Child processes under limits: start, deadline, framing and end.
plan         The plan of one step, its output, and the KV groups of a model.
snapshot     A snapshot of an engine for operators, as JSON.
detokenizer  Token ids to text as they arrive, and stop strings.
executor     The interface between the engine and the device that runs a plan.
commands     Commands, events and questions of the channel between front end and engine.
costs        What a step costs in seconds: the table and its measurement.
structured   Grammars that an output has to follow.
scheduler    Which requests run in the next step, for how many tokens, in which blocks.
routing      Which of several engines gets a request.
core         The engine's loop.
transport    The connection of front end and engine: in a thread, a process, or several processes.
frontend     The two front ends, `AsyncLLM` and `LLM`, which also turn output token ids into text.
simulation   Engines without a device, on a clock that may be virtual.
"""
