"""The way between the front end and the engine: commands in, events out, across a thread or a process.

Reading order:

channel         inbox and outbox of an engine in a thread
client          `EngineClient`, what the front end sees; the engine's run loop, and the thread around it
queries         questions that are open
wire            what crosses a process
link            the front end's two sockets to an engine
child           its hold on an engine process of this machine
process_client  `EngineClient` over one process
process_core    the child's side of it
remote          the front end's hold on an engine process of another machine, and its client
remote_core     that engine's side of it
replica         one engine of several
data_parallel   `EngineClient` over several
"""
