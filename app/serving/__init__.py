"""The running server: from settings to an engine, from a prompt to an answer, from SIGTERM to the end.

In reading order:

loading         Settings to an engine: the only module that imports both the device side and the engine side.
prompts         Prompts to token ids, on the event loop or on a thread.
server          The state of a running server that its models share: phase, requests, tenants, drain.
model_policy    The policy of several models: what is loaded and unloaded when.
model_server    One model: its settings, admission, metrics and engine, and how it is loaded.
model_pool      All models of a server, which it loads for their requests.
endpoint        Handlers as ASGI applications: a request scope, accounting, background requests.
generation      A parsed body to a generated answer, for every dialect.
step_cost_file  The file of step costs in the cache folder.
files           Clients' files and batches on disk, in bounded space for each tenant.
batches         The rows of batches, answered one by one when nothing else runs.
response_store  Kept responses and their event logs, in bounded memory for each tenant.
process         The process of `headrace serve`: workers, Hypercorn, SIGHUP, shutdown.
engine_main     The main module of an engine's process.
rank_main       The main module of a rank's process.
"""
