"""The tensors of a quantized checkpoint while codes are paired with scales: each is checked, all problems at once."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from ...backend.stored_matrix import StoredMatrix
from ...errors import CheckpointError, checkpoint_error
from ...files import thread_count
from ..derived_tensor import DerivedTensor, Rows, WholeMatrices
from ..tensor_file import DTYPES, TensorInfo
from .codes import e8m0

SCALES = ("F32", "F16", "BF16")
OF_ACTIVATIONS = (
    ".activation_scale", ".input_scale", ".input_scale_ub", ".input_zero_point", ".input_global_scale", ".k_scale",
    ".v_scale", ".q_scale", ".output_scale", ".output_zero_point", ".kv_scale",
)  # fmt: skip
"""The ends of names of tensors that say how activations are quantized."""
UNFIT = "the files do not fit quantization_config in config.json: get both anew from the same place"
PACKED_TENSORS = 4
"""The most tensors of a matrix that lies there by columns: words, zero points, scales and groups of inputs."""


class SourceFormat(ABC):
    """How the weights of a checkpoint are quantized, as its ``config.json`` states it."""

    sign: ClassVar[str]
    """The tensors that such a checkpoint has, in words."""

    @abstractmethod
    def pair(self, source: SourceTensors) -> None:
        """Call ``source.replace`` for each quantized tensor, and note what is wrong."""


@dataclass
class SourceTensors:
    """The tensors of the files, by name; ``stored`` are their values, read when they are used.

    ``derived`` are the float tensors that take the place of those in ``used``; ``problems`` is what is wrong.
    """

    infos: Mapping[str, TensorInfo]
    stored: Mapping[str, StoredMatrix]
    derived: dict[str, DerivedTensor] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._transposes: dict[str, Callable[[], np.ndarray]] = {}
        self._transposed = WholeMatrices(self._transposes, PACKED_TENSORS * (thread_count() + 1))

    def ending(self, suffix: str) -> list[str]:
        """The tensors whose names end so, without that end, in the order of the files."""
        return [name.removesuffix(suffix) for name in self.infos if name.endswith(suffix)]

    def has(self, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...], of: str) -> bool:
        """Whether the tensor ``name`` is there with one of the types and shapes; notes it if not, as a part ``of``."""
        info, wanted = self.infos.get(name), " or ".join(str(list(shape)) for shape in shapes)
        if info is None:
            self.problems.append(f"{of!r} is quantized, and {name!r} is missing, {' or '.join(dtypes)} {wanted}")
            return False
        if info.dtype not in dtypes:
            self.problems.append(f"tensor {name!r} is {info.dtype}; beside {of!r} it must be {' or '.join(dtypes)}")
            return False
        if info.shape not in shapes:
            self.problems.append(f"tensor {name!r} has shape {list(info.shape)}; beside {of!r} it must be {wanted}")
            return False
        return True

    def matrix(self, name: str, dtype: str, of: str) -> tuple[int, int] | None:
        """The shape of a matrix of codes; notes a problem and returns None if it is missing or is none."""
        info = self.infos.get(name)
        if info is None:
            self.problems.append(f"{of!r} is there, and {name!r} is missing, a matrix of {dtype}")
        elif info.dtype != dtype or len(info.shape) != 2:
            self.problems.append(f"tensor {name!r} is {info.dtype} {list(info.shape)}; it must be a matrix of {dtype}")
        else:
            return info.shape[0], info.shape[1]
        return None

    def replace(
        self, names: Sequence[str], result: str, shape: tuple[int, ...], rows: Rows, label: str, dtype: str = "F32"
    ) -> None:
        """Put the tensor ``result`` with ``rows`` in the place of ``names``, the codes first; ``label`` is its type."""
        codes, stored = self.infos[names[0]], sum(self.infos[name].nbytes for name in names)
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        info = replace(codes, dtype=dtype, shape=shape, nbytes=nbytes, stored_as=label, stored_bytes=stored)
        self.derived[result] = DerivedTensor(info, rows)
        self.used.update(names)

    def rows(self, name: str) -> StoredMatrix:
        """A tensor as a matrix: all axes but the last taken together, read in rows."""
        stored = self.stored[name]
        columns = stored.shape[-1] if stored.shape else 1
        return replace(stored, shape=(math.prod(stored.shape[:-1]), columns))

    def transposed(self, name: str, first: int, end: int) -> np.ndarray:
        """Columns of a matrix as rows. The matrix is read whole, and kept for a while."""
        self._transposes.setdefault(name, lambda: np.ascontiguousarray(np.asarray(self.stored[name]).T))
        return self._transposed.rows(name, first, end)

    def scales(self, name: str, values: np.ndarray) -> np.ndarray:
        """Some values of the tensor ``name`` as scales, fp32. Bytes are exponents, see :func:`.codes.e8m0`.

        Raises :class:`CheckpointError` for one that is not finite.
        """
        scales: np.ndarray = e8m0(values) if values.dtype == np.uint8 else values.astype(np.float32)
        if not np.isfinite(scales).all():
            problem = f"tensor {name!r} holds a scale that is {scales[~np.isfinite(scales)][0]:g}"
            raise CheckpointError(f"{self.infos[name].file}: {problem}; the file is damaged: download it again")
        return scales


def dequantized(
    found: SourceFormat, infos: Mapping[str, TensorInfo], stored: Mapping[str, StoredMatrix], path: object
) -> tuple[dict[str, TensorInfo], dict[str, DerivedTensor]]:
    """The tensors of a float checkpoint, and those of them that are computed.

    Raises :class:`CheckpointError`, with ``path`` as its title, that lists what is missing or misshapen.
    """
    source = SourceTensors({k: v for k, v in infos.items() if not k.endswith(OF_ACTIVATIONS)}, stored)
    found.pair(source)
    if source.problems:
        raise checkpoint_error(path, source.problems, UNFIT)
    if not source.derived:
        problem = f"quantization_config says that weights are quantized, and there is no tensor {found.sign}"
        raise checkpoint_error(path, [problem], "if they are float, remove quantization_config from config.json")
    kept = {name: info for name, info in source.infos.items() if name not in source.used}
    if clash := kept.keys() & source.derived.keys():
        problems = [f"{name!r} is there both quantized and float" for name in sorted(clash)]
        raise checkpoint_error(path, problems, UNFIT)
    return {**kept, **{name: tensor.info for name, tensor in source.derived.items()}}, source.derived


def block_scales(source: SourceTensors, name: str, rows: int, block_rows: int, groups: int) -> Rows:
    """The scales ``name`` of blocks, ``ceil(rows / block_rows)`` times ``groups`` values, for single rows of the codes.

    ``rows`` are those of one matrix; several may lie one behind the other.
    """
    stored = source.stored[name]
    stored = replace(stored, shape=(math.prod(stored.shape) // groups, groups))
    per_matrix = -(-rows // block_rows)

    def of_rows(first: int, end: int) -> np.ndarray:
        number = np.arange(first, end)
        blocks = number // rows * per_matrix + number % rows // block_rows
        low, high = int(blocks[0]), int(blocks[-1]) + 1
        scales: np.ndarray = source.scales(name, np.asarray(stored[low:high]))[blocks - low]
        return scales

    return of_rows
