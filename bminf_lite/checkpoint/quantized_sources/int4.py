"""GPTQ (https://arxiv.org/abs/2210.17323) and AWQ (https://arxiv.org/abs/2306.00978): codes of 2, 4 or 8 bits.

Both store the transpose of a weight ``[out, in]``, with codes packed into int32 words, and scales of groups of inputs.
``per`` is the number of codes in a word.

| | GPTQ (AutoGPTQ's ``QuantLinear``) | AWQ (AutoAWQ's ``WQLinear_GEMM``) |
|---|---|---|
| ``X.qweight`` | int32 ``[in / per, out]``, from the low bits on | int32 ``[in, out / 8]``, in :data:`AWQ_ORDER` |
| ``X.qzeros`` | int32 ``[groups, out / per]``: the zero point less 1 | int32 ``[groups, out / 8]``, in that order |
| ``X.scales`` | float ``[groups, out]`` | the same |
| ``X.g_idx`` | int32 ``[in]``, the group of each input; optional | |

``checkpoint_format`` ``gptq_v2`` stores the zero point itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import CheckpointError, checkpoint_error, is_whole
from .codes import RowsOf, ScaledCodes, unsigned, unsigned_along_rows
from .source_tensors import SCALES, SourceFormat, SourceTensors

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, counted from the low bits, of each of 8 outputs."""
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""What is added to a stored zero point."""
BITS = {"gptq": (2, 4, 8), "awq": (4,)}


def parse(raw: Mapping[str, Any], source: object) -> SourceFormat:
    """The format of ``quantization_config``.

    Raises :class:`CheckpointError` with every setting that is not known.
    """
    method = raw["quant_method"]
    bits, size = raw.get("bits", raw.get("w_bit", 4)), raw.get("group_size", raw.get("q_group_size", 128))
    key = "checkpoint_format" if method == "gptq" else "version"
    layout = str(raw.get(key) or ("gptq" if method == "gptq" else "gemm")).lower()
    layouts = tuple(GPTQ_FORMATS) if method == "gptq" else ("gemm",)
    problems = []
    if bits not in BITS[method] or isinstance(bits, bool):
        problems.append(f"bits is {bits!r}; this version reads {' or '.join(map(str, BITS[method]))} of {method}")
    if not is_whole(size) or (size < 1 and size != -1):
        problems.append(f"group_size is {size!r}; it must be -1 for whole rows, or the size of a group")
    if layout not in layouts:
        problems.append(f"{key} is {layout!r}; this version reads {' or '.join(layouts)}")
    dynamic = raw.get("dynamic") or {}
    if not isinstance(dynamic, dict) or any(not pattern.startswith("-:") for pattern in dynamic):
        problems.append("dynamic gives some layers settings of their own; this version reads one setting for all")
    if problems:
        raise checkpoint_error(source, [f"quantization_config.{problem}" for problem in problems])
    if method == "awq":
        return Int4("AWQ int4", bits, size, is_awq=True)
    return Int4(f"GPTQ int{bits}", bits, size, zero_offset=GPTQ_FORMATS[layout])


@dataclass(frozen=True)
class Int4(SourceFormat):
    """Codes of ``bits`` bits with a scale and a zero point for ``group_size`` inputs, or with -1 for all of a row.

    ``zero_offset`` is added to a stored zero point.
    """

    label: str
    bits: int
    group_size: int
    zero_offset: int = 0
    is_awq: bool = False
    sign = "*.qweight (gptq, awq)"

    @property
    def per(self) -> int:
        """Codes in a word."""
        return 32 // self.bits

    def pair(self, source: SourceTensors) -> None:
        for module in source.ending(".qweight"):
            shape = source.matrix(f"{module}.qweight", "I32", of=f"{module}.scales")
            if shape is not None:
                inputs, outputs = shape
                words = (1, self.per) if self.is_awq else (self.per, 1)
                self._pair(source, module, inputs * words[0], outputs * words[1])

    def _pair(self, source: SourceTensors, module: str, inputs: int, outputs: int) -> None:
        weight, zeros, scales, index = (f"{module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
        size = inputs if self.group_size == -1 else self.group_size
        groups = -(-inputs // size)
        fits = source.has(zeros, ["I32"], (groups, -(-outputs // self.per)), of=weight)
        fits &= source.has(scales, SCALES, (groups, outputs), of=weight)
        has_index = index in source.infos
        if has_index:
            fits &= source.has(index, ["I32", "I64"], (inputs,), of=weight)
        if not fits:
            return
        codes = self._packed_by_output(source, weight) if self.is_awq else self._packed_by_input(source, weight)
        found = ScaledCodes(
            codes,
            lambda first, end: source.scales(scales, source.transposed(scales, first, end)),
            functools.partial(groups_of_inputs, source, index, groups) if has_index else size,
            self._packed_by_output(source, zeros, self.zero_offset),
        )
        names = (weight, zeros, scales, *([index] if has_index else []))
        source.replace(names, f"{module}.weight", (outputs, inputs), found.rows, self.label)

    def _packed_by_input(self, source: SourceTensors, name: str) -> RowsOf:
        """Codes whose words hold neighbouring inputs of an output, int32 ``[in / per, out]``."""

        def rows(first: int, end: int) -> np.ndarray:
            return unsigned(source.transposed(name, first, end), self.bits).astype(np.float32)

        return rows

    def _packed_by_output(self, source: SourceTensors, name: str, offset: int = 0) -> RowsOf:
        """Codes whose words hold neighbouring outputs, int32 ``[n, out / per]``, as ``[out, n]``."""
        order = AWQ_ORDER if self.is_awq else None

        def rows(first: int, end: int) -> np.ndarray:
            start = first // self.per
            codes = unsigned_along_rows(source.transposed(name, start, -(-end // self.per)), self.bits, order)
            return codes[first - start * self.per : end - start * self.per].astype(np.float32) + np.float32(offset)

        return rows


def groups_of_inputs(source: SourceTensors, name: str, groups: int) -> np.ndarray:
    """The group of each input. Raises :class:`CheckpointError` for one that does not exist."""
    index = np.asarray(source.stored[name])
    if index.size and not (index.min() >= 0 and index.max() < groups):
        wrong = int(index[(index < 0) | (index >= groups)][0])
        problem = f"tensor {name!r} holds the group {wrong}, and there are {groups}"
        raise CheckpointError(f"{source.infos[name].file}: {problem}; the file is damaged: download it again")
    return index
