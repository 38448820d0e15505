"""What a transformer is built of: linear, norm, rotary, activation, embedding; in plain torch, and on CUDA by kernels.

Imported by gpu.models, which only wires them. Each layer owns its parameters and knows the names under which a
Hugging Face checkpoint keeps them (`gpu.layers.weights`), so that merging or packing weights never shows in a model
file. Layers are for inference only: parameters are created empty, need no gradient, and the caller runs them under
`torch.inference_mode()`. Where two operations are fused by the kernels of a device, they are one call here too.
"""
