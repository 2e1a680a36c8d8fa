"""A backend: a device with the operations of models, each defined once, over NumPy.

Layers call operations and pass arrays on. :mod:`.operations` has them by group, and :mod:`.device` has what a device
does beside them: arrays, copies, captured work, caches and memory. A faster backend overrides operations with kernels.
It must return the same integers bit for bit, and the same floats within the tolerances that
``tests/backend/tolerances.py`` gives with their reasons.

Numbers (see docs/numerics.md): the residual stream, norms, softmax, rotary angles and logits are fp32. Other
activations are rounded to ``activation_dtype`` between operations: fp32 here, fp16 on a GPU. Constructed with
``activation_dtype=np.float16`` this class rounds where a GPU rounds, so that the two can be compared tightly.
"""

from __future__ import annotations

from .operations.attention import AttentionOperations
from .operations.experts import ExpertOperations
from .operations.products import ProductOperations
from .operations.recurrences import RecurrenceOperations
from .operations.rows import RowOperations
from .operations.sampling import SamplingOperations
from .operations.weights import WeightOperations


class Backend(
    WeightOperations,
    ExpertOperations,
    ProductOperations,
    RowOperations,
    AttentionOperations,
    RecurrenceOperations,
    SamplingOperations,
):
    """The operations over NumPy, on the host's memory."""

    computes_in_threads = True
    """Whether several threads may call operations at once, and gain by it."""
