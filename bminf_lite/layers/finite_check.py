"""Finding the layer in which a model's numbers stop being finite.

A NaN or an infinity in an activation makes all later activations NaN, and the logits do not show its origin: a damaged
weight, or an activation that is too large for fp16. A model built with these checks tests the input of each product. It
computes the same, but the host waits for each layer, and steps are not captured in graphs.
"""

from __future__ import annotations

import numpy as np

from ..backend.base import Backend
from ..errors import BminfError
from .loading import Weights
from .recording import LinearCall, LinearHooks


def with_finite_checks(weights: Weights, ops: Backend) -> tuple[Weights, Backend]:
    """``weights`` and ``ops`` for a model whose steps raise ``BminfError`` where an activation is not finite.

    The message names the tensors of the first product whose input is not finite.
    """

    def check(call: LinearCall) -> None:
        values = ops.host(call.x)
        wrong = np.argwhere(~np.isfinite(values))
        if len(wrong):
            token, channel = wrong[0]
            raise BminfError(
                f"{', '.join(call.tensors)}: the input holds {values[token, channel]} in channel {channel} of token "
                f"{token} of this step's {len(values):,}; {len(wrong):,} of its numbers are not finite"
            )

    hooks = LinearHooks(ops, weights, check)
    return hooks.weights, hooks.ops
