"""Migrated checkpoints as transformers opens them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    return model.eval()
