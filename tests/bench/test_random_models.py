"""Random models of every shape compute finite numbers in fp16, also behind all of their layers, and route evenly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from bminf_lite.backend.cpu import CpuBackend
from bminf_lite.bench.calls import recorded_choices
from bminf_lite.bench.model import BenchModel, RandomWeights, random_model, read_shape, shape_names
from bminf_lite.bench.session import Session, check_results
from bminf_lite.checkpoint.opened_model import ModelDescription, describe_model
from bminf_lite.checkpoint.recipe import load_recipe
from bminf_lite.layers.recording import LinearCall, LinearHooks
from bminf_lite.placement import make_engine_config

HEADS = ("num_attention_heads", "num_heads", "n_head", "n_heads")
DIVIDED = (
    *HEADS, "hidden_size", "dim", "d_model", "n_embd", "word_embed_proj_dim", "intermediate_size", "d_ff", "ffn_dim",
    "hidden_dim", "n_inner", "block_ff_dim", "intermediate_size_mlp", "moe_intermediate_size",
    "shared_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
    "num_key_value_heads", "num_global_key_value_heads", "q_lora_rank", "kv_lora_rank", "linear_num_key_heads",
    "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "mamba_d_ssm", "n_groups", "mamba_n_groups",
)  # fmt: skip
"""Widths and numbers of heads."""
KEPT_HEADS = {"codegen": 4}
"""Heads of families that need some."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ROUTED = ("nemotron-3-nano-30b-a3b", "qwen3-30b-a3b", "qwen3.6-35b-a3b", "kimi-linear-48b-a3b", "gemma-4-26b-a4b")
"""Sigmoids behind Mamba 2, softmax behind attention and DeltaNet, sigmoids behind Kimi's, norms behind layers."""
LIMIT = float(np.finfo(np.float16).max) / 16
"""Of what products read: a wider model has larger extremes."""
QUICK = ("cpm-2", "falcon-h1-7b", "gemma-4-e2b", "lfm2-8b-a1b", "llama-3.2-1b")
GENERATING = [name for name in shape_names() if describe_model(read_shape(name)).config.generates]


def narrowed(config: Mapping[str, Any], experts: int = 16) -> dict[str, Any]:
    """A model with all layers of ``config`` and one of its heads, widths in proportion, and ``experts`` at most."""
    own = dict(config)
    text = own.get("text_config")
    if isinstance(text, Mapping):
        return own | {"text_config": narrowed(text, experts)}
    heads = next((own[key] for key in HEADS if own.get(key)), 32)
    factor = heads // KEPT_HEADS.get(own["model_type"], 1)
    own |= {key: max(1, own[key] // factor) for key in DIVIDED if own.get(key)}
    own |= {key: min(own[key], experts) for key in EXPERTS if own.get(key)}
    own |= {key: 1000 for key in ("vocab_size", "vocab_size_per_layer_input") if own.get(key)}
    if isinstance(linear := own.get("linear_attn_config"), Mapping):
        own["linear_attn_config"] = linear | {"num_heads": 1}
    return own


def observed(name: str, described: ModelDescription, extremes: dict[str, float]) -> BenchModel:
    """A random model in fp16, of each of whose products the largest input is noted."""
    ops = CpuBackend(activation_dtype=np.float16)

    def note(call: LinearCall) -> None:
        extreme = float(np.abs(ops.host(call.x)).max(initial=0))
        extremes[call.tensors[0]] = max(extremes.get(call.tensors[0], 0.0), extreme)

    hooks = LinearHooks(ops, RandomWeights(described.spec, load_recipe("w8a8")), note)
    network = described.architecture.Model(described.config, hooks.weights, hooks.ops)
    limits = make_engine_config(described.config, described.config.cache_layout, None, None, 2048)
    return BenchModel(name, network, limits, parameters=0, nbytes=0)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in GENERATING]
)
def test_a_random_model_of_a_shape_is_finite_in_fp16(name: str) -> None:
    described, extremes = describe_model(narrowed(read_shape(name))), dict[str, float]()
    session = Session(observed(name, described, extremes), 1, 48)
    position = session.fill_context(40)
    session.prepare_decode(position)
    check_results(session.decode(3), described.config.vocab_size, name)
    wrong = {tensor: extreme for tensor, extreme in extremes.items() if not extreme < LIMIT}
    assert extremes and not wrong


@pytest.mark.parametrize(
    "name", [name if name in ROUTED[:2] else pytest.param(name, marks=pytest.mark.slow) for name in ROUTED]
)
def test_rows_choose_as_many_experts_as_independent_ones(name: str) -> None:
    """16 rows of a prompt one after another, and 16 of 64 sequences that decode."""
    rows, ops = 16, CpuBackend()
    config = narrowed(read_shape(name), experts=64)
    config["vocab_size"] = 16384  # few rows have the same token
    model = random_model(name, config, ops)
    prompt, decoding = Session(model, 1, 128), Session(model, 64, 32)
    with recorded_choices(ops) as chosen:
        prompt.prepare_prefill(128)()
    choices = [ids for ids in chosen if len(ids) == 128]  # the last layer may compute the last row alone
    decoding.prepare_decode(decoding.fill_context(16))
    decoding.decode(4)
    with recorded_choices(ops) as chosen:
        decoding.decode_eagerly()
    for found in (choices, list(chosen)):
        read = [len(np.unique(group)) for ids in found for group in np.split(ids, len(ids) // rows)]
        top_k = found[0].shape[1]
        assert np.mean(read) == pytest.approx(64 * (1 - (1 - top_k / 64) ** rows), rel=0.03)
    prompt.close()
    decoding.close()
