"""A model on several ranks, each a process with a part of every layer, or with some of the layers.

In reading order:

layout  the sizes of the groups, and which rank this is
cuts    which part of every tensor a rank has
"""

from gpu.parallel.cuts import cut, sharded
from gpu.parallel.layout import Layout

__all__ = ["Layout", "cut", "sharded"]
