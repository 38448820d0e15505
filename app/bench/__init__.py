"""`headrace bench`: how fast a server, or the model without one, really is.

In reading order:

serve       `headrace bench serve`: a workload against any server of OpenAI's API
workloads   the requests to come: lengths, shared beginnings, conversations, and when each is sent
driver      sends a workload and records what came back, and how well it did so itself
connection  HTTP/1.1 connections for a client that measures: next to nothing happens when bytes arrive
answers     what the bytes of an answer say, read when that delays nobody's clock
report      from what every request saw to the one result, with the keys of vLLM's benchmarks
timelines   what a server of this kind says of the same requests, and where client and server disagree
display     what a terminal shows: a bar while it runs, a table at its end
html        the page of a run, with plots
predict     what the simulator says of the same workload, and how far from the truth each figure is
latency     `headrace bench latency`: how long one batch takes, again and again, in this process
throughput  `headrace bench throughput`: all prompts at once, in this process
startup     `headrace bench startup`: from exec of a server to its first answer, to ready, to the first token
offline     what these three share
"""
