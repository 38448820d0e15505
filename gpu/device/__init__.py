"""The runner of a device that computes while the host goes on: what a request is lives there, in stable rows.

`gpu.model_runner` keeps the batch on the host, gathers a step's inputs and waits for its tokens; that suits a CPU. Here
the device keeps the batch, makes a step's inputs, samples, and feeds the token back to its own row. The host sends the
diffs of a plan, in one copy, and starts the step: it neither needs the tokens of the step before nor waits for them.
A step in which everybody decodes is one CUDA graph, and so are the layers of any that is not too large. All of it runs
on a CPU too, without graphs and pinned memory, which is how it is tested against the other runner.

Tensor ranks all run the same steps, with the collectives of layers and logits within their graphs; on CUDA that has
never run, for want of a machine with two cards. A stage of a pipeline has the other runner.

In reading order:

runner     all of it together: one plan in, one step started
tables     the row table on the device
rows       what of the row table goes to them
upload     the way of a step's diffs to the device: one copy, one scatter
inputs     a step's inputs, made on the device out of its rows
sampling   from hidden states to tokens, on the device
graphs     steps as CUDA graphs
download   the way of a step's tokens back to the host
choices    which kernels a card runs: what only the card can tell
rehearsal  what a runner does before it serves: what takes the most memory, and every kernel
memory     how much of a CUDA device the KV cache may have
"""

from gpu.device.graphs import CudaGraphs
from gpu.device.runner import DeviceRunner, make_device_runner

__all__ = ["CudaGraphs", "DeviceRunner", "make_device_runner"]
