"""Whether a checkpoint's tensors are those that a model needs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..models.spec import Parameter, Role, Spec
from .compressed_tensors import QUANTIZATION_SUFFIXES, QuantizationConfig, packed_width
from .tensor_file import FLOAT_DTYPES, TensorInfo


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a checkpoint must, or may, hold, with the types and the shapes that it may have."""

    name: str
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    required: bool = True

    def mismatches(self, info: TensorInfo) -> Iterator[str]:
        """What is wrong with the tensor that the file has, in words."""
        if info.shape not in self.shapes:
            shapes = " or ".join(str(list(shape)) for shape in self.shapes)
            yield f"tensor {self.name!r} has shape {list(info.shape)}; config.json asks for {shapes}"
        if info.dtype not in self.dtypes:
            yield f"tensor {self.name!r} is {info.dtype}; it must be {' or '.join(self.dtypes)}"


def spec_problems(spec: Spec, tensors: Mapping[str, TensorInfo], quantization: QuantizationConfig | None) -> list[str]:
    """Every missing, misshapen, wrongly typed or unexpected tensor, in words. Empty if the checkpoint fits."""
    problems: list[str] = []
    known: set[str] = set()
    for name, parameter in spec.parameters.items():
        if name in spec.tied:
            known |= {name, *(name.removesuffix(".weight") + companion for companion in QUANTIZATION_SUFFIXES)}
            continue
        for expected in expected_tensors(name, parameter, quantization):
            known.add(expected.name)
            if expected.name in tensors:
                problems += expected.mismatches(tensors[expected.name])
            elif expected.required:
                dtypes, shape = " or ".join(expected.dtypes), list(expected.shapes[0])
                problems.append(f"missing tensor {expected.name!r}, {dtypes} {shape}")
    ignored = [re.compile(pattern) for pattern in spec.ignored]
    problems += [
        f"unexpected tensor {name!r}, {info.dtype} {list(info.shape)}; config.json describes a model without it"
        for name, info in tensors.items()
        if name not in known and not any(pattern.fullmatch(name) for pattern in ignored)
    ]
    return problems


def expected_tensors(
    name: str, parameter: Parameter, quantization: QuantizationConfig | None
) -> Iterator[ExpectedTensor]:
    """The tensors that stand for a parameter in a file.

    Only linear layers and the head can be quantized; ``Conv1D`` weights stay float in this format.
    """
    module = name.removesuffix(".weight")
    quantizable = parameter.role in (Role.LINEAR, Role.HEAD) and not parameter.transposed
    group = quantization.group_of(module) if quantization and quantizable else None
    if group is None:
        yield ExpectedTensor(name, FLOAT_DTYPES, (parameter.shape,))
        return
    rows, columns = parameter.shape
    if group.packed:
        yield ExpectedTensor(f"{module}.weight_packed", ("I32",), ((rows, packed_width(columns)),))
        yield ExpectedTensor(f"{module}.weight_shape", ("I64", "I32"), ((2,),))
    else:
        yield ExpectedTensor(name, ("I8",), ((rows, columns),))
    per_row = ((rows, 1), (rows,), (1,))
    yield ExpectedTensor(f"{module}.weight_scale", FLOAT_DTYPES, per_row)
    yield ExpectedTensor(f"{module}.weight_zero_point", ("I8", "I32", "I64"), per_row, required=False)
    if quantization and (count := quantization.outliers.get(module)):
        yield ExpectedTensor(f"{module}.outlier_columns", ("I32",), ((count,),))
        yield ExpectedTensor(f"{module}.outlier_weight", ("F16",), ((rows, count),))
