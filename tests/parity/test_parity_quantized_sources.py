"""Weights that others have quantized, beside the code of transformers and compressed-tensors that dequantizes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import quantized_kit as kit
from tiny_models import random_tokens
from tolerances import assert_close

import bminf_lite
from bminf_lite.checkpoint.reader import open_checkpoint

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
import make_goldens  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
GPT_OSS = make_goldens.BASE | {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_local_experts": 3,
    "num_experts_per_tok": 2, "num_key_value_heads": 2, "sliding_window": 7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip


def numpy(tensor: Any) -> np.ndarray:
    """A tensor of torch, bf16 and FP8 as their bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if tensor.dtype == torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return tensor.detach().numpy()


def read(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """A tensor of a folder that holds ``tensors``."""
    with open_checkpoint(kit.save(folder, {"model_type": "x", "quantization_config": config}, tensors)) as checkpoint:
        return checkpoint.read(name)


def test_mxfp4_is_what_transformers_reads(tmp_path: Path) -> None:
    """All bytes, and exponents down to subnormal numbers of bf16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    random = kit.Random(0)
    blocks = random.bits((2, 64, 5, 16), np.uint8)
    scales = random.rng.integers(0, 250, (2, 64, 5), np.uint8)
    found = read(tmp_path, {"quant_method": "mxfp4"}, {"x_blocks": blocks, "x_scales": scales}, "x_blocks")
    expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    np.testing.assert_array_equal(np.swapaxes(found, 1, 2), numpy(expected))


@pytest.mark.parametrize(("rows", "columns", "block"), [(256, 384, 128), (96, 64, 32)])
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16, np.uint8])
def test_fp8_is_what_transformers_reads(rows: int, columns: int, block: int, scale_dtype: Any, tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    random, shape = kit.Random(1), (rows // block, columns // block)
    codes = random.fp8((rows, columns))
    scales = random.exponents(shape) if scale_dtype is np.uint8 else random.scales(shape, scale_dtype)
    config = kit.FP8 | {"weight_block_size": [block, block]}
    found = read(tmp_path, config, {"x.weight": codes, "x.weight_scale_inv": scales}, "x.weight")
    fp8 = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
    if scale_dtype is ml_dtypes.bfloat16:
        as_torch = torch.from_numpy(scales.view(np.int16)).view(torch.bfloat16)
    else:
        as_torch = torch.from_numpy(scales)
    expected = Fp8Dequantize(None)._dequantize_one(fp8, as_torch, torch.float32)
    np.testing.assert_array_equal(found, numpy(expected))


def test_a_published_gpt_oss_has_the_logits_of_transformers(tmp_path: Path) -> None:
    stored, _ = kit.mxfp4_experts(GPT_OSS)
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    config = GPT_OSS | {"architectures": ["GptOssForCausalLM"], "quantization_config": quantization}
    assert_same_logits(kit.save(tmp_path, config, stored))


def test_an_fp8_checkpoint_has_the_logits_of_transformers(tmp_path: Path) -> None:
    block = [32, 32]
    config = kit.CONFIG | {"architectures": ["LlamaForCausalLM"], "vocab_size": 97}
    config["quantization_config"] = kit.FP8 | {"weight_block_size": block}

    def make(random: kit.Random, shape: tuple[int, int]) -> kit.Made:
        codes, scales = random.fp8(shape), random.scales((shape[0] // 32, shape[1] // 32)) / 100
        return {"weight": codes, "weight_scale_inv": scales}, codes.astype(np.float32)

    stored, _ = kit.model(kit.Form("", kit.FP8, make))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        stored[name] = np.resize(stored[name], (97, 64))
    assert_same_logits(kit.save(tmp_path, config, stored))


def assert_same_logits(folder: Path) -> None:
    """A folder has the same logits here and in transformers, which dequantizes it without a GPU too."""
    tokens = random_tokens(3, 33, 97)
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    expected = make_goldens.logits_of(hf.eval(), tokens)
    with bminf_lite.load(folder, device="cpu") as model:
        assert_close(model.logits(tokens), expected, "logits", np.float32, np.abs(expected).max())


WEIGHTS: list[tuple[str, dict[str, Any]]] = [
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32]}),
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
    ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel", "symmetric": False}),
    ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}),
    ("naive-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
]


@pytest.mark.parametrize(("layout", "weights"), WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compressed_tensors_reads_the_same(layout: str, weights: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    """Its compressor writes the tensors, and its decompression, in the type of the scales, is ours rounded to it."""
    compressors = pytest.importorskip("compressed_tensors.compressors", reason="parity needs compressed-tensors")
    from compressed_tensors.quantization import QuantizationScheme

    random, rows, columns = kit.Random(2), 96, 64
    args = {"symmetric": True, "dynamic": False} | weights
    size, strategy = weights.get("group_size") or columns, weights["strategy"]
    shape = {"tensor": (1,), "channel": (rows, 1), "block": (3, 2)}.get(strategy, (rows, columns // size))
    kind = getattr(torch, dtype)
    exponents = random.rng.integers(-9, -5, shape)
    scale = torch.from_numpy(np.exp2(exponents) if layout.startswith("mx") else random.scales(shape)).to(kind)
    weight = torch.from_numpy(random.rng.standard_normal((rows, columns)).astype(np.float32) / 40).to(kind)
    state = {"weight": weight, "weight_scale": scale}
    if not args["symmetric"]:
        zeros = random.rng.integers(-8, 8, shape) if args["num_bits"] == 4 else random.rng.integers(-50, 50, shape)
        state["weight_zero_point"] = torch.from_numpy(zeros.astype(np.int8))
    if strategy == "tensor_group":
        state["weight_global_scale"] = torch.tensor([1.5])
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=layout)
    compressor = compressors.BaseCompressor.get_value_from_registry(layout)
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]
    config = {"quant_method": "compressed-tensors", "format": layout, "ignore": [],
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}}  # fmt: skip
    tensors = {f"x.{name}": numpy(values.detach()) for name, values in stored.items()}
    found = read(tmp_path, config, tensors, "x.weight")
    np.testing.assert_array_equal(found.astype(numpy(expected).dtype), numpy(expected))
