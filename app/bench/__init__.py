"""`headrace bench`: measure a server, or the model in this process.

In reading order:

driver   Sends a workload to a server and records every answer.
serve    `headrace bench serve`: a workload against any OpenAI-compatible server.
offline  `headrace bench latency` and `throughput`: the model in this process; `startup`: starts of a server.
"""
