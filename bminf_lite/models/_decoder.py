"""What decoders share: the loop that runs the layers, and what most have behind the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..backend.base import Backend
from ..backend.values import Array, ForwardBatch, LayerCache
from ..layers.cache import KVCache
from ..layers.linear import LMHead
from ..layers.norm import RMSNorm


class ModelBuilder(Protocol):
    """A model's parts, each made when it is asked for: run one after another, they need memory for one."""

    def embed(self) -> Callable[[ForwardBatch], Array]:
        """A step's tokens to the residual stream."""
        ...

    def block(self, layer: int) -> Callable[[Array, LayerCache, ForwardBatch], Array]:
        """The layer of that number, from 0 on."""
        ...

    def output(self) -> Callable[[Array], Array]:
        """The residual stream to logits."""
        ...


@dataclass(frozen=True)
class Output:
    """The residual stream to logits: ``head(norm(r))``."""

    norm: RMSNorm
    head: LMHead

    def __call__(self, residual: Array) -> Array:
        return self.head(self.norm(residual))


class Decoder:
    """Tokens in, logits out. ``config`` says how many ``layers`` there are."""

    def __init__(self, config: Any, builder: ModelBuilder, ops: Backend):
        self.ops = ops
        self.config = config
        self.embed = builder.embed()
        self.blocks = ops.blocks(builder.block, config.layers)
        self.output: Any = builder.output()

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """Run a step's tokens: fp32 logits ``[B, vocab]`` of each sequence's last token, or of all ``[T, vocab]``."""
        residual = self.embed(batch)
        for block, layer_cache in zip(self.blocks, cache.layers, strict=True):
            residual = block(residual, layer_cache, batch)
        if not all_logits:
            residual = self.ops.last_tokens(residual, batch)
        return self.output(residual)
