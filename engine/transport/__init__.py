"""The way between the front end and the engine: commands in, events out, across a thread or a process.

Reading order:

channel         inbox and outbox of an engine in a thread
client          `EngineClient`, what the front end sees; the engine's run loop, and the thread around it
queries         questions that are open
wire            what crosses a process
link            the front end's two sockets to an engine
child           its hold on an engine process of this machine
remote          its hold on an engine process of another machine
process_client  `EngineClient` over one process, wherever it is
process_core    the side of a process of this machine
remote_core     the side of one on another machine
replica         one engine of several
data_parallel   `EngineClient` over several
"""
