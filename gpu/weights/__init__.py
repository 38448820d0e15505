"""From an opened checkpoint to tensors on a device.

In reading order:

reading       the weights of a model, one at a time: from GGUF, from safetensors, or random
dummy         random weights from a configuration alone
quantization  the same rounded to 8 or 4 bits
tensors       the same as torch tensors, on a device
staging       their way to the device, through a little pinned memory
"""

from gpu.weights.reading import Weight, floats, read_weights

__all__ = ["Weight", "floats", "read_weights"]
