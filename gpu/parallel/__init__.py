"""A model on several ranks.

In reading order:

messages        Messages between a driver and its ranks.
links           Rings in shared memory, and links between pipeline stages.
rank            One rank: its part of the model, and its handling of messages.
rank_main       The main module of a rank's process.
multiproc       Ranks as processes of this machine.
secure_sockets  ZMQ sockets between machines, authenticated by CURVE keys.
ray_ranks       Ranks as Ray actors on several machines.
"""
