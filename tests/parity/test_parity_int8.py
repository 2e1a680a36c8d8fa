"""int8 versions of the GPTs and encoder-decoders against transformers made to compute with the same codes.

Each matrix of transformers' model is replaced by what its codes and scales stand for, and for w8a8 the input of each
linear layer by its codes times their scales. What is left is fp32 rounding, which may move a code next to a tie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny_models import ENCODER_DECODERS, GPTS, Golden, RandomWeights, goldens

from bminf_lite import models
from bminf_lite.backend.quantization import quantize_rows, quantize_weight
from bminf_lite.models.spec import Role

torch = pytest.importorskip("torch", reason="parity needs torch")
pytest.importorskip("transformers", reason="parity needs transformers")
import make_goldens  # noqa: E402  (needs torch)

pytestmark = pytest.mark.parity

CASES = [golden for family in (*GPTS, *ENCODER_DECODERS) for golden in goldens(family)]
UNTIED = [g for g in CASES if not models.find(g.config).parse(g.config).tied_head]
"""A tied head is quantized here beside the float embedding, which transformers' model cannot hold."""


def twin(golden: Golden, dynamic: bool) -> Any:
    """transformers' model that computes with this project's codes."""
    hf = make_goldens.build(golden.config, golden.seed)
    parameters = golden.spec.parameters
    with torch.no_grad():
        for name, values in make_goldens.parameters_of(hf).items():
            if parameters[name].role in (Role.LINEAR, Role.HEAD):
                matrix = values.numpy().T if parameters[name].transposed else values.numpy()
                matrix = quantize_weight(matrix).dequantize()
                values.copy_(torch.from_numpy(matrix.T if parameters[name].transposed else matrix))
    for module in hf.modules():
        if dynamic and type(module).__name__ in ("Linear", "Conv1D"):
            module.register_forward_pre_hook(lambda _, inputs: (as_codes(inputs[0]),))
    return hf


def as_codes(x: Any) -> Any:
    """Activations as their codes and scales represent them."""
    codes, scale = quantize_rows(x.numpy())
    return torch.from_numpy(codes.astype(np.float32) * scale[..., None])


def errors(golden: Golden, dynamic: bool) -> np.ndarray:
    """How far each token's logits are from the twin's, relative to the largest logit: ``[tokens]``."""
    hf = twin(golden, dynamic)
    weights = RandomWeights(golden.config, golden.seed, quantized=True, dynamic=dynamic)
    if golden.source is None:
        expected = make_goldens.logits_of(hf, golden.tokens)
    else:
        _, expected = make_goldens.encoded_and_logits(hf, golden.source, golden.tokens)
    logits = golden.logits_with(weights)
    return np.abs(logits - expected).max(axis=1) / np.abs(expected).max()


@pytest.mark.parametrize("golden", UNTIED, ids=str)
def test_w8a16_logits(golden):
    assert errors(golden, dynamic=False).max() < 2e-6


def test_w8a8_logits():
    """A code that falls the other way changes its token, and in an encoder every token: seldom, and a little."""
    found = [errors(golden, dynamic=True) for golden in UNTIED]
    assert max(worst.max() for worst in found) < 3e-2
    assert np.mean([np.median(worst) < 2e-6 for worst in found]) > 0.8
