"""The comparison with other engines, on a tiny shape on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def peers():
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    import bench_peers

    return bench_peers


@pytest.fixture
def mixture() -> dict[str, Any]:
    """The configuration of a tiny mixture."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96, "vocab_size": 256, "head_dim": 16}
    heads = {"num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return {"model_type": "qwen3_moe", "max_position_embeddings": 64, **sizes, **heads, **experts}


def test_everything_runs_in_turn(peers, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    arguments = ["--shape", "llama-tiny", "-p", "8,16", "-n", "4", "-r", "2", "--device", "cpu", "--compile", "none"]
    rows = peers.main([*arguments, "-o", "json", "--plot", str(tmp_path / "x.png")])
    assert json.loads(capsys.readouterr().out)["rows"] == rows
    assert [(r["prompt"], r["peer"]) for r in rows] == [
        (p, peer) for p in (8, 16) for peer in (peers.ENGINE, "transformers bf16, eager")
    ]
    assert all(r["tokens_per_second"] > 0 and r["first_token_ms"] > 0 for r in rows)
    assert all(r["times_faster_decode"] == 1 for r in rows if r["peer"] == peers.ENGINE)
    assert (tmp_path / "x.png").stat().st_size > 1000
    assert "times" in peers.table(rows)


def test_prompts_with_fewer_tokens_and_peers_that_fail(peers, capsys: pytest.CaptureFixture[str]) -> None:
    def first_only(batch: int, prompt: int, count: int):
        return 0.25, 0.5 if count > 1 else None

    def failing(batch: int, prompt: int, count: int):
        if prompt == 2:
            raise RuntimeError("no such kernel")
        return 0.25, 0.5

    found = peers.measure({peers.ENGINE: first_only, "failing": failing}, [1, 2], 1, [3, 1], 2)
    assert {prompt: list(times) for prompt, times in found.items()} == {1: [peers.ENGINE], 2: [peers.ENGINE]}
    assert found[1][peers.ENGINE].medians() == (0.25, 0.5) and found[2][peers.ENGINE].medians() == (0.25, None)
    lines = capsys.readouterr().err
    assert lines.count("left out") == 1 and "RuntimeError: no such kernel" in lines
    rows = peers.rows(found, 1)
    assert [r["tokens_per_second"] for r in rows] == [2, None] and rows[1]["times_faster_decode"] is None
    assert "None" not in peers.table(rows)


def test_layers_of_a_mixture_run_the_code_of_one(peers, mixture: dict[str, Any]) -> None:
    """Its tokens are those of the model as it is, whose layers are unchanged afterwards."""
    import torch
    from torch._dynamo.utils import counters

    other = peers.Transformers(mixture, "cpu", torch.float32)
    layers = peers.CompiledLayers(other.model, "cpu")
    layers.prefill = layers.decode = torch.compile(peers.layer_forward, fullgraph=True, dynamic=False, backend="eager")
    torch._dynamo.reset()
    counters.clear()
    first, token = layers.run(2, 6, 5)
    assert first > 0 and token > 0
    assert counters["stats"]["unique_graphs"] == 2, "a layer is compiled for prompts, and one for decode steps"
    assert layers.run(2, 7, 1)[1] is None
    layers.run(2, 6, 5)
    found = torch.cat(layers.tokens, 1)
    assert [layer.self_attn.layer_idx for layer in other.model.model.layers] == list(range(5))
    with torch.inference_mode():
        expected = other.model.generate(layers.ids.clone(), max_new_tokens=5, min_new_tokens=5, do_sample=False)
    assert found.tolist() == expected[:, 6:].tolist()


def test_a_static_cache_gives_the_same_tokens(peers) -> None:
    """What is compiled on a GPU is this step with this cache; here it runs uncompiled."""
    import torch

    other = peers.Transformers(peers.read_shape("llama-tiny"), "cpu", torch.float32)
    other.compiled = other.model.forward
    chosen: list[torch.Tensor] = []
    real = other._next

    def record(*arguments):
        chosen.append(real(*arguments))
        return chosen[-1]

    other._next = record
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        chosen.clear()
        first, token = other.run(2, 6, 5, compiled)
        assert first > 0 and token > 0
        runs.append(torch.cat(chosen, 1).tolist())
    assert runs[0] == runs[1] and len(runs[0][0]) == 5


def test_the_model_of_int8_weights_is_a_llama(peers) -> None:
    """A prompt and steps behind it give what transformers computes with the same weights."""
    import torch
    import transformers
    from int8_llama import Int8Linear, Int8Llama

    torch.manual_seed(0)
    config = peers.read_shape("llama-tiny")
    own = Int8Llama(config, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    theirs.lm_head.weight = torch.nn.Parameter(torch.empty(config["vocab_size"], config["hidden_size"]))

    def float_weight(layer: Int8Linear) -> torch.Tensor:
        return layer.codes * layer.scale[:, None]

    with torch.inference_mode():
        theirs.model.embed_tokens.weight.copy_(own.embedding.weight)
        theirs.lm_head.weight.copy_(float_weight(own.head))
        for a, b in zip(own.layers, theirs.model.layers, strict=True):
            attention, mlp = b.self_attn, b.mlp
            fused = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            sizes = [len(p.weight) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
            assert fused.shape == a.qkv.codes.shape
            parts = float_weight(a.qkv).split(sizes)
            for linear, weight in zip((attention.q_proj, attention.k_proj, attention.v_proj), parts, strict=True):
                linear.weight.copy_(weight)
            for linear, layer in (
                (attention.o_proj, a.out),
                (mlp.gate_proj, a.gate),
                (mlp.up_proj, a.up),
                (mlp.down_proj, a.down),
            ):
                linear.weight.copy_(float_weight(layer))
        own.make_cache(2, 12)
        tokens = torch.randint(0, config["vocab_size"], (2, 9))
        expected = theirs(tokens).logits
        found = [own(tokens[:, :6], torch.arange(6))]
        found += [own(tokens[:, i : i + 1], torch.tensor([i])) for i in range(6, 9)]
        torch.testing.assert_close(torch.stack(found, 1), expected[:, 5:], rtol=1e-4, atol=1e-4)
    assert (expected.std() > 1e-3).item()
