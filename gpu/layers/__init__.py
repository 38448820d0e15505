"""What a transformer is built of: linear, norm, rotary, activation, embedding; in plain torch, and on CUDA by kernels.

Imported by gpu.models, which only wires them. Each layer is made from the parts of a model that it computes with
(`gpu.checkpoint.architecture`), owns their parameters and takes them in under their names (`gpu.layers.weights`), so
that merging or packing weights never shows in a model file. Layers are for inference only: parameters are created
empty, need no gradient, and the caller runs them under `torch.inference_mode()`. Where two operations are fused by the
kernels of a device, they are one call here too.

In reading order:

linear      linear layers, merged where one input feeds several of them
norm        root-mean-square normalization
rotary      rotary position embedding, with the frequency scalings of long contexts
activation  the gated activation of the feed-forward network
embedding   the two ends of a model: token ids to vectors, vectors to logits
weights     the way of a checkpoint tensor into a layer
packed      matrices laid out once for the processor
"""
