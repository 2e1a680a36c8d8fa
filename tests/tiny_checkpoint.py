"""Writes tiny random checkpoints, as Hugging Face folders, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from bminf_lite import models as architectures
from bminf_lite.models.spec import Role

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
CHAT_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WORDS = "the quick brown fox jumps over the lazy dog and runs away "


def tensors(config: dict[str, Any], seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random tensors for ``config``, tied ones left out: weights about ``1/sqrt(in)``, norms about 1.

    Embeddings have values of fp16, which a migration keeps.
    """
    architecture = architectures.find(config)
    spec = architecture.spec(architecture.parse(config))
    generator = np.random.default_rng(seed)
    result = {}
    for name, parameter in spec.parameters.items():
        values = generator.standard_normal(parameter.shape, np.float32)
        if parameter.role is Role.VECTOR:
            values = 0.1 * values + (0 if name.endswith("bias") else 1)
        else:
            values /= np.float32(np.sqrt(parameter.shape[-1]))
        if parameter.role is Role.EMBEDDING:
            values = values.astype(np.float16).astype(np.float32)
        if name not in spec.tied:
            result[name] = values.astype(dtype)
    return result


def byte_tokenizer() -> Tokenizer:
    """A token per byte (0 to 255 in the alphabet's order), then ``<s>``, which starts every prompt, and ``</s>``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 256)])
    return tokenizer


def save(folder: Path, config: dict[str, Any], values: Mapping[str, np.ndarray]) -> Path:
    """Make ``folder`` a checkpoint without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(values), folder / "model.safetensors", {"format": "pt"})
    return folder


def write(
    folder: Path,
    *,
    seed: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
    generation_config: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Write a checkpoint into ``folder``; ``config`` changes :data:`CONFIG`. Returns the folder."""
    full = CONFIG | config
    save(folder, full, tensors(full, seed))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257} | (generation_config or {})))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"} | ({"chat_template": chat_template} if chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder
