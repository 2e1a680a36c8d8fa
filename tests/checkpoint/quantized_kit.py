"""Checkpoints as other projects quantize them, of random bits, and the values that the definitions give them.

A definition here reads bits one by one and looks scales up by their index, so it shares nothing with the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tiny_checkpoint import tensors as random_tensors

from bminf_lite import models
from bminf_lite.models.spec import Role

Tensors = dict[str, np.ndarray]
NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8",
}  # fmt: skip
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 1, "intermediate_size": 96, "vocab_size": 40, "max_position_embeddings": 64,
}  # fmt: skip
"""Whole groups of 32 and words of 8 codes; blocks of 40 x 24 leave a rest."""


def save(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a folder with one safetensors file, of any type that NumPy and ``ml_dtypes`` have."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, data = {}, b""
    for name, values in tensors.items():
        begin, data = len(data), data + np.ascontiguousarray(values).tobytes()
        header[name] = {
            "dtype": NAMES[values.dtype.name], "shape": list(values.shape), "data_offsets": [begin, len(data)],
        }  # fmt: skip
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def codes_by_bits(words: np.ndarray, bits: int) -> np.ndarray:
    """The codes of rows of words, the first in the lowest bits, int64 ``[rows, n * 32 / bits]``."""
    flat = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    return flat.reshape(len(words), -1, bits).astype(np.int64) @ (1 << np.arange(bits))


def fp4_by_bits(packed: np.ndarray) -> np.ndarray:
    """FP4 values of bytes, the first in the low bits, fp32 ``[rows, 2 * n]``."""
    codes = codes_by_bits(packed, 4)
    return np.where(codes >= 8, -1, 1).astype(np.float32) * np.array(FP4, np.float32)[codes % 8]


def scale_of(scales: np.ndarray, shape: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """The scale of each element, by its row and column."""
    rows, columns = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    return scales.astype(np.float32)[rows][:, columns]


class Random:
    """Random bits and scales."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def bits(self, shape: tuple[int, ...], dtype: Any = np.int32) -> np.ndarray:
        info = np.iinfo(dtype)
        return self.rng.integers(info.min, info.max, shape, dtype, endpoint=True)

    def scales(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        return (0.01 * (1 + self.rng.random(shape))).astype(dtype)

    def fp8(self, shape: tuple[int, ...]) -> np.ndarray:
        """All values of FP8 but NaN."""
        bits = self.bits(shape, np.uint8)
        return np.where(bits & 127 == 127, bits - 1, bits).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)

    def exponents(self, shape: tuple[int, ...], low: int = 118) -> np.ndarray:
        return self.rng.integers(low, 124, shape, np.uint8)


Made = tuple[Tensors, np.ndarray]
"""The tensors of a layer, by the end of their names, and its weight fp32 ``[out, in]``."""


@dataclass(frozen=True)
class Form:
    """A way to quantize: ``config`` is the ``quantization_config``, ``make`` quantizes a matrix of a shape."""

    label: str
    config: dict[str, Any]
    make: Callable[[Random, tuple[int, int]], Made]
    extra: tuple[str, ...] = field(default=())
    """The ends of names of tensors that say how activations are quantized."""


