"""`headrace simulate`, and what the page's simulator runs: the server's scheduler and admission on a virtual clock.

Reading order:

door       the server's admission, asked on the virtual clock
loads      who sends what, and when
machine    what is simulated: step costs, KV cache, settings
run        one simulation of a workload from beginning to end
traces     recorded loads: files of what was asked when, as workloads
search     sweeps, and the highest rate that keeps its promises
recording  a simulation as a file that the dashboard plays
command    `headrace simulate`: its flags and what it prints
session    a simulation whose parameters change while it runs, for a person who watches
"""
