"""Where layers get their weights from."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..backend.quantization import HostWeight


class Weights(Protocol):
    """Tensors by checkpoint name: a checkpoint, or random ones of the right shapes."""

    def weight(self, name: str) -> HostWeight:
        """The matrix ``name`` ``[out, in]``, float or int8."""
        ...

    def vector(self, name: str) -> np.ndarray:
        """The float tensor ``name``: a gain, a bias or an embedding table."""
        ...
