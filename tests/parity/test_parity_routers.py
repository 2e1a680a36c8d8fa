"""Each family's router in transformers chooses the experts that ours does, with the same weights."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from bminf_lite.backend.expert_values import GroupScore, MaskedScore, RouterSpec, Score
from bminf_lite.backend.routing import route

torch = pytest.importorskip("torch", reason="parity needs torch")
pytest.importorskip("transformers", reason="parity needs transformers")

pytestmark = pytest.mark.parity
TOKENS, HIDDEN, EXPERTS, TOP_K = 64, 64, 32, 6
TOLERANCE = 16 * 2.0**-24
"""Logits are one and the same; exponentials within two units, a sum of up to 32, a quotient, a sum of 6, a quotient."""
SIGMOID = {"score": Score.SIGMOID}
NORMED = {"renormalise": True}
GROUPS = {"num_groups": 8, "top_groups": 3}
IN_GROUPS = {"n_group": 8, "topk_group": 3}
DEEPSEEK = SIGMOID | NORMED | GROUPS | {"epsilon": 1e-20, "scale": 2.5}
DEEPSEEK_CONFIG = IN_GROUPS | {"norm_topk_prob": True, "routed_scaling_factor": 2.5}


@dataclass(frozen=True)
class Family:
    """A router of transformers, with what its configuration says in its words (``config``) and in ours (``spec``)."""

    model_type: str
    router: str
    spec: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)
    experts: str = "num_experts"
    top_k: str = "num_experts_per_tok"
    biased: bool = False

    def __str__(self) -> str:
        return "-".join([self.model_type, *map(str, self.config.values())])

    def make(self, dtype: Any = None) -> Any:
        """The module, with random parameters and buffers, and its own configuration."""
        package = f"transformers.models.{self.model_type}"
        parts = "modeling", "configuration"
        modules = [pytest.importorskip(f"{package}.{part}_{self.model_type}") for part in parts]
        prefix = self.router.removesuffix("TopKRouter").removesuffix("TopkRouter").removesuffix("Router")
        prefix += "Text" if self.model_type == "llama4" else ""
        sizes = {"hidden_size": HIDDEN, self.experts: EXPERTS, self.top_k: TOP_K}
        config = getattr(modules[1], f"{prefix}Config")(**sizes | self.config)
        made = getattr(modules[0], self.router)(config).to(dtype or torch.float32)
        for tensor in [*made.parameters(), *made.buffers()]:
            scale = 1 / np.sqrt(HIDDEN) if tensor.ndim == 2 and len(tensor) == EXPERTS else 0.3
            tensor.data.normal_(0, scale * 3)
        return made


FAMILIES = [
    Family("mixtral", "MixtralTopKRouter", NORMED, experts="num_local_experts"),
    *(
        Family(name, f"{prefix}TopKRouter", {"renormalise": normed}, {"norm_topk_prob": normed})
        for name, prefix in (("qwen2_moe", "Qwen2Moe"), ("qwen3_moe", "Qwen3Moe"), ("olmoe", "Olmoe"))
        for normed in (False, True)
    ),
    Family("granitemoe", "GraniteMoeTopKRouter", {"score": Score.SOFTMAX_OF_CHOSEN}, experts="num_local_experts"),
    *(
        Family(
            "ernie4_5_moe",
            "Ernie4_5_MoeTopKRouter",
            NORMED | {"min_sum": least},
            {"moe_norm_min": least},
            experts="moe_num_experts",
            top_k="moe_k",
            biased=True,
        )
        for least in (1e-12, 0.5)
    ),
    *(
        Family(name, f"{prefix}TopkRouter", DEEPSEEK, DEEPSEEK_CONFIG, experts="n_routed_experts", biased=True)
        for name, prefix in (
            ("glm4_moe", "Glm4Moe"),
            ("glm4_moe_lite", "Glm4MoeLite"),
            ("nemotron_h", "NemotronH"),
            ("deepseek_v3", "DeepseekV3"),
            ("dots1", "Dots1"),
            ("solar_open", "SolarOpen"),
        )
    ),
    Family("exaone_moe", "ExaoneMoeTopkRouter", DEEPSEEK, DEEPSEEK_CONFIG, biased=True),
    Family(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        SIGMOID | {"scale": 1.5},
        {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
        experts="n_routed_experts",
        biased=True,
    ),
    Family("minimax_m2", "MiniMaxM2TopKRouter", SIGMOID | NORMED, experts="num_local_experts", biased=True),
    Family(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        {"scale": 16.0},
        {"topk_method": "greedy", "routed_scaling_factor": 16.0},
        experts="n_routed_experts",
    ),
    Family(
        "deepseek_v2",
        "DeepseekV2TopkRouter",
        GROUPS | {"group_score": GroupScore.LARGEST, "masked": MaskedScore.ZERO, "scale": 16.0},
        IN_GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        experts="n_routed_experts",
    ),
    Family(
        "mistral4",
        "Mistral4TopkRouter",
        GROUPS | NORMED | {"masked": MaskedScore.ZERO, "epsilon": 1e-20, "scale": 2.0},
        IN_GROUPS | {"norm_topk_prob": True, "routed_scaling_factor": 2.0},
        experts="n_routed_experts",
    ),
    *(
        Family(
            "lfm2_moe",
            "Lfm2MoeTopKRouter",
            SIGMOID | NORMED | {"epsilon": 1e-6, "scale": 1.5},
            {"use_expert_bias": biased, "norm_topk_prob": True, "routed_scaling_factor": 1.5},
            biased=biased,
        )
        for biased in (False, True)
    ),
    Family("gpt_oss", "GptOssTopKRouter", {"score": Score.SOFTMAX_OF_CHOSEN}, experts="num_local_experts"),
    Family("gemma4", "Gemma4TextRouter", NORMED, top_k="top_k_experts"),
    Family("llama4", "Llama4Router", SIGMOID | {"scales_input": True}, experts="num_local_experts"),
]


def theirs(module: Any, family: Family, hidden: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, Any, Any]:
    """Their logits, ids and weights, a bias that only chooses, and a scale of each expert."""
    bias = scale = None
    arguments = [hidden]
    if family.model_type == "minimax_m2" or (family.model_type == "lfm2_moe" and family.biased):
        bias = torch.randn(EXPERTS) * 0.3
        arguments.append(bias)
    elif family.biased:
        found = module.moe_statics if family.model_type == "ernie4_5_moe" else module
        bias = found.e_score_correction_bias.reshape(-1)
    with torch.no_grad():
        logits, weights, ids = (*module(*arguments), None)[:3]
        if family.model_type == "llama4":  # scores of all experts, 0 for those that are not chosen; and logits
            scores, logits = logits, weights
            ids = scores.topk(TOP_K, dim=1).indices
            weights = scores.gather(1, ids)
        if family.model_type == "gemma4":  # its router gives probabilities in place of logits
            logits, scale = logits.log(), module.per_expert_scale.numpy()
    bias = None if bias is None else bias.float().numpy()
    return logits.float().numpy(), ids.numpy(), weights.float().numpy(), bias, scale


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_choices_and_weights(family: Family) -> None:
    torch.manual_seed(0)
    logits, ids, weights, bias, scale = theirs(family.make(), family, torch.randn(TOKENS, HIDDEN) * 2)
    found_ids, found = route(logits, RouterSpec(EXPERTS, TOP_K, **family.spec), bias, scale)
    order = np.argsort(ids, axis=1), np.argsort(found_ids, axis=1)
    expected, actual = (np.take_along_axis(i, o, 1) for i, o in zip((ids, found_ids), order, strict=True))
    np.testing.assert_array_equal(actual, expected)
    expected, actual = (np.take_along_axis(w, o, 1) for w, o in zip((weights, found), order, strict=True))
    bound = 64 * TOLERANCE if family.model_type == "gemma4" else TOLERANCE  # the logarithm of a probability is rounded
    np.testing.assert_allclose(actual, expected, rtol=bound)
    assert len(np.unique(found_ids)) > TOP_K  # tokens differ


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "ernie4_5_moe"])
def test_weights_that_a_model_casts_to_its_type(name: str) -> None:
    family = next(f for f in FAMILIES if f.model_type == name)
    torch.manual_seed(0)
    module = family.make(torch.bfloat16)
    logits, ids, weights, bias, _ = theirs(module, family, (torch.randn(TOKENS, HIDDEN) * 2).to(torch.bfloat16))
    spec = replace(RouterSpec(EXPERTS, TOP_K, **family.spec), weight_type="bfloat16")
    found_ids, found = route(logits, spec, bias)
    same = (np.sort(ids, 1) == np.sort(found_ids, 1)).all(1)
    assert same.mean() > 0.6  # logits in bf16 tie, and torch names no order then
    for row in np.flatnonzero(same):
        ours = dict(zip(found_ids[row].tolist(), found[row].tolist(), strict=True))
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            assert abs(ours[expert] - weight) <= 2.0**-8 * weight  # a last bit of fp32 may round it the other way
