"""The memory that a checkpoint's or a configuration's model needs, and the plan of where its weights are stored.

The model is built on a :class:`~bminf_lite.backend.meta.MetaBackend` with weights that have a shape and no values. That
takes milliseconds for any size and needs no formula per architecture.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from .backend import MAX_GPUS
from .backend.adapter_slots import MOST_RANK, MOST_SLOTS, AdapterSlots
from .backend.base import Backend
from .backend.cache_values import AllTokens, Retention
from .backend.communicator import OneRank
from .backend.meta import MetaBackend
from .backend.quantization import HostWeight, Int8Weight
from .backend.values import Placement
from .checkpoint.draft_head import HeadWeights, describe_head, head_scheme, head_token_ids, open_head, require_fit
from .checkpoint.draft_layer import describe_layer, open_layer
from .checkpoint.opened_model import ModelDescription, OpenedModel, describe_model, open_model
from .checkpoint.reader import read_json
from .checkpoint.recipe import Recipe, Scheme, load_recipe
from .cuda.kernels.arrays import HEAD_PAD
from .engine.config import EngineConfig
from .engine.draft_model import DraftedNetwork, HeadedNetwork
from .engine.network import DraftNetwork, Network, ObservedNetwork
from .engine.speculative import AUTO, EAGLE3, MTP, NGRAM, SpeculativeConfig
from .errors import OutOfMemory, UsageError, require_bool, require_whole
from .files import expand
from .layers.cache import CacheLayout, Latent, Layout
from .memory.cache_memory import CacheGroup, cache_blocks
from .memory.machine import HOST_RESERVE, available_memory, machine_of
from .memory.planner import CAPTURED_TOKENS, CHUNK, Machine, MemoryPlan, MemoryRequirements, plan_memory
from .memory.sizes import format_size, parse_size
from .memory.step_time import StepWork
from .models import ModelConfig
from .models._decoder import Decoder
from .models._eagle3 import Eagle3Config, Eagle3Head
from .models._mtp import MtpConfig, MtpHead
from .models.spec import Role, Spec

LIBRARY_BYTES = 48 << 20
"""Bytes of cublasLt's workspace and the kernels' own small arrays on the device."""

LOGIT_BYTES = 16
"""Bytes of scratch for each logit: an int32 sum, an fp32 logit, and what the sampler derives from it. A step reads and
writes about as many."""
CPU_CACHE = 4 << 30
"""Bytes that a CPU is assumed to have free where the system does not say."""
LAYER_PRODUCTS = 2 * 10**11
"""Products of two numbers, about, that a GPU computes while the host launches the kernels of a layer."""
MOST_CAPTURED_TEXT_TOKENS = 4096

SchemeOf = Callable[[str], Scheme]


class MetaWeights:
    """A model's tensors without their values. ``scheme_of`` returns how a matrix is quantized, by its name."""

    def __init__(self, spec: Spec, scheme_of: SchemeOf):
        self.spec = spec
        self.scheme_of = scheme_of

    def weight(self, name: str) -> HostWeight:
        """A matrix of zeros that takes no memory."""
        parameter = self.spec.parameters[name]
        shape = parameter.shape[::-1] if parameter.transposed else parameter.shape
        return _zeros(shape, self.scheme_of(name))

    def vector(self, name: str) -> np.ndarray:
        """A float tensor of zeros that takes no memory."""
        return np.broadcast_to(np.float32(0), self.spec.parameters[name].shape)


@functools.lru_cache(4096)
def _zeros(shape: tuple[int, int], scheme: Scheme) -> HostWeight:
    """One object for all matrices that are alike: a mixture has tens of thousands."""
    if scheme is Scheme.FLOAT:
        return np.broadcast_to(np.float16(0), shape)
    codes, scale = np.broadcast_to(np.int8(0), shape), np.broadcast_to(np.float16(1), shape[:1])
    return Int8Weight(codes, scale, scheme is Scheme.W8A8)


