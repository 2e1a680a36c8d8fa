"""Encoders: BERT and its relatives, Nomic BERT and ModernBERT, as llama.cpp's converter writes them.

A file of RoBERTa or XLM-RoBERTa has no rows of positions before the first one, so it is one of BERT. Poolings are
numbers (``{architecture}.pooling_type``), and vectors get length 1 as llama.cpp's programs do it.
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import CheckpointError
from .converted import Converted
from .header import REMEDY, GgufHeader

POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
"""``pooling_type``, and sentence-transformers' names."""
POSITIONS, TOKEN_TYPES, OUTPUT_OF_HEAD = "position_embd.weight", "token_types.weight", "cls.output.weight"
_HEAD_OF_TRAINING = ("cls.weight", "cls.norm.weight")


def pooling_of(header: GgufHeader) -> str | None:
    """The name of the pooling in a file of a model that embeds; None if it names none.

    Raises :class:`CheckpointError` for one that is not known.
    """
    kind = header.of_model("pooling_type")
    if kind in (None, 0):
        return None
    if kind not in POOLINGS:
        problem = f"pooling_type is {kind!r}, not one of {', '.join(map(str, POOLINGS))}"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")
    return POOLINGS[kind]


def module_files(header: GgufHeader) -> dict[str, str]:
    """The files of sentence-transformers that say an encoder's pooling; none if the file does not say it."""
    if header.architecture not in ENCODERS or (pooling := pooling_of(header)) is None:
        return {}
    paths = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(paths.items())
    ]
    settings = {"word_embedding_dimension": header.of_model("embedding_length"), "pooling_mode": pooling}
    return {"modules.json": json.dumps(modules), "1_Pooling/config.json": json.dumps(settings)}


def _encoder(header: GgufHeader, config: dict[str, Any]) -> None:
    """Refuse heads, whose kind a file does not say, and attention to the tokens before alone."""
    if OUTPUT_OF_HEAD in header.tensors:
        problem = f"has a head that classifies or ranks (the tensor {OUTPUT_OF_HEAD}), whose form it does not say"
        raise CheckpointError(f"{header.path}: {problem}; {REMEDY}")
    if header.of_model("attention.causal", False) is not False:
        problem = f"attention.causal is {header.of_model('attention.causal')!r}, not false"
        raise CheckpointError(f"{header.path}: {header.architecture}.{problem}; {REMEDY}")
    if TOKEN_TYPES in header.tensors:
        config["type_vocab_size"] = header.tensors[TOKEN_TYPES].shape[0]


def _check_rotation(header: GgufHeader, config: dict[str, Any]) -> None:
    if config.pop("rope_scaling", None):
        problem = "has a scaling of the rotation (rope.scaling.*), which this version does not run for this model"
        raise CheckpointError(f"{header.path}: {problem}; {REMEDY}")


def _bert(header: GgufHeader, config: dict[str, Any]) -> None:
    _encoder(header, config)
    if POSITIONS not in header.tensors:
        raise CheckpointError(f"{header.path}: lacks the tensor {POSITIONS}; {REMEDY}")
    config["max_position_embeddings"] = header.tensors[POSITIONS].shape[0]


def _nomic_bert(header: GgufHeader, config: dict[str, Any]) -> None:
    _encoder(header, config)
    _check_rotation(header, config)


def _modern_bert(header: GgufHeader, config: dict[str, Any]) -> None:
    """A base for the layers without a window, and one for the others; of a training's head only parts are in a file."""
    _encoder(header, config)
    _check_rotation(header, config)
    config["attention_bias"] = "blk.0.attn_qkv.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    config["norm_bias"] = "blk.0.ffn_norm.bias" in header.tensors


def _head_of_training(header: GgufHeader) -> set[str]:
    return {name for name in _HEAD_OF_TRAINING if name in header.tensors}


_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
ENCODERS: dict[str, Converted] = {
    "bert": Converted(
        "bert", _KEYS | {"attention.layer_norm_epsilon": "layer_norm_eps"}, {"hidden_act": "gelu"}, further=_bert
    ),
    "nomic-bert": Converted(
        "nomic_bert",
        {
            "embedding_length": "n_embd",
            "block_count": "n_layer",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "context_length": "max_trained_positions",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "rope.freq_base": "rotary_emb_base",
        },
        {"activation_function": "swiglu"},
        further=_nomic_bert,
    ),
    "modern-bert": Converted(
        "modernbert",
        _KEYS
        | {
            "attention.layer_norm_epsilon": "norm_eps",
            "attention.sliding_window": "local_attention",
            "attention.sliding_window_pattern": "global_attn_every_n_layers",
            "hidden_activation": "hidden_activation",
            "rope.freq_base": "global_rope_theta",
            "rope.freq_base_swa": "local_rope_theta",
        },
        {},
        required=("attention.sliding_window",),
        unread=_head_of_training,
        further=_modern_bert,
    ),
}
