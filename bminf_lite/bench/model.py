"""The model that is measured: a network on its device, from a checkpoint or with random weights of a shape.

A shape is a configuration in the form of a checkpoint's ``config.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np

from ..backend.base import Backend
from ..backend.communicator import on_ranks
from ..backend.quantization import HostWeight, Int8Weight
from ..backend.random_matrix import FLOAT_UNIT, RandomMatrix
from ..checkpoint.opened_model import ModelDescription, describe_model, open_model
from ..checkpoint.reader import read_json
from ..checkpoint.recipe import Recipe, Scheme, load_recipe
from ..engine.config import EngineConfig
from ..engine.network import Network
from ..engine.speculative import SpeculativeConfig
from ..errors import UsageError, choices
from ..layers.loading import Weights
from ..memory.planner import MemoryPlan
from ..models.spec import Role, Spec
from ..placement import checkpoint_requirements, make_engine_config, plan_placement, recipe_schemes, requirements

CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")
"""Ends of the names of biases that correct a router's choice. Training sets them so that all experts are used."""
LARGEST_CORRECTION = 0.01
"""The largest of these biases, beside scores between 0 and 1 whose standard deviation is about 0.2."""
ROUTED_TABLE_UNIT = 2
"""Elements of an embedding before routers are codes over this, about 37, if norms alone read the residual stream.

A layer adds about 1, so rows differ as their tokens do. With elements of 1, what layers add to all rows alike prevails
after some layers, which is the mean of an attention's values or of squared ReLUs; then most rows choose the same
experts.
"""
STREAM_FACTORS = ("layer_scalar",)
"""Ends of the names of factors of the whole residual stream behind a layer, whose product over layers stays about 1."""


def shape_names() -> list[str]:
    """The shapes that come with the package, sorted."""
    folder = resources.files("bminf_lite").joinpath("configs")
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


def read_shape(name: str) -> dict[str, Any]:
    """The configuration of the shape ``name``, or that in the file ``name``.

    Raises ``UsageError`` if there is neither, ``CheckpointError`` for a file that is not a JSON object.
    """
    if name in shape_names():
        with resources.as_file(resources.files("bminf_lite").joinpath("configs", f"{name}.json")) as path:
            return read_json(path)
    if Path(name).is_file():
        return read_json(Path(name))
    found = choices(name, shape_names(), '"bminf-lite bench" alone lists all')
    raise UsageError(f"--shape {name!r} is neither a file nor a packaged shape; {found}")


@dataclass(frozen=True)
class BenchModel:
    """A model that is ready to run.

    ``parameters`` counts elements, tied ones once; ``nbytes`` are the bytes of weights that were read. ``plan`` says
    where the weights are; None on a CPU. ``peers`` has the networks of the other ranks of a model that is divided.
    """

    name: str
    network: Network
    engine_config: EngineConfig
    parameters: int
    nbytes: int
    plan: MemoryPlan | None = None
    peers: tuple[Network, ...] = ()

    @property
    def networks(self) -> tuple[Network, ...]:
        """The networks of all ranks."""
        return (self.network, *self.peers)

    @property
    def ranks(self) -> list[BenchModel]:
        """The model as each rank has it."""
        return [replace(self, network=network, peers=()) for network in self.networks]

    @property
    def ops(self) -> Backend:
        """The backend, of the first rank."""
        return self.network.ops

    def cache_bytes(self, tokens: float, states: float = 0.0) -> float:
        """Bytes of a rank's keys and values of ``tokens`` tokens of one sequence, and of ``states`` of its states."""
        layout = self.engine_config.cache_layout.shard(self.ops.communicator.tp_size)
        itemsize = self.ops.activation_dtype.itemsize
        return tokens * layout.bytes_per_token(itemsize) + states * layout.bytes_per_sequence(itemsize)


def random_model(
    name: str,
    config: Mapping[str, Any],
    ops: Backend | Sequence[Backend],
    kv_cache: str = "fp16",
    max_batch: int | None = None,
    recipe: str | Recipe = "w8a8",
    max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens,
    speculative: SpeculativeConfig | None = None,
) -> BenchModel:
    """A model of the shape ``config`` with random int8 weights, made on the device.

    ``kv_cache``, ``max_batch`` and ``max_num_batched_tokens`` are those of ``load``. ``ops`` are the backends of all
    ranks, or one. ``recipe`` says how each matrix is quantized and rotated, without a calibration. Layers that do not
    fit the memory limit are streamed, as those of a checkpoint are. Adapters have the backends' slots. With
    ``speculative``, which names no model, the engine drafts. Raises ``UsageError`` for a recipe that leaves a matrix
    float.
    """
    num_draft_tokens = 0 if speculative is None else speculative.num_draft_tokens
    described, chosen = describe_model(config), load_recipe(recipe)
    _require_generating(described)
    spec, ranks = described.spec, _ranks(ops)
    plan = plan_placement(
        ranks,
        spec,
        lambda: requirements(
            described, recipe_schemes(spec, chosen), kv_cache, num_draft_tokens, ranks[0].adapter_slots, len(ranks)
        ),
        max_chunk=max_num_batched_tokens,
    )
    name = name if chosen.name == "w8a8" else f"{name}, {chosen.name}"
    if plan is not None:
        plan = replace(plan, exponent=0.0)  # random routers choose all experts about equally often
    weights = RandomWeights(spec, chosen)
    made = _build(name, described, weights, ranks, plan, kv_cache, max_batch, max_num_batched_tokens)
    if speculative is None:
        return made
    engine_config = replace(made.engine_config, num_draft_tokens=num_draft_tokens, speculative=speculative)
    return replace(made, engine_config=engine_config)