def chosen_drafts(speculative: Any, spec: Spec, has_one_order: bool) -> SpeculativeConfig | None:
    """How a model drafts; ``speculative`` is that of ``load``.

    ``"auto"`` stands for n-grams where a step with drafts gives the bits of steps without them, on a device that
    ``has_one_order``, for a decoder that has no experts: each draft would read its own. Else it stands for no drafts.
    Raises ``UsageError``.
    """
    if not isinstance(speculative, str) or speculative != AUTO:
        return SpeculativeConfig.from_value(speculative)
    has_experts = any(parameter.role is Role.ROUTER for parameter in spec.parameters.values())
    return NGRAM if has_one_order and not has_experts and not spec.source_readers else None


def requirements_of(
    path: str | Path,
    recipe: str | Path | None = None,
    kv_cache: str = "fp16",
    speculative: Any = None,
    slots: AdapterSlots | None = None,
    tp_size: int = 1,
) -> MemoryRequirements:
    """The memory that a model needs, with its draft model if ``speculative``, that of ``load`` on a GPU, has one.

    With a ``tp_size``, it is that of one of as many ranks.

    A path is that of a checkpoint's folder, or of its ``config.json`` alone. With a ``recipe``, the model is taken as
    if it were migrated by this recipe. Without one, a checkpoint is taken as it is stored and a configuration as
    ``w8a8``. Adapters have ``slots`` like the given ones. Raises ``CheckpointError`` and ``UsageError``.
    """
    with ExitStack() as opened:
        model, scheme_of = _described(path, recipe, opened)
        drafts = chosen_drafts(speculative, model.spec, has_one_order=True)
        num_draft_tokens = 0 if drafts is None else drafts.num_draft_tokens
        own = requirements(model, scheme_of, kv_cache, num_draft_tokens, slots, tp_size)
        if drafts is None or not drafts.has_layers:
            return own
        draft_scheme_of: SchemeOf
        if drafts.method == MTP:
            draft, draft_scheme_of = describe_layer(model, path), scheme_of
        elif drafts.method == EAGLE3:
            assert drafts.model is not None
            draft, draft_scheme_of = _described_head(drafts.model, opened), head_scheme
            require_fit(model, draft, drafts.model)
        else:
            assert drafts.model is not None
            draft, draft_scheme_of = _described(drafts.model, None, opened)
            require_same_tokens(model.config, draft.config, drafts.model)
        other = requirements(draft, draft_scheme_of, kv_cache, num_draft_tokens, tp_size=tp_size)
        layout = model.config.cache_layout.beside(draft.config.cache_layout).with_int8(is_int8_cache(kv_cache))
        return with_draft_model(own, other, model.config, layout.with_drafts(num_draft_tokens).shard(tp_size))


def _described(path: str | Path, recipe: str | Path | None, opened: ExitStack) -> tuple[ModelDescription, SchemeOf]:
    """The model of a folder or a ``config.json``, and how its matrices are quantized; see :func:`requirements_of`."""
    path = expand(path)
    if path.is_file() and path.suffix == ".json":
        described = describe_model(read_json(path), path.parent)
        described = replace(described, spec=described.spec.with_drafting())
        return described, recipe_schemes(described.spec, load_recipe(recipe or "w8a8"))
    model = opened.enter_context(open_model(path))
    schemes = model.weights().scheme_of if recipe is None else recipe_schemes(model.spec, load_recipe(recipe))
    return model.description, schemes


def _described_head(path: str | Path, opened: ExitStack) -> ModelDescription:
    """The EAGLE-3 head of a folder or a ``config.json``."""
    path = expand(path)
    if path.is_file() and path.suffix == ".json":
        return describe_head(read_json(path))
    return opened.enter_context(open_head(path)).description


def open_draft(drafts: SpeculativeConfig | None, model: OpenedModel) -> AbstractContextManager[OpenedModel | None]:
    """The checkpoint of the draft model or the head for an open model, if there is one.

    Raises ``CheckpointError``, and ``UsageError`` if it is not for that model.
    """
    if drafts is not None and drafts.method == MTP:
        return open_layer(model)
    if drafts is None or drafts.model is None:
        return nullcontext()
    opened = (open_head if drafts.method == EAGLE3 else open_model)(drafts.model)
    try:
        if drafts.method == EAGLE3:
            require_fit(model.description, opened.description, opened.path)
        else:
            require_same_tokens(model.config, opened.config, opened.path)
    except BaseException:
        opened.close()
        raise
    return opened


