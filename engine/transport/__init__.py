"""The way between the front end and the engine: commands in, events out.

In reading order:

channel         The inbox and outbox of an engine in a thread.
queries         Open questions to an engine, each until its answer or the engine's death.
client          `EngineClient`, the front end's interface, and the engine's thread.
wire            Messages between processes as msgpack, and the addresses of their sockets.
child           An engine process of this machine: its sockets, heartbeat and lifeline.
process_client  `EngineClient` over an engine process of this machine.
process_core    The engine's side of a process boundary.
replica         One engine of several, with its restarts.
data_parallel   `EngineClient` over several engines.
"""