def _ranks(ops: Backend | Sequence[Backend]) -> Sequence[Backend]:
    return ops if isinstance(ops, Sequence) else [ops]


def _require_generating(model: ModelDescription) -> None:
    if not model.config.generates:
        raise UsageError(
            "this model makes vectors of texts, and bench measures prompts and decoding; in the repository, "
            "benchmarks/measure_embeddings.py measures vectors"
        )


def checkpoint_model(
    path: Path,
    ops: Backend | Sequence[Backend],
    kv_cache: str = "fp16",
    max_batch: int | None = None,
    max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens,
) -> BenchModel:
    """The model in the folder ``path``. Raises ``CheckpointError``, ``OutOfMemory``."""
    ranks = _ranks(ops)
    with open_model(path) as model:
        _require_generating(model.description)
        plan = plan_placement(
            ranks,
            model.spec,
            lambda: checkpoint_requirements(model, kv_cache=kv_cache, tp_size=len(ranks)),
            max_chunk=max_num_batched_tokens,
        )
        name, weights = path.resolve().name, model.weights()
        return _build(name, model.description, weights, ranks, plan, kv_cache, max_batch, max_num_batched_tokens)


def _build(
    name: str,
    model: ModelDescription,
    weights: Weights,
    ranks: Sequence[Backend],
    plan: MemoryPlan | None,
    kv_cache: str,
    max_batch: int | None,
    max_num_batched_tokens: int,
) -> BenchModel:
    config, spec = model.config, model.spec
    counted = [CountingWeights(weights) for _ in ranks]
    network, *peers = on_ranks(ranks, lambda rank: model.architecture.Model(config, counted[rank], ranks[rank]))
    int8 = kv_cache == "int8"
    cache_layout = config.cache_layout.with_int8(int8)
    engine_config = make_engine_config(config, cache_layout, plan, max_batch, max_num_batched_tokens)
    parameters = sum(math.prod(p.shape) for n, p in spec.parameters.items() if n not in spec.tied)
    name = f"{name}, int8 cache" if int8 else name
    return BenchModel(name, network, engine_config, parameters, counted[0].nbytes, plan, tuple(peers))


class CountingWeights:
    """Passes ``weights`` on and counts their bytes."""

    def __init__(self, weights: Weights):
        self._weights = weights
        self.nbytes = 0

    def weight(self, name: str) -> HostWeight:
        found = self._weights.weight(name)
        elements = math.prod(found.shape)
        self.nbytes += elements + found.scale.nbytes if isinstance(found, Int8Weight) else found.nbytes
        return found

    def vector(self, name: str) -> np.ndarray:
        found = self._weights.vector(name)
        self.nbytes += math.prod(found.shape) * np.dtype(found.dtype).itemsize
        return found


class RandomWeights:
    """Random int8 weights for ``spec``, scaled so that a layer's output is about as large as its input.

    Each expert is about as likely as another, and tokens choose independently: the biases that correct a router's
    choice are small, rows of a router's matrix have the norm 1, and the rows that it reads are mostly the tokens'
    embeddings.
    """

    def __init__(self, spec: Spec, recipe: Recipe):
        self._spec = spec
        self._recipe = recipe
        self._seeds = {name: i for i, name in enumerate(spec.parameters)}
        has_routers = any(parameter.role is Role.ROUTER for parameter in spec.parameters.values())
        self._table_unit = ROUTED_TABLE_UNIT if has_routers and spec.stream is not None else FLOAT_UNIT

    def weight(self, name: str) -> HostWeight:
        parameter = self._spec.parameters[name]
        rows, columns = parameter.shape[::-1] if parameter.transposed else parameter.shape
        seed = self._seeds[name]
        if parameter.role is Role.EMBEDDING:  # a tied head: with the codes of the table, each token would choose itself
            seed += len(self._seeds)
        codes = RandomMatrix((rows, columns), np.int8, seed)
        spread = np.random.default_rng(self._seeds[name]).uniform(0.5, 1.5, rows)
        scheme = self._recipe.scheme_of(name, parameter.role is Role.HEAD)
        if scheme is Scheme.FLOAT:
            raise UsageError(f"recipe {self._recipe.name}: leaves {name} float; random weights are int8 (w8a8, w8a16)")
        return Int8Weight(
            cast(np.ndarray, codes),
            (spread / (73.3 * columns**0.5)).astype(np.float32),
            scheme is Scheme.W8A8,
            rotation=self._recipe.rotation_of(self._spec, name),
        )

    def vector(self, name: str) -> np.ndarray:
        parameter = self._spec.parameters[name]
        if parameter.role is Role.EMBEDDING:
            rows, columns = parameter.shape
            return cast(np.ndarray, RandomMatrix((rows, columns), np.float16, self._seeds[name], unit=self._table_unit))
        random = np.random.default_rng(self._seeds[name])
        if parameter.role is Role.ROUTER:
            matrix: np.ndarray = random.standard_normal(parameter.shape).astype(np.float32)
            matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
            return matrix
        if name.endswith(CORRECTION_BIASES):
            return random.uniform(-LARGEST_CORRECTION, LARGEST_CORRECTION, parameter.shape).astype(np.float32)
        if name.endswith(STREAM_FACTORS):
            return random.uniform(0.95, 1.05, parameter.shape).astype(np.float32)
        if len(parameter.shape) == 3:  # a convolution of each channel, over the last axis
            return random.uniform(0.5, 1.5, parameter.shape).astype(np.float32) / np.float32(parameter.shape[-1] ** 0.5)
        if name.endswith(".bias"):
            return random.uniform(-0.1, 0.1, parameter.shape).astype(np.float32)
        return random.uniform(0.5, 1.5, parameter.shape).astype(np.float32)