def draft_requirements(
    draft: OpenedModel, kv_cache: str, num_draft_tokens: int, tp_size: int = 1
) -> MemoryRequirements:
    """The memory that an open draft model or head needs, or one of ``tp_size`` ranks of it."""
    scheme_of = head_scheme if isinstance(draft.config, Eagle3Config) else draft.weights().scheme_of
    return requirements(draft.description, scheme_of, kv_cache, num_draft_tokens, tp_size=tp_size)


def with_draft(network: Network, model: OpenedModel, draft: OpenedModel, ops: Backend) -> DraftedNetwork:
    """A network, that of an open ``model``, beside an open draft model or head; none of its layers is streamed."""
    ops.placement = Placement()
    slots, ops.adapter_slots = ops.adapter_slots, None  # drafts are those of the model without adapters
    try:
        return _with_draft(network, model, draft, ops)
    finally:
        ops.adapter_slots = slots


def _with_draft(network: Network, model: OpenedModel, draft: OpenedModel, ops: Backend) -> DraftedNetwork:
    num_layers = model.config.num_layers
    cost = draft_cost(checkpoint_requirements(model), draft_requirements(draft, "fp16", 0))
    if isinstance(draft.config, MtpConfig):
        layer = MtpHead(draft.config, draft.weights(), ops)
        layer.attach(network)
        return HeadedNetwork(cast(ObservedNetwork, network), num_layers, layer, cost)
    if not isinstance(draft.config, Eagle3Config):
        second = cast(DraftNetwork, draft.architecture.Model(draft.config, draft.weights(), ops))
        return DraftedNetwork(network, num_layers, second, cost)
    head = Eagle3Head(draft.config, HeadWeights.of(draft, model), ops)
    head.attach(num_layers, cast(Decoder, network).embed, head_token_ids(draft))
    return HeadedNetwork(cast(ObservedNetwork, network), num_layers, head, cost)


def require_same_tokens(config: ModelConfig, draft: ModelConfig, path: str | Path) -> None:
    """Raise ``UsageError`` for a draft model at ``path`` whose tokens are not those of the model."""
    if config.is_encoder_decoder or draft.is_encoder_decoder:
        raise UsageError("speculative: a model with an encoder neither has a draft model nor is one")
    if config.vocab_size != draft.vocab_size:
        raise UsageError(
            f"the draft model {path} has {draft.vocab_size:,} tokens in its vocabulary, but the model has "
            f"{config.vocab_size:,}; give a smaller model of the same family"
        )


def plan(
    path: str | Path,
    *,
    memory_limit: int | str | None = None,
    context: int | None = None,
    batch: int = 1,
    kv_cache: str = "fp16",
    recipe: str | Path | None = None,
    gpu_memory: int | str | None = None,
    link: float | None = None,
    bandwidth: float | None = None,
    speculative: str | Mapping[str, Any] | SpeculativeConfig | None = AUTO,
    max_adapters: int = 0,
    max_adapter_rank: int = 16,
    adapter_experts: bool = False,
    gpus: int = 1,
) -> MemoryPlan:
    """Plan which weights a GPU holds, which are streamed to it, and how fast that is; nothing is loaded.

    ``path`` is a checkpoint's folder, or a ``config.json`` alone; with a ``recipe``, as if it were migrated by it. The
    GPU has ``gpu_memory`` (bytes or ``"24GiB"``), and ``link`` and ``bandwidth`` are the speeds of copies from the host
    and of its own memory in bytes per second; without ``gpu_memory`` or ``link`` this machine's GPU is measured. The
    plan has room for ``context`` tokens of ``batch`` sequences. ``speculative`` is that of ``load``, whose draft model
    may be a ``config.json`` here. ``max_adapters`` and ``max_adapter_rank`` are those of ``load``; 0 is a model without
    adapters. With ``adapter_experts`` adapters may change the experts of a mixture too. With ``gpus``, the plan is that
    of each of them. Prints as lines of text. Raises ``CheckpointError``, ``UsageError``, ``DeviceError``, and
    ``OutOfMemory`` if nothing would fit.
    """
    require_whole("context", 1 if context is None else context)
    require_whole("batch", batch)
    require_whole("max_adapters", max_adapters, MOST_SLOTS, least=0)
    require_whole("max_adapter_rank", max_adapter_rank, MOST_RANK)
    require_whole("gpus", gpus, MAX_GPUS)
    require_bool("adapter_experts", adapter_experts)
    if adapter_experts and not max_adapters:
        raise UsageError("adapter_experts is for adapters, and max_adapters is 0: give max_adapters too")
    experts = None if adapter_experts else frozenset[str]()
    slots = AdapterSlots(max_adapters, max_adapter_rank, experts=experts) if max_adapters else None
    requirements = requirements_of(path, recipe, kv_cache, speculative, slots, gpus)
    gpu_bytes = None if gpu_memory is None else parse_size(gpu_memory)
    return plan_memory(requirements, machine_of(memory_limit, gpu_bytes, link, bandwidth), context, batch)


