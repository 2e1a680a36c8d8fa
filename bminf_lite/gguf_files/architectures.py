"""What llama.cpp's converter does to a Hugging Face model, undone: configuration, names, and the order of rows.

The package ``gguf`` knows the names. The orders of rows and the metadata of each architecture are in :data:`TABLE`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CheckpointError, checkpoint_error, is_whole
from . import gemma4, recurrent
from .header import GgufHeader
from .rope import FACTORS, LONG_FACTORS, number, rope_scaling, shortest, small_tensor
from .special_tokens import end_ids
from .unread import ReadHeader, unread_problems

COMMON = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
EPSILON = {"attention.layer_norm_epsilon": "layer_norm_eps"}
HEAD_SIZE = {"attention.key_length": "head_dim"}
WINDOW = {"attention.sliding_window": "sliding_window"}
CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
GRANITE = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
NEMOTRON_H = (
    {key: name for key, name in COMMON.items() if key not in ("block_count", "rope.freq_base")}
    | HEAD_SIZE
    | {"attention.layer_norm_rms_epsilon": "layer_norm_epsilon"}
    | recurrent.NEMOTRON_MAMBA
)
QWEN35 = COMMON | RMS | HEAD_SIZE | recurrent.DELTA_NET
LFM2 = COMMON | HEAD_SIZE | {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"}
GPT_NAMES = {
    "embedding_length": "n_embd",
    "block_count": "n_layer",
    "feed_forward_length": "n_inner",
    "attention.head_count": "n_head",
    "context_length": "n_positions",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
}
OLMO_EPS = 1e-5
"""The epsilon of OLMo's norms, which no ``config.json`` states."""
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
    "moe_latent_size": 0,
    "leading_dense_block_count": 0,
}
"""Whole numbers, and the least. Some files write 0 for what they have not."""
PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
"""Sizes of which some files have a list."""
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 1 << 16
"""Some architectures get a list of their layers' kinds, which must not have 2 billion items."""
REQUIRED = ("embedding_length", "block_count", "attention.head_count", "context_length")


FusedNames = tuple[tuple[str, ...], ...]
"""Of each expert the names of its matrices in a tensor."""


@dataclass(frozen=True)
class Converted:
    """An architecture: Hugging Face's ``model_type``, and ``keys`` from metadata to ``config.json``.

    ``fixed`` are values that the converter drops because all models have them. ``permuted``: the rows of query and key
    of each head alternate between its halves, as in Meta's LLaMA. ``grouped_qkv``: query, key and value of a fused
    matrix are one after another instead of head by head. ``norm_offset``: 1 is added to the weights of norms.
    ``transposed`` are parts of names of matrices that Hugging Face stores ``[in, out]``. ``required`` are further keys
    that a file must have. ``renamed`` are parts of Hugging Face's names that a file has under another name than the
    package ``gguf`` says, and ``joined`` those of matrices whose rows a file has as several tensors. ``tensors`` has
    whole names of tensors in a layer, and ``unread`` says which tensors no model of Hugging Face has. ``further`` adds
    to the configuration.
    """

    model_type: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    permuted: bool = False
    grouped_qkv: bool = False
    norm_offset: bool = False
    transposed: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tiled: bool = False
    drafts: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)
    unread: Callable[[GgufHeader], set[str]] | None = None
    further: Callable[[GgufHeader, dict[str, Any]], None] | None = None


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
        raise checkpoint_error(header.path, problems, "migrate the model's Hugging Face folder instead")
    return config


def _check_experts(header: GgufHeader, known: Converted) -> None:
    """Refuse experts of architectures that are run without, and numbers of experts that are not in the tensors."""
    if "expert_count" not in known.keys:
        problem = f"is a mixture of experts, which this version does not run for {header.architecture}"
        raise CheckpointError(f"{header.path}: {problem}; migrate the model's Hugging Face folder instead")
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
    if size < _largest(heads):
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

    head_dim = config.get("head_dim") or header.of_model("embedding_length") // _largest(config[_heads_name(known)])
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


