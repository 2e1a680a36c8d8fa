"""This engine's operations on PyTorch tensors, and PyTorch models in int8 (extra ``[torch]``); see docs/torch.md.

- :mod:`bminf_lite.torch.ops`: softmax, norms, quantization and int8 products as differentiable operators.
- :func:`wrap`, :func:`from_migrated`, :func:`save_pretrained`, :class:`Int8Linear`: models with int8 layers.
- :func:`measure`, :func:`compare`, :func:`sweep`: time, memory and agreement.

Nothing else in the package imports torch.
"""

from . import ops
from .folders import from_migrated, save_pretrained
from .linear import Int8Linear
from .measuring import compare, measure, sweep
from .wrapping import wrap

__all__ = ["Int8Linear", "compare", "from_migrated", "measure", "ops", "save_pretrained", "sweep", "wrap"]
