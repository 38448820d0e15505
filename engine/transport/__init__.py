"""The connection between front end and engine: commands go in, events come out.

In reading order:

channel         The inbox and outbox of an engine in a thread.
client          `EngineClient`, the front end's interface; an engine in a thread; open questions.
wire            Messages between processes as msgpack, and the addresses of their sockets.
process_client  `EngineClient` for an engine process on this machine.
process_core    The engine's side of a process boundary.
data_parallel   `EngineClient` for several engines, and their restarts.
"""
