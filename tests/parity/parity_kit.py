"""What transformers makes of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity needs torch")
transformers = pytest.importorskip("transformers", reason="parity needs transformers")
pytest.importorskip("compressed_tensors", reason="parity needs compressed-tensors")


def reopened(folder: Path) -> Any:
    """The model, computing in fp32. Its checkpoint holds what transformers looks for, and nothing else."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    scale = getattr(model.get_input_embeddings(), "embed_scale", None)
    if scale is not None:  # transformers rounds it to the type that it computes in, else that of the folder
        scale.copy_(scale.to(transformers.AutoConfig.from_pretrained(folder).dtype))
    return model.eval()


def greedy(hf: Any, prompt: list[int]) -> list[int]:
    """The tokens, 24 at most, that transformers continues with; of an encoder-decoder, those of its decoder."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        tokens = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    return tokens[0, 1 if hf.config.is_encoder_decoder else len(prompt) :].tolist()


def relative_error(logits: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
