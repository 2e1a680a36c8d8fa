"""Writes random adapters of the experts of tiny models as PEFT saves them, without torch."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from adapter_files import write_adapter
from tiny_models import Golden, RandomWeights, goldens

from bminf_lite.models.spec import FusedExperts

RANK = 3


def named(family: str) -> Golden:
    return next(goldens(family))


def saved(golden: Golden, folder: Path) -> dict[str, np.ndarray]:
    """The golden's tensors, which are saved in ``folder``."""
    tensors = RandomWeights(golden.config, golden.seed).tensors
    golden.save(folder, tensors)
    return tensors


def parameters(golden: Golden) -> dict[str, FusedExperts]:
    """The parameters that hold the matrices of all experts in transformers, by their names here."""
    ends = ("_blocks", "_bias")
    return {name: fused for name, fused in golden.spec.fused.items() if not name.endswith(ends)}


def matrices(golden: Golden) -> list[str]:
    return [name for fused in parameters(golden).values() for name in chain(*fused.experts)]


Factors = dict[str, tuple[np.ndarray, np.ndarray]]


def random_factors(golden: Golden, seed: int = 0, names: list[str] | None = None) -> Factors:
    """Factors of matrices of experts: those of an expert that are one parameter share the first factor."""
    rng, spec, found = np.random.default_rng(seed), golden.spec, {}
    for fused in parameters(golden).values():
        for expert in fused.experts:
            a = None
            for name in expert:
                out, features = spec.parameters[name].shape
                a = rng.standard_normal((RANK, features), np.float32) / np.sqrt(features) if a is None else a
                found[name] = a.astype(np.float32), rng.standard_normal((out, RANK), np.float32) / 2
    return found if names is None else {name: found[name] for name in names}


def as_modules(factors: Factors, folder: Path, **config: Any) -> Path:
    """An adapter's folder, as PEFT saves modules."""
    tensors = {}
    for name, (a, b) in factors.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
    return write_adapter(folder, tensors, **{"r": RANK, "lora_alpha": 6, **config})


def as_parameters(golden: Golden, factors: Factors, folder: Path, turned: bool = False, **config: Any) -> Path:
    """The same, as PEFT saves ``target_parameters``: one wrapper of a module inside of another."""
    tensors, wrapped = {}, {}
    for name, fused in parameters(golden).items():
        stacked = []
        for expert in fused.experts:
            rows = [factors[matrix][1] for matrix in expert]
            b = np.stack(rows, axis=1).reshape(-1, RANK) if fused.interleaved else np.concatenate(rows)
            a = factors[expert[0]][0]
            stacked.append((b.T, a.T) if turned and not fused.transposed else (a, b))
        module = "base_model.model." + re.sub(r"\.block_sparse_moe\.", ".mlp.", name.rpartition(".")[0])
        depth = wrapped[module] = wrapped.get(module, 0) + 1
        wrapper = module + ".base_layer" * (2 - depth)
        tensors[f"{wrapper}.lora_A.weight"] = np.ascontiguousarray(np.concatenate([a for a, _ in stacked]))
        b = np.stack([b for _, b in stacked], axis=2)  # [out, rank, experts]
        tensors[f"{wrapper}.lora_B.weight"] = np.ascontiguousarray(b.reshape(len(b), -1))
    options = {"r": RANK, "lora_alpha": 6, "target_modules": [], "target_parameters": ["gate_up_proj"]}
    return write_adapter(folder, tensors, **{**options, "peft_version": "0.18.1" if turned else "0.21.2", **config})
