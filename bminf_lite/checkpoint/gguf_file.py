"""GGUF files as a checkpoint: tensors under Hugging Face's names, dequantized while they are read.

F32, F16 and BF16 are read as they are. All other types are dequantized to F32 by the package ``gguf``; for Q8_0, whose
values are a code times an fp16 scale, this is exact. Rows that llama.cpp's converter reordered are put back in order.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .. import models
from ..errors import CheckpointError, checkpoint_error
from ..gguf_files.config import config_json, generation_config, in_metadata
from ..gguf_files.encoders import module_files
from ..gguf_files.header import GgufHeader, GgufTensor, read_header
from ..gguf_files.tensors import (
    hugging_face_shape,
    is_transposed,
    joined_order,
    joined_tensors,
    row_order,
    stacked_experts,
    tensor_names,
    tensors_left_out,
    undo,
)
from ..gguf_files.tokenizer import tokenizer_files
from ..models.spec import FusedExperts, Parameter, Spec
from .tensor_file import DTYPES, FLOAT_DTYPES, TensorFile, TensorInfo

GROUP_ROWS = 16
"""The package ``gguf`` dequantizes this many rows at once, so that they stay in a core's cache."""
GROUP_BYTES = 1 << 17
"""Short rows are joined until its groups have about this many bytes: below that its calls take longer than the work."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the file: ``order`` are its rows in Hugging Face's order; ``transposed``: it is to be transposed.

    ``undo`` gives Hugging Face's values of the file's, and ``shape`` is Hugging Face's.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    order: np.ndarray | None
    transposed: bool
    undo: Callable[[np.ndarray], np.ndarray] | None

    @property
    def dtype(self) -> str:
        """The type in which its values are read."""
        return self.tensor.type if self.tensor.type in FLOAT_DTYPES else "F32"


class GgufFile(TensorFile):
    """One open file. ``stored`` maps Hugging Face's names to its tensors."""

    def __init__(self, path: Path, stored: Mapping[str, StoredTensor]):
        self._stored = stored
        super().__init__(path)

    def _read_header(self) -> Mapping[str, TensorInfo]:
        infos = {}
        for name, stored in self._stored.items():
            tensor, nbytes = stored.tensor, math.prod(stored.shape) * DTYPES[stored.dtype].itemsize
            stored_as = "" if tensor.type == stored.dtype else tensor.type
            infos[name] = TensorInfo(
                stored.dtype, stored.shape, self.path, tensor.offset, nbytes, stored_as, tensor.nbytes
            )
        return infos

    def read_tensor(self, name: str, buffer: memoryview, offset: int = 0) -> None:
        stored, info = self._stored[name], self.tensors[name]
        itemsize = DTYPES[info.dtype].itemsize
        if stored.transposed:
            values = self._transposed(name).reshape(-1).view(np.uint8)
            buffer[:] = values[offset : offset + len(buffer)].data
            return
        if self.is_verbatim(name):
            super().read_tensor(name, buffer, offset)
            return
        row = _columns(stored.tensor) * itemsize
        first, end = offset // row, -(-(offset + len(buffer)) // row)
        rows = self._rows(stored, first, end)
        with np.errstate(all="ignore"):  # who reads values that are not finite says so
            undone = rows if stored.undo is None else stored.undo(rows)
            values = np.ascontiguousarray(undone).reshape(-1).view(np.uint8)
        buffer[:] = values[offset - first * row : offset - first * row + len(buffer)].data

    def is_verbatim(self, name: str) -> bool:
        stored = self._stored[name]
        is_changed = stored.transposed or stored.order is not None or stored.undo is not None
        return not is_changed and stored.tensor.type == stored.dtype

    def _rows(self, stored: StoredTensor, first: int, end: int) -> np.ndarray:
        """Rows ``first`` to ``end`` in Hugging Face's order. Rows that lie side by side are read together."""
        if stored.order is None:
            return self._consecutive_rows(stored.tensor, first, end)
        order = stored.order[first:end]
        low, high = int(order.min()), int(order.max()) + 1
        if high - low <= 4 * len(order):
            rows: np.ndarray = self._consecutive_rows(stored.tensor, low, high)[order - low]
            return rows
        return np.concatenate([self._consecutive_rows(stored.tensor, int(i), int(i) + 1) for i in order])

    def _consecutive_rows(self, tensor: GgufTensor, first: int, end: int) -> np.ndarray:
        row_bytes = tensor.nbytes // (math.prod(tensor.shape) // _columns(tensor))
        shape = (end - first, *tensor.shape[1:][-1:])
        raw = np.empty((end - first, row_bytes), np.uint8)
        self._read_into(raw.reshape(-1).data, tensor.offset + first * row_bytes)
        if tensor.type in FLOAT_DTYPES:
            return raw.view(DTYPES[tensor.type]).reshape(shape)
        return _dequantized(raw, tensor.type, self.path).reshape(shape)

    @functools.lru_cache(maxsize=1)  # noqa: B019, the file and its cache end together
    def _transposed(self, name: str) -> np.ndarray:
        """A whole matrix ``[in, out]``, or one of each head; blocks of one matrix are read one after another."""
        stored = self._stored[name]
        values = self._consecutive_rows(stored.tensor, 0, math.prod(stored.tensor.shape[:-1]))
        return np.ascontiguousarray(values.reshape(stored.tensor.shape).swapaxes(-1, -2)).reshape(stored.shape)


