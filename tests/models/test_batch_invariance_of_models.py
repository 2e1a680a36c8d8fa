"""On a GPU a token's logits in a w8a8 model are the same bits alone, in a batch, and in a step with prompts.

Every sequence here has one token, which sees only itself, so attention adds nothing up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tiny_models import RandomWeights, TinyModel, goldens, random_tokens, tiny_model

from bminf_lite.backend.quantization import HostWeight

pytestmark = pytest.mark.gpu

LLAMA = {
    "model_type": "llama",
    "vocab_size": 500,
    "hidden_size": 1056,
    "intermediate_size": 1504,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
}
HALF_HEAD = "llama with an fp16 head"
FAMILIES = ("llama", "qwen3", "gpt2", "opt", "gpt_neox")
CONFIGS = {"llama of 1,056": LLAMA, HALF_HEAD: LLAMA} | {name: next(goldens(name)).config for name in FAMILIES}
SEQUENCES = 2048


class HalfHead(RandomWeights):
    """Weights in int8, but for the head."""

    def weight(self, name: str) -> HostWeight:
        return self.vector(name).astype(np.float16) if name == "lm_head.weight" else super().weight(name)


@dataclass(frozen=True)
class Sequences:
    """A sequence of one token for each slot, and the bits of their logits in one step."""

    model: TinyModel
    tokens: np.ndarray
    together: np.ndarray

    def bits(self, first: int, count: int, *prompts: list[int]) -> np.ndarray:
        """The bits of the logits of some sequences, in one step with longer prompts before them."""
        self.model.clear()
        rows = [*prompts, *([int(t)] for t in self.tokens[first : first + count])]
        logits: np.ndarray = self.model.run(*rows, all_logits=False)
        return logits[len(prompts) :].view(np.int32)


@pytest.fixture(scope="module", params=CONFIGS)
def sequences(request: Any, cuda_backend: Any) -> Sequences:
    if request.param == HALF_HEAD and request.config.getoption("--fake-gpu"):
        pytest.skip("BLAS has its own order for each shape")
    config = CONFIGS[request.param]
    weights = (HalfHead if request.param == HALF_HEAD else RandomWeights)(config, 5, quantized=True)
    model = tiny_model(cuda_backend, config, weights, slots=SEQUENCES + 1)
    tokens = random_tokens(9, SEQUENCES, config["vocab_size"])
    together = model.run(*([int(t)] for t in tokens), all_logits=False).view(np.int32)
    return Sequences(model, tokens, together)


@pytest.mark.parametrize("count", [1, 2, 3, 8, 16, 17, 64, 65, 256])
def test_a_token_alone_and_among_others(sequences, count):
    for first in (0, 77, SEQUENCES - count):
        expected = sequences.together[first : first + count]
        np.testing.assert_array_equal(sequences.bits(first, count), expected)


@pytest.mark.parametrize("count", [1, 2, 8, 17, 256, SEQUENCES])
def test_a_token_decoded_and_read_in_a_step_with_a_prompt(sequences, count):
    expected = sequences.together[:count]
    np.testing.assert_array_equal(sequences.bits(0, count, [3, 1, 4, 1, 5, 9, 2, 6]), expected)
