"""The draft head of EAGLE-3 (https://arxiv.org/abs/2503.01840): one layer that guesses the next tokens of a model.

It reads the model's residual stream before some of its layers. For the token at position ``p``:

    f_p = fc([stream_a, stream_b, stream_c] of the token at p - 1)
    x_p = [input_layernorm(embedding of the token at p), hidden_norm(f_p)]
    h_p = f_p + attention(x_p);  r_p = h_p + mlp(post_attention_layernorm(h_p))
    logits = lm_head(norm(r_p))

With ``norm_before_residual``, ``hidden_norm(f_p)`` takes the place of ``f_p`` in ``h_p`` too. To guess a second token
and more, ``r_p`` takes the place of ``f_{p + 1}``, which the model has not computed.

Checkpoints are those that EAGLE, SpecForge and TensorRT Model Optimizer write, and those of vLLM's speculators. The
layer is called ``midlayer`` or ``layers.0``. The head may have fewer tokens than the model: ``d2t`` has the distance
from each of them to the model's token. It may lack the embedding, which is then the model's. Layers are counted in two
ways: ``eagle_aux_hidden_state_layer_ids`` beside the other keys names layers by their input (vLLM), inside of
``eagle_config`` by their output (SGLang). Without it they are 2, L / 2 and L - 3, by their input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..backend.base import Backend
from ..backend.cache_values import StateArray
from ..backend.guesses import GuessPlace
from ..backend.values import Array, AttentionSpec, ForwardBatch, ShortConvolution
from ..errors import CheckpointError, is_whole
from ..layers.cache import CacheLayout, KeyValues, KVCache, State
from ..layers.embedding import Embedding
from ..layers.linear import Columns, Linear
from ..layers.loading import Weights
from ..layers.norm import rms_norm
from . import llama
from ._architecture import Architecture
from ._config import ConfigReader, ModelConfig, flag, integer
from ._rotary import Rotary, parse_rotary
from .parts.feed_forward import FeedForwardPart
from .parts.part import LayerSource, SharedValues
from .spec import Spec, Tensors, embedding, head, linear, norm

LAYER = "layers.0"
FC, EMBEDDING, HEAD, NORM = "fc", "embed_tokens", "lm_head", "norm"
INPUT_NORM, FEATURE_NORM, MLP_NORM = (
    f"{LAYER}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
)
QKV = tuple(f"{LAYER}.self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj"))
OUT = f"{LAYER}.self_attn.o_proj"
TOKEN_MAP = "d2t"
"""The tensor int64 ``[draft_vocab_size]``: what is added to the number of a draft's token."""
ALIASES = ((r"(?:model\.)?midlayer\.(.*)", r"layers.0.\1"), (r"model\.(.*)", r"\1"))
NUM_FEATURES = 3
"""Layers of the model whose input a head reads, unless the file names others."""
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

KEYS = (
    llama.KEYS
    | llama.BIASES
    | {
        "layers": integer("num_hidden_layers", 1, high=1),
        "norm_before_residual": flag("norm_before_residual", False),
        "draft_vocab_size": integer("draft_vocab_size", derive=lambda fields: fields["vocab_size"]),
        "target_hidden_size": integer("target_hidden_size", derive=lambda fields: fields["hidden_size"]),
    }
)


@dataclass(frozen=True)
class Eagle3Config(ModelConfig):
    """A head for a model of ``vocab_size`` tokens. ``layer_ids`` count layers by their input; None for the default.

    ``has_embedding`` and ``has_token_map`` say what the file has.
    """

    draft_vocab_size: int
    target_hidden_size: int
    inner_size: int
    activation: str
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rotary: Rotary | None
    attention_bias: bool
    mlp_bias: bool
    norm_before_residual: bool
    layer_ids: tuple[int, ...] | None = None
    has_embedding: bool = True
    has_token_map: bool = True

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def num_features(self) -> int:
        """Layers of the model that the head reads."""
        return NUM_FEATURES if self.layer_ids is None else len(self.layer_ids)

    @property
    def cache_layout(self) -> CacheLayout:
        """Keys and values, and the features of the last token, which belong to the next one."""
        features = State((StateArray("inputs", (self.hidden_size,), dtype=None, ring=2),), has_snapshots=False)
        return CacheLayout((KeyValues(self.kv_heads, self.head_dim), features))

    @property
    def divided(self) -> dict[str, int]:
        return {}

    @property
    def undivided(self) -> str | None:
        return "a draft head is not divided"

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a model of ``num_layers`` whose input the head reads. Raises ``CheckpointError``."""
        found = (2, num_layers // 2, num_layers - 3) if self.layer_ids is None else self.layer_ids
        if any(not 0 <= layer < num_layers for layer in found) or len(set(found)) < len(found):
            raise CheckpointError(
                f"the draft head reads the input of the layers {', '.join(map(str, found))}, but the model has "
                f"{num_layers} layers: it belongs to another model"
            )
        return found


def head_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a head's ``config.json`` in one mapping; vLLM's speculators put those of the layer into another."""
    nested = config.get("transformer_layer_config")
    return {**config, **nested} if isinstance(nested, Mapping) else dict(config)


