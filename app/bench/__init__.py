"""`headrace bench`: measures a server, or the model in this process.

In reading order:

driver      Sends a workload to a server and records every answer.
serve       `headrace bench serve`: a workload against any OpenAI-compatible server.
offline     The model and result file that the benchmarks without a server share.
latency     `headrace bench latency`: the time of one batch, repeated.
throughput  `headrace bench throughput`: all prompts at once.
startup     `headrace bench startup`: from exec to the first answer, to ready, to the first token.
"""
