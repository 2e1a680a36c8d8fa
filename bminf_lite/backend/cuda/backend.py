"""One NVIDIA GPU: the operations of :class:`bminf_lite.backend.base.Backend` by kernels whose results must equal it.

:mod:`.operations` has them by group, as :mod:`bminf_lite.backend.operations` has their definitions, and :mod:`.device`
what a GPU does beside them.
"""

from __future__ import annotations

from ..base import Backend
from .operations.attention import CudaAttentionOperations
from .operations.experts import CudaExpertOperations
from .operations.products import CudaProductOperations
from .operations.recurrences import CudaRecurrenceOperations
from .operations.rows import CudaRowOperations
from .operations.sampling import CudaSamplingOperations
from .operations.weights import CudaWeightOperations

DECODE_SIZES = (
    *(1, 2, 4, 8, 16, 32, 48, 56, 64, 96, 112, 128),
    *(192, 224, 256),
    *range(320, 513, 64),
    *range(640, 1025, 128),
)
"""Numbers of sequences of captured decode steps, behind most of which products take another tile of rows."""
MIXED_SIZES = tuple(
    (decodes, tokens)
    for decodes, sizes in {
        0: (16, 64, 128, 256, 384, 512),
        8: (16, 64, 128, 256, 512),
        32: (64, 128, 256, 512),
        64: (64, 256, 512),
        128: (128, 256, 512),
        256: (256, 512),
        512: (256, 512),
    }.items()
    for tokens in sizes
)
"""Decoding sequences and prompt tokens of captured steps. The host launches larger steps faster than they run."""
SOURCE_SIZES = (16, 32, 64, 128, 256, 384, 512)
"""Tokens of captured sources. Products of more than 64 rows have tiles of 128, so sizes between would save little."""

TEXT_SIZES = (16, 32, 64, *range(128, 1025, 128), 1536, 2048, 3072, 4096)
"""The same of texts that become vectors: of small models, the host bounds batches of more tokens.

The device bounds a large model's from some hundred tokens on, where finer sizes pay.
"""


class CudaBackend(
    CudaWeightOperations,
    CudaExpertOperations,
    CudaProductOperations,
    CudaRowOperations,
    CudaAttentionOperations,
    CudaRecurrenceOperations,
    CudaSamplingOperations,
    Backend,
):
    """The operations on GPU number ``device`` within ``memory_limit``: bytes, ``"6GiB"``, or None for what is free."""

    decode_sizes = DECODE_SIZES
    mixed_sizes = MIXED_SIZES
    source_sizes = SOURCE_SIZES
    text_sizes = TEXT_SIZES
    max_text_tokens = 1 << 16
    max_steps_in_flight = 1
    has_one_order = True
    computes_in_threads = False
