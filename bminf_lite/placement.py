"""From a checkpoint, or from a configuration alone, to what its model asks of a device.

The model is built on a :class:`~bminf_lite.backend.meta.MetaBackend` with weights that have a shape and no values, so
this costs milliseconds for any size, and holds for every architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from . import models
from .backend.base import Backend
from .backend.meta import MetaBackend
from .backend.quantization import HostWeight, Int8Weight
from .checkpoint.reader import Checkpoint, open_checkpoint, read_json
from .checkpoint.recipe import Recipe, Scheme, load_recipe
from .engine.config import EngineConfig
from .errors import OutOfMemory
from .layers.cache import CacheShape
from .memory.machine import available_memory
from .memory.planner import CHUNK, Machine, MemoryPlan, MemoryRequirements, plan_memory
from .memory.sizes import format_size
from .models.spec import Role, Spec

LIBRARY_BYTES = 48 << 20
"""What cublasLt's workspace and the kernels' own small arrays take on the device."""
HEAD_PAD = 16
"""Heads in a GPU's cache are padded to a multiple of so many elements."""

SchemeOf = Callable[[str], Scheme]


class MetaWeights:
    """A model's tensors without their values. ``scheme_of`` says how a matrix is quantized, by its name."""

    def __init__(self, spec: Spec, scheme_of: SchemeOf):
        self.spec = spec
        self.scheme_of = scheme_of

    def weight(self, name: str) -> HostWeight:
        """A matrix of zeros that takes no memory."""
        parameter = self.spec.parameters[name]
        shape = parameter.shape[::-1] if parameter.transposed else parameter.shape
        scheme = self.scheme_of(name)
        if scheme is Scheme.FLOAT:
            return np.broadcast_to(np.float16(0), shape)
        codes, scale = np.broadcast_to(np.int8(0), shape), np.broadcast_to(np.float16(1), shape[:1])
        return Int8Weight(codes, scale, scheme is Scheme.W8A8)

    def vector(self, name: str) -> np.ndarray:
        """A float tensor of zeros that takes no memory."""
        return np.broadcast_to(np.float32(0), self.spec.parameters[name].shape)


