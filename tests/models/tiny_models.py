"""Tiny random models: weights from a seed, alike wherever they are made, and the few lines that run one.

A golden file holds a configuration, a seed, token ids and the logits that transformers computed. The weights come from
the raw output of NumPy's PCG64, whose stream NumPy promises to keep, in the order of the tensors' names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bminf_lite import models
from bminf_lite.backend.base import Backend
from bminf_lite.backend.quantization import HostWeight, quantize_weight
from bminf_lite.backend.values import Step
from bminf_lite.layers.cache import KVCache

GOLDENS = Path(__file__).parents[1] / "goldens"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def random_tensors(seed: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """fp32 tensors, sized so that attention has contrast, no layer is idle, and biases and gains matter."""
    generator = np.random.PCG64(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        raw = generator.random_raw(int(np.prod(shape)))
        uniform = (raw >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - np.float32(1)  # [-1, 1)
        if name.endswith("norm.weight"):
            values = 1 + np.float32(0.3) * uniform
        elif name.endswith(".bias"):
            values = np.float32(0.5) * uniform
        elif name.endswith("embed_tokens.weight"):
            values = uniform
        else:
            gain = 2.5 if name.endswith(("q_proj.weight", "k_proj.weight", "lm_head.weight")) else 1.7
            values = np.float32(gain / np.sqrt(shape[1])) * uniform
        tensors[name] = values.reshape(shape)
    return tensors


def random_tokens(seed: int, count: int, vocab_size: int) -> np.ndarray:
    """Token ids, int32 ``[count]``."""
    return (np.random.PCG64([seed, 1]).random_raw(count) % np.uint64(vocab_size)).astype(np.int32)


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """A checksum of names and values, to tell a changed generator from a changed result."""
    total = hashlib.sha256()
    for name, values in sorted(tensors.items()):
        total.update(name.encode() + values.astype("<f4").tobytes())
    return total.hexdigest()[:16]


@dataclass(frozen=True)
class Golden:
    """One configuration, as a ``config.json`` holds it, and transformers' fp32 logits ``[tokens, vocab]``."""

    name: str
    config: dict[str, Any]
    seed: int
    weights: str
    tokens: np.ndarray
    logits: np.ndarray

    def __str__(self) -> str:
        return f"{self.config['model_type']}: {self.name}"


def goldens(family: str) -> Iterator[Golden]:
    """The committed cases of one family."""
    cases = json.loads((GOLDENS / f"{family}.json").read_text())
    with np.load(GOLDENS / f"{family}.npz") as arrays:
        for name, case in cases.items():
            tokens = np.array(case["tokens"], np.int32)
            yield Golden(name, case["config"], case["seed"], case["weights"], tokens, arrays[name])


class RandomWeights:
    """A model's tensors, float or quantized as migration does it; what a checkpoint is to the layers."""

    def __init__(self, config: dict[str, Any], seed: int, quantized: bool = False, dynamic: bool = True):
        architecture = models.find(config)
        spec = architecture.spec(architecture.parse(config))
        self.tied = spec.tied
        shapes = {name: p.shape for name, p in spec.parameters.items() if name not in spec.tied}
        self.tensors = random_tensors(seed, shapes)
        self.quantized = quantized
        self.dynamic = dynamic

    def vector(self, name: str) -> np.ndarray:
        return self.tensors[self.tied.get(name, name)]

    def weight(self, name: str) -> HostWeight:
        return quantize_weight(self.vector(name), self.dynamic) if self.quantized else self.vector(name)


class TinyModel:
    """A model on a backend with a cache of its own, driven step by step."""

    def __init__(self, backend: Backend, config: dict[str, Any], weights: RandomWeights, slots: int = 1):
        architecture = models.find(config)
        self.backend = backend
        self.config = architecture.parse(config)
        self.network = architecture.Model(self.config, weights, backend)
        self.slots = slots
        self.clear()

    def clear(self) -> None:
        """Forget every sequence."""
        self.past = [0] * self.slots
        self.cache = KVCache(self.backend, self.config.cache_shape, self.slots, 16, 1024)

    def run(self, *rows: Sequence[int], slots: Sequence[int] | None = None, all_logits: bool = True) -> np.ndarray:
        """One step with new tokens for each of some slots: logits of all tokens, packed, or of each row's last."""
        slots = list(range(len(rows))) if slots is None else list(slots)
        counts = [len(row) for row in rows]
        past = [self.past[s] for s in slots]
        for slot, count in zip(slots, counts, strict=True):
            self.past[slot] += count
        reach = max(self.past[s] for s in slots)
        self.cache.reserve(reach)
        values = np.concatenate(rows), np.cumsum([0, *counts]), past, slots
        arrays = (self.backend.array(np.asarray(x, np.int32)) for x in values)
        step = Step(*arrays, count=len(rows), longest=max(counts), reach=reach)
        return np.array(self.backend.host(self.network(step, self.cache, all_logits)))
