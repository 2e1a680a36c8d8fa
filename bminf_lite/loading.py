"""From a folder to what a model consists of: opened files, a plan for the memory, and a network on each rank."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from . import backend
from .adapters import MAX_ADAPTERS, AdapterOptions, ModelAdapters
from .backend.base import Backend
from .backend.communicator import on_ranks
from .backend.values import Pooling
from .checkpoint.opened_model import OpenedModel, open_model
from .engine.config import EngineConfig
from .engine.speculative import AUTO, EAGLE3, MTP, SpeculativeConfig
from .errors import UsageError, require_bool, require_whole
from .generation_config import not_obeyed_text
from .layers.cache import KVCache
from .layers.finite_check import with_finite_checks
from .memory.planner import MemoryPlan, MemoryRequirements
from .models import DecoderConfig
from .models.spec import Role, Spec
from .placement import (
    captured_text_tokens,
    checkpoint_requirements,
    chosen_drafts,
    draft_requirements,
    is_int8_cache,
    make_engine_config,
    open_draft,
    plan_placement,
    with_captured_texts,
    with_draft,
    with_draft_model,
    with_long_texts,
)
from .pooling.pooler import PoolingModel
from .pooling.scores import ClassifierSettings
from .pooling.settings import PoolingSettings, read_settings

MAX_BATCH = 1 << 16
"""The bound of ``max_batch``: each sequence takes memory of the host, in tables, when the first request comes."""
MAX_BATCHED_TOKENS = 1 << 16
"""The bound of ``max_num_batched_tokens``."""
TEXT_TOKENS, TEXT_PRODUCTS = 8192, 2 * 10**13
"""A batch of texts has the tokens that take ``TEXT_PRODUCTS`` products of two numbers, but ``TEXT_TOKENS`` at least."""


@dataclass(frozen=True)
class LoadArguments:
    """The arguments of :func:`bminf_lite.load`, which says what they mean."""

    device: str = "auto"
    memory_limit: int | str | None = None
    max_batch: int | None = None
    kv_cache: str = "fp16"
    context: int | None = None
    check: bool = False
    prefix_cache: bool = True
    max_queue: int = EngineConfig.max_queue
    max_num_batched_tokens: int = EngineConfig.max_num_batched_tokens
    speculative: str | Mapping[str, Any] | SpeculativeConfig | None = AUTO
    adapters: Mapping[str, str | Path] | None = None
    max_adapters: int = MAX_ADAPTERS
    max_adapter_rank: int | None = None
    gpus: int = 1
    embeddings: bool = False

    def require_valid(self) -> None:
        """Raise ``UsageError`` for what is wrong whatever the model is."""
        require_whole("max_batch", 1 if self.max_batch is None else self.max_batch, MAX_BATCH)
        require_whole("context", 1 if self.context is None else self.context)
        require_whole("max_queue", self.max_queue)
        require_whole("max_num_batched_tokens", self.max_num_batched_tokens, MAX_BATCHED_TOKENS)
        require_bool("check", self.check)
        require_bool("prefix_cache", self.prefix_cache)
        require_bool("embeddings", self.embeddings)
        is_int8_cache(self.kv_cache)

    def require_valid_for_vectors(self) -> None:
        """Raise ``UsageError`` for what a model that gives vectors does not take."""
        if self.gpus != 1:
            raise UsageError(f"gpus is {self.gpus!r}, but a model that gives vectors is not divided: give 1")
        if self.adapters is not None:
            raise UsageError("adapters are given, but a model that gives vectors takes none: merge one into it")

    def speculative_config(self) -> SpeculativeConfig | None:
        """What ``speculative`` asks for; None for nothing, and for what the model decides."""
        if isinstance(self.speculative, str) and self.speculative == AUTO:
            return None
        return SpeculativeConfig.from_value(self.speculative)

    def batched_tokens(self, opened: OpenedModel, ops: Backend) -> int:
        """``max_num_batched_tokens`` for a model, which has another default if it makes vectors of texts."""
        config, most = opened.config, self.max_num_batched_tokens
        if config.generates:
            return most
        if most == EngineConfig.max_num_batched_tokens:
            most = text_batch_tokens(opened.spec, ops)
        return most if config.reads_pieces else max(most, config.context_length)


class ModelParts(NamedTuple):
    """What a :class:`bminf_lite.Model` is made of, in the order of its arguments."""

    networks: Sequence[Any]
    engine_config: EngineConfig
    folder: Path
    generation_config: Mapping[str, Any]
    eos_ids: frozenset[int] | None
    adapters: ModelAdapters | None
    pooling: PoolingModel | None


def load_parts(path: str | Path, options: LoadArguments) -> ModelParts:
    """Open a checkpoint and load it; see :func:`bminf_lite.load`, whose caller a warning names."""
    options.require_valid()
    drafts_from = options.speculative_config()
    backend.check_device(options.device, options.memory_limit)
    with open_model(path) as opened, open_draft(drafts_from, opened) as draft:
        config = opened.config
        if not_obeyed := not_obeyed_text(opened.generation_config):
            warnings.warn(f"{opened.checkpoint.path}: {not_obeyed}", UserWarning, stacklevel=3)
        if not config.generates:
            options.require_valid_for_vectors()
        settings = None
        if options.embeddings or not config.generates:
            settings = pooling_settings(opened, may_embed=options.gpus == 1 and draft is None)
        most = max(config.hidden_size * options.max_num_batched_tokens, config.vocab_size)
        backends = backend.create_ranks(options.gpus, options.device, options.memory_limit, most)
        try:
            return _Loading(options, opened, draft, drafts_from, settings, backends).parts()
        except BaseException:
            backend.close_ranks(backends)
            raise


class _Loading:
    """An opened model, perhaps with the model that drafts for it, on its way to the devices of all ranks."""

    def __init__(
        self,
        options: LoadArguments,
        opened: OpenedModel,
        draft: OpenedModel | None,
        drafts_from: SpeculativeConfig | None,
        settings: PoolingSettings | None,
        backends: Sequence[Backend],
    ):
        self.options, self.opened, self.draft, self.settings = options, opened, draft, settings
        self.backends, self.config = backends, opened.config
        self.max_num_batched_tokens = options.batched_tokens(opened, backends[0])
        self.adapters: AdapterOptions | None = None
        if options.adapters is not None:
            given = options.adapters, options.max_adapters, options.max_adapter_rank
            self.adapters = AdapterOptions.read_all(opened, *given)
            for ops in backends:
                ops.adapter_slots = self.adapters.slots()
        speculative = options.speculative if self.config.generates else drafts_from
        self.drafts = chosen_drafts(speculative, opened.spec, backends[0].has_one_order)
        self.num_draft_tokens = 0 if self.drafts is None else self.drafts.num_draft_tokens
        self.has_draft_model = draft is not None and drafts_from is not None and drafts_from.method not in (EAGLE3, MTP)
        layout = self.config.cache_layout
        if draft is not None:
            layout = layout.beside(draft.config.cache_layout)
        self.cache_layout = layout.with_int8(is_int8_cache(options.kv_cache))

    def parts(self) -> ModelParts:
        """Plan the memory, and build the networks."""
        options, opened = self.options, self.opened
        sizes = options.context, self.max_num_batched_tokens
        plan = plan_placement(self.backends, opened.spec, self._requirements, *sizes)
        networks = on_ranks(self.backends, self._network)
        adapters = None
        if self.adapters is not None:
            slots = [ops.adapter_slots for ops in self.backends if ops.adapter_slots is not None]
            adapters = ModelAdapters(self.adapters, slots)
        config, pooling = self._engine_config(plan), None
        if self.settings is not None:
            longest = config.context_length if plan is None else min(config.context_length, plan.context)
            pooling = pooling_model(opened, networks[0], longest, self.settings)
        folder = opened.checkpoint.path
        return ModelParts(networks, config, folder, opened.generation_config, opened.eos_ids, adapters, pooling)

    def _requirements(self) -> MemoryRequirements:
        """What the model needs of a rank's memory, with the model that drafts for it."""
        options, num_drafts, gpus = self.options, self.num_draft_tokens, self.options.gpus
        slots = self.backends[0].adapter_slots
        own = checkpoint_requirements(self.opened, None, options.kv_cache, num_drafts, slots, gpus)
        if self.draft is not None:
            other = draft_requirements(self.draft, options.kv_cache, num_drafts, gpus)
            return with_draft_model(own, other, self.config, self.cache_layout.with_drafts(num_drafts).shard(gpus))
        if self.settings is not None and self.config.generates:
            own = with_captured_texts(own, self.opened.spec, self.config)
        if self.settings is not None and self.config.reads_pieces:
            return with_long_texts(own, self.config)
        return own

    def _network(self, rank: int) -> Any:
        weights, ops = self.opened.weights(), self.backends[rank]
        KVCache.for_sequences(ops, self.cache_layout, 1, 1).close()  # raises now if there cannot be such a cache
        built_from = with_finite_checks(weights, ops) if self.options.check else (weights, ops)
        network = self.opened.architecture.Model(self.config, *built_from)
        return network if self.draft is None else with_draft(network, self.opened, self.draft, ops)

    def _engine_config(self, plan: MemoryPlan | None) -> EngineConfig:
        options, most = self.options, self.max_num_batched_tokens
        made = make_engine_config(self.config, self.cache_layout, plan, options.max_batch, most, options.prefix_cache)
        made = replace(
            made,
            max_queue=options.max_queue,
            num_draft_tokens=self.num_draft_tokens,
            speculative=self.drafts or EngineConfig.speculative,
            num_adapter_slots=0 if self.adapters is None else options.max_adapters,
            max_captured_text_tokens=captured_text_tokens(self.opened.spec, self.config.num_layers),
        )
        if self.draft is None or not self.has_draft_model:
            return made
        return replace(made, context_length=min(self.config.context_length, self.draft.config.context_length))