def tensors_left_out(header: GgufHeader) -> set[str]:
    """The tensors that are not the model's: those that :func:`config_json` reads, and those of layers that draft."""
    known = converted(header)
    further = set()
    if known.drafts:
        first = recurrent.layers_that_run(header)
        further = {x for x in header.tensors if (m := re.match(r"blk\.(\d+)\.", x)) and int(m[1]) >= first}
    return {
        *further,
        *(known.unread(header) if known.unread else ()),
        *((FACTORS,) if "rope.freq_base" in known.keys or known.further is gemma4.further else ()),
        *(LONG_FACTORS if known.further is _phi3 else ()),
    }


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


def converted(header: GgufHeader) -> Converted:
    """The entry of the table. Raises :class:`CheckpointError` if there is none."""
    if header.architecture not in TABLE:
        known = ", ".join(sorted(TABLE))
        raise CheckpointError(f"{header.path}: GGUF architecture {header.architecture!r} is not one of {known}")
    return TABLE[header.architecture]


def tensor_names(header: GgufHeader, names: Iterable[str]) -> dict[str, str]:
    """Hugging Face's ``names`` of tensors, each with the name in the file. Names without one there are left out."""
    import gguf

    known = converted(header)
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture)
    mapping = gguf.get_tensor_name_map(number, int(header.of_model("block_count")))
    found = {}
    for name in names:
        if (layer := _in_layer(name, known.tensors)) is not None:
            found[name] = layer[0] + known.tensors[layer[1]]
            continue
        in_converter = recurrent.with_bias(name)
        if whole := mapping.get_name(in_converter):
            found[name] = whole
            continue
        module, dot, part = in_converter.rpartition(".")
        in_file = mapping.get_name(module) or mapping.get_name(module.removeprefix("transformer."))
        if (layer := _in_layer(module, known.renamed)) is not None:
            in_file = layer[0] + _of_shared(header, known.renamed[layer[1]])
        if in_file is not None:
            found[name] = in_file + dot + part
    return found