def parse(config: Mapping[str, Any]) -> Eagle3Config:
    """The configuration of a head, with an embedding and a map of tokens. Raises ``CheckpointError``."""
    config = head_config(config)
    read = ConfigReader(config, KEYS)
    llama.check_heads(read)
    rotary = parse_rotary(read)
    layer_ids = _layer_ids(read)
    fields = read.checked_fields()
    return Eagle3Config(
        fields["vocab_size"], fields["hidden_size"], fields["context_length"], fields["draft_vocab_size"],
        fields["target_hidden_size"], fields["intermediate_size"], fields["activation"], fields["heads"],
        fields["kv_heads"], fields["head_dim"], fields["norm_eps"], rotary, fields["qkv_bias"], fields["mlp_bias"],
        fields["norm_before_residual"], layer_ids,
    )  # fmt: skip


def _layer_ids(read: ConfigReader) -> tuple[int, ...] | None:
    """The layers that the file names, counted by their input."""
    nested = read.config.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
    if nested.get("use_aux_hidden_state") is False:
        read.problem("eagle_config", "eagle_config.use_aux_hidden_state is false: the head is one of EAGLE 1 or 2")
    own, others = read.config.get(LAYER_IDS), nested.get(LAYER_IDS)
    ids, shift = (own, 0) if own is not None else (others, 1)
    if ids is None:
        return None
    if not isinstance(ids, list) or not ids or not all(is_whole(i) and i >= 0 for i in ids):
        read.problem(LAYER_IDS, f"{LAYER_IDS} is {ids!r}, not a list of the numbers of layers")
        return None
    return tuple(i + shift for i in ids)


def spec(config: Eagle3Config) -> Spec:
    """Every tensor of a head's file, but for the maps of tokens."""
    width, double = config.hidden_size, 2 * config.hidden_size
    heads = config.heads * config.head_dim
    tensors: Tensors = linear(FC, (width, config.num_features * config.target_hidden_size))
    for name, count in zip(QKV, (config.heads, config.kv_heads, config.kv_heads), strict=True):
        tensors |= linear(name, (count * config.head_dim, double), config.attention_bias)
    tensors |= linear(OUT, (width, heads), config.attention_bias) | _mlp(config).stated(LAYER).tensors
    for name in (INPUT_NORM, FEATURE_NORM, MLP_NORM, NORM):
        tensors |= norm(name, width)
    if config.has_embedding:
        tensors |= embedding(EMBEDDING, (config.vocab_size, width))
    tensors |= head(HEAD, (config.draft_vocab_size, width))
    return Spec(tensors, ignored=(TOKEN_MAP, "t2d", r".*rotary_emb\.inv_freq"), aliases=ALIASES)


def _mlp(config: Eagle3Config) -> FeedForwardPart:
    return FeedForwardPart(config.hidden_size, config.inner_size, config.activation, bias=config.mlp_bias)


class Eagle3Layer:
    """The layer of a head."""

    def __init__(self, config: Eagle3Config, weights: Weights, ops: Backend):
        self.ops = ops
        self.norm_before_residual = config.norm_before_residual
        self.input_norm, self.feature_norm, self.mlp_norm = (
            rms_norm(ops, weights, name, config.norm_eps) for name in (INPUT_NORM, FEATURE_NORM, MLP_NORM)
        )
        width, shared = config.hidden_size, SharedValues(ops, weights)
        self.qkv_of_embedding = Linear(ops, Columns(weights, slice(0, width)), QKV, config.attention_bias)
        self.qkv_of_features = Linear(ops, Columns(weights, slice(width, 2 * width)), QKV)
        rope = shared.rope(config.rotary, config.head_dim)
        self.spec = AttentionSpec(config.heads, config.kv_heads, config.head_dim, config.head_dim**-0.5, rope=rope)
        self.out = Linear(ops, weights, [OUT], config.attention_bias)
        self.mlp = _mlp(config).build(LayerSource(ops, weights, LAYER, shared))

    def read(self, embedded: Array, features: Array, cache: KVCache, batch: ForwardBatch) -> None:
        """Add a step's tokens to the cache; see :meth:`__call__`."""
        attend = self.ops.attention if batch.last_positions is None else self.ops.last_token_attention
        attend(self._qkv(embedded, self.feature_norm(features)), self.spec, cache.layers[0], batch)

    def __call__(self, embedded: Array, features: Array, cache: KVCache, batch: ForwardBatch) -> Array:
        """``r`` of a step's tokens: their embeddings and features fp32 ``[T, features]`` -> the same shape."""
        normed = self.feature_norm(features)
        qkv = self._qkv(embedded, normed)
        residual = normed if self.norm_before_residual else features
        residual = self.out.add_to(residual, self.ops.attention(qkv, self.spec, cache.layers[0], batch))
        hidden = self.mlp.hidden(self.mlp_norm(residual), None, batch, False)
        return self.mlp.add_to(residual, hidden)

    def _qkv(self, embedded: Array, normed: Array) -> Array:
        return self.qkv_of_features.add_to(self.qkv_of_embedding.fp32(self.input_norm(embedded)), normed)


