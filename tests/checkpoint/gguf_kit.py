"""Tiny models as GGUF files, converted as llama.cpp's ``convert_hf_to_gguf.py`` does it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import gguf_mixtures
import gguf_recurrent
import numpy as np
from tiny_models import OFFSET_NORMS, Golden, RandomWeights
from tolerances import assert_close

import bminf_lite
from bminf_lite import models
from bminf_lite.checkpoint.opened_model import open_model

ARCHITECTURES = {
    "phi": "phi2",
    "cohere": "command-r",
    "gpt_neox": "gptneox",
    "gemma3_text": "gemma3",
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "gpt_bigcode": "starcoder",
    "falcon_h1": "falcon-h1",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_dense": "hunyuan-dense",
}
"""Names in GGUF that are not the ``model_type``, of families that :mod:`gguf_mixtures` does not have."""
PERMUTED = (
    "llama", "olmo", "arcee", "granite", "smollm3", "ministral3", "granitemoe", "granitemoehybrid", "nemotron_h",
    "granitemoeshared", "mixtral",
)  # fmt: skip
RECURRENT = (
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "lfm2",
    "lfm2_moe",
    "qwen3_moe",
    "qwen3_next",
    "granitemoe",
    "granitemoeshared",
    "qwen3_5_text",
    "qwen3_5_moe_text",
)
"""Families with layers that have a state, or with experts: see :mod:`gguf_recurrent`."""


def permuted(weights: np.ndarray, heads: int) -> np.ndarray:
    """``LlamaModel.permute`` of the converter."""
    return (
        weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(weights.shape)
    )


def write(
    path: Path,
    golden: Golden,
    kind: str = "F32",
    tensors: dict[str, np.ndarray] | None = None,
    text: dict[str, Any] | None = None,
    fused_experts: bool = False,
    **metadata: Any,
) -> Path:
    """The golden's model, its matrices in the type ``kind``. ``metadata`` replaces or adds keys of the architecture.

    ``text`` is a vocabulary over bytes: ``vocabulary``, ``merges`` and ``added`` tokens. ``fused_experts``: gate and up
    of an expert are one matrix.
    """
    config = models.find(golden.config).parse(golden.config)
    tensors = RandomWeights(golden.config, golden.seed).tensors if tensors is None else tensors
    model_type = golden.config["model_type"]
    tensors, experts = gguf_recurrent.stacked(tensors)
    experts = gguf_recurrent.fused(experts) if fused_experts else experts
    known = ARCHITECTURES | gguf_mixtures.FAMILIES
    architecture = "nemotron_h_moe" if model_type == "nemotron_h" and experts else known.get(model_type, model_type)
    writer = gguf.GGUFWriter(path, architecture)
    kit = gguf_recurrent if model_type in RECURRENT else gguf_mixtures if model_type in gguf_mixtures.FAMILIES else None
    found = (common_metadata if kit is None else kit.metadata)(config, golden.config)
    for key, value in (found | metadata).items():
        add(writer, f"{architecture}.{key}", value)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, metadata.get("block_count", config.num_layers))
    tied = golden.spec.tied
    for name, values in tensors.items():
        if name in tied:
            continue
        module, _, part = name.rpartition(".")
        converted = convert(model_type, name, values, config)
        if kit is not None:
            for in_file, part_values in kit.convert(name, converted, config, golden.config, names):
                add_tensor(writer, in_file, part_values, kind)
            continue
        known = names.get_name(module) or names.get_name(module.removeprefix("transformer."))
        add_tensor(writer, f"{known}.{part}", converted, kind)
    for name, values in experts.items():
        add_tensor(writer, name, values, "F32" if name.endswith(".bias") else kind)
    if text is None:
        writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    else:
        add_text(writer, text, golden.config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def common_metadata(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What all architectures have, and what follows from the parts of the first layer."""
    rope = given.get("rope_parameters") or {}
    mixer, mlp = (sub.part for sub in config.layer_parts[0].sublayers)
    norm = config.layer_parts[0].norms[0]
    found: dict[str, Any] = {
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "context_length": config.context_length,
        "feed_forward_length": mlp.inner_size,
        "attention.head_count": mixer.heads,
        "attention.head_count_kv": mixer.kv_heads,
        "attention.layer_norm_rms_epsilon": norm.eps,
        "attention.layer_norm_epsilon": norm.eps,
        "rope.freq_base": float(rope.get("rope_theta", given.get("rope_theta", 10000.0))),
    }
    if mixer.rotary:
        found["rope.dimension_count"] = mixer.rotary.size
        if given["model_type"] == "gpt_neox":
            found["rope.freq_base"] = float(given.get("rotary_emb_base", 10000.0))
            found["use_parallel_residual"] = config.layer_parts[0].parallel
        else:
            found["attention.key_length"] = mixer.head_dim
    return found


