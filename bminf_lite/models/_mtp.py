"""A layer of a checkpoint that guesses the model's next tokens (MTP, https://arxiv.org/abs/2412.19437).

Let ``h_p`` be what the model's last norm makes of the residual stream at position ``p``, and ``e_p`` the model's
embedding of token ``p``. The layer's inputs and logits at ``p`` are::

    x_p = fc([embedding_norm(e_p), hidden_norm(h_{p - 1})])
    r_p = layer(x_p)                                 logits of token p + 1 = model's head(norm(r_p))

To guess a second token and more, ``norm(r_p)`` takes the place of ``h_p``, which the model has not computed. ``fc`` is
a sum of two products, of which that of ``h_{p - 1}`` is computed with the model's step, and kept for the next token.

Published files hold such a layer, and it has seen no entry for the first token of a text; here it has one, without
``h``. The layer's own copies of the embedding and of the head, which some files have, are the model's, and not read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.cache_values import StateArray
from ..backend.guesses import GuessPlace
from ..backend.values import Array, ForwardBatch, ShortConvolution
from ..layers.cache import CacheLayout, KVCache, State, caches_of_layers
from ..layers.linear import Columns, Linear
from ..layers.loading import Weights
from ._config import ModelConfig
from .parts.norms import NormPart
from .parts.part import LayerParts, LayerSource, SharedValues
from .spec import Parameter, Role, Spec, Tensors


@dataclass(frozen=True)
class MtpConfig(ModelConfig):
    """The layer ``layer_name`` of ``layer``'s parts, the matrix ``fc`` and the norms around them."""

    layer: LayerParts
    layer_name: str
    fc: str
    embedding_norm: NormPart
    hidden_norm: NormPart
    norm: NormPart

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def cache_layout(self) -> CacheLayout:
        """What the layer keeps, and of the last token what belongs to the next one."""
        hidden = State((StateArray("inputs", (self.hidden_size,), dtype=None, ring=2),), has_snapshots=False)
        return CacheLayout((*self.layer.layouts, hidden))

    @property
    def divided(self) -> dict[str, int]:
        return self.layer.divided

    @property
    def shared_heads(self) -> frozenset[int]:
        return self.layer.shared_heads

    @property
    def undivided(self) -> str | None:
        reasons = (sub.part.undivided for sub in self.layer.sublayers)
        return next((reason for reason in reasons if reason is not None), None)


def spec(config: MtpConfig) -> Spec:
    """Every tensor of the layer that is read."""
    stated = config.layer.stated(config.layer_name)
    shape = config.hidden_size, 2 * config.hidden_size
    tensors: Tensors = {f"{config.fc}.weight": Parameter(shape, Role.LINEAR, inputs=2)} | stated.tensors
    for norm in (config.embedding_norm, config.hidden_norm, config.norm):
        tensors |= norm.tensors()
    return Spec(tensors, fused={name: fused for part in stated.parts for name, fused in part.fused.items()})


class Hidden:
    """What the next tokens need of a step's tokens, while the model computes them."""

    def __init__(self, num_layers: int, project: Callable[[Array], Array]):
        self._num_layers = num_layers
        self._project = project
        self.values: Array = None

    wants_all = True
    """Every token is read behind the last layer."""

    def observe(self, layer: int, residual: Array) -> None:
        """Read the stream behind the last layer; see :data:`.._decoder.Observer`."""
        if layer == self._num_layers:
            self.values = self._project(residual)


class MtpHead:
    """The layer on the device of ``ops``. :meth:`attach` gives it the model before it is used."""

    def __init__(self, config: MtpConfig, weights: Weights, ops: Backend):
        self.ops = ops
        self.config = config
        width = config.hidden_size
        self.fc_of_embedding = Linear(ops, Columns(weights, slice(0, width)), [config.fc])
        self.fc_of_hidden = Linear(ops, Columns(weights, slice(width, 2 * width)), [config.fc])
        self.embedding_norm, self.hidden_norm, self.norm = (
            norm.build(ops, weights) for norm in (config.embedding_norm, config.hidden_norm, config.norm)
        )
        taps = np.stack([np.zeros(width, np.float32), np.ones(width, np.float32)])
        self.previous = ShortConvolution(ops.array(taps), None)
        shared = SharedValues(ops, weights)
        for sub in config.layer.sublayers:
            sub.part.share(shared)
        build = config.layer.build
        self.layers = ops.blocks(lambda _: build(LayerSource(ops, weights, config.layer_name, shared)), 1)
        self.model: Any = None

    def attach(self, model: Any) -> None:
        """Let the layer read ``model``, a decoder, and use its embedding and its head."""
        self.model = model

    def features(self) -> Hidden:
        """Collects what is needed of a step."""
        norm = self.model.output.norm
        return Hidden(self.model.config.num_layers, lambda residual: self._project(norm(residual)))

    def read(self, batch: ForwardBatch, cache: KVCache, features: Hidden) -> None:
        """Add a step's tokens to the cache, behind the model's step that computed their features."""
        with self.ops.step(batch):
            before = self.ops.previous_rows(features.values, self.previous, cache.layers[-1], batch)
            self._stream(self.model.embed(batch), before, cache, batch, batch.last_positions is not None)

    def guess(self, place: GuessPlace, cache: KVCache, features: Array) -> Array:
        """Guess the token behind each sequence's one of a step.

        Returns what stands for its features. Without ``features``, the token's are those that the step before has left.
        """
        batch = place.batch
        with self.ops.step(batch):
            embedded = self.model.embed(batch)
            if features is None:  # what stands for this token's own is overwritten before anything reads it
                features = self.ops.previous_rows(embedded, self.previous, cache.layers[-1], batch)
            hidden = self.norm(self._stream(embedded, features, cache, batch))
            self.ops.guess(self.model.output.head.fp32(hidden), place.guesses, place.sampler)
            return self._project(hidden)

    def _project(self, hidden: Array) -> Array:
        """``fc`` of what belongs to the next token: fp32 ``[T, features]``."""
        return self.fc_of_hidden.fp32(self.hidden_norm(hidden))

    def _stream(
        self, embedded: Array, before: Array, cache: KVCache, batch: ForwardBatch, only_last: bool = False
    ) -> Array:
        residual = self.fc_of_embedding.add_to(before, self.embedding_norm(embedded))
        (own,) = caches_of_layers([self.config.layer.layouts], cache)
        for layer in self.layers:
            residual = layer(residual, own, batch, only_last)
        return residual
