"""The way between the front end and the engine: commands in, events out.

In reading order:

channel         The inbox and outbox of an engine in a thread.
client          `EngineClient`, the front end's interface, the engine's thread, and open questions.
wire            Messages between processes as msgpack, and the addresses of their sockets.
process_client  `EngineClient` over an engine process of this machine.
process_core    The engine's side of a process boundary.
replica         One engine of several, with its restarts.
data_parallel   `EngineClient` over several engines.
"""
