"""From an opened checkpoint to tensors on a device.

In reading order:

reading  the weights of a model, one at a time: from GGUF, from safetensors, or random
dummy    random weights from a configuration alone
staging  their way to the device, through a little pinned memory
"""

from gpu.weights.reading import Weight, dequantized, packed_weights_of, weights_of

__all__ = ["Weight", "dequantized", "packed_weights_of", "weights_of"]
