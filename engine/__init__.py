"""The engine: plan, run, pick, bookkeep.

This room knows requests, token budgets and KV blocks. It imports neither torch nor starlette and none of the
other rooms, so a scheduler is tested without a model and a model without a server. What runs a plan is an
`Executor` (`engine.core.executor`), which the application chooses and hands in.

What crosses between the parts, and then the wings, each of which lists its own modules. Reading order:

messages          requests and outputs, and the checks of what a client asked
stats             what an engine says of itself beside its outputs
errors            what goes wrong on purpose
errors_in_words   the same on the way to another process
curve             sockets between machines, which let in who has the keys
end_when_stopped  a process beside another that ends it where it is stopped
clock             what time it is, handed to whoever needs to know
snapshot          what an engine answers when it is asked how it is
kv_events         what an engine tells of its prefix cache, and how a prompt's beginning is named there
commands          the alphabet of the channel: what goes down, what comes up, what can be asked
scheduler         who runs in the next step, for how many tokens, in which blocks
core              the loop: schedule, submit, update
structured        grammars that an output has to follow
routing           which of several engines gets a request
transport         the way between front end and engine, in a thread, a process, or several
frontend          the two front doors, and the way back from token ids to text
simulation        an engine without a device, on a clock that may be virtual
"""
