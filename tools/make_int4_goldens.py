"""Make tests/data/int4_layouts.npz: what AutoGPTQ and AutoAWQ pack, and the weights that they make of it.

    python tools/make_int4_goldens.py FOLDER_OF_AUTO_GPTQ_0.7.1 FOLDER_OF_AUTOAWQ_0.2.9

The folders are the unpacked packages of PyPI (``pip download --no-deps``); two files of them are loaded, without their
dependencies and kernels. Needs torch and transformers. Each case has ``{case}/{tensor}``, ``{case}/weight`` fp32
``[out, in]`` and ``{case}/bits``.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

OUTPUTS, INPUTS, GROUP = 64, 96, 32
TARGET = Path(__file__).parents[1] / "tests" / "data" / "int4_layouts.npz"


def module_of(path: Path) -> ModuleType:
    """A file as a module, without the package that it is in."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gptq(qlinear: ModuleType, bits: int, act_order: bool) -> dict[str, np.ndarray]:
    """A random weight, packed and multiplied with the identity by AutoGPTQ."""
    generator = torch.Generator().manual_seed(bits + 10 * act_order)
    linear = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator) / 10
    index = torch.arange(INPUTS) // GROUP
    if act_order:
        index = index[torch.randperm(INPUTS, generator=generator)]
    groups = INPUTS // GROUP
    high = torch.stack([weight[:, index == g].amax(1) for g in range(groups)], 1)
    low = torch.stack([weight[:, index == g].amin(1) for g in range(groups)], 1)
    scales = ((high - low) / (2**bits - 1)).half().float()
    zeros = torch.round(-low / scales).clamp(1, 2**bits - 1)
    codes = torch.round(weight / scales[:, index] + zeros[:, index]).clamp(0, 2**bits - 1)
    linear.weight.data = (codes - zeros[:, index]) * scales[:, index]
    packed = qlinear.QuantLinear(bits, GROUP, INPUTS, OUTPUTS, False, weight_dtype=torch.float32)
    packed.pack(linear, scales, zeros.clone(), index.to(torch.int32))
    found = packed(torch.eye(INPUTS)).T
    return {
        "qweight": packed.qweight.numpy(), "qzeros": packed.qzeros.numpy(), "scales": scales.T.half().numpy(),
        "g_idx": packed.g_idx.numpy(), "weight": found.detach().numpy(), "bits": np.array(bits),
    }  # fmt: skip


def awq(packing: ModuleType) -> dict[str, np.ndarray]:
    """Random words, and the weight that AutoAWQ makes of them."""
    rng = np.random.default_rng(1)
    info = np.iinfo(np.int32)
    words = rng.integers(info.min, info.max, (INPUTS, OUTPUTS // 8), np.int32, endpoint=True)
    zeros = rng.integers(info.min, info.max, (INPUTS // GROUP, OUTPUTS // 8), np.int32, endpoint=True)
    scales = (0.01 * (1 + rng.random((INPUTS // GROUP, OUTPUTS)))).astype(np.float16)
    as_torch = [torch.from_numpy(values) for values in (words, zeros, scales.astype(np.float32))]
    weight = packing.dequantize_gemm(*as_torch, 4, GROUP).T.contiguous()
    return {"qweight": words, "qzeros": zeros, "scales": scales, "weight": weight.numpy(), "bits": np.array(4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("auto_gptq", type=Path)
    parser.add_argument("autoawq", type=Path)
    args = parser.parse_args()
    qlinear = module_of(args.auto_gptq / "auto_gptq" / "nn_modules" / "qlinear" / "qlinear_cuda.py")
    cases = {f"gptq{bits}": gptq(qlinear, bits, act_order=False) for bits in (2, 4, 8)}
    cases["gptq4_act_order"] = gptq(qlinear, 4, act_order=True)
    cases["awq"] = awq(module_of(args.autoawq / "awq" / "utils" / "packing_utils.py"))
    arrays = {f"{case}/{name}": values for case, tensors in cases.items() for name, values in tensors.items()}
    np.savez_compressed(TARGET, **arrays)
    print(f"{TARGET}: {len(arrays)} arrays, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
