"""The way between the front end and the engine: commands in, events out, across a thread or a process.

Reading order:

channel         inbox and outbox of an engine in a thread
client          `EngineClient`, what the front end sees; the engine's run loop, and the thread around it
queries         questions that are open
wire            what crosses a process
child           the front end's hold on an engine process
process_client  `EngineClient` over one process
process_core    the child's side of it
router          which of several engines gets a request
data_parallel   `EngineClient` over several
"""
