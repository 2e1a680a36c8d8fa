"""Mistral Small 4 (https://huggingface.co/mistralai): latent attention whose queries grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..backend.expert_values import WEIGHT_TYPES, MaskedScore, RouterSpec
from ..backend.values import PositionScale
from ..layers.position import rope_parameters
from ._architecture import decoder
from ._config import ConfigReader, integer, number, with_defaults
from ._decoder import DecoderConfig
from ._rotary import parse_rotary
from .deepseek_v3 import LATENT_KEYS, check_latent, latent_attention, mixture_of_latents, query_rank, score_scale
from .mixtral import check_top_k
from .qwen3_moe import with_num_experts

KEYS = with_defaults(
    LATENT_KEYS,
    vocab_size=131072,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_key_value_heads=32,
    max_position_embeddings=1048576,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    n_routed_experts=128,
    num_experts_per_tok=4,
)
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def parse(config: Mapping[str, Any]) -> DecoderConfig:
    read = ConfigReader(with_num_experts(config, "n_routed_experts"), KEYS)
    check_top_k(read)
    router, q_rank = router_of(read), query_rank(read, 1024)
    parameters = rotation(read)
    unscaled = {name: value for name, value in parameters.items() if name != "llama_4_scaling_beta"}
    rotary = parse_rotary(read, interleaved=check_latent(read), parameters=unscaled)
    beta = number("llama_4_scaling_beta", 0.0, high=1e3).convert(parameters.get("llama_4_scaling_beta", 0.0))
    original = integer("original_max_position_embeddings").convert(parameters.get("original_max_position_embeddings"))
    text = f"llama_4_scaling_beta and original_max_position_embeddings are not numbers in {parameters!r}"
    read.require(beta is not None and (original is not None or beta == 0), text, "rope_parameters")
    scale = score_scale(read, parameters)
    fields = read.checked_fields()
    growing = PositionScale(beta, original) if beta else None
    attention = latent_attention(fields, rotary, q_rank, scale, position_scale=growing)
    dense = [layer < fields["dense"] for layer in range(fields["layers"])]
    return mixture_of_latents(fields, attention, router, dense)


def rotation(read: ConfigReader) -> Mapping[str, Any]:
    """The rotary parameters, without the part of a head that is rotated, which other keys say too."""
    nope, rotated = read.fields["nope_dim"], read.fields["head_dim"]
    try:
        found = rope_parameters({"rope_parameters": ROPE} | dict(read.config), whole_heads=False)
    except ValueError as error:
        read.problem("rope_parameters", str(error))
        return ROPE
    part = found.pop("partial_rotary_factor", None)
    if part is not None:
        text = f"partial_rotary_factor is {part!r}, not qk_rope_head_dim ({rotated}) of {nope + rotated} elements"
        is_part = isinstance(part, (int, float)) and int((nope + rotated) * part) == rotated
        read.require(is_part, text, "qk_rope_head_dim", "qk_nope_head_dim")
    return found


def router_of(read: ConfigReader) -> RouterSpec:
    """The router: a softmax, renormalised over the chosen experts of the best groups."""
    fields = read.fields
    dtype = str(read.config.get("dtype") or read.config.get("torch_dtype")).removeprefix("torch.")
    try:
        return RouterSpec(
            fields["experts"],
            fields["top_k"],
            renormalise=fields["renormalise"],
            epsilon=1e-20,
            scale=fields["scale"],
            num_groups=fields["num_groups"],
            top_groups=fields["top_groups"],
            masked=MaskedScore.ZERO,
            weight_type=dtype if dtype in WEIGHT_TYPES else "float32",
        )
    except ValueError as error:
        read.problem("n_group", str(error))
        return RouterSpec(1, 1)


architecture = decoder(parse)
