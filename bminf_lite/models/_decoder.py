"""The parts that decoders share: the loop over the layers, and the output after the last one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..backend.base import Backend
from ..backend.values import Array, ForwardBatch, LayerCache
from ..layers.cache import KVCache
from ..layers.linear import Linear
from ..layers.norm import NormLayer
from ._config import ModelConfig


class DecoderLayer(Protocol):
    """A layer of a decoder."""

    def __call__(self, residual: Array, cache: LayerCache, batch: ForwardBatch, only_last: bool = False) -> Array:
        """Residual stream, cache and batch to the residual stream, fp32 ``[T, features]``.

        With ``only_last``, for a batch with ``last_positions``, the result has the rows of last tokens, ``[B,
        features]``; keys and values of all tokens are added to the cache.
        """
        ...


class DecoderBuilder(Protocol):
    """Makes the parts of a model one at a time, so that a caller may keep one of them in memory."""

    @property
    def config(self) -> ModelConfig: ...
    @property
    def ops(self) -> Backend: ...

    def embed(self) -> Callable[[ForwardBatch], Array]:
        """Tokens to the residual stream, fp32 ``[T, features]``."""

    def block(self, layer: int) -> DecoderLayer:
        """Layer ``layer``, counted from 0."""

    def output(self) -> Callable[[Array], Array]:
        """The residual stream to logits, fp32 ``[T, vocab]``."""


@dataclass(frozen=True)
class Output:
    """The residual stream ``r`` to logits: ``head(project(norm(r)))``, fp32 ``[T, vocab]``, limited by ``softcap``."""

    norm: NormLayer | None
    project: Linear | None
    head: Linear
    softcap: float | None = None

    def __call__(self, residual: Array) -> Array:
        x = self.norm(residual) if self.norm else residual
        logits = self.head.fp32(self.project(x) if self.project else x)
        return logits if self.softcap is None else self.head.ops.soft_cap(logits, self.softcap)


class Decoder:
    """Tokens in, logits out."""

    def __init__(self, builder: DecoderBuilder):
        self.ops = builder.ops
        self.config = builder.config
        self.embed = builder.embed()
        self.blocks = self.ops.blocks(builder.block, self.config.layers)
        self.output = builder.output()

    def __call__(self, batch: ForwardBatch, cache: KVCache, all_logits: bool = False) -> Array:
        """fp32 logits ``[L, vocab]`` of the step's ``logit_rows``, or with ``all_logits`` of all, ``[T, vocab]``."""
        with self.ops.step(batch):
            residual, last = self.embed(batch), self.config.layers - 1
            only_last = batch.last_positions is not None and not all_logits
            for i, (block, layer_cache) in enumerate(zip(self.blocks, cache.layers, strict=True)):
                residual = block(residual, layer_cache, batch, only_last and i == last)
            if not all_logits and not only_last:
                residual = self.ops.last_tokens(residual, batch)
            return self.output(residual)