def _columns(tensor: GgufTensor) -> int:
    """Elements of a row; those of matrices of several experts are one after another, and a vector has rows of one."""
    return max(tensor.shape[-1], 1) if len(tensor.shape) > 1 else 1


def _dequantized(raw: np.ndarray, type_name: str, path: Path) -> np.ndarray:
    """Rows of bytes in a type of ggml, ``[rows, row_bytes]``, as fp32, in their order."""
    import gguf

    rows, row_bytes = raw.shape
    wanted = max(GROUP_BYTES // (GROUP_ROWS * row_bytes), 1)
    joined = math.gcd(rows, 1 << (wanted.bit_length() - 1))  # rows that gguf reads as one
    try:
        with np.errstate(all="ignore"):  # scales of a damaged file may not be finite, which who reads the values says
            values: np.ndarray = gguf.quants.dequantize(
                raw.reshape(rows // joined, joined * row_bytes), gguf.GGMLQuantizationType[type_name]
            )
    except NotImplementedError as error:
        raise CheckpointError(f"{path}: the package gguf cannot dequantize {type_name}") from error
    return values.astype(np.float32, copy=False)


@dataclass(frozen=True)
class GgufCheckpoint:
    """What a Hugging Face folder of the model would hold; ``text_files`` makes the files without tensors.

    ``joined`` are tensors whose rows are those of several of the files: their names there, and the order of the rows if
    it is another. ``stacked`` are tensors
    of the files that hold a matrix of each expert, and ``parameters`` all tensors of the model.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    text_files: Callable[[], dict[str, str]]
    files: list[TensorFile]
    joined: dict[str, tuple[tuple[str, ...], np.ndarray | None]]
    stacked: dict[str, FusedExperts]
    parameters: Mapping[str, Parameter]


def open_gguf(path: Path) -> GgufCheckpoint:
    """Open the GGUF file ``path``, or all parts of it.

    Raises :class:`CheckpointError` if a file cannot be read, for an architecture that is unknown, and for tensors that
    are unknown or have a type that cannot be dequantized.
    """
    header = read_header(path)
    config = config_json(header)
    spec = _spec_of(header, config)
    names = tensor_names(header, spec.parameters)
    parts_of = joined_tensors(header, spec.parameters)
    joined = {name: (parts, joined_order(header, name, parts)) for name, parts in parts_of.items()}
    fused = stacked_experts(header, {name: fused.experts for name, fused in spec.fused.items()})
    stacked = {name: FusedExperts(experts) for name, experts in fused.items() if name in header.tensors}
    _check_shapes(header, stacked, spec)
    by_file: dict[Path, dict[str, StoredTensor]] = {part: {} for part in header.paths}
    known = {file_name: name for name, file_name in names.items()}
    left_out = tensors_left_out(header)
    for file_name, tensor in header.tensors.items():
        if file_name in left_out:
            continue
        name = known.get(file_name, file_name)  # an unknown one is reported as unexpected
        try:
            order = row_order(header, file_name)
        except (ArithmeticError, TypeError, ValueError) as error:
            problem = f"tensor {file_name!r} {list(tensor.shape)} does not fit the numbers of heads in the metadata"
            raise CheckpointError(f"{path}: {problem}; the file is damaged: download it again") from error
        transposed, shape = is_transposed(header, file_name), hugging_face_shape(header, file_name)
        stored = StoredTensor(tensor, shape, order, transposed, undo(header, file_name))
        by_file[tensor.path][name] = stored
    files: list[TensorFile] = []
    try:
        files += (GgufFile(part, stored) for part, stored in by_file.items() if stored)
    except BaseException:
        for file in files:
            file.close()
        raise
    return GgufCheckpoint(
        config,
        generation_config(header),
        functools.partial(_text_files, header),
        files,
        joined,
        stacked,
        spec.parameters,
    )


def _check_shapes(header: GgufHeader, stacked: Mapping[str, FusedExperts], spec: Spec) -> None:
    problems = []
    for name, fused in stacked.items():
        found, expected = header.tensors[name].shape, fused.shape(spec.parameters)
        if found != expected:
            problems.append(f"tensor {name!r} has shape {list(found)}; the metadata need {list(expected)}")
    if problems:
        raise checkpoint_error(header.path, problems, "export the model again")


def _spec_of(header: GgufHeader, config: dict[str, Any]) -> Spec:
    """The model's tensors. Errors name the file, and the keys of its metadata instead of those of a ``config.json``."""
    try:
        architecture = models.find(config)
        return architecture.spec(architecture.parse(config))
    except CheckpointError as error:
        problem = str(error).removeprefix("config.json").removeprefix(": ")
        raise CheckpointError(f"{header.path}: {in_metadata(header, problem)}") from None


def _text_files(header: GgufHeader) -> dict[str, str]:
    """The files beside ``config.json``; without a tokenizer if the file's vocabulary is of an unknown kind."""
    found = {"generation_config.json": json.dumps(generation_config(header), indent=2)} | module_files(header)
    try:
        return found | tokenizer_files(header)
    except CheckpointError:  # a model runs on token ids too
        return found
