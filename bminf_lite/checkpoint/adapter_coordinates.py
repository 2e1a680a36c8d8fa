"""Adapters of an original model, changed for the folder that was migrated from it.

Migration may change a matrix ``W`` so that the model stays the same: multiply rows and columns by powers of two
(``folded`` in the manifest), and rotate the residual stream and the value heads (``rotated_offline``, see
:mod:`.offline_rotation`). Its inputs and outputs are then other numbers. An adapter ``B A`` is changed as ``W`` was:
what happened to the columns of ``W`` happens to those of ``A``, and what happened to its rows to those of ``B``.

Rotations of a product's input at run time change nothing: adapters read the input before it is rotated.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from ..backend.adapter_slots import Part, SavedMatrix
from ..backend.side_products import Adapter
from ..errors import CheckpointError
from ..models.spec import Parameter
from .manifest import DAMAGED_MANIFEST, MANIFEST_FILE
from .offline_rotation import ROTATED_STREAM, Change, changes_of
from .opened_model import OpenedModel
from .weight_rewrite import unpacked_factors, unpacked_vector

Fit = Callable[[str, Part], Part]
_DAMAGE = ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError, zlib.error


def fitted_to_folder(model: OpenedModel) -> Fit:
    """What changes an adapter of a matrix, by its name, from the original's coordinates to those of an open model.

    Raises :class:`CheckpointError` for a folder whose manifest lacks what is needed.
    """
    manifest, spec = model.checkpoint.manifest, model.spec
    folded: Mapping[str, Mapping[str, str]] = manifest.get("folded") or {}
    rotated = manifest.get("rotated_offline") or ()
    changes = changes_of(spec) if rotated else {}
    norms: Mapping[str, str] = manifest.get("rotated_norms") or {}
    if any(part.startswith(ROTATED_STREAM) for part in rotated) and not norms:
        raise CheckpointError(
            f"{model.path / MANIFEST_FILE}: keeps no weights of the norms that were folded into the rotated matrices, "
            "because it was written by an earlier version; migrate the original again to use adapters"
        )

    def fit(name: str, part: Part) -> Part:
        is_saved = isinstance(part, SavedMatrix)  # whose rows are read as those of ``a`` are
        adapter = Adapter(part.values, np.eye(1, dtype=np.float32)) if isinstance(part, SavedMatrix) else part
        factors = folded.get(name, {})
        try:
            if name in changes:
                assert not (is_saved and changes[name].columns)
                adapter = _turned(adapter, changes[name], norms)
            assert not (is_saved and "rows" in factors)
            fitted = _scaled(adapter, factors, spec.parameters[name])
            return SavedMatrix(fitted.a) if is_saved else fitted
        except _DAMAGE as error:
            problem = f"what was folded into {name!r} cannot be read ({error}); {DAMAGED_MANIFEST}"
            raise CheckpointError(f"{model.path / MANIFEST_FILE}: {problem}") from error

    return fit


def _turned(adapter: Adapter, change: Change, norms: Mapping[str, str]) -> Adapter:
    """The adapter of a matrix after a :class:`.offline_rotation.Change`."""
    a, b = adapter.a, adapter.b
    if change.norm is not None:
        a = a * (unpacked_vector(norms[change.norm]) + np.float32(change.offset))
    for transform in change.rows:
        a = transform(np.ascontiguousarray(a))
    for transform in change.columns:
        b = np.ascontiguousarray(transform(np.ascontiguousarray(b.T)).T)
    return replace(adapter, a=a, b=b)


def _scaled(adapter: Adapter, factors: Mapping[str, str], parameter: Parameter) -> Adapter:
    """The adapter of a matrix whose rows and columns, as it is stored, were multiplied by powers of two."""
    by_row, by_column = (unpacked_factors(factors[axis]) if axis in factors else None for axis in ("rows", "columns"))
    if parameter.transposed:
        by_row, by_column = by_column, by_row
    a = adapter.a if by_column is None else adapter.a * by_column
    b = adapter.b if by_row is None else adapter.b * by_row[:, None]
    return replace(adapter, a=a, b=b)