def text_batch_tokens(spec: Spec, ops: Backend) -> int:
    """The default of ``max_num_batched_tokens`` for a model that makes vectors of texts.

    The host prepares a batch while the device computes the one before, which takes less time for a small model.
    """
    weights = sum(math.prod(p.shape) for p in spec.parameters.values() if p.role is Role.LINEAR)
    return min(max(TEXT_PRODUCTS // max(weights, 1), TEXT_TOKENS), ops.max_text_tokens)


def pooling_settings(opened: OpenedModel, may_embed: bool) -> PoolingSettings:
    """What the folder of an open model says of its vectors. A model that generates gives the last token's.

    Raises ``UsageError`` for one that generates, unless it ``may_embed`` beside that.
    """
    config = opened.config
    if config.generates and not (may_embed and isinstance(config, DecoderConfig)):
        raise UsageError(
            "of models that generate text, only a decoder on one GPU, without a draft model, makes vectors of texts: "
            "load another model, or without embeddings"
        )
    is_causal = config.generates or getattr(config, "is_causal", False)
    return read_settings(opened.path, Pooling.LAST if is_causal else Pooling.MEAN, config.hidden_size)


def pooling_model(opened: OpenedModel, network: Any, longest: int, settings: PoolingSettings) -> PoolingModel:
    """What a model makes of texts of up to ``longest`` tokens."""
    config = opened.config
    classifier = None if config.generates else network.classifier
    scores = None
    if classifier is not None:
        scores = ClassifierSettings.of(opened.description.config_json, network.config.labels)
    sizes = config.hidden_size, config.vocab_size, longest
    return PoolingModel(settings, *sizes, classifier, scores)
