"""A checkpoint's tensors on a device.

In reading order:

quantization  The setting `quantization`: weights rounded while they are read.
reading       Weights in numpy, one at a time: from GGUF, safetensors, or random.
tensors       Weights as torch tensors on a device, through pinned staging buffers.
"""
