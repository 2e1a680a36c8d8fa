"""Which layers of an 8B model does a small GPU hold, and how fast will it be? Needs no GPU and no weights."""

import json
import tempfile
from pathlib import Path

import bminf_lite

LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}

with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.json"
    config.write_text(json.dumps(LLAMA_3_8B))
    for memory in ("24GiB", "12GiB", "6GiB"):
        print(f"--- {memory}")
        print(bminf_lite.plan(config, gpu_memory=memory, link=25e9, bandwidth=360e9, context=4096))
