"""What llama.cpp's converter does to the tensors of a Hugging Face model, undone: names, and the order of rows.

The package ``gguf`` knows the names. The orders of rows of each architecture are in :data:`.architectures.TABLE`.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from . import latent, recurrent
from .architectures import converted
from .converted import largest, layers_that_run
from .header import GgufHeader
from .rope import FACTORS

FusedNames = tuple[tuple[str, ...], ...]
"""Of each expert the names of its matrices in a tensor."""


def tensors_left_out(header: GgufHeader) -> set[str]:
    """The tensors that are not the model's: those that :func:`config_json` reads, and those of layers that draft."""
    known = converted(header)
    further = set()
    if known.drafts:
        first = layers_that_run(header)
        further = {x for x in header.tensors if (m := re.match(r"blk\.(\d+)\.", x)) and int(m[1]) >= first}
    return {
        *further,
        *(known.unread(header) if known.unread else ()),
        *((FACTORS,) if "rope.freq_base" in known.keys else ()),
    }


def tensor_names(header: GgufHeader, names: Iterable[str]) -> dict[str, str]:
    """Hugging Face's ``names`` of tensors, each with the name in the file. Names without one there are left out."""
    import gguf

    known = converted(header)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    mapping = gguf.get_tensor_name_map(number, int(header.of_model("block_count")))
    found = {}
    for name in names:
        if (layer := _in_layer(name, known.tensors)) is not None:
            found[name] = layer[0] + known.tensors[layer[1]]
            continue
        in_converter = recurrent.with_bias(name)
        if whole := mapping.get_name(in_converter):
            found[name] = whole
            continue
        module, dot, part = in_converter.rpartition(".")
        in_file = mapping.get_name(module) or mapping.get_name(module.removeprefix("transformer."))
        if (layer := _in_layer(module, known.renamed)) is not None:
            in_file = layer[0] + _of_shared(header, known.renamed[layer[1]])
        if in_file is not None:
            found[name] = in_file + dot + part
    return found


def joined_tensors(header: GgufHeader, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Those of Hugging Face's ``names`` whose rows the file has as several tensors, with their names there."""
    joined, found = converted(header).joined, {}
    for name in names:
        module, _, part = name.rpartition(".")
        if (layer := _in_layer(module, joined)) is not None:
            found[name] = tuple(f"{layer[0]}{_of_shared(header, one)}.{part}" for one in joined[layer[1]])
    return found


def _of_shared(header: GgufHeader, name: str) -> str:
    """The ``name`` of a matrix of a feed-forward layer, which is a shared expert's if there are others."""
    return f"{name}_shexp" if name.startswith("ffn_") and header.of_model("expert_count") else name


def stacked_experts(header: GgufHeader, spec_fused: Mapping[str, FusedNames]) -> dict[str, FusedNames]:
    """The tensors that hold one matrix of each expert, or gate and up of each, by their names in a file.

    Biases of experts have names of their own. ``spec_fused`` has for each tensor that may hold experts the names of
    each expert's matrices or biases: of each layer first gate, if there is one, and up, then down.
    """
    found: dict[str, FusedNames] = {}
    if not header.of_model("expert_count"):
        return found
    of_layers: dict[tuple[str, str], list[FusedNames]] = {}
    for name, experts in spec_fused.items():
        if match := re.fullmatch(r".*\blayers\.(\d+)\..+", name):
            kinds = of_layers.setdefault((match[1], experts[0][0].rpartition(".")[2]), [])
            kinds += [] if experts in kinds else [experts]  # a checkpoint may have the same under several names
    for (layer, part), (inner, *down) in of_layers.items():
        start = f"blk.{layer}.ffn"
        if len(inner[0]) == 2:
            found[f"{start}_gate_up_exps.{part}"] = inner
        for kind, index in zip(("gate", "up")[-len(inner[0]) :], range(2), strict=False):
            found[f"{start}_{kind}_exps.{part}"] = tuple((e[index],) for e in inner)
        found |= {f"{start}_down_exps.{part}": experts for experts in down}
    return found


def joined_order(header: GgufHeader, name: str, parts: Sequence[str]) -> np.ndarray | None:
    """The rows of a tensor of :func:`joined_tensors` in Hugging Face's order; None for the order of the file."""
    if ".in_proj_qkvz." in name:
        rows = sum(header.tensors[part].shape[0] for part in parts if part in header.tensors)
        return recurrent.order_by_key_heads(header, rows)
    return latent.order_of_heads(header, parts) if ".kv_b_proj." in name else None


def _in_layer(module: str, known: Iterable[str]) -> tuple[str, str] | None:
    """The beginning of the file's names of a module's layer, and the one of ``known`` that the module is there."""
    match = re.fullmatch(r".*\blayers\.(\d+)\.(.+)", module)
    return (f"blk.{match[1]}.", match[2]) if match and match[2] in known else None


def row_order(header: GgufHeader, name: str) -> np.ndarray | None:
    """The rows of the tensor ``name`` of the file in the order that Hugging Face has; None for the same order."""
    known, rows = converted(header), header.tensors[name].shape[0]
    heads = largest(header.of_model("attention.head_count"))
    if known.tiled and (order := recurrent.order_of_values(header, name)) is not None:
        return order
    if known.permuted and (".attn_q." in name or ".attn_k." in name):
        if ".attn_k." in name:
            heads = largest(header.of_model("attention.head_count_kv", heads))
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    if known.grouped_qkv and ".attn_qkv." in name:
        kv_heads = largest(header.of_model("attention.head_count_kv", heads))
        head_dim = rows // (heads + 2 * kv_heads)
        parts = np.split(np.arange(rows), [heads * head_dim, (heads + kv_heads) * head_dim])
        return np.concatenate([part.reshape(kv_heads, -1) for part in parts], axis=1).ravel()
    return None


def undo(header: GgufHeader, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """What undoes the converter's change of the values of the tensor ``name`` of the file; None for no change."""
    known = converted(header)
    if known.norm_offset and name.endswith("norm.weight") and not name.endswith(".ssm_norm.weight"):
        return _without_offset
    if known.tiled and name.endswith(".ssm_out.weight"):
        return functools.partial(recurrent.grouped_columns, header)
    return recurrent.log_of_decay if name.endswith(".ssm_a") else None


def hugging_face_shape(header: GgufHeader, name: str) -> tuple[int, ...]:
    """The shape that Hugging Face has for the tensor ``name`` of the file; the rows of heads are one after another."""
    shape, is_swapped = header.tensors[name].shape, is_transposed(header, name)
    if len(shape) > 1 and (is_swapped or name.endswith(f".{latent.VALUES_OF_LATENT}.weight")):
        *heads, rows, columns = shape
        rows, columns = (columns, rows) if is_swapped else (rows, columns)
        return (math.prod(heads) * rows, columns)
    if (given := next((to for end, to in converted(header).shapes.items() if name.endswith(end)), None)) is not None:
        return tuple(math.prod(shape) if size == -1 else size for size in given)
    return recurrent.hugging_face_shape(name, shape)


def _without_offset(values: np.ndarray) -> np.ndarray:
    less: np.ndarray = values - values.dtype.type(1)
    return less


def is_transposed(header: GgufHeader, name: str) -> bool:
    """Whether Hugging Face stores the matrix ``name`` of the file ``[in, out]``, or each matrix of a head."""
    return name.endswith(".weight") and any(part in name for part in converted(header).transposed)
