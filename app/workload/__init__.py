"""Workloads and results, shared by `headrace bench` and `headrace simulate`.

In reading order:

datasets   Requests of a workload: lengths, shared prefixes, conversations, arrival times, recorded traces.
report     Measurements of all requests as one result, with the keys of vLLM's benchmarks.
rendering  A result in a terminal and as an HTML page with plots.
"""
