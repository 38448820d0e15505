"""A model on several ranks, each a process with a part of every layer, or with some of the layers.

In reading order:

layout              the sizes of the groups, and which rank this is
cuts                which part of every tensor a rank has
communicator        collectives among the tensor ranks of a stage
torch_communicator  the same by torch.distributed
shared_tensors      the same over the shared memory of one machine
ring                messages from one process to several, through shared memory
stage_link          activations, from the ranks of a stage to those of the next
messages            what a driver tells its ranks, and they it
rank                one rank: its part of the model, and what messages do to it
rank_process        the main of a rank's process
rank_child          the driver's handle of such a process: starts it, and tells why it ended
multiproc           the executor: ranks on this machine
ray_rank            one rank in an actor of Ray's
ray_executor        the same for ranks on the machines of a Ray cluster
"""

from gpu.parallel.cuts import check_cuts, cut, sharded
from gpu.parallel.layout import Layout

__all__ = ["Layout", "check_cuts", "cut", "sharded"]
