"""The models, by torch. Make a `CausalLM` for a configuration, load its weights and call `forward`.

In reading order:

decoder       the decoder-only transformer, wired from what a family's record says
attention     how tokens see each other: a layer for each kind there is
feed_forward  what a layer does with each token by itself: a layer for each kind there is
experts       the same where experts share the tokens
served        a model as the worker and the host's runner want it, in numpy
"""

from gpu.models.decoder import CausalLM

__all__ = ["CausalLM"]
