"""GGUF files beside transformers, which reads them too: logits, tokens, and the folder that a migration makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from parity_kit import relative_error, reopened
from tiny_models import Golden, case_without_golden, random_tokens
from tolerances import assert_close

import bminf_lite

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
pytest.importorskip("gguf", reason="GGUF needs the package gguf")
import gguf_kit  # noqa: E402
import make_goldens  # noqa: E402

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


MIXTURES = {
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "minimax_m2": {"head_dim": 32, "rotary_dim": 16},
}
"""Sizes of mixtures of experts; of those that transformers does not read from a file, its defaults."""


def golden_of(model_type: str) -> Golden:
    config = make_goldens.BASE | {"model_type": model_type, "hidden_size": 64, "rms_norm_eps": 1e-5}
    if model_type == "qwen3":
        config["head_dim"] = 128  # transformers takes its own default
    if model_type.startswith("gemma"):
        config |= {"head_dim": 256, "rms_norm_eps": 1e-6}  # the queries' scale is not in a file
    if model_type in MIXTURES:
        config |= {"intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2} | MIXTURES[model_type]
    return Golden("gguf", config, 6, "", random_tokens(6, 33, 97), case_without_golden("cpm1").logits)


FURTHER = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 8},
    "gemma3_text": {"attention.sliding_window": 8, "rope.freq_base": 1000000.0},
}


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", *MIXTURES])
def test_transformers_makes_the_same_of_a_file(model_type: str, kind: str, tmp_path: Path) -> None:
    golden = golden_of(model_type)
    path = gguf_kit.write(tmp_path / "model.gguf", golden, kind, vocab_size=97, **FURTHER.get(model_type, {}))
    hf = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = make_goldens.logits_of(hf, golden.tokens)
    with bminf_lite.load(path, device="cpu") as model:
        assert_close(model.logits(golden.tokens), expected, "logits", np.float32, np.abs(expected).max())
    if model_type in MIXTURES:
        return
    bminf_lite.migrate(path, tmp_path / "out", "w8a16")
    with bminf_lite.load(tmp_path / "out", device="cpu") as model:
        ours = model.logits(golden.tokens)
    theirs = make_goldens.logits_of(reopened(tmp_path / "out"), golden.tokens)
    assert relative_error(ours, theirs) < (0.01 if golden.spec.tied else 1e-4)  # a tied head is float there
