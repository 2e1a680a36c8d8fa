"""What the table says of an architecture, the names that many share, and what many add to a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import CheckpointError, is_whole
from .header import REMEDY, GgufHeader

COMMON = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
EPSILON = {"attention.layer_norm_epsilon": "layer_norm_eps"}
HEAD_SIZE = {"attention.key_length": "head_dim"}
WINDOW = {"attention.sliding_window": "sliding_window"}
CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
SHARED_EXPERT = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""The widths of experts, and of one that all tokens share."""
GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


@dataclass(frozen=True)
class Converted:
    """An architecture: Hugging Face's ``model_type``, and ``keys`` from metadata to ``config.json``.

    ``fixed`` are values that the converter drops because all models have them. ``permuted``: the rows of query and key
    of each head alternate between its halves, as in Meta's LLaMA. ``grouped_qkv``: query, key and value of a fused
    matrix are one after another instead of head by head. ``norm_offset``: 1 is added to the weights of norms.
    ``transposed`` are parts of names of matrices that Hugging Face stores ``[in, out]``, and ``shapes`` has ends of
    names of tensors that it stores in another shape, with -1 for the size that follows. ``tiled``: the value heads of
    one key head of a gated DeltaNet are apart. ``drafts``: layers behind those that run guess tokens. ``required`` are
    further keys that a file must have. ``renamed`` are parts of Hugging Face's names that a file has under another name
    than the package ``gguf`` says, and ``joined`` those of matrices whose rows a file has as several tensors.
    ``tensors`` has whole names of tensors in a layer, and ``unread`` says which tensors no model of Hugging Face has,
    such as those of a rotation. ``further`` adds to the configuration, and may take one of ``others`` as the
    ``model_type``.
    """

    model_type: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    permuted: bool = False
    grouped_qkv: bool = False
    norm_offset: bool = False
    transposed: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tiled: bool = False
    drafts: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    tensors: Mapping[str, str] = field(default_factory=dict)
    unread: Callable[[GgufHeader], set[str]] | None = None
    further: Callable[[GgufHeader, dict[str, Any]], None] | None = None


def largest(value: Any) -> int:
    """The size of layers that have it; others may have 0."""
    return int(max(value) if isinstance(value, list) else value)


def llama(header: GgufHeader, config: dict[str, Any]) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rotated = header.of_model("rope.dimension_count", config.get("head_dim", head_dim))
    if "partial_rotary_factor" not in config and rotated != config.setdefault("head_dim", rotated):
        problem = f"rotates {rotated} of {config['head_dim']} elements of each head (rope.dimension_count)"
        raise CheckpointError(f"{header.path}: {problem}, which llama.cpp does not run either")
    biases(header, config)


def granite(header: GgufHeader, config: dict[str, Any]) -> None:
    """In llama.cpp a flag turns the rotation of Granite off."""
    if not header.of_model("rope.scaling.finetuned", True):
        problem = "has no rotation (rope.scaling.finetuned), which this version does not run"
        raise CheckpointError(f"{header.path}: {problem}; {REMEDY}")
    llama(header, config)


def biases(header: GgufHeader, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors


def partial(header: GgufHeader, config: dict[str, Any]) -> None:
    """The rotated part of each head."""
    rotated = header.of_model("rope.dimension_count")
    if rotated is not None:
        config["partial_rotary_factor"] = rotated / (config["hidden_size"] // config["num_attention_heads"])


def partial_of_head(header: GgufHeader, config: dict[str, Any]) -> None:
    """The rotated part of each head, which may have another size than the embedding has for each."""
    head_dim = header.of_model("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    config["partial_rotary_factor"] = header.of_model("rope.dimension_count", head_dim) / head_dim


def windows(header: GgufHeader, config: dict[str, Any]) -> None:
    """The window, and the layers that have one."""
    config["sliding_window"] = header.of_model("attention.sliding_window")
    pattern = header.of_model("attention.sliding_window_pattern")
    if config["sliding_window"] is None:
        pattern = [False] * config["num_hidden_layers"]
    if not isinstance(pattern, list):
        problem = "has windows, and does not say in which layers"
        raise CheckpointError(f"{header.path}: {problem}; {REMEDY}")
    config["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def has(header: GgufHeader, *parts: str) -> bool:
    """Whether any layer has a tensor of one of these names, such as ``attn_q.bias``."""
    return any(name.startswith("blk.") and name.split(".", 2)[-1] in parts for name in header.tensors)


def layers_that_run(header: GgufHeader) -> int:
    """The layers without those behind that draft tokens."""
    further = header.of_model("nextn_predict_layers", 0)
    return int(header.of_model("block_count")) - (further if is_whole(further) and further >= 0 else 1 << 32)


def checked_layers(header: GgufHeader) -> int:
    """The layers that run. Raises :class:`CheckpointError` if there is none."""
    layers = layers_that_run(header)
    if layers < 1:
        problem = f"nextn_predict_layers is {header.of_model('nextn_predict_layers')!r} of block_count layers"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; export the model again")
    return layers