def joined_tensors(header: GgufHeader, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Those of Hugging Face's ``names`` whose rows the file has as several tensors, with their names there."""
    joined, found = converted(header).joined, {}
    for name in names:
        module, _, part = name.rpartition(".")
        if (layer := _in_layer(module, joined)) is not None:
            found[name] = tuple(f"{layer[0]}{_of_shared(header, one)}.{part}" for one in joined[layer[1]])
    return found


def _of_shared(header: GgufHeader, name: str) -> str:
    """The ``name`` of a matrix of a feed-forward layer, which is a shared expert's if there are others."""
    return f"{name}_shexp" if name.startswith("ffn_") and header.of_model("expert_count") else name


def stacked_experts(header: GgufHeader, spec_fused: Mapping[str, FusedNames]) -> dict[str, FusedNames]:
    """The tensors that hold one matrix of each expert, or gate and up of each, by their names in a file.

    ``spec_fused`` has for each tensor that may hold experts the names of each expert's matrices: of each layer first
    gate, if there is one, and up, then down.
    """
    found: dict[str, FusedNames] = {}
    if not header.of_model("expert_count"):
        return found
    for name, experts in spec_fused.items():
        match = re.fullmatch(r".*\blayers\.(\d+)\..+", name)
        if match is None:
            continue
        start = f"blk.{match[1]}.ffn"
        is_inner = f"{start}_up_exps.weight" not in found
        kinds = (("gate", "up")[-len(experts[0]) :]) if is_inner else ("down",)
        if len(kinds) == 2:
            found[f"{start}_gate_up_exps.weight"] = experts
        found |= {f"{start}_{kind}_exps.weight": tuple((e[i],) for e in experts) for i, kind in enumerate(kinds)}
    return found


def joined_order(header: GgufHeader, name: str, parts: Iterable[str]) -> np.ndarray | None:
    """The rows of a tensor of :func:`joined_tensors` in Hugging Face's order; None for the order of the file."""
    if ".in_proj_qkvz." not in name:
        return None
    rows = sum(header.tensors[part].shape[0] for part in parts if part in header.tensors)
    return recurrent.order_by_key_heads(header, rows)


def _in_layer(module: str, known: Iterable[str]) -> tuple[str, str] | None:
    """The beginning of the file's names of a module's layer, and the one of ``known`` that the module is there."""
    match = re.fullmatch(r".*\blayers\.(\d+)\.(.+)", module)
    return (f"blk.{match[1]}.", match[2]) if match and match[2] in known else None


def row_order(header: GgufHeader, name: str) -> np.ndarray | None:
    """The rows of the tensor ``name`` of the file in the order that Hugging Face has; None for the same order."""
    known, rows = converted(header), header.tensors[name].shape[0]
    heads = _largest(header.of_model("attention.head_count"))
    if known.tiled and (order := recurrent.order_of_values(header, name)) is not None:
        return order
    if known.permuted and (".attn_q." in name or ".attn_k." in name):
        if ".attn_k." in name:
            heads = _largest(header.of_model("attention.head_count_kv", heads))
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
    if known.grouped_qkv and ".attn_qkv." in name:
        kv_heads = _largest(header.of_model("attention.head_count_kv", heads))
        head_dim = rows // (heads + 2 * kv_heads)
        parts = np.split(np.arange(rows), [heads * head_dim, (heads + kv_heads) * head_dim])
        return np.concatenate([part.reshape(kv_heads, -1) for part in parts], axis=1).ravel()
    return None


def undo(header: GgufHeader, name: str) -> Callable[[np.ndarray], np.ndarray] | None:
    """What undoes the converter's change of the values of the tensor ``name`` of the file; None for no change."""
    known = converted(header)
    if known.norm_offset and name.endswith("norm.weight") and not name.endswith(".ssm_norm.weight"):
        return _without_offset
    if known.tiled and name.endswith(".ssm_out.weight"):
        return functools.partial(recurrent.grouped_columns, header)
    return recurrent.log_of_decay if name.endswith(".ssm_a") else None


def _without_offset(values: np.ndarray) -> np.ndarray:
    less: np.ndarray = values - values.dtype.type(1)
    return less


def is_transposed(header: GgufHeader, name: str) -> bool:
    """Whether Hugging Face stores the matrix ``name`` of the file ``[in, out]``."""
    return name.endswith(".weight") and any(part in name for part in converted(header).transposed)


def _largest(value: Any) -> int:
    """The size of layers that have it; others may have 0."""
    return int(max(value) if isinstance(value, list) else value)


# -- what single architectures add ------------------------------------------------------------------------------------


def _llama(header: GgufHeader, config: dict[str, Any]) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    rotated = header.of_model("rope.dimension_count", config.get("head_dim", head_dim))
    if "partial_rotary_factor" not in config and rotated != config.setdefault("head_dim", rotated):
        problem = f"rotates {rotated} of {config['head_dim']} elements of each head (rope.dimension_count)"
        raise CheckpointError(f"{header.path}: {problem}, which llama.cpp does not run either")
    _biases(header, config)


def _granite(header: GgufHeader, config: dict[str, Any]) -> None:
    """In llama.cpp a flag turns the rotation of Granite off."""
    if not header.of_model("rope.scaling.finetuned", True):
        problem = "has no rotation (rope.scaling.finetuned), which this version does not run"
        raise CheckpointError(f"{header.path}: {problem}; migrate the model's Hugging Face folder instead")
    _llama(header, config)


def _biases(header: GgufHeader, config: dict[str, Any]) -> None:
    config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors


def _partial(header: GgufHeader, config: dict[str, Any]) -> None:
    """The rotated part of each head."""
    rotated = header.of_model("rope.dimension_count")
    if rotated is not None:
        config["partial_rotary_factor"] = rotated / (config["hidden_size"] // config["num_attention_heads"])


def _phi3(header: GgufHeader, config: dict[str, Any]) -> None:
    _partial(header, config)
    if all(name in header.tensors for name in LONG_FACTORS):
        if header.of_model("rope.scaling.factor", 1) not in (0, 1):
            problem = "has rope.scaling.factor beside LongRoPE's factors, which are not combined here"
            raise CheckpointError(f"{header.path}: {problem}; migrate the model's Hugging Face folder instead")
        short, long = ([shortest(x) for x in small_tensor(header, name)] for name in LONG_FACTORS)
        config["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        factor = header.of_model("rope.scaling.attn_factor")
        if factor is not None:
            config["rope_scaling"]["attention_factor"] = shortest(factor)
    original = header.of_model("rope.scaling.original_context_length", config["max_position_embeddings"])
    config["original_max_position_embeddings"] = original


def _stablelm(header: GgufHeader, config: dict[str, Any]) -> None:
    _partial(header, config)
    config["use_qkv_bias"] = "blk.0.attn_q.bias" in header.tensors
    config["use_parallel_residual"] = "blk.0.ffn_norm.weight" not in header.tensors


def _nemotron(header: GgufHeader, config: dict[str, Any]) -> None:
    _partial(header, config)
    _llama(header, config)
    config["head_dim"] = header.of_model("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    rotated = header.of_model("rope.dimension_count", config["head_dim"])
    config["partial_rotary_factor"] = rotated / config["head_dim"]


def _falcon(header: GgufHeader, config: dict[str, Any]) -> None:
    """The newer architecture has grouped heads and two norms; the older one a single key-value head."""
    config["new_decoder_architecture"] = "blk.0.attn_norm_2.weight" in header.tensors
    config["multi_query"] = config["num_kv_heads"] == 1
    config["bias"] = "blk.0.attn_qkv.bias" in header.tensors
    if not config["new_decoder_architecture"] and not config["multi_query"]:
        problem = "is a Falcon of the first architecture with many key-value heads, which may have ALiBi"
        raise CheckpointError(f"{header.path}: {problem}; migrate the model's Hugging Face folder instead")


def _gemma(header: GgufHeader, config: dict[str, Any], large: int) -> None:
    """The scale of queries: from the size of a head, or with ``large`` layers from the embedding's size over the heads.

    The numbers are those of llama.cpp, because the files do not hold them.
    """
    heads, is_large = config["num_attention_heads"], config["num_hidden_layers"] == large
    config["query_pre_attn_scalar"] = config["hidden_size"] / heads if is_large else config["head_dim"]


def _gemma2(header: GgufHeader, config: dict[str, Any]) -> None:
    _gemma(header, config, large=46)


def _gemma3(header: GgufHeader, config: dict[str, Any]) -> None:
    _gemma(header, config, large=62)
    if config.get("sliding_window") is None:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]


def _gpt_neox(header: GgufHeader, config: dict[str, Any]) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config["rotary_pct"] = header.of_model("rope.dimension_count", head_dim) / head_dim
    config["rotary_emb_base"] = config.pop("rope_theta", 10000.0)


def _olmo(header: GgufHeader, config: dict[str, Any]) -> None:
    """The norms' epsilon is no key of Hugging Face's; queries, keys and values may be limited."""
    eps = header.of_model("attention.layer_norm_epsilon", OLMO_EPS)
    if shortest(eps) != OLMO_EPS:
        problem = f"attention.layer_norm_epsilon is {shortest(eps)}, but OLMo's norms have {OLMO_EPS}"
        raise CheckpointError(f"{header.path}: {problem}; export the model again")
    if limit := header.of_model("attention.clamp_kqv"):
        problem = f"limits queries, keys and values to {shortest(limit)} (attention.clamp_kqv)"
        raise CheckpointError(f"{header.path}: {problem}, which this version does not run")


def _ernie4_5(header: GgufHeader, config: dict[str, Any]) -> None:
    config["use_bias"] = "blk.0.attn_q.bias" in header.tensors


def _olmo2(header: GgufHeader, config: dict[str, Any]) -> None:
    """OLMo 3 has the same name, and windows."""
    if header.of_model("attention.sliding_window"):
        config["model_type"] = "olmo3"
        _windows(header, config)


def _windows(header: GgufHeader, config: dict[str, Any]) -> None:
    """The window, and the layers that have one."""
    config["sliding_window"] = header.of_model("attention.sliding_window")
    pattern = header.of_model("attention.sliding_window_pattern")
    if config["sliding_window"] is None:
        pattern = [False] * config["num_hidden_layers"]
    if not isinstance(pattern, list):
        problem = "has windows, and does not say in which layers"
        raise CheckpointError(f"{header.path}: {problem}; migrate the model's Hugging Face folder instead")
    config["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]


def _seed_oss(header: GgufHeader, config: dict[str, Any]) -> None:
    _biases(header, config)
    config["attention_out_bias"] = "blk.0.attn_output.bias" in header.tensors


def _glm4(header: GgufHeader, config: dict[str, Any]) -> None:
    """The text model of GLM-4V has rotations of its own, and GLM-OCR layers that predict further tokens."""
    for key, what in (("rope.dimension_sections", "rotations by sections"), ("nextn_predict_layers", "further layers")):
        if header.of_model(key):
            raise CheckpointError(f"{header.path}: has {what} ({key}), which this version does not run")
    _biases(header, config)
    head_dim = header.of_model("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    config["partial_rotary_factor"] = header.of_model("rope.dimension_count", head_dim) / head_dim


def _ministral3(header: GgufHeader, config: dict[str, Any]) -> None:
    """The file has the ``mscale_all_dim`` of YaRN; the ``mscale`` beside it is 1 in llama.cpp."""
    _biases(header, config)
    multiplier, beta = (
        header.of_model("rope.scaling.yarn_log_multiplier"),
        header.of_model("attention.temperature_scale"),
    )
    if "rope_scaling" not in config or multiplier is None or beta is None:
        problem = "lacks the numbers of YaRN (rope.scaling.*) or attention.temperature_scale"
        raise CheckpointError(f"{header.path}: {problem}; export the model again")
    if header.of_model("rope.scaling.attn_factor", 1.0) == 1:
        config["rope_scaling"].pop("attention_factor", None)  # it follows from these
    original = config["rope_scaling"].get("original_max_position_embeddings")
    if (length := header.of_model("attention.temperature_length", original)) != original:
        problem = f"attention.temperature_length is {length}, not the original context of {original}"
        raise CheckpointError(f"{header.path}: {problem}; migrate the model's Hugging Face folder instead")
    config["rope_scaling"] |= {
        "mscale": 1.0,
        "mscale_all_dim": shortest(multiplier),
        "llama_4_scaling_beta": number(header, "attention.temperature_scale"),
    }


TABLE: dict[str, Converted] = {
    "llama": Converted("llama", COMMON | RMS | HEAD_SIZE, {}, permuted=True, further=_llama),
    "qwen2": Converted("qwen2", COMMON | RMS, {"use_sliding_window": False}),
    "qwen3": Converted("qwen3", COMMON | RMS | HEAD_SIZE, {"use_sliding_window": False}),
    "phi3": Converted("phi3", COMMON | RMS | WINDOW, {}, further=_phi3),
    "olmo2": Converted("olmo2", COMMON | RMS, {}, further=_olmo2),
    "granite": Converted(
        "granite",
        COMMON | RMS | GRANITE,
        {},
        permuted=True,
        further=_granite,
    ),
    "stablelm": Converted("stablelm", COMMON | EPSILON, {}, further=_stablelm),
    "starcoder2": Converted("starcoder2", COMMON | {"attention.layer_norm_epsilon": "norm_epsilon"}, {}),
    "phi2": Converted("phi", COMMON | EPSILON, {}, further=_partial),
    "command-r": Converted("cohere", COMMON | EPSILON | {"logit_scale": "logit_scale"}, {}),
    "cohere2": Converted(
        "cohere2",
        COMMON | WINDOW | EPSILON | {"logit_scale": "logit_scale"},
        {},
        required=("attention.sliding_window",),
    ),
    "smollm3": Converted("smollm3", COMMON | RMS, {"no_rope_layer_interval": 4}, permuted=True, further=_biases),
    "nemotron": Converted(
        "nemotron", COMMON | {"attention.layer_norm_epsilon": "norm_eps"}, {}, norm_offset=True, further=_nemotron
    ),
    "falcon": Converted(
        "falcon",
        {key: name for key, name in COMMON.items() if key not in ("feed_forward_length", "attention.head_count_kv")}
        | {
            "feed_forward_length": "ffn_hidden_size",
            "attention.head_count_kv": "num_kv_heads",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        {"alibi": False},
        grouped_qkv=True,
        further=_falcon,
    ),
    "gemma": Converted("gemma", COMMON | RMS | HEAD_SIZE, {}, norm_offset=True),
    "olmo": Converted("olmo", COMMON, {}, permuted=True, further=_olmo),
    "ernie4_5": Converted("ernie4_5", COMMON | RMS | HEAD_SIZE, {}, further=_ernie4_5),
    "arcee": Converted("arcee", COMMON | RMS | HEAD_SIZE, {}, permuted=True, further=_llama),
    "jais2": Converted("jais2", COMMON | EPSILON | HEAD_SIZE, {}, further=_biases),
    "gemma2": Converted("gemma2", COMMON | RMS | HEAD_SIZE | WINDOW | CAPS, {}, norm_offset=True, further=_gemma2),
    "gemma3": Converted(
        "gemma3_text",
        COMMON
        | RMS
        | HEAD_SIZE
        | WINDOW
        | CAPS
        | {"rope.freq_base_swa": "rope_local_base_freq", "attention.sliding_window_pattern": "sliding_window_pattern"},
        {},
        norm_offset=True,
        further=_gemma3,
    ),
    "gemma4": Converted(
        "gemma4_text",
        gemma4.KEYS,
        {},
        required=("attention.key_length", "attention.key_length_swa", "attention.sliding_window"),
        tensors=gemma4.TENSORS,
        unread=gemma4.unread_tensors,
        further=gemma4.further,
    ),
    "bloom": Converted(
        "bloom",
        {
            "embedding_length": "hidden_size",
            "block_count": "n_layer",
            "attention.head_count": "n_head",
            "context_length": "seq_length",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        {},
        grouped_qkv=True,
    ),
    "seed_oss": Converted("seed_oss", COMMON | RMS | HEAD_SIZE, {}, further=_seed_oss),
    "falcon-h1": Converted(
        "falcon_h1",
        COMMON | RMS | HEAD_SIZE | recurrent.MAMBA,
        {"mamba_d_head": "auto"},
        required=tuple(recurrent.MAMBA),
        further=recurrent.falcon_h1,
    ),
    "granitehybrid": Converted(
        "granitemoehybrid",
        COMMON
        | RMS
        | recurrent.MAMBA
        | GRANITE
        | recurrent.EXPERTS
        | {"expert_count": "num_local_experts", "expert_shared_feed_forward_length": "shared_intermediate_size"},
        {"mamba_d_head": "auto"},
        permuted=True,
        required=tuple(recurrent.MAMBA),
        renamed={"shared_mlp.output_linear": "ffn_down"},
        joined={"shared_mlp.input_linear": ("ffn_gate", "ffn_up")},
        further=recurrent.granite_hybrid,
    ),
    "nemotron_h": Converted(
        "nemotron_h",
        NEMOTRON_H,
        {},
        permuted=True,
        required=tuple(recurrent.NEMOTRON_MAMBA),
        further=recurrent.nemotron_h,
    ),
    "nemotron_h_moe": Converted(
        "nemotron_h",
        NEMOTRON_H | recurrent.NEMOTRON_EXPERTS,
        {},
        permuted=True,
        required=(*recurrent.NEMOTRON_MAMBA, *list(recurrent.NEMOTRON_EXPERTS)[:4]),
        further=recurrent.nemotron_h_moe,
    ),
    "qwen35": Converted(
        "qwen3_5_text",
        QWEN35,
        {},
        norm_offset=True,
        required=tuple(recurrent.DELTA_NET),
        tiled=True,
        drafts=True,
        further=recurrent.qwen35,
    ),
    "qwen35moe": Converted(
        "qwen3_5_moe_text",
        QWEN35
        | recurrent.EXPERTS
        | {
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        {},
        norm_offset=True,
        required=(*recurrent.DELTA_NET, *recurrent.EXPERTS, "expert_feed_forward_length"),
        tiled=True,
        drafts=True,
        further=recurrent.qwen35,
    ),
    "qwen3next": Converted(
        "qwen3_next",
        QWEN35
        | recurrent.EXPERTS
        | {
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        {"norm_topk_prob": True},
        norm_offset=True,
        required=(*recurrent.DELTA_NET, *recurrent.EXPERTS, "expert_feed_forward_length"),
        joined={"linear_attn.in_proj_qkvz": ("attn_qkv", "attn_gate")},
        further=recurrent.qwen35,
    ),
    "qwen3moe": Converted(
        "qwen3_moe",
        COMMON | RMS | HEAD_SIZE | recurrent.EXPERTS | {"expert_feed_forward_length": "moe_intermediate_size"},
        {"norm_topk_prob": True, "use_sliding_window": False},
        required=(*recurrent.EXPERTS, "expert_feed_forward_length"),
        further=_biases,
    ),
    "granitemoe": Converted(
        "granitemoe",
        COMMON | RMS | GRANITE | recurrent.EXPERTS | {"expert_count": "num_local_experts"},
        {},
        permuted=True,
        required=tuple(recurrent.EXPERTS),
        further=_granite,
    ),
    "lfm2": Converted(
        "lfm2",
        LFM2,
        {"block_auto_adjust_ff_dim": False},
        required=("shortconv.l_cache",),
        further=recurrent.lfm2,
    ),
    "lfm2moe": Converted(
        "lfm2_moe",
        LFM2
        | recurrent.EXPERTS
        | {
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        {"norm_topk_prob": True, "routed_scaling_factor": 1.0},
        required=("shortconv.l_cache", *recurrent.EXPERTS, "expert_feed_forward_length"),
        further=recurrent.lfm2_moe,
    ),
    "glm4": Converted("glm4", COMMON | RMS | HEAD_SIZE, {}, further=_glm4),
    "exaone4": Converted("exaone4", COMMON | RMS | HEAD_SIZE, {}, further=_windows),
    "mistral3": Converted("ministral3", COMMON | RMS | HEAD_SIZE, {}, permuted=True, further=_ministral3),
    "starcoder": Converted("gpt_bigcode", GPT_NAMES, {"multi_query": True}),
    "gptneox": Converted(
        "gpt_neox",
        COMMON | EPSILON | {"use_parallel_residual": "use_parallel_residual"},
        {},
        grouped_qkv=True,
        required=("use_parallel_residual",),
        further=_gpt_neox,
    ),
    "gpt2": Converted("gpt2", GPT_NAMES, {}, transposed=("attn_qkv", "attn_output", "ffn_up", "ffn_down")),
}
"""How each architecture is converted, by its name in GGUF."""