def requirements_of(path: str | Path, recipe: str | Path | None = None, kv_cache: str = "fp16") -> MemoryRequirements:
    """What the checkpoint in the folder ``path`` asks of a device, or the model whose ``config.json`` the file is.

    With ``recipe`` as if it were migrated by that; by default a checkpoint as it is, and a configuration as
    ``w8a8``. Raises ``CheckpointError`` and ``UsageError``.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".json":
        config = read_json(path)
        architecture = models.find(config)
        spec = architecture.spec(architecture.parse(config))
        return requirements(architecture, config, recipe_schemes(spec, load_recipe(recipe or "w8a8")), kv_cache)
    with open_checkpoint(path) as checkpoint:
        return checkpoint_requirements(checkpoint, recipe, kv_cache)


def checkpoint_requirements(
    checkpoint: Checkpoint, recipe: str | Path | None = None, kv_cache: str = "fp16"
) -> MemoryRequirements:
    """What the model of an open checkpoint asks of a device, as it is stored or as if it were migrated."""
    architecture = models.find(checkpoint.config)
    spec = architecture.spec(architecture.parse(checkpoint.config))
    checkpoint.validate(spec)
    scheme_of = recipe_schemes(spec, load_recipe(recipe)) if recipe is not None else stored_schemes(checkpoint, spec)
    return requirements(architecture, checkpoint.config, scheme_of, kv_cache)


def plan_placement(
    ops: Backend, spec: Spec, get_requirements: Callable[[], MemoryRequirements], context: int | None = None
) -> MemoryPlan | None:
    """MemoryPlan for the memory that a backend can still get, and tell it where the weights are to live.

    None where its memory is the host's, in which all weights of ``spec`` must fit. Raises ``OutOfMemory``, saying what
    would fit.
    """
    memory = ops.memory()
    if "available" not in memory:
        _require_host_memory(spec)
        return None
    plan = plan_memory(get_requirements(), Machine(memory["available"] + memory["used"]), context)
    ops.placement = plan.placement
    return plan


def make_engine_config(
    config: Any, cache_shape: CacheShape, plan: MemoryPlan | None, max_batch: int = EngineConfig.max_batch
) -> EngineConfig:
    """What bounds the runs of a model of that parsed configuration, whose weights live where ``plan`` says."""
    return EngineConfig(
        config.context_length,
        config.vocab_size,
        cache_shape,
        max_batch,
        max_num_batched_tokens=plan.chunk if plan is not None else CHUNK,
        cache_tokens=plan.context if plan is not None and plan.host_tables else 0,
        is_encoder_decoder=bool(getattr(config, "max_source_length", 0)),
        max_source_length=getattr(config, "max_source_length", 0),
        decoder_start_token_ids=getattr(config, "decoder_start_token_ids", ()),
    )


def _require_host_memory(spec: Spec) -> None:
    """Raise ``OutOfMemory`` where a CPU's weights, fp32 whatever they are stored as, are more than the host has free.

    Linux would give that memory all the same, and kill a process once it is used.
    """
    needed, free = sum(4 * math.prod(p.shape) for p in spec.parameters.values()), available_memory()
    if free is not None and needed > free:
        raise OutOfMemory(
            f"the model's weights take {format_size(needed)} on a CPU, which computes in fp32, but the host has "
            f"{format_size(free)} free; run it on a GPU, or on a host with more memory"
        )


def requirements(
    architecture: ModuleType, config: dict[str, Any], scheme_of: SchemeOf, kv_cache: str = "fp16"
) -> MemoryRequirements:
    """What a model of ``config`` asks of a device; ``kv_cache`` is ``fp16`` or ``int8``."""
    parsed = architecture.parse(config)
    meta = MetaBackend()
    architecture.Model(parsed, MetaWeights(architecture.spec(parsed), scheme_of), meta)
    *encoders, layers = meta.layer_bytes
    return MemoryRequirements(
        layers=tuple(layers),
        prompt_layers=tuple(size for stack in encoders for size in stack),
        fixed=meta.non_layer_bytes + LIBRARY_BYTES,
        tables=meta.table_bytes,
        fixed_read=meta.non_layer_bytes - meta.table_bytes,
        cache_per_token=cache_bytes(parsed.cache_shape, kv_cache) * len(meta.layer_bytes),  # a source has its own
        scratch_per_token=meta.token_bytes,
        scratch_per_sequence=16 * parsed.vocab_size,
        context_length=parsed.context_length,
    )


def cache_bytes(shape: CacheShape, kv_cache: str) -> int:
    """What a token of one sequence takes in a GPU's cache: fp16, or int8 with an fp16 scale per head."""
    padded = -(-shape.head_dim // HEAD_PAD) * HEAD_PAD
    per_head = padded + 2 if kv_cache == "int8" else 2 * padded
    return 2 * shape.layers * shape.kv_heads * per_head


def recipe_schemes(spec: Spec, recipe: Recipe) -> SchemeOf:
    """Schemes as migration with ``recipe`` chooses them."""
    return lambda name: recipe.scheme_of(name, spec.parameters[name].role is Role.HEAD)


def stored_schemes(checkpoint: Checkpoint, spec: Spec) -> SchemeOf:
    """Schemes as a checkpoint has them; what is quantized when it is loaded is so as its manifest says."""
    weights = checkpoint.weights(spec)

    def scheme_of(name: str) -> Scheme:
        if name in spec.tied:
            return weights.tied_scheme
        if spec.parameters[name].transposed:
            return weights.late.get(name, Scheme.FLOAT)
        group = checkpoint.quantization.group_of(name.removesuffix(".weight")) if checkpoint.quantization else None
        if group is None:
            return Scheme.FLOAT
        return Scheme.W8A8 if group.dynamic else Scheme.W8A16

    return scheme_of
