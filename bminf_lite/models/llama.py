"""LLaMA 2 and 3 (https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783), the base of Mistral and Qwen.

A pre-norm decoder: RMSNorm, grouped-query attention with rotary positions, a gated feed-forward layer. Others of the
family differ by a window, biases or a norm on queries and keys, which their files give to the functions here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ._architecture import decoder
from ._config import ACTIVATIONS, MAX_HEAD_DIM, MAX_LAYERS, ConfigReader, Fields, choice, flag, integer, number
from ._decoder import DecoderConfig
from ._mtp import MtpConfig
from ._rotary import parse_rotary
from .parts.attention import AttentionPart
from .parts.ends import InputPart, OutputPart
from .parts.feed_forward import FeedForwardPart
from .parts.norms import NormKind, NormPart
from .parts.part import LayerParts, Part, Sublayer

KEYS = {
    "vocab_size": integer("vocab_size", 32000),
    "hidden_size": integer("hidden_size", 4096),
    "intermediate_size": integer("intermediate_size", 11008),
    "layers": integer("num_hidden_layers", 32, high=MAX_LAYERS),
    "heads": integer("num_attention_heads", 32),
    "kv_heads": integer("num_key_value_heads", derive=lambda fields: fields["heads"]),
    "head_dim": integer(
        "head_dim", derive=lambda fields: max(fields["hidden_size"] // fields["heads"], 1), high=MAX_HEAD_DIM
    ),
    "context_length": integer("max_position_embeddings", 2048),
    "norm_eps": number("rms_norm_eps", 1e-6, high=1.0),
    "activation": choice("hidden_act", "silu", ACTIVATIONS),
    "tied_head": flag("tie_word_embeddings", False),
}
"""The keys that the whole family has."""

ATTENTION_BIAS = flag("attention_bias", False)
BIASES = {"qkv_bias": ATTENTION_BIAS, "o_bias": ATTENTION_BIAS, "mlp_bias": flag("mlp_bias", False)}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    return parse_family(ConfigReader(config, KEYS | BIASES))


def parse_family(read: ConfigReader) -> DecoderConfig:
    """The configuration of a model of the family with equal layers, without windows."""
    check_heads(read)
    rotary = parse_rotary(read)
    fields = read.checked_fields()
    return model(fields, [pre_norm(fields, attention(fields, rotary=rotary), feed_forward(fields))] * fields["layers"])


def check_heads(read: ConfigReader) -> None:
    """Record problems with the numbers of heads and their size."""
    head_dim = read.fields["head_dim"]
    if read.is_null(read.keys["head_dim"]):
        read.require_divisible("hidden_size", "heads")
    read.require_divisible("heads", "kv_heads")
    text = f"head_dim ({head_dim}) is odd, which rotary positions do not allow"
    read.require(head_dim % 2 == 0, text, "head_dim", "hidden_size", "num_attention_heads")


# -- the parts of the family, from the fields of a configuration ------------------------------------------------------


def attention(fields: Fields, **others: Any) -> AttentionPart:
    """Attention with the heads and biases of ``fields``, and the ``others`` of its options."""
    part = AttentionPart(
        fields["hidden_size"],
        fields["heads"],
        fields["kv_heads"],
        fields["head_dim"],
        qkv_bias=fields.get("qkv_bias", False),
        out_bias=fields.get("o_bias", False),
        norm_eps=fields["norm_eps"],
    )
    return replace(part, **others)


def feed_forward(fields: Fields, **others: Any) -> FeedForwardPart:
    """A gated feed-forward layer of ``intermediate_size``, and the ``others`` of its options."""
    sizes = fields["hidden_size"], fields["intermediate_size"], fields["activation"]
    return replace(FeedForwardPart(*sizes, bias=fields.get("mlp_bias", False)), **others)


def norm(fields: Fields, name: str, kind: NormKind = NormKind.RMS, offset: float = 0.0) -> NormPart:
    """A norm of the residual stream."""
    return NormPart(name, fields["hidden_size"], fields["norm_eps"], kind, offset)


def pre_norm(
    fields: Fields,
    mixer: Part,
    mlp: Part,
    kind: NormKind = NormKind.RMS,
    offset: float = 0.0,
    names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
) -> LayerParts:
    """A layer whose two parts read a norm of the residual stream each."""
    first, second = (norm(fields, name, kind, offset) for name in names)
    return LayerParts((Sublayer(mixer, first), Sublayer(mlp, second)))


def parallel(
    fields: Fields, mixer: Part, mlp: Part, kind: NormKind, names: tuple[str, ...] = ("input_layernorm",)
) -> LayerParts:
    """A layer whose two parts read the same residual stream, through one norm or one each."""
    first, *others = (norm(fields, name, kind) for name in names)
    return LayerParts((Sublayer(mixer, first), Sublayer(mlp, *others)), parallel=True)


class DraftingNames(NamedTuple):
    """What the tensors of a layer that guesses tokens are called; see :class:`._mtp.MtpConfig`."""

    layer: str
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str

    @classmethod
    def behind(cls, num_layers: int) -> DraftingNames:
        """Those of DeepSeek-V3, and of families that follow it: the layer comes behind the model's last one."""
        layer = f"model.layers.{num_layers}"
        return cls(layer, *(f"{layer}.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")))


def drafting(fields: Fields, layer: LayerParts, names: DraftingNames, offset: float = 0.0) -> MtpConfig:
    """A layer that guesses tokens, with RMSNorms."""
    norms = (norm(fields, name, offset=offset) for name in (names.embedding_norm, names.hidden_norm, names.norm))
    sizes = fields["vocab_size"], fields["hidden_size"], fields["context_length"]
    return MtpConfig(*sizes, layer, names.layer, names.fc, *norms)


def model(
    fields: Fields,
    layers: Iterable[LayerParts],
    kind: NormKind = NormKind.RMS,
    offset: float = 0.0,
    names: Mapping[str, str] | None = None,
    input: Mapping[str, Any] | None = None,
    output: Mapping[str, Any] | None = None,
    **others: Any,
) -> DecoderConfig:
    """A decoder of ``layers`` with a norm behind them; ``kind`` and ``offset`` are that norm's.

    ``names`` are those of ``embedding``, ``final_norm`` and ``head`` where they differ from LLaMA's. ``input`` and
    ``output`` are options of :class:`.InputPart` and :class:`.OutputPart`, and ``others`` of :class:`.DecoderConfig`.
    """
    found = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"} | dict(names or {})
    sizes = fields["vocab_size"], fields["hidden_size"]
    final_norm = norm(fields, found["final_norm"], kind, offset)
    return DecoderConfig(
        *sizes,
        fields["context_length"],
        InputPart(*sizes, name=found["embedding"], **(input or {})),
        tuple(layers),
        OutputPart(*sizes, final_norm, name=found["head"], **(output or {})),
        tied_head=fields["tied_head"],
        **others,
    )


architecture = decoder(parse)