def fp8_blocks(random: Random, shape: tuple[int, int], dtype: Any = np.float32) -> Made:
    codes, scales = random.fp8(shape), random.scales((-(-shape[0] // 40), -(-shape[1] // 24)), dtype)
    return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float32) * scale_of(scales, shape, (40, 24))


def fp8_power_blocks(random: Random, shape: tuple[int, int]) -> Made:
    codes, bits = random.fp8(shape), random.exponents((-(-shape[0] // 40), -(-shape[1] // 24)))
    scales = np.exp2(bits.astype(np.float32) - 127)
    weight = codes.astype(np.float32) * scale_of(scales, shape, (40, 24))
    return {"weight": codes, "weight_scale_inv": bits.view(ml_dtypes.float8_e8m0fnu)}, weight


def fp8_tensor(random: Random, shape: tuple[int, int]) -> Made:
    codes, scale = random.fp8(shape), random.scales(())
    return {"weight": codes, "weight_scale_inv": scale}, codes.astype(np.float32) * scale


def fp8_rows(random: Random, shape: tuple[int, int], dtype: Any = np.float32) -> Made:
    codes, scales = random.fp8(shape), random.scales((shape[0], 1), dtype)
    return {"weight": codes, "weight_scale": scales}, codes.astype(np.float32) * scales.astype(np.float32)


def gptq(random: Random, shape: tuple[int, int], bits: int = 4, shuffled: bool = False, offset: int = 1) -> Made:
    (outputs, inputs), per, size = shape, 32 // bits, 16
    groups = inputs // size
    words, zeros = random.bits((inputs // per, outputs)), random.bits((groups, outputs // per))
    scales, index = random.scales((groups, outputs), np.float16), np.arange(inputs) // size
    index = random.rng.permutation(index) if shuffled else index
    codes, points = codes_by_bits(words.T, bits), codes_by_bits(zeros, bits).T + offset
    weight = (codes - points[:, index]).astype(np.float32) * scales.T.astype(np.float32)[:, index]
    tensors = {"qweight": words, "qzeros": zeros, "scales": scales}
    return tensors | ({"g_idx": index.astype(np.int32)} if shuffled else {}), weight


def awq(random: Random, shape: tuple[int, int]) -> Made:
    (outputs, inputs), size = shape, 16
    words, zeros = random.bits((inputs, outputs // 8)), random.bits((inputs // size, outputs // 8))
    scales = random.scales((inputs // size, outputs), np.float16)

    def ordered(packed: np.ndarray) -> np.ndarray:
        """The packer puts output ``order[i]`` of 8 at place ``i``."""
        places = codes_by_bits(packed, 4).reshape(len(packed), -1, 8)
        found = np.empty_like(places)
        found[..., [0, 2, 4, 6, 1, 3, 5, 7]] = places
        return found.reshape(len(packed), -1)

    by_input = (ordered(words) - np.repeat(ordered(zeros), size, axis=0)).astype(np.float32)
    weight = by_input * np.repeat(scales.astype(np.float32), size, axis=0)
    return {"qweight": words, "qzeros": zeros, "scales": scales}, weight.T


def packed(random: Random, shape: tuple[int, int], bits: int = 4, zeros: bool = False, index: bool = False) -> Made:
    """int4 or int8 of compressed-tensors, in groups of 16."""
    (rows, columns), per = shape, 32 // bits
    middle, groups = 1 << (bits - 1), columns // 16
    words, scales = random.bits((rows, columns // per)), random.scales((rows, groups), ml_dtypes.bfloat16)
    tensors = {"weight_packed": words, "weight_scale": scales, "weight_shape": np.array(shape, np.int64)}
    codes, group_of = codes_by_bits(words, bits) - middle, np.arange(columns) // 16
    if index:
        group_of = random.rng.permutation(group_of)
        tensors["weight_g_idx"] = group_of.astype(np.int32)
    if zeros:
        tensors["weight_zero_point"] = random.bits((rows // per, groups))
        codes = codes - (codes_by_bits(tensors["weight_zero_point"].T, bits).T - middle)[:, group_of]
    return tensors, codes.astype(np.float32) * scales.astype(np.float32)[:, group_of]


def int8_with_zeros(random: Random, shape: tuple[int, int]) -> Made:
    codes, zeros = random.bits(shape, np.int8), random.bits((shape[0], 1), np.int8)
    scales = random.scales((shape[0], 1))
    weight = (codes.astype(np.int64) - zeros).astype(np.float32) * scales
    return {"weight": codes, "weight_scale": scales, "weight_zero_point": zeros}, weight


def nvfp4(random: Random, shape: tuple[int, int]) -> Made:
    bits, scales = random.bits((shape[0], shape[1] // 2), np.uint8), np.abs(random.fp8((shape[0], shape[1] // 16)))
    divisor = np.array([random.rng.random() + 100], np.float32)
    weight = fp4_by_bits(bits) * scale_of(scales.astype(np.float32) / divisor, shape, (1, 16))
    return {"weight_packed": bits, "weight_scale": scales, "weight_global_scale": divisor}, weight


def mxfp4_layer(random: Random, shape: tuple[int, int], low: int = 118) -> Made:
    """``low`` is the lowest exponent; the highest is 123."""
    bits, scales = random.bits((shape[0], shape[1] // 2), np.uint8), random.exponents((shape[0], shape[1] // 32), low)
    weight = fp4_by_bits(bits) * scale_of(np.exp2(scales.astype(np.float32) - 127), shape, (1, 32))
    return {"weight_packed": bits, "weight_scale": scales}, weight


def compressed(*targets: str, **weights: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors whose layers have these ``weights``."""
    group = {"targets": list(targets or ("Linear",)), "weights": {"num_bits": 8, "symmetric": True} | weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 24]}
FORMS = [
    Form("FP8 with scales of blocks of 40 x 24", FP8, fp8_blocks),
    Form("FP8 with scales of blocks of 40 x 24", FP8, lambda r, s: fp8_blocks(r, s, ml_dtypes.bfloat16)),
    Form("FP8 with scales of blocks of 40 x 24", FP8 | {"scale_fmt": "ue8m0"}, fp8_power_blocks),
    Form("FP8 with scales of whole matrices", FP8 | {"weight_block_size": None, "activation_scheme": "static"},
         fp8_tensor, ("activation_scale",)),
    Form("FP8 with scales of rows", {"quant_method": "fbgemm_fp8"}, fp8_rows, ("input_scale_ub",)),
    Form("GPTQ int4", GPTQ, gptq),
    Form("GPTQ int4", GPTQ | {"desc_act": True}, lambda r, s: gptq(r, s, shuffled=True)),
    Form("GPTQ int4", GPTQ | {"checkpoint_format": "gptq_v2"}, lambda r, s: gptq(r, s, offset=0)),
    Form("GPTQ int8", GPTQ | {"bits": 8}, lambda r, s: gptq(r, s, 8)),
    Form("GPTQ int2", GPTQ | {"bits": 2}, lambda r, s: gptq(r, s, 2)),
    Form("AWQ int4", {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "GEMM", "zero_point": True}, awq),
    Form("FP8 (compressed-tensors)", compressed(type="float", strategy="channel"), fp8_rows, ("input_scale",)),
    Form("FP8 (compressed-tensors)", compressed(type="float", strategy="channel"),
         lambda r, s: fp8_rows(r, s, ml_dtypes.bfloat16)),
    Form("FP8 (compressed-tensors)", compressed(type="float", strategy="block", block_structure=[40, 24]),
         lambda r, s: ({"weight": (made := fp8_blocks(r, s))[0]["weight"],
                        "weight_scale": made[0]["weight_scale_inv"]}, made[1])),
    Form("int4 (compressed-tensors)", compressed(num_bits=4, strategy="group", group_size=16), packed),
    Form("int4 (compressed-tensors)", compressed(num_bits=4, group_size=16, actorder="group"),
         lambda r, s: packed(r, s, index=True)),
    Form("int4 (compressed-tensors)", compressed(num_bits=4, group_size=16, symmetric=False),
         lambda r, s: packed(r, s, zeros=True)),
    Form("int8 (compressed-tensors)", compressed(group_size=16, symmetric=False),
         lambda r, s: packed(r, s, 8, zeros=True)),
    Form("int8 (compressed-tensors)", compressed(strategy="channel", symmetric=False), int8_with_zeros),
    Form("NVFP4", compressed(num_bits=4, type="float", strategy="tensor_group", group_size=16), nvfp4),
    Form("MXFP4", compressed(num_bits=4, type="float", strategy="group", group_size=32), mxfp4_layer),
]  # fmt: skip


def model(form: Form, seed: int = 0) -> tuple[Tensors, Tensors]:
    """The tensors of a LLaMA in this form, and those of the float checkpoint of the same model."""
    architecture = models.find(CONFIG)
    linear = {n for n, p in architecture.spec(architecture.parse(CONFIG)).parameters.items() if p.role is Role.LINEAR}
    stored: Tensors = {}
    values = random_tensors(CONFIG, seed)
    for number, name in enumerate(sorted(linear)):
        parts, values[name] = form.make(Random(seed + number), values[name].shape)
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        stored |= {f"{module}.{part}": np.ones((), np.float32) for part in form.extra}
    return {**{name: value for name, value in values.items() if name not in linear}, **stored}, values


def mxfp4_experts(config: Mapping[str, Any], seed: int = 0) -> tuple[Tensors, Tensors]:
    """A gpt-oss as published, and the tensors ``[experts, in, out]`` of the float checkpoint of the same model."""
    architecture = models.find(dict(config))
    spec = architecture.spec(architecture.parse(dict(config)))
    random, values = Random(seed), random_tensors(dict(config), seed)
    floats = {name: value.astype(ml_dtypes.bfloat16) for name, value in values.items()}
    stored = dict(floats)
    for name, fused in spec.fused.items():
        parts = [part for names in fused.experts for part in names]
        if name.endswith("_bias"):
            fused_bias = fused.joined(floats)
            stored = {k: v for k, v in stored.items() if k not in parts} | {name: fused_bias}
            floats = {k: v for k, v in floats.items() if k not in parts} | {name: fused_bias}
        elif name.endswith("_blocks"):
            experts, rows, columns = fused.shape(spec.parameters)
            bits = random.bits((experts, rows, columns // 32, 16), np.uint8)
            exponents = random.exponents((experts, rows, columns // 32))
            matrix = fp4_by_bits(bits.reshape(-1, columns // 2)).reshape(experts, rows, columns)
            matrix = matrix * np.repeat(np.exp2(exponents.astype(np.float32) - 127), 32, axis=2)
            plain = name.removesuffix("_blocks")
            stored = {k: v for k, v in stored.items() if k not in parts} | {name: bits, f"{plain}_scales": exponents}
            transposed = np.ascontiguousarray(np.swapaxes(matrix, 1, 2)).astype(ml_dtypes.bfloat16)
            floats = {k: v for k, v in floats.items() if k not in parts} | {plain: transposed}
    return stored, floats
