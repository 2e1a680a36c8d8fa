"""How a GPU's arrays are padded. The CUDA backend allocates with these numbers, and planning counts with them."""

from __future__ import annotations

from ..cuda.kernels.gemm.layouts import GROUP

PAD = GROUP
"""Rows of matrices, and vectors, are padded to a multiple of so many elements: whole groups of COL32's columns.
Weights of row-major int8 products are padded to half of it."""
HEAD_PAD = 16
"""Heads in the key-value cache are padded to a multiple of so many elements, with zeros, for the tensor cores."""
