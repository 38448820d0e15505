"""The simulator: the server's scheduler and admission on a virtual clock.

In reading order:

loads    Simulated clients and their arrival times.
machine  The simulated machine: step costs, KV cache and settings.
driver   The simulation loop, for a whole run or for a person who changes parameters.
command  `headrace simulate`: flags, output, sweeps and the search for the highest rate.
"""