def checkpoint_requirements(
    model: OpenedModel,
    recipe: str | Path | None = None,
    kv_cache: str = "fp16",
    num_draft_tokens: int = 0,
    slots: AdapterSlots | None = None,
    tp_size: int = 1,
) -> MemoryRequirements:
    """The memory that the model of an open checkpoint needs, as it is stored or as if it were migrated.

    With a ``tp_size``, it is that of one of as many ranks.
    """
    scheme_of = model.weights().scheme_of if recipe is None else recipe_schemes(model.spec, load_recipe(recipe))
    return requirements(model.description, scheme_of, kv_cache, num_draft_tokens, slots, tp_size)


def draft_cost(model: MemoryRequirements, draft: MemoryRequirements) -> float:
    """The time of a step of a draft model relative to one of the model, as the bytes of the weights that they read."""
    return draft.decode.matrix_bytes / model.decode.matrix_bytes


def with_draft_model(
    model: MemoryRequirements, draft: MemoryRequirements, config: ModelConfig, layout: CacheLayout
) -> MemoryRequirements:
    """What a model needs beside a draft model that is never streamed; ``layout`` has the layers of both."""
    return replace(
        model,
        fixed=model.fixed + draft.weights - LIBRARY_BYTES,
        cache=cache_groups(config, layout),
        scratch_per_token=model.scratch_per_token + draft.scratch_per_token,
        scratch_per_sequence=model.scratch_per_sequence + draft.scratch_per_sequence,
    )


