"""Where ``speculative="auto"`` drafts: only where a step with drafts has the bits of steps without them."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest

import bminf_lite
from bminf_lite.checkpoint.opened_model import describe_model
from bminf_lite.engine.speculative import AUTO, NGRAM, SpeculativeConfig
from bminf_lite.placement import chosen_drafts


@pytest.mark.parametrize(
    ("shape", "has_one_order", "drafts"),
    [
        ("llama-3-8b", True, NGRAM),
        ("lfm2-1.2b", True, NGRAM),
        ("mixtral-8x7b", True, None),
        ("llama-3-8b", False, None),
        ("cpm-2", True, None),
    ],
)
def test_auto(shape: str, has_one_order: bool, drafts: SpeculativeConfig | None) -> None:
    config = json.loads(resources.files("bminf_lite").joinpath("configs", f"{shape}.json").read_text())
    described = describe_model(config)
    assert chosen_drafts(AUTO, described.spec, has_one_order) == drafts
    assert chosen_drafts("suffix", described.spec, has_one_order) == SpeculativeConfig("suffix")
    assert chosen_drafts("none", described.spec, has_one_order) is None


def test_a_cpu_does_not_draft_unless_asked() -> None:
    demo = Path(bminf_lite.__file__).parent / "demo_model"
    with bminf_lite.load(demo, device="cpu") as model:
        assert model.engine_config.num_draft_tokens == 0
    with bminf_lite.load(demo, device="cpu", speculative="suffix") as model:
        assert model.engine_config.num_draft_tokens == 8
