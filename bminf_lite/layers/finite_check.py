"""Finding the layer in which a model's numbers stop being numbers.

A NaN or an infinity in an activation makes everything after it NaN, the logits in the end, and there nobody can tell
where it came from: a damaged weight, or an activation that fp16 does not hold. So a model may be built to look at what
enters each product. It computes what it always does, but the host waits for each layer, and nothing is recorded.
"""

from __future__ import annotations

import numpy as np

from ..backend.base import Backend
from ..errors import BminfError
from .loading import Weights
from .recording import LinearCall, LinearHooks


def with_finite_checks(weights: Weights, ops: Backend) -> tuple[Weights, Backend]:
    """``weights`` and ``ops`` for a model whose steps raise ``BminfError`` where an activation is not finite.

    The message names the tensors of the first product that would have read it.
    """

    def check(call: LinearCall) -> None:
        values = ops.host(call.x)
        wrong = np.argwhere(~np.isfinite(values))
        if len(wrong):
            token, channel = wrong[0]
            raise BminfError(
                f"{', '.join(call.tensors)}: the input holds {values[token, channel]} in channel {channel} of token "
                f"{token} of this step, which has {len(values):,}; {len(wrong):,} of its numbers are not finite"
            )

    hooks = LinearHooks(ops, weights, check)
    return hooks.weights, hooks.ops
