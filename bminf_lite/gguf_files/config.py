"""The ``config.json`` and ``generation_config.json`` of a GGUF file."""

from __future__ import annotations

import re
from typing import Any

from ..errors import CheckpointError, checkpoint_error, is_whole
from .architectures import converted
from .converted import Converted, largest
from .header import REMEDY, GgufHeader
from .rope import rope_scaling, shortest
from .special_tokens import end_ids
from .unread import ReadHeader, unread_problems

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
    "penalty_last_n": "penalty_last_n",
    "xtc_probability": "xtc_probability",
    "mirostat": "mirostat",
}
"""Recommendations for sampling, ``general.sampling.{key}``, and their names in a ``generation_config.json``."""
SIZES = {
    "embedding_length": 1,
    "block_count": 1,
    "attention.head_count": 1,
    "context_length": 1,
    "attention.key_length": 1,
    "feed_forward_length": 0,
    "attention.head_count_kv": 0,
    "attention.value_length": 0,
    "rope.dimension_count": 0,
    "rope.scaling.original_context_length": 0,
    "attention.sliding_window": 0,
    "ssm.conv_kernel": 1,
    "ssm.state_size": 1,
    "ssm.time_step_rank": 1,
    "ssm.group_count": 1,
    "ssm.inner_size": 1,
    "shortconv.l_cache": 1,
    "expert_count": 0,
    "expert_used_count": 0,
    "expert_feed_forward_length": 0,
    "expert_shared_feed_forward_length": 0,
    "expert_group_count": 0,
    "expert_group_used_count": 0,
    "expert_shared_count": 0,
    "interleave_moe_layer_step": 1,
    "moe_latent_size": 0,
    "kda.head_dim": 1,
    "attention.q_lora_rank": 0,
    "attention.kv_lora_rank": 1,
    "attention.key_length_mla": 0,
    "attention.value_length_mla": 0,
    "leading_dense_block_count": 0,
}
"""Whole numbers, and the least. Some files write 0 for what they have not."""
PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Sizes of which some files have a list."""
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 1 << 16
"""Some architectures get a list of their layers' kinds, which must not have 2 billion items."""
REQUIRED = ("embedding_length", "block_count", "attention.head_count", "context_length")


def config_json(header: GgufHeader) -> dict[str, Any]:
    """The ``config.json`` of the model.

    Raises :class:`CheckpointError` for an unknown architecture, and for metadata that would change the results and are
    not read.
    """
    known = converted(header)
    if problems := _size_problems(header):
        raise checkpoint_error(header.path, problems, "export the model again")
    header = ReadHeader(header.paths, header.metadata, header.tensors)
    if header.of_model("expert_count"):
        _check_experts(header, known)
    required = [*REQUIRED, *(key for key in known.keys if key.endswith("epsilon") or key in known.required)]
    missing = [f"{header.architecture}.{key}" for key in required if header.of_model(key) is None]
    missing += [] if "token_embd.weight" in header.tensors else ["the tensor token_embd.weight"]
    if missing:
        raise checkpoint_error(header.path, [f"lacks {name}" for name in missing], "export the model again")
    config: dict[str, Any] = {"model_type": known.model_type, **known.fixed}
    for key, name in known.keys.items():
        value = header.of_model(key)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if value is not None:
            config[name] = shortest(value) if isinstance(value, float) else value
    config["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id")):
        if (token := header.metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[name] = token
    _set_defaults(header, known, config)
    scaling = rope_scaling(header, config) if "rope.freq_base" in known.keys else None
    if scaling:
        config["rope_scaling"] = scaling
    if known.further:
        known.further(header, config)
    problems = unread_problems(header, config)
    if problems:
        raise checkpoint_error(header.path, problems, REMEDY)
    return config


def _check_experts(header: GgufHeader, known: Converted) -> None:
    """Refuse experts of architectures that are run without, and numbers of experts that are not in the tensors."""
    if "expert_count" not in known.keys:
        problem = f"is a mixture of experts, which this version does not run for {header.architecture}"
        raise CheckpointError(f"{header.path}: {problem}; {REMEDY}")
    count = header.of_model("expert_count")
    held = {tensor.shape[0] for name, tensor in header.tensors.items() if name.endswith("_exps.weight")}
    if held != {count}:
        found = f"the tensors hold {', '.join(map(str, sorted(held))) or 'none'}"
        problem = f"{header.architecture}.expert_count is {count}, but {found}"
        raise CheckpointError(f"{header.path}: {problem}; export the model again")


def _size_problems(header: GgufHeader) -> list[str]:
    """What is wrong with the numbers with which others are computed."""
    problems = []
    for key, least in SIZES.items():
        value = header.of_model(key)
        numbers = value if isinstance(value, list) and key in PER_LAYER else [value]
        most = MOST_LAYERS if key == "block_count" else LARGEST_SIZE
        if value is not None and not (numbers and all(is_whole(n) and least <= n <= most for n in numbers)):
            wanted = f"a whole number from {least} to {most:,}"
            problems.append(f"{header.architecture}.{key} is {value!r}, but must be {wanted}")
    if problems:
        return problems
    size, heads = header.of_model("embedding_length", 1), header.of_model("attention.head_count", 1)
    if isinstance(heads, list) and len(set(heads)) > 1:
        return [f"{header.architecture}.attention.head_count is {heads!r}, and such layers are not supported"]
    if size < largest(heads):
        return [f"{header.architecture}.attention.head_count is {heads}, but embedding_length is {size}"]
    return []


def in_metadata(header: GgufHeader, text: str) -> str:
    """A text with keys of the file's metadata in place of the names of a ``config.json``."""
    for key, name in converted(header).keys.items():
        text = re.sub(rf"\b{re.escape(name)}\b", f"{header.architecture}.{key}", text)
    return text


_FACTORS_OF_1 = ("logit_scale", "embedding_scale", "residual_scale")


def _set_defaults(header: GgufHeader, known: Converted, config: dict[str, Any]) -> None:
    """What llama.cpp takes for keys that the file does not have, where Hugging Face takes something else."""

    def is_absent(key: str) -> bool:
        return key in known.keys and not header.of_model(key)

    head_dim = config.get("head_dim") or header.of_model("embedding_length") // largest(config[_heads_name(known)])
    if is_absent("rope.freq_base"):
        config[known.keys["rope.freq_base"]] = 10000.0
    if is_absent("attention.head_count_kv"):
        config[known.keys["attention.head_count_kv"]] = config[_heads_name(known)]
    if is_absent("attention.key_length"):
        config[known.keys["attention.key_length"]] = head_dim
    if is_absent("attention.scale"):
        config[known.keys["attention.scale"]] = head_dim**-0.5
    config.update({known.keys[key]: 1.0 for key in _FACTORS_OF_1 if is_absent(key)})


def _heads_name(known: Converted) -> str:
    return known.keys["attention.head_count"]


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """The tokens that end a text, and how to draw tokens, as a ``generation_config.json`` says it."""
    ids, metadata = end_ids(header), header.metadata
    found: dict[str, Any] = {"eos_token_id": ids} if ids else {}
    for key, name in SAMPLING.items():
        if (value := metadata.get(f"general.sampling.{key}")) is not None:
            found[name] = shortest(value) if isinstance(value, float) else value
    if found.get("temperature"):
        found["do_sample"] = True
    else:
        found.pop("temperature", None)
    return found
