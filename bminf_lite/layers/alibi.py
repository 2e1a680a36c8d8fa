"""ALiBi's slopes (https://arxiv.org/abs/2108.12409): a bias that grows linearly with the distance, one slope a head."""

from __future__ import annotations

import math

import numpy as np


def alibi_slopes(heads: int) -> np.ndarray:
    """The slope of each head, fp32 ``[heads]``.

    For a power of two they are ``2**(-8 / heads)`` and its powers. Otherwise they are those of the next smaller power
    of two, and then every second one of the next larger.
    """
    whole = 2 ** int(math.log2(heads))
    powers = [2.0 ** (-8 * (i + 1) / whole) for i in range(whole)]
    powers += [2.0 ** (-4 * (2 * i + 1) / whole) for i in range(heads - whole)]
    return np.array(powers, np.float32)
