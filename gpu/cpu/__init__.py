"""The CPU path: the decoder's step in one call of a small C++ library, built when Headrace is installed.

builds        what processors there is a build of the library for
library       finds the library and describes its structs
matrices      weights as the library computes with them: the bits of a GGUF file, or bfloat16
weights       the way of a checkpoint's tensors into the library's structs
memory        where weights and KV lie: large pages
sampling      the draw of `gpu.sampling`, by the library
decoder       a model on top of it, with the interface that the model runner needs
communicator  what the ranks of one machine tell each other, through shared memory

It is for x86 processors with AVX2 and for 64-bit ARM. Elsewhere, and where there is no compiler, models run on torch
(`gpu.models`), which stays the reference.
"""
