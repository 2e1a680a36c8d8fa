"""Make tests/goldens/encoders: the results of transformers for tiny random encoders (torch; development only).

    python tools/make_encoder_goldens.py

As tools/make_goldens.py does for models that generate. A case has the vectors of all tokens of several texts, or the
numbers of a classifier; weights are made again from the seed.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))
from tiny_models import GOLDENS, digest, random_tensors, random_tokens, reading_architecture

BASE = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
BASE |= {"vocab_size": 97, "max_position_embeddings": 80}
DISTILBERT = {"dim": 48, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 97, "max_position_embeddings": 80}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
MODERNBERT = BASE | TOKENS | {"num_hidden_layers": 4, "local_attention": 10}
TYPES = ["full_attention", "sliding_attention"]
DECODER = BASE | {"num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 0}
GEMMA = DECODER | {"sliding_window": 8, "num_hidden_layers": 3, "use_bidirectional_attention": True}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "query_pre_attn_scalar": 9}
LFM2 = BASE | {"num_key_value_heads": 2, "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False}
LFM2 |= {"layer_types": ["conv", "full_attention", "conv"], "pad_token_id": 0}
LENGTHS = (3, 40, 1, 61)
"""Tokens of a case's texts."""
AUTO = {"": AutoModel, "sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}
CASES: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {
    "bert": {
        "vectors": ("", BASE),
        "relu, three types, large eps": (
            "",
            BASE | {"hidden_act": "relu", "type_vocab_size": 3, "layer_norm_eps": 1e-2},
        ),
        "one head, one layer": ("", BASE | {"num_attention_heads": 1, "num_hidden_layers": 1}),
        "texts": ("sequence", BASE | {"num_labels": 3}),
        "one label": ("sequence", BASE | {"num_labels": 1}),
        "tokens": ("token", BASE | {"id2label": {"0": "O", "1": "B-PER", "2": "I-PER"}}),
    },
    "roberta": {
        "vectors": ("", BASE),
        "no padding row": ("", BASE | {"pad_token_id": 0, "hidden_act": "gelu_new"}),
        "texts": ("sequence", BASE | {"num_labels": 3}),
        "tokens": ("token", BASE | {"num_labels": 4}),
    },
    "xlm-roberta": {"vectors": ("", BASE), "texts": ("sequence", BASE | {"num_labels": 1})},
    "distilbert": {
        "vectors": ("", DISTILBERT),
        "sines, relu": ("", DISTILBERT | {"sinusoidal_pos_embds": True, "activation": "relu"}),
        "texts": ("sequence", DISTILBERT | {"num_labels": 3}),
        "tokens": ("token", DISTILBERT | {"num_labels": 2}),
    },
    "mpnet": {
        "vectors": ("", BASE),
        "relu, large eps": ("", BASE | {"hidden_act": "relu", "layer_norm_eps": 1e-2}),
        "texts": ("sequence", BASE | {"num_labels": 2}),
        "tokens": ("token", BASE | {"num_labels": 2}),
    },
    "modernbert": {
        "vectors": ("", MODERNBERT),
        "biases, layer types": (
            "",
            MODERNBERT
            | {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "layer_types": TYPES * 2}
            | {
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                }
            },
        ),
        "texts": ("sequence", MODERNBERT | {"num_labels": 3}),
        "texts, mean": (
            "sequence",
            MODERNBERT
            | {"num_labels": 2, "classifier_pooling": "mean", "classifier_bias": True, "classifier_activation": "relu"},
        ),
        "tokens": ("token", MODERNBERT | {"num_labels": 3}),
    },
    "qwen3": {
        "vectors": ("", DECODER),
        "texts": ("sequence", DECODER | {"num_labels": 1}),
        "tokens": ("token", DECODER | {"num_labels": 3}),
    },
    "mistral": {"vectors": ("", DECODER | {"sliding_window": 7})},
    "gemma3_text": {"vectors": ("", GEMMA)},
    "lfm2": {"vectors": ("", LFM2)},
    "nomic_bert": {
        "vectors": ("", BASE),
        "own head size, base": (
            "",
            BASE | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
        ),
    },
}


def main() -> None:
    cases, arrays = {}, {}
    for family, own in CASES.items():
        for number, (name, (kind, keys)) in enumerate(own.items()):
            key, seed = f"{family}: {name}", 100 * len(cases) + number
            config = {"model_type": family, "architectures": [f"It{head_class(kind)}"]} | keys
            model, weights = build(kind, config, seed)
            texts = [random_tokens(seed + i, n, keys["vocab_size"] - 5) + 5 for i, n in enumerate(LENGTHS)]
            arrays[key] = np.concatenate([results(kind, model, text) for text in texts])
            cases[key] = {
                "config": config,
                "seed": seed,
                "weights": digest(weights),
                "texts": [t.tolist() for t in texts],
            }
            print(key, arrays[key].shape, float(np.abs(arrays[key]).max()))
    (GOLDENS / "encoders.json").write_text(json.dumps(cases, indent=1) + "\n")
    np.savez_compressed(GOLDENS / "encoders.npz", **arrays)


def head_class(kind: str) -> str:
    """The end of the class's name in transformers."""
    return {"": "Model", "sequence": "ForSequenceClassification", "token": "ForTokenClassification"}[kind]


def build(kind: str, config: dict[str, Any], seed: int) -> tuple[Any, dict[str, np.ndarray]]:
    """transformers' model with the weights of a seed, in fp32, and these weights by the names of the specification."""
    keys = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    hf_config = AutoConfig.for_model(config["model_type"], **json.loads(json.dumps(keys)))
    model = AUTO[kind].from_config(hf_config, attn_implementation="eager", dtype=torch.float32).eval()
    architecture = reading_architecture(config)
    spec = architecture.spec(architecture.parse(config))
    weights = random_tensors(seed, {name: p.shape for name, p in spec.parameters.items()}, config["model_type"])
    used = set()
    with torch.no_grad():
        for stored, parameter in model.named_parameters():
            found = ((re.fullmatch(pattern, stored), new) for pattern, new in spec.aliases)
            name = next((match.expand(new) for match, new in found if match), stored)
            if name in weights:
                parameter.copy_(torch.from_numpy(weights[name]))
                used.add(name)
            else:
                assert any(re.fullmatch(pattern, name) for pattern in spec.ignored), name
    assert used == weights.keys(), weights.keys() - used
    return model, weights


def results(kind: str, model: Any, text: np.ndarray) -> np.ndarray:
    """The vectors of a text's tokens fp32 ``[n, features]``, or a classifier's numbers of it or of its tokens."""
    ids = torch.from_numpy(text[None].astype(np.int64))
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    values = found.logits if kind else found.last_hidden_state
    return values.numpy().reshape(-1, values.shape[-1])


if __name__ == "__main__":
    main()
