"""The shapes in configs/ are those of the published models: they parse, and have as many parameters."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from bminf_lite import models

CONFIGS = Path(__file__).parents[2] / "configs"
PARAMETERS = {
    "cpm-1": 2.597e9,
    "cpm-2": 11.087e9,
    "eva": 2.841e9,
    "eva-2": 2.841e9,
    "eva-2-large": 0.9675e9,
    "eva-2-base": 0.3009e9,
    "llama-2-7b": 6.738e9,
    "llama-3.2-1b": 1.2358e9,
    "llama-3-8b": 8.030e9,
    "llama-3-70b": 70.55e9,
    "mistral-7b": 7.248e9,
    "qwen2.5-7b": 7.616e9,
    "qwen3-8b": 8.191e9,
    "phi-2": 2.780e9,
    "phi-3-mini": 3.821e9,
    "phi-4": 14.66e9,
    "olmo-2-7b": 7.299e9,
    "olmo-2-32b": 32.23e9,
    "olmo-3-7b": 7.298e9,
    "granite-3.3-8b": 8.171e9,
    "smollm3-3b": 3.075e9,
    "seed-oss-36b": 36.15e9,
    "stablelm-2-1.6b": 1.645e9,
    "command-r": 34.98e9,
    "command-r7b": 8.028e9,
    "glm-4-9b": 9.400e9,
    "glm-4-32b-0414": 32.57e9,
    "exaone-4.0-32b": 32.00e9,
    "gpt-j-6b": 6.051e9,
    "falcon-7b": 6.922e9,
    "falcon-rw-1b": 1.3116e9,
    "gemma-2-9b": 9.2417e9,
    "gemma-3-27b": 27.009e9,
    "gemma-4-e2b": 4.6286e9,
    "gemma-4-e4b": 7.4630e9,
    "gemma-4-31b": 30.697e9,
    "gemma-4-26b-a4b": 25.233e9,
    "bloom-7b1": 7.0690e9,
    "starcoder2-15b": 15.96e9,
    "starcoder": 15.52e9,
    "flan-t5-xl": 2.850e9,
    "mt5-xl": 3.743e9,
    "umt5-xl": 3.768e9,
    "lfm2-1.2b": 1.170e9,
    "olmo-hybrid-7b": 7.431e9,
    "falcon-h1-7b": 7.5857e9,
    "granite-4.0-h-small": 32.207e9,
    "nemotron-3-nano-30b-a3b": 31.58e9,
    "mamba-codestral-7b": 7.285e9,
    "kimi-linear-48b-a3b": 49.12e9,
    "mixtral-8x7b": 46.70e9,
    "qwen3-30b-a3b": 30.53e9,
    "olmoe-1b-7b": 6.919e9,
    "flexolmo-7x7b": 33.27e9,
    "qwen1.5-moe-a2.7b": 14.32e9,
    "glm-4.5-air": 106.85e9,
    "deepseek-v2-lite": 15.706e9,
    "deepseek-v3": 671.03e9,
    "kimi-k2": 1026.41e9,
    "glm-4.7-flash": 29.94e9,
    "mistral-small-4": 118.97e9,
    "qwen3-next-80b-a3b": 79.67e9,
    "qwen3.6-27b": 26.90e9,
    "qwen3.6-35b-a3b": 34.66e9,
    "granite-3.1-3b-a800m": 3.299e9,
    "ernie-4.5-21b-a3b": 21.83e9,
    "minimax-m2": 228.69e9,
    "lfm2-8b-a1b": 8.340e9,
    "gpt-oss-20b": 20.91e9,
    "gpt-oss-120b": 116.83e9,
    "llama-4-scout": 107.77e9,
    "gemma-7b": 8.5377e9,
    "olmo-7b": 6.8881e9,
    "ernie-4.5-0.3b": 0.36075e9,
    "afm-4.5b": 4.6192e9,
    "jais-2-8b": 8.0904e9,
    "cwm": 32.581e9,
    "ministral-8b-2410": 8.0198e9,
    "hyperclovax-seed-think-14b": 14.748e9,
    "nanochat-d32": 1.879e9,
    "youtu-llm-2b": 1.9616e9,
    "minicpm3-4b": 4.074e9,
    "bamba-9b": 9.7802e9,
    "dots-llm1": 142.77e9,
    "solar-open-100b": 102.65e9,
    "k-exaone-236b-a23b": 236.57e9,
    "hunyuan-3-295b-a21b": 295.03e9,
    "hunyuan-7b": 7.505e9,
    "lfm3-1.7b": 1.7288e9,
    "gpt-neo-1.3b": 1.3156e9,
    "internlm3-8b": 8.804e9,
    "iquest-coder-40b": 39.79e9,
    "granite-swa-2b": 2.144e9,
    "phi-3.5-moe": 41.87e9,
    "apertus-8b": 8.053e9,
    "apertus-70b": 70.60e9,
    "hunyuan-a13b": 80.39e9,
    "mellum-2-12b": 12.15e9,
    "trinity-mini": 26.124e9,
    "all-minilm-l6-v2": 22.565e6,
    "bert-large": 334.09e6,
    "bge-m3": 566.71e6,
    "all-mpnet-base-v2": 108.90e6,
    "modernbert-base": 149.01e6,
    "nomic-embed-text-v1.5": 136.73e6,
}
"""Counted from the shapes. The first ten papers say 2.6, 11, 2.8, 2.8, 0.97, 0.3, 7, 1.24, 8 and 70 billion."""

WITHOUT_SHAPE = {"cohere2_moe", "flint", "granitemoe_swa", "laguna"}
"""Families whose published sizes no source at hand gives. A GPU's tests run layers of ``fake_gpu.real_shapes``."""


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.json")))
def test_a_published_shape_has_its_parameters(name):
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    architecture = models.find(config)
    spec = architecture.spec(architecture.parse(config))
    count = sum(math.prod(p.shape) for key, p in spec.parameters.items() if key not in spec.tied)
    assert count == pytest.approx(PARAMETERS.get(name, count), rel=1e-3)


def test_every_family_has_a_shape():
    """So ``plan`` and ``bench --shape`` know it, and the tests of a GPU run a layer of it."""
    shapes = [json.loads(path.read_text()) for path in CONFIGS.glob("*.json")]
    families = {models.text_config(config)["model_type"].replace("-", "_") for config in shapes}
    assert families == set(models.names()) - WITHOUT_SHAPE