def convert(model_type: str, name: str, values: np.ndarray, config: Any) -> np.ndarray:
    """A tensor as the converter changes it."""
    mixer = gguf_recurrent.attention_of(config) or config.layer_parts[0].sublayers[0].part
    if model_type in PERMUTED and name.rpartition(".")[0].endswith("q_proj"):
        return permuted(values, mixer.heads)
    if model_type in PERMUTED and name.rpartition(".")[0].endswith("k_proj"):
        return permuted(values, mixer.kv_heads)
    if model_type in ("gpt_neox", "bloom") and "query_key_value" in name:
        parts = values.reshape(mixer.heads, 3, mixer.head_dim, *values.shape[1:]).swapaxes(0, 1)
        return parts.reshape(values.shape)
    if model_type == "falcon" and "query_key_value" in name:
        grouped = values.reshape(mixer.kv_heads, -1, mixer.head_dim, *values.shape[1:])
        parts = grouped[:, :-2], grouped[:, -2], grouped[:, -1]
        return np.concatenate([part.reshape(-1, *values.shape[1:]) for part in parts])
    if model_type in OFFSET_NORMS and name.endswith("norm.weight") and "linear_attn" not in name:
        return values + 1
    if model_type == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return values.T
    return values


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def add_text(writer: gguf.GGUFWriter, text: dict[str, Any], config: dict[str, Any]) -> None:
    """A vocabulary over bytes."""
    ids = text["vocabulary"] | text["added"]
    tokens = sorted(ids, key=ids.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in text["added"] else 1 for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in text["merges"]])
    writer.add_add_bos_token(True)
    writer.add_eos_token_id(config["eos_token_id"])
    if config.get("bos_token_id") is not None:
        writer.add_bos_token_id(config["bos_token_id"])


def add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    """Vectors stay F32, and so do matrices whose rows a type cannot hold."""
    values, quantized = np.ascontiguousarray(values, np.float32), gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[quantized][0]
    if values.ndim == 1 or values.shape[-1] % block or kind == "F32":
        writer.add_tensor(name, values)
    elif kind == "F16":
        writer.add_tensor(name, values.astype(np.float16))
    else:
        writer.add_tensor(name, gguf.quants.quantize(values, quantized), raw_dtype=quantized)


def as_stored(name: str, values: np.ndarray, kind: str) -> np.ndarray:
    """The values of a tensor after a conversion to ``kind`` and back."""
    quantized = gguf.GGMLQuantizationType[kind]
    if values.ndim == 1 or values.shape[-1] % gguf.GGML_QUANT_SIZES[quantized][0] or kind == "F32":
        return values
    if kind == "F16":
        return values.astype(np.float16).astype(np.float32)
    return gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(values), quantized), quantized)


def check(golden: Golden, folder: Path, computed: tuple[str, ...], has_values: bool = True) -> None:
    """Write a golden as a file, whose tensors and logits must be the golden's.

    Tensors whose names end with one of ``computed`` were computed on the way, so they may differ in the last bits.
    ``has_values``: whether tensors have the golden's values, and not only their shapes.
    """
    path = write(folder / "model.gguf", golden)
    expected = RandomWeights(golden.config, golden.seed).tensors
    with open_model(path) as model:
        assert model.checkpoint.tensors.keys() == expected.keys()
        for name, values in expected.items():
            found, atol = model.checkpoint.read(name), 3e-7 if name.endswith(computed) else 0
            assert found.shape == values.shape
            if has_values:
                np.testing.assert_allclose(found, values, atol=atol, rtol=0, err_msg=name)
    with bminf_lite.load(path, device="cpu") as loaded:
        assert_close(loaded.logits(golden.tokens), golden.logits, "logits", np.float32, np.abs(golden.logits).max())
