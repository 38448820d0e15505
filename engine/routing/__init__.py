"""Which of several engines gets a request: one policy, for engines of one server, for fleets and for the simulator.

A pure library on its caller's thread, without clock, chance or I/O. Reading order:

prefix_index  which engines can find which beginnings of prompts, by what they publish
router        what each engine has to do, and which of them a request is best given to
tenants       what all engines together have served whom, and how many requests of one tenant run at once
fleet_size    how many engines there should be, by what waits
stats         what is told of all that
"""
