"""DeepSeek-V3 and R1 (https://arxiv.org/abs/2412.19437): latent attention, experts behind sigmoids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..backend.expert_values import RouterSpec
from ..layers.position import rope_parameters, score_mscale
from . import llama
from ._architecture import decoder
from ._config import MAX_HEAD_DIM, ConfigReader, Fields, flag, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import Rotary, parse_rotary
from .glm4_moe import experts_part, router_of
from .mixtral import check_top_k
from .parts.latent_attention import LatentAttentionPart
from .qwen3_moe import with_num_experts

LATENT_KEYS = llama.KEYS | {
    "head_dim": integer("qk_rope_head_dim", 64, high=MAX_HEAD_DIM),  # that of the rotation
    "nope_dim": integer("qk_nope_head_dim", 128, high=MAX_HEAD_DIM),
    "value_dim": integer("v_head_dim", 128, high=MAX_HEAD_DIM),
    "rank": integer("kv_lora_rank", 512, high=2**16),
    "bias": llama.ATTENTION_BIAS,
    "interleaved": flag("rope_interleave", True),
    "experts": integer("n_routed_experts", 256),
    "top_k": integer("num_experts_per_tok", 8),
    "shared": integer("n_shared_experts", 1),
    "expert_size": integer("moe_intermediate_size", 2048),
    "num_groups": integer("n_group", 1),
    "top_groups": integer("topk_group", 1),
    "scale": number("routed_scaling_factor", 1.0, low=1e-30),
    "renormalise": flag("norm_topk_prob", True),
    "dense": integer("first_k_dense_replace", 0, low=0),
}
"""The keys of all families with latent attention."""
KEYS = with_defaults(
    LATENT_KEYS,
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    max_position_embeddings=4096,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
    first_k_dense_replace=3,
)
CORRECTION_BIAS = "mlp.gate.e_score_correction_bias"


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "n_routed_experts"), KEYS)
    require_published_form(read, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    check_top_k(read)
    router, q_rank = router_of(read), query_rank(read, 1536)
    rotary = parse_rotary(read, interleaved=check_latent(read))
    scale = score_scale(read)
    fields = read.checked_fields()
    attention = latent_attention(fields, rotary, q_rank, scale)
    dense = [layer < fields["dense"] for layer in range(fields["layers"])]
    return mixture_of_latents(fields, attention, router, dense, CORRECTION_BIAS)


def require_published_form(read: ConfigReader, **values: Any) -> None:
    """Record a problem with each key that files of the family have, and that is not as transformers assumes."""
    for name, value in values.items():
        given = read.config.get(name, value)
        if given != value:
            read.problem(name, f"{name} is {given!r}; this version runs {value!r} only, as transformers does")


def query_rank(read: ConfigReader, default: int | None) -> int | None:
    """The width to which queries are compressed; None if they are not."""
    found: int | None = read.value_or_none(integer("q_lora_rank", default, high=2**16))
    return found


def check_latent(read: ConfigReader) -> bool:
    """Record problems with the sizes of heads; whether neighbouring elements are rotated."""
    fields = read.fields
    text = f"qk_rope_head_dim ({fields['head_dim']}) is odd, which rotary positions do not allow"
    read.require(fields["head_dim"] % 2 == 0, text, "qk_rope_head_dim")
    heads, kv_heads = fields["heads"], fields["kv_heads"]
    text = f"num_key_value_heads ({kv_heads}) is not num_attention_heads ({heads}): all heads share one latent"
    read.require(kv_heads == heads, text, "num_key_value_heads", "num_attention_heads")
    return bool(fields["interleaved"])


def score_scale(read: ConfigReader, parameters: Mapping[str, Any] | None = None) -> float:
    """What multiplies scores: one over the root of a query's size, and YaRN's factor twice.

    ``parameters`` are those of the rotation, by default as the file has them.
    """
    try:
        mscale = score_mscale(rope_parameters(read.config) if parameters is None else parameters)
    except ValueError as error:
        read.problem("rope_parameters", str(error))
        mscale = 1.0
    return float((read.fields["nope_dim"] + read.fields["head_dim"]) ** -0.5 * mscale**2)


def latent_attention(
    fields: Fields, rotary: Rotary | None, q_rank: int | None, scale: float, **others: Any
) -> LatentAttentionPart:
    """Latent attention with the sizes of ``fields``, and the ``others`` of its options."""
    assert rotary is not None
    return LatentAttentionPart(
        fields["hidden_size"],
        fields["heads"],
        fields["nope_dim"],
        fields["value_dim"],
        fields["rank"],
        rotary,
        scale,
        q_rank,
        bias=fields["bias"],
        **others,
    )


def mixture_of_latents(
    fields: Fields,
    attention: LatentAttentionPart,
    router: RouterSpec,
    dense: Sequence[bool],
    correction_bias: str | None = None,
    num_drafting: int = 1,
) -> DecoderConfig:
    """A decoder with experts, and shared ones, in the layers that are not ``dense``.

    Behind the last one a file may have ``num_drafting`` layers that guess tokens, of which the first one is read.
    """
    experts = experts_part(fields, router, correction_bias)
    mlps = (llama.feed_forward(fields) if is_dense else experts for is_dense in dense)
    drafting = "|".join(str(len(dense) + layer) for layer in range(num_drafting))
    guesses = llama.drafting(fields, llama.pre_norm(fields, attention, experts), llama.DraftingNames.behind(len(dense)))
    return llama.model(
        fields,
        [llama.pre_norm(fields, attention, mlp) for mlp in mlps],
        ignored=(r".*rotary_emb\.inv_freq", rf"model\.layers\.(?:{drafting})\..*"),
        drafting=guesses if num_drafting else None,
    )


architecture = decoder(parse)
