"""The simulator: the server's scheduler and admission on a virtual clock.

In reading order:

loads    Simulated clients and their arrival times.
machine  The simulated machine: step costs, KV cache and settings.
driver   Simulations of a whole workload or of a load with changing parameters.
several  Simulations of several models that share memory.
command  `headrace simulate`: flags, output, sweeps and the search for the highest rate.
"""
