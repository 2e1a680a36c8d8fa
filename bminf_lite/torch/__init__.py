"""This engine's operations on PyTorch tensors (extra ``[torch]``): on torch's stream, in torch's memory.

- :mod:`bminf_lite.torch.ops`: softmax, norms, quantization and int8 products as differentiable operators.

Nothing else in the package imports torch.
"""

from . import ops

__all__ = ["ops"]
