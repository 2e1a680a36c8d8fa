"""What decoders share: the loop that runs the layers, and what most have behind the last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..backend.base import Backend
from ..backend.values import Array, LayerCache, Step
from ..layers.cache import KVCache
from ..layers.linear import Head
from ..layers.norm import RMSNorm


class Pieces(Protocol):
    """A model's parts, each made when it is asked for: run one after another, they need memory for one."""

    def embed(self) -> Callable[[Step], Array]:
        """A step's tokens to the residual stream."""
        ...

    def block(self, layer: int) -> Callable[[Array, LayerCache, Step], Array]:
        """The layer of that number, from 0 on."""
        ...

    def output(self) -> Callable[[Array], Array]:
        """The residual stream to logits."""
        ...


@dataclass(frozen=True)
class Output:
    """The residual stream to logits: ``head(norm(r))``."""

    norm: RMSNorm
    head: Head

    def __call__(self, residual: Array) -> Array:
        return self.head(self.norm(residual))


class Decoder:
    """Tokens in, logits out. ``config`` says how many ``layers`` there are."""

    def __init__(self, config: Any, pieces: Pieces, ops: Backend):
        self.ops = ops
        self.config = config
        self.embed = pieces.embed()
        self.blocks = ops.blocks(pieces.block, config.layers)
        self.output: Any = pieces.output()

    def __call__(self, step: Step, cache: KVCache, all_logits: bool = False) -> Array:
        """Run a step's tokens: fp32 logits ``[B, vocab]`` of each sequence's last token, or of all ``[T, vocab]``."""
        residual = self.embed(step)
        for block, layer_cache in zip(self.blocks, cache.layers, strict=True):
            residual = block(residual, layer_cache, step)
        if not all_logits:
            residual = self.ops.last_tokens(residual, step)
        return self.output(residual)
