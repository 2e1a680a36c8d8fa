"""Tiny random folders of encoders with a tokenizer, as sentence-transformers and transformers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tiny_models import random_tensors
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from bminf_lite import models as architectures

WORDS = ("a", "cat", "dog", "sits", "on", "the", "mat", "query", "passage", ":", "runs", "and", "barks", "now", "red")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": len(SPECIAL) + len(WORDS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "pad_token_id": 0,
}


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of words that frames texts and pairs as BERT does."""
    vocabulary = {piece: i for i, piece in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(5)  # as published files have it; it must not count
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))


def write_encoder(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A random encoder with a tokenizer."""
    config = BERT | changes
    folder.mkdir(parents=True)
    architecture = architectures.find(config)
    spec = architecture.spec(architecture.parse(config))
    shapes = {name: p.shape for name, p in spec.parameters.items()}
    save_file(random_tensors(seed, shapes), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def write_modules(folder: Path, pooling: dict[str, Any], *steps: dict[str, Any], **prompts: Any) -> None:
    """``modules.json`` with a pooling and ``steps``: configurations of linear layers, or empty for a normalization."""
    prefix = "sentence_transformers.models."
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{prefix}Transformer"}]
    modules.append({"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{prefix}Pooling"})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32} | pooling))
    for i, step in enumerate(steps, 2):
        kind = "Dense" if step else "Normalize"
        modules.append({"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": prefix + kind})
        if step:
            (folder / f"{i}_Dense").mkdir()
            (folder / f"{i}_Dense" / "config.json").write_text(json.dumps(step))
            shapes = {"linear.weight": (step["out_features"], step["in_features"])}
            shapes |= {"linear.bias": (step["out_features"],)} if step.get("bias", True) else {}
            save_file(random_tensors(i, shapes), folder / f"{i}_Dense" / "model.safetensors")
    (folder / "modules.json").write_text(json.dumps(modules))
    if prompts:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The cosine of each pair of rows."""
    return (a * b).sum(axis=-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
