"""Tiny encoders as GGUF files, converted as llama.cpp's converter does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import gguf_kit
import numpy as np

from bminf_lite import models

ARCHITECTURES = {
    "bert": "bert",
    "roberta": "bert",
    "xlm-roberta": "bert",
    "nomic_bert": "nomic-bert",
    "modernbert": "modern-bert",
}


def write(
    path: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], kind: str = "F32", **changes: Any
) -> Path:
    """The model of a ``config.json``, its matrices in the type ``kind``; ``changes`` replace or add metadata."""
    parsed = models.find(config).parse(config)
    architecture = ARCHITECTURES[config["model_type"]]
    size, layers = (config.get(names[0], config.get(names[1])) for names in (SIZE, LAYERS))
    writer = gguf.GGUFWriter(path, architecture)
    heads, inner = config.get("num_attention_heads", config.get("n_head")), config.get("intermediate_size")
    found = {
        "embedding_length": size,
        "block_count": layers,
        "context_length": parsed.context_length,
        "feed_forward_length": inner or config["n_inner"],
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": config.get("layer_norm_eps", 1e-5 if architecture == "modern-bert" else 1e-12),
        "attention.causal": False,
        "pooling_type": 2,
    }
    if architecture == "nomic-bert":
        found["rope.freq_base"] = config.get("rotary_emb_base", 10000.0)
    if architecture == "modern-bert":
        found |= {
            "attention.sliding_window": config["local_attention"],
            "attention.sliding_window_pattern": config.get("global_attn_every_n_layers", 3),
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 160000.0,
            "rope.freq_base_swa": 10000.0,
            "rope.scaling.type": "none",
        }
    plain = {key: value for key, value in changes.items() if not key.startswith("tokenizer.")}
    for key, value in (found | plain).items():
        gguf_kit.add(writer, f"{architecture}.{key}", value)
    for key in changes.keys() - plain.keys():
        gguf_kit.add(writer, key, changes[key])
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, layers)
    for name, values in tensors.items():
        if name == "embeddings.position_embeddings.weight":
            values = values[len(values) - parsed.context_length :]
        in_file = names.get_name(name, try_suffixes=(".weight", ".bias"))
        gguf_kit.add_tensor(writer, in_file, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SIZE, LAYERS = ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer")
