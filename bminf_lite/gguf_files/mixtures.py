"""Architectures with attention and experts."""

from __future__ import annotations

from . import recurrent
from .converted import COMMON, GRANITE, HEAD_SIZE, RMS, Converted, biases, granite

MIXTURES: dict[str, Converted] = {
    "qwen3moe": Converted(
        "qwen3_moe",
        COMMON | RMS | HEAD_SIZE | recurrent.EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True, "use_sliding_window": False},
        required=(*recurrent.EXPERTS, "expert_feed_forward_length"),
        further=biases,
    ),
    "granitemoe": Converted(
        "granitemoe",
        COMMON | RMS | GRANITE | recurrent.EXPERTS | {"expert_count": "num_local_experts"},
        {},
        permuted=True,
        required=tuple(recurrent.EXPERTS),
        further=granite,
    ),
}
