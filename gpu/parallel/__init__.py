"""A model on several ranks.

In reading order:

messages        Messages between a driver and its ranks.
links           Rings in shared memory, and links between pipeline stages.
rank_main       The main module of a rank's process: its part of the model, and its handling of messages.
multiproc       Ranks as processes of this machine.
ray_ranks       Ranks as Ray actors on several machines.
"""