class Features:
    """The features of a step's tokens while the model computes them: the sum of ``fc`` over the layers' streams."""

    def __init__(self, fc: Mapping[int, Linear]):
        self._fc = fc
        self.sum: Array = None

    wants_all = False
    """No token is read behind the last layer."""

    def observe(self, layer: int, residual: Array) -> None:
        """Add what a layer's input gives; see :data:`.._decoder.Observer`."""
        fc = self._fc.get(layer)
        if fc is not None:
            self.sum = fc.fp32(residual) if self.sum is None else fc.add_to(self.sum, residual)


class Eagle3Head:
    """A head on the device of ``ops``. :meth:`attach` gives it the model's layers and tokens before it is used."""

    def __init__(self, config: Eagle3Config, weights: Weights, ops: Backend):
        self.ops = ops
        self.config = config
        self.embedding = Embedding(ops, weights, EMBEDDING) if config.has_embedding else None
        width = config.target_hidden_size
        parts = [Columns(weights, slice(i * width, (i + 1) * width)) for i in range(config.num_features)]
        self.fc = [Linear(ops, part, [FC]) for part in parts]
        taps = np.stack([np.zeros(config.hidden_size, np.float32), np.ones(config.hidden_size, np.float32)])
        self.previous = ShortConvolution(ops.array(taps), None)
        self.layers = ops.blocks(lambda _: Eagle3Layer(config, weights, ops), 1)
        self.norm = rms_norm(ops, weights, NORM, config.norm_eps)
        self.head = Linear(ops, weights, [HEAD])
        self.fc_of: Mapping[int, Linear] = {}
        self.token_ids: Array = None
        self.embed_with: Any = None

    def attach(self, num_layers: int, embed: Any, token_ids: np.ndarray | None = None) -> None:
        """Let the head read a model of ``num_layers``, whose ``embed`` is used if the head has no embedding.

        ``token_ids`` int32 ``[draft_vocab_size]`` are the model's tokens; None if they are the head's.
        """
        self.fc_of = dict(zip(self.config.layers_of(num_layers), self.fc, strict=True))
        self.embed_with = embed
        if token_ids is not None:
            self.token_ids = self.ops.array(token_ids)

    def features(self) -> Features:
        """Collects the features of a step."""
        return Features(self.fc_of)

    def read(self, batch: ForwardBatch, cache: KVCache, features: Features) -> None:
        """Add a step's tokens to the cache, behind the model's step that computed their features."""
        with self.ops.step(batch):
            before = self.ops.previous_rows(features.sum, self.previous, cache.layers[1], batch)
            for layer in self.layers:
                layer.read(self._embed(batch), before, cache, batch)

    def guess(self, place: GuessPlace, cache: KVCache, features: Array) -> Array:
        """Guess the token behind each sequence's one of a step.

        Returns what stands for its features. Without ``features``, the token's are those that the step before has left.
        """
        batch = place.batch
        with self.ops.step(batch):
            embedded = self._embed(batch)
            if features is None:  # what stands for this token's own is overwritten before anything reads it
                features = self.ops.previous_rows(embedded, self.previous, cache.layers[1], batch)
            for layer in self.layers:
                features = layer(embedded, features, cache, batch)
            logits = self.head.fp32(self.norm(features))
            self.ops.guess(logits, place.guesses, place.sampler, self.token_ids)
        return features

    def _embed(self, batch: ForwardBatch) -> Array:
        found: Array = self.embedding(batch) if self.embedding is not None else self.embed_with(batch)
        return found


def token_ids(offsets: Sequence[int] | np.ndarray, config: Eagle3Config) -> np.ndarray:
    """The model's tokens of the head's, int32 ``[draft_vocab_size]``, by ``d2t``. Raises ``CheckpointError``."""
    found = np.arange(len(offsets), dtype=np.int64) + np.asarray(offsets, np.int64)
    if len(found) != config.draft_vocab_size or found.min() < 0 or found.max() >= config.vocab_size:
        raise CheckpointError(
            f"tensor {TOKEN_MAP!r} names {len(found):,} tokens from {found.min()} to {found.max()}, but the head has "
            f"{config.draft_vocab_size:,}, and the model's are 0 to {config.vocab_size - 1}"
        )
    return found.astype(np.int32)


architecture = Architecture(parse, spec, Eagle3Head, lambda built: built)
"""For checkpoints and plans; no ``model_type`` names it."""
