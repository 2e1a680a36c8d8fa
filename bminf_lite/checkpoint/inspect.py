"""The content of a checkpoint of any architecture. Only statistics of the scales are computed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from .compressed_tensors import QUANTIZATION_SUFFIXES
from .reader import Checkpoint, open_checkpoint


def inspect(path: str | Path) -> dict[str, Any]:
    """A description of the checkpoint in the folder ``path``, as JSON values.

    ``model_type``, ``architectures``, ``parameters`` (how many, scales not counted), ``bytes`` and ``file_bytes``,
    ``dtypes`` (bytes per type as it is read), ``quantization`` (None, or its groups), ``migration`` (recipe, tool
    version and sources of the manifest, or None) and ``tensors``: for each its ``dtype``, ``shape``, ``bytes`` and
    ``file``, for a type that is dequantized ``stored_as``, and for a quantized layer's codes ``activations``
    (``int8`` or ``float``) and ``scale`` (dtype, min, median, max). Raises :class:`CheckpointError` if the checkpoint
    cannot be opened.
    """
    with open_checkpoint(path) as checkpoint:
        tensors = {name: _describe(checkpoint, name) for name in checkpoint.tensors}
        dtypes: dict[str, int] = {}
        for info in checkpoint.tensors.values():
            dtypes[info.dtype] = dtypes.get(info.dtype, 0) + info.nbytes
        files = {info.file for info in checkpoint.tensors.values()}
        manifest = checkpoint.manifest
        return {
            "path": str(path),
            "model_type": checkpoint.config.get("model_type"),
            "architectures": checkpoint.config.get("architectures"),
            "parameters": sum(tensor.get("parameters", 0) for tensor in tensors.values()),
            "bytes": sum(dtypes.values()),
            "file_bytes": sum(file.stat().st_size for file in files),
            "dtypes": dtypes,
            "quantization": _quantization(checkpoint),
            "migration": {key: manifest.get(key) for key in ("recipe", "tool_version", "tied_head", "sources")}
            if manifest
            else None,
            "tensors": tensors,
        }


def _quantization(checkpoint: Checkpoint) -> dict[str, Any] | None:
    found = checkpoint.quantization
    if found is None:
        return None
    groups = [
        {
            "targets": list(group.targets.listed),
            "packed": group.packed,
            "activations": "int8" if group.dynamic else "float",
        }
        for group in found.groups
    ]
    transforms = [
        {"targets": list(t.targets.listed), "ignore": list(t.ignore.listed), "block": t.block} for t in found.transforms
    ]
    return {"groups": groups, "ignore": list(found.ignore.listed), "input_rotations": transforms}


def _describe(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    info = checkpoint.tensors[name]
    result: dict[str, Any] = {"dtype": info.dtype, "shape": list(info.shape)}
    result |= {"bytes": info.nbytes, "file": info.file.name}
    if info.stored_as:
        result["stored_as"] = info.stored_as
    module = name.removesuffix("_packed").removesuffix(".weight")
    group = checkpoint.quantization.group_of(module) if checkpoint.quantization else None
    codes = name == f"{module}.weight_packed" or (name == f"{module}.weight" and info.dtype == "I8")
    if codes and group is not None:
        result["activations"] = "int8" if group.dynamic else "float"
        result["scale"] = _scale_statistics(checkpoint.read(f"{module}.weight_scale"))
        if group.packed:
            result["unpacked_shape"] = checkpoint.read(f"{module}.weight_shape").tolist()
    if not name.endswith(tuple(c for c in QUANTIZATION_SUFFIXES if c != ".weight_packed")):
        result["parameters"] = math.prod(result.get("unpacked_shape", info.shape))
    return result


def _scale_statistics(scale: np.ndarray) -> dict[str, Any]:
    values = scale.astype(np.float64)
    statistics = {"min": float(values.min()), "median": float(np.median(values)), "max": float(values.max())}
    return {"dtype": scale.dtype.name, **statistics}
