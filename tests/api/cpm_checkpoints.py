"""Tiny random checkpoints of CPM-1, CPM-2 and EVA with their vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cpm_kit
import tiny_checkpoint
from safetensors.numpy import save_file

WORDS = cpm_kit.word_list()
SIZE = -(-len(WORDS) // 8) * 8

ENCODER_DECODER = {
    "vocab_size": SIZE, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2,
    "num_decoder_layers": 2, "max_position_embeddings": 64,
}  # fmt: skip


def write(folder: Path, model_type: str, seed: int = 0, **config: Any) -> Path:
    """A checkpoint as the migration tools write it, in fp32."""
    tokenizer = {"cpm2": "CPM2Tokenizer", "eva": "EVATokenizer"}[model_type]
    start, end = {"cpm2": ("<s>", "<eod>"), "eva": ("<s_0>", "<sep>")}[model_type]
    full = {
        "model_type": model_type, **ENCODER_DECODER, "decoder_start_token_id": WORDS.index(start),
        "eos_token_id": WORDS.index(end), **config,
    }  # fmt: skip
    cpm_kit.write_words(folder, tokenizer)
    (folder / "config.json").write_text(json.dumps(full))
    save_file(tiny_checkpoint.tensors(full, seed), str(folder / "model.safetensors"), {"format": "pt"})
    return folder


def write_cpm1(folder: Path, **config: Any) -> Path:
    """CPM-1, with a sentencepiece model."""
    full = {
        "model_type": "cpm1", "vocab_size": 136, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, **config,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(full))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CPM1Tokenizer"}')
    (folder / "chinese_vocab.model").write_bytes(cpm_kit.sentencepiece_model())
    save_file(tiny_checkpoint.tensors(full), str(folder / "model.safetensors"), {"format": "pt"})
    return folder
