"""A float checkpoint with an adapter merged into it, wherever a checkpoint's folder is opened.

Rows of the merged matrices are computed in fp32 while they are read, so nothing is written but what a migration writes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..backend.side_products import Adapter
from ..errors import CheckpointError
from ..models.spec import Role, Spec
from .adapter_folder import read_adapter
from .derived_tensor import DerivedTensor, Rows, info_as
from .opened_model import ModelSource, OpenedModel, open_model
from .reader import Checkpoint


@dataclass(frozen=True)
class MergedFolder(ModelSource):
    """The float checkpoint in ``folder`` (or a GGUF file) with the adapter in the folder ``adapter``."""

    folder: Path
    adapter: Path

    def __fspath__(self) -> str:
        return str(self.folder)

    def __str__(self) -> str:
        return str(self.folder)

    def open(self) -> OpenedModel:
        """The merged model. Raises :class:`CheckpointError` for int8 codes, and as :func:`read_adapter` does."""
        model = open_model(self.folder)
        try:
            return merged(model, self.adapter)
        except BaseException:
            model.close()
            raise


def merged(model: OpenedModel, adapter: Path, in_type_of_file: Collection[str] = ()) -> OpenedModel:
    """``model``, an open float checkpoint, with an adapter added to its matrices as they are read.

    These are fp32, but for those named ``in_type_of_file``, which are rounded. Both models share the files.
    """
    checkpoint, spec = model.checkpoint, model.spec
    if checkpoint.quantization is not None:
        raise CheckpointError(
            f"{model.path}: is int8, and an adapter cannot be merged into codes: rounding to their grid would lose "
            "most of a small change. Merge into the float checkpoint that it was made from, or serve the adapter as it "
            "is (--adapter)"
        )
    read = read_adapter(adapter, model, mergeable(spec))
    changes = {
        name: _derived(checkpoint, spec, name, of, name in in_type_of_file) for name, of in read.adapters.items()
    }
    return OpenedModel(checkpoint.with_derived(changes), model.description, model.eos_ids)


def mergeable(spec: Spec) -> set[str]:
    """The matrices that an adapter may be merged into: all but embeddings, and heads that are their embedding."""
    others = (Role.VECTOR, Role.EMBEDDING)
    return {name for name, p in spec.parameters.items() if p.role not in others and name not in spec.tied}


def _derived(checkpoint: Checkpoint, spec: Spec, name: str, adapter: Adapter, rounded: bool) -> DerivedTensor:
    info = checkpoint.tensors[name]
    first, second = adapter.b * np.float32(adapter.scale), adapter.a
    if spec.parameters[name].transposed:
        first, second = np.ascontiguousarray(second.T), np.ascontiguousarray(first.T)
    return DerivedTensor(info if rounded else info_as(info, "F32"), _rows(checkpoint.stored(name), first, second))


def _rows(values: np.ndarray, first: np.ndarray, second: np.ndarray) -> Rows:
    """Rows of ``values + first @ second``."""

    def rows(start: int, end: int) -> np.ndarray:
        total: np.ndarray = np.asarray(values[start:end]).astype(np.float32) + first[start:end] @ second
        return total

    return rows
