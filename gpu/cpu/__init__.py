"""The decoder's step by the C++ library of csrc/.

In reading order:

builds        The builds of the library, and the processor flags that each needs.
library       The loaded library: its functions, structs and sampling.
weights       Tensors as the library's structs: fields, packing, memory.
communicator  The ranks of one machine over shared memory.
decoder       One step of the decoder by one call of the library.
encoder       Encoders: layers of decoders with other data.
"""
