"""Gated products that fp16 can hold, on any text.

A GPU stores ``f(gate) * up`` in fp16, which ends at 65,504; an infinity there makes the token's results NaN. A bound
needs no text. What gate and up read is a norm's result ``x = n * d`` with ``|n|^2 <= features`` and the norm's weight
``d``, so ``|w . x| <= sqrt(features) * |w * d|`` for each row ``w``, and ``|f(y)| <= |y|``. Where the bound exceeds
:data:`LARGEST`, the rows of up are multiplied by a power of two and down by its inverse. The model stays the same, and
of an int8 matrix only scales change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ..backend.quantization import rows_per_block
from ..files import thread_count
from ..models.spec import GatedProduct
from .derived_tensor import DerivedTensor, Rows, info_as
from .opened_model import OpenedModel
from .reader import Checkpoint

LARGEST = 2.0**15
"""The largest bound that needs no factor: half of fp16's range, because errors of quantization are added."""

MAX_SHIFT = 10
"""Factors are at most ``2**MAX_SHIFT``: larger ones would make small values subnormal, and bounds are not tight."""


def shift_for(features: int, gate: np.ndarray, up: np.ndarray) -> int:
    """The power of two, 0 or more, for rows of gate and up that read ``features`` elements.

    ``gate`` and ``up`` are ``|w * d|`` of each row, fp32 ``[n]``.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        product = gate * up
    peak = max(math.sqrt(features) * float(up.max(initial=0)), features * float(product.max(initial=0)))
    if not LARGEST < peak < math.inf:
        return 0
    return min(math.ceil(math.log2(peak / LARGEST)), MAX_SHIFT)


def product_shift(checkpoint: Checkpoint, product: GatedProduct) -> int:
    """The power of two for a product of a float checkpoint; reads the two matrices."""
    norm_weight = _norm_weight(checkpoint, product)
    norms = {name: row_norms(checkpoint.stored(name), norm_weight) for name in {product.gate, product.up}}
    return shift_for(len(norm_weight), *gate_and_up(product, norms[product.gate], norms[product.up]))


def _norm_weight(checkpoint: Checkpoint, product: GatedProduct) -> np.ndarray:
    """The weight of the norm before ``product``, with its offset, fp32 ``[features]``; 1 if the norm has none."""
    if product.norm is None:
        return np.ones(checkpoint.tensors[product.up].shape[1], np.float32)
    weight: np.ndarray = checkpoint.vector(product.norm).astype(np.float32) + np.float32(product.offset)
    return weight


def gate_and_up(product: GatedProduct, gate: np.ndarray, up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values per row of gate and of up, from those of the matrices, which may be one with up in its second half."""
    if product.gate != product.up:
        return gate, up
    first, second = np.split(gate, 2)
    return first, second


def up_factors(product: GatedProduct, rows: int, shift: int) -> np.ndarray:
    """The factors of the rows of the matrix ``product.up``, fp32 ``[rows]``."""
    factors = np.full(rows, 2.0**-shift, np.float32)
    if product.gate == product.up:
        factors[: rows // 2] = 1
    return factors


def row_norms(matrix: np.ndarray, norm_weight: np.ndarray) -> np.ndarray:
    """The norm of each row of ``matrix * norm_weight``: float ``[out, in]``, fp32 ``[in]`` -> fp32 ``[out]``."""
    with np.errstate(over="ignore"):
        squares = norm_weight * norm_weight
    step = rows_per_block(len(norm_weight))

    def of_block(first: int) -> np.ndarray:
        block = np.array(matrix[first : first + step]).astype(np.float32, copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            found: np.ndarray = np.square(block, out=block) @ squares
        return found

    with ThreadPoolExecutor(thread_count()) as pool:
        parts = list(pool.map(of_block, range(0, matrix.shape[0], step)))
    norms: np.ndarray = np.sqrt(np.concatenate(parts))
    return norms


def range_factors(model: OpenedModel) -> dict[str, np.ndarray]:
    """The factors that the gated products of an open float model need: of rows, fp32 ``[out]``, by matrix.

    Reads all gates and ups.
    """
    checkpoint, found = model.checkpoint, dict[str, np.ndarray]()
    for product in model.spec.gated:
        shift = product_shift(checkpoint, product)
        if shift:
            found[product.up] = up_factors(product, checkpoint.tensors[product.up].shape[0], shift)
            found[product.down] = np.full(checkpoint.tensors[product.down].shape[0], 2.0**shift, np.float32)
    return found


def within_fp16(model: OpenedModel, factors: Mapping[str, np.ndarray] | None = None) -> OpenedModel:
    """``model``, an open float checkpoint, with its :func:`range_factors`; it is ``model`` if none are needed.

    Both models share the files.
    """
    factors = range_factors(model) if factors is None else factors
    if not factors:
        return model
    checkpoint = model.checkpoint
    changes = {name: _multiplied(checkpoint, name, rows) for name, rows in factors.items()}
    return OpenedModel(checkpoint.with_derived(changes), model.description, model.eos_ids)


def _multiplied(checkpoint: Checkpoint, name: str, factors: np.ndarray) -> DerivedTensor:
    """A matrix in fp32, its rows multiplied by ``factors``."""
    return DerivedTensor(info_as(checkpoint.tensors[name], "F32"), _rows(checkpoint.stored(name), factors))


def _rows(values: np.ndarray, factors: np.ndarray) -> Rows:
    def rows(first: int, end: int) -> np.ndarray:
        scaled: np.ndarray = np.asarray(values[first:end]).astype(np.float32) * factors[first:end, None]
        return scaled

    return rows


ScaleRows = Callable[[str, np.ndarray], None]
"""Multiplies the scales of an int8 matrix, by its name, by fp32 ``[out]``."""


def limit_gated_products(
    checkpoint: Checkpoint, products: tuple[GatedProduct, ...], norms: dict[str, np.ndarray], scale_rows: ScaleRows
) -> None:
    """Call ``scale_rows`` for the matrices of products that need it.

    ``norms`` has the norm of each row, fp32 ``[out]``, of matrices that became int8, without the norm's weight. A bound
    from these and the largest weight mostly shows that none is needed. Otherwise the matrices are read again.
    """
    for product in products:
        if not {product.gate, product.up, product.down} <= norms.keys():
            continue
        norm_weight = np.abs(_norm_weight(checkpoint, product))
        with np.errstate(over="ignore", invalid="ignore"):
            rough = [part * norm_weight.max() for part in gate_and_up(product, norms[product.gate], norms[product.up])]
        if shift_for(len(norm_weight), *rough) == 0:
            continue
        shift = product_shift(checkpoint, product)
        if shift:
            scale_rows(product.up, up_factors(product, len(norms[product.up]), shift))
            scale_rows(product.down, np.full(len(norms[product.down]), 2.0**shift, np.float32))
