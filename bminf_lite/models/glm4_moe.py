"""GLM-4.5 and GLM-4.6 (https://arxiv.org/abs/2508.06471): experts behind a sigmoid router, and shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import RouterSpec, Score
from . import llama
from ._architecture import decoder
from ._config import ConfigReader, Fields, flag, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .mixtral import check_top_k
from .parts.attention import QueryKeyNorm
from .parts.experts import ExpertsPart
from .qwen3_moe import with_num_experts

KEYS = with_defaults(
    llama.KEYS,
    vocab_size=151552,
    intermediate_size=10944,
    num_hidden_layers=46,
    num_attention_heads=96,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
) | {
    "qkv_bias": llama.ATTENTION_BIAS,
    "qk_norm": flag("use_qk_norm", False),
    "experts": integer("n_routed_experts", 128),
    "top_k": integer("num_experts_per_tok", 8),
    "shared": integer("n_shared_experts", 1),
    "expert_size": integer("moe_intermediate_size", 1408),
    "num_groups": integer("n_group", 1),
    "top_groups": integer("topk_group", 1),
    "scale": number("routed_scaling_factor", 1.0, low=1e-30),
    "renormalise": flag("norm_topk_prob", True),
    "dense": integer("first_k_dense_replace", 1, low=0),
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_head_dim(with_num_experts(config, "n_routed_experts")), KEYS)
    check_top_k(read)
    router = router_of(read)
    llama.check_heads(read)
    rotary = parse_rotary(read, part=0.5)
    fields = read.checked_fields()
    qk_norm = QueryKeyNorm.HEAD if fields["qk_norm"] else QueryKeyNorm.NONE
    attention = llama.attention(fields, rotary=rotary, qk_norm=qk_norm)
    experts = experts_part(fields, router)
    layers = range(fields["layers"])
    mlps = (llama.feed_forward(fields) if layer < fields["dense"] else experts for layer in layers)
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention, mlp) for mlp in mlps],
        ignored=(r".*rotary_emb\.inv_freq", rf"model\.layers\.{len(layers)}\..*"),  # a layer that guesses tokens
        drafting=llama.drafting(
            fields, llama.pre_norm(fields, attention, experts), llama.DraftingNames.behind(len(layers))
        ),
    )


def experts_part(
    fields: Fields,
    router: RouterSpec,
    correction_bias: str | None = "mlp.gate.e_score_correction_bias",
    shared: str = "mlp.shared_experts",
    **others: Any,
) -> ExpertsPart:
    """Experts beside a feed-forward layer ``shared`` of the size of several, and the ``others`` of their options."""
    gate, up, down = (f"{shared}.{name}_proj" for name in ("gate", "up", "down"))
    inner_size = fields["shared"] * fields["expert_size"]
    return ExpertsPart(
        fields["hidden_size"],
        fields["expert_size"],
        fields["activation"],
        router,
        correction_bias=correction_bias,
        shared=llama.feed_forward(fields, inner_size=inner_size, inner=(gate, up), down=down),
        **others,
    )


def with_head_dim(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """``config`` with heads of 128 elements, as published models have, if it names no size and none follows."""
    hidden, heads = (config.get(key.name, key.default) for key in (KEYS["hidden_size"], KEYS["heads"]))
    follows = config.get("head_dim") is not None or not (type(hidden) is type(heads) is int and heads > 0)
    return config if follows or hidden % heads == 0 else {**config, "head_dim": 128}


def router_of(read: ConfigReader) -> RouterSpec:
    """The router: sigmoids, which a bias corrects for the choice, within the best groups of experts."""
    fields = read.fields
    try:
        return RouterSpec(
            fields["experts"],
            fields["top_k"],
            Score.SIGMOID,
            renormalise=fields["renormalise"],
            epsilon=1e-20,
            scale=fields["scale"],
            num_groups=fields["num_groups"],
            top_groups=fields["top_groups"],
        )
    except ValueError as error:
        read.problem("n_group", str(error))
        return RouterSpec(1, 1)


architecture = decoder(parse)