def captured_text_tokens(spec: Spec, num_layers: int) -> int:
    """The most tokens of a batch of texts that is captured.

    With more tokens the device computes a layer for longer than the host launches its kernels.
    """
    weights = sum(math.prod(p.shape) for p in spec.parameters.values() if p.role is Role.LINEAR)
    return min(max(LAYER_PRODUCTS * num_layers // max(weights, 1), CAPTURED_TOKENS), MOST_CAPTURED_TEXT_TOKENS)


def with_captured_texts(needed: MemoryRequirements, spec: Spec, config: ModelConfig) -> MemoryRequirements:
    """What a model needs that also makes vectors of texts, batches of which it captures beside its steps."""
    return replace(needed, captured_tokens=needed.captured_tokens + captured_text_tokens(spec, config.num_layers))


def with_long_texts(needed: MemoryRequirements, config: ModelConfig) -> MemoryRequirements:
    """What a model needs that makes vectors of texts which it computes in pieces.

    It keeps the fp32 residual stream of a whole text and what layers read beside it, and what one layer of each kind
    keeps.
    """
    kinds = {layouts for layouts in config.layer_layouts if layouts}
    kept = sum(group.token_bytes for layouts in kinds for group in cache_groups(config, CacheLayout(layouts)))
    rows = 4 * config.hidden_size + 2 * config.layer_input_features
    return replace(needed, text_bytes_per_token=rows + kept)


def plan_placement(
    backends: Sequence[Backend],
    spec: Spec,
    get_requirements: Callable[[], MemoryRequirements],
    context: int | None = None,
    max_chunk: int = CHUNK,
) -> MemoryPlan | None:
    """Plan for the memory that all ranks' backends can still allocate, and set their ``placement`` accordingly.

    ``get_requirements`` are those of a rank. ``context`` and ``max_chunk`` are those of :func:`.plan_memory`.
    Returns None for a CPU, whose host must have room for all weights of ``spec``. Raises ``OutOfMemory``, whose message
    names a size that would fit.
    """
    memories = [ops.memory() for ops in backends]
    if "available" not in memories[0]:
        _require_host_memory(spec)
        return None
    needed, taken = get_requirements(), backends[0].communicator.nbytes
    free = available_memory()
    host = None if free is None else max(free - HOST_RESERVE, 0) // len(backends)
    machine = Machine(min(memory["available"] + memory["used"] for memory in memories), host_memory=host)
    plan = plan_memory(replace(needed, fixed=needed.fixed + taken), machine, context, max_chunk=max_chunk)
    for ops in backends:
        ops.placement = plan.placement
        ops.expect_weights(max(plan.resident_bytes - needed.adapters - LIBRARY_BYTES - taken, 0))
    return plan


def make_engine_config(
    config: ModelConfig,
    cache_layout: CacheLayout,
    plan: MemoryPlan | None,
    max_num_seqs: int | None = None,
    max_chunk: int = CHUNK,
    prefix_cache: bool = True,
) -> EngineConfig:
    """The engine's configuration for a model of the parsed configuration ``config`` under ``plan``.

    The key-value cache has the blocks of :meth:`.MemoryPlan.num_blocks`. Without a plan (on a CPU) it takes at most a
    quarter of the host's free memory, but has room for one sequence of the model's context, and steps have up to
    ``max_chunk`` tokens.
    """
    chunk, logit_rows = max_chunk, EngineConfig.max_logit_rows
    if plan is None:
        max_num_seqs = max_num_seqs or EngineConfig.max_num_seqs
        room, groups = (available_memory() or CPU_CACHE) // 4, cache_groups(config, cache_layout, itemsize=4)
        blocks = cache_blocks(groups, config.context_length, chunk, room, max_num_seqs, snapshots=prefix_cache)
    else:
        max_num_seqs = max_num_seqs or plan.max_num_seqs
        blocks, chunk = plan.num_blocks(max_num_seqs, prefix_cache), plan.chunk
        logit_rows = min(plan.max_logit_rows, logit_rows)
    context = config.context_length
    if not config.generates:
        most = chunk if not config.reads_pieces else context if plan is None else plan.context
        context = min(context, most)
    num_blocks, num_source_blocks = (blocks[:-1], blocks[-1]) if config.is_encoder_decoder else (blocks, 0)
    return EngineConfig(
        context,
        config.vocab_size,
        cache_layout,
        tuple(num_blocks),
        num_source_blocks,
        max_num_seqs,
        max_num_batched_tokens=chunk,
        max_logit_rows=logit_rows,
        prefix_cache=prefix_cache,
        is_encoder_decoder=config.is_encoder_decoder,
        generates=config.generates,
        max_source_length=config.max_source_length,
        decoder_start_token_ids=config.decoder_start_token_ids,
        num_layers=config.num_layers,
    )


def cache_groups(config: ModelConfig, layout: CacheLayout, itemsize: int = 2) -> tuple[CacheGroup, ...]:
    """The memory of each group of layers, that of the sources of an encoder-decoder last.

    Heads are padded as on a GPU. ``itemsize`` is that of the activation type.
    """

    def group(layers: Sequence[Layout], kept: Retention) -> CacheGroup:
        arrays = [layer.block_bytes(itemsize, HEAD_PAD) for layer in layers]
        return CacheGroup.of(arrays, kept, any(layer.int8 for layer in layers))

    groups = [group(layout.layers_of(i), kept) for i, kept in enumerate(layout.groups)]
    if config.is_encoder_decoder:
        groups.append(group(layout.layers, AllTokens(config.max_source_length)))
    return tuple(groups)


def is_int8_cache(kv_cache: str) -> bool:
    """Whether ``kv_cache`` is ``int8``. Raises ``UsageError`` if it is neither that nor ``fp16``."""
    if not isinstance(kv_cache, str) or kv_cache not in ("fp16", "int8"):
        raise UsageError(f"kv_cache is {kv_cache!r}, but must be fp16 or int8")
    return kv_cache == "int8"


def _require_host_memory(spec: Spec) -> None:
    """Raise ``OutOfMemory`` if the weights, which a CPU keeps in fp32, exceed the host's free memory.

    Linux would grant the memory and kill a process when it is used.
    """
    needed, free = sum(4 * math.prod(p.shape) for p in spec.parameters.values()), available_memory()
    if free is not None and needed > free:
        raise OutOfMemory(
            f"the model's weights take {format_size(needed)} on a CPU, which computes in fp32, but the host has "
            f"{format_size(free)} free; run it on a GPU, or on a host with more memory"
        )


def requirements(
    model: ModelDescription,
    scheme_of: SchemeOf,
    kv_cache: str = "fp16",
    num_draft_tokens: int = 0,
    slots: AdapterSlots | None = None,
    tp_size: int = 1,
) -> MemoryRequirements:
    """The memory that a model, or one of ``tp_size`` ranks of it, needs; ``kv_cache`` is ``fp16`` or ``int8``.

    A step checks up to ``num_draft_tokens`` drafts of a sequence. Adapters have ``slots`` like the given ones.
    """
    config = model.config
    meta = MetaBackend()
    meta.adapter_slots = None if slots is None else slots.empty()
    meta.communicator = OneRank(tp_size=tp_size)
    model.architecture.Model(config, MetaWeights(model.spec, scheme_of), meta)
    *encoders, layers = meta.layer_bytes
    layout = config.cache_layout.with_int8(is_int8_cache(kv_cache)).with_drafts(num_draft_tokens)
    cache = cache_groups(config, layout.shard(tp_size))
    places = np.cumsum([0, *map(len, config.layer_layouts)])
    read = CacheLayout(tuple(layout.shard(tp_size).layers[places[source]] for source in config.source_layers.values()))
    needed = MemoryRequirements(
        layers=tuple(layers),
        prompt_layers=tuple(size for stack in encoders for size in stack),
        fixed=meta.non_layer_bytes + LIBRARY_BYTES,
        tables=meta.table_bytes,
        decode=_decode_work(model.spec, config, scheme_of, meta, cache, cache_groups(config, read)),
        cache=cache,
        scratch_per_token=meta.token_bytes,
        scratch_per_sequence=LOGIT_BYTES * (config.vocab_size if config.generates else config.hidden_size),
        context_length=config.context_length,
        adapters=meta.adapter_bytes,
        captured_tokens=CAPTURED_TOKENS if tp_size == 1 else CHUNK,
    )
    if config.generates:
        return needed
    needed = replace(needed, captured_tokens=captured_text_tokens(model.spec, config.num_layers))
    return with_long_texts(needed, config) if config.reads_pieces else needed


def _decode_work(
    spec: Spec,
    config: ModelConfig,
    scheme_of: SchemeOf,
    meta: MetaBackend,
    cache: Sequence[CacheGroup],
    shared: Sequence[CacheGroup],
) -> StepWork:
    """What a decode step of the model that was built on ``meta`` reads and launches.

    Where a layer reads a source, its product of the source's keys and values is not launched, but attention to it is.
    """
    sizes = {name: math.prod(spec.parameters[name].shape) for name in spec.source_readers}
    source_bytes = sum(size * (2 if scheme_of(name) is Scheme.FLOAT else 1) for name, size in sizes.items())
    attentions = sum(group.num_layers for group in (*cache, *shared))
    sources = cache[-1].num_layers if config.is_encoder_decoder else 0
    return StepWork(
        matrix_bytes=sum(meta.layer_bytes[-1])
        + meta.non_layer_bytes
        - meta.table_bytes
        - meta.adapter_bytes
        - source_bytes,
        launches=meta.layer_products[-1] - sources + attentions,
        norm_vectors=meta.layer_vectors[-1] + config.shared_norm_vectors,
        logit_bytes=LOGIT_BYTES * config.vocab_size,
        experts=tuple(meta.expert_bytes),
        shared=tuple(shared),
        latents=sum(isinstance(layout, Latent) for layouts in config.layer_layouts for layout in layouts),
        layer_inputs=config.num_layers if config.layer_input_features else 0,
    )


def recipe_schemes(spec: Spec, recipe: Recipe) -> SchemeOf:
    """The scheme that ``recipe`` gives a matrix, by the matrix's name."""
    return lambda name: recipe.scheme_of(name, spec.parameters[name].role is Role.HEAD)
